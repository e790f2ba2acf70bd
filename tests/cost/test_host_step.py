"""The optimizer's step on the CPU: what it moves, and its time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_mmparallel.cost import analytic_costs
from hf_mmparallel.cost.devices import HostStep, host_step_ms
from hf_mmparallel.cost.gradient_sums import optimizer_ms
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan

from .models import PLAIN, model

HOST = replace(PLAIN, host_link_gb_per_s=10.0, host_memory_gb_per_s=80.0, host_memory_gib=64, node_size=8)


def test_the_slowest_of_three_counts():
    assert host_step_ms(HOST, HostStep(memory_bytes=1e7)) == pytest.approx(1.0)  # an eighth of 80 GB/s
    assert host_step_ms(HOST, HostStep(1e7, received_bytes=3e7)) == pytest.approx(3.0)
    assert host_step_ms(HOST, HostStep(1e7, 3e7, sent_bytes=5e7)) == pytest.approx(5.0)
    assert host_step_ms(replace(HOST, host_link_gb_per_s=None), HostStep(1e7)) == 0.0


@pytest.mark.parametrize("master_weights", [None, False])
def test_bytes_of_a_trained_module(master_weights):
    costs = analytic_costs(model(("vision",)), HOST)
    language = ModulePlugin(offload_optimizer=True, master_weights=master_weights)
    plan = resolve_plan(costs.spec, {LANGUAGE_MODEL: language})
    memories = stage_memories(costs, plan)
    count = sum(p.num_elements for p in costs.spec.modules[LANGUAGE_MODEL].parameters)
    wide = 4 if master_weights is None else 2
    expected = HostStep(count * (6 * wide + 2 * 4 + 2), 4.0 * count, 2.0 * count)
    assert memories[LANGUAGE_MODEL, 0, 0].host_step == expected
    assert memories["vision", 0, 0].host_step == HostStep()


def test_the_predicted_step_has_it():
    costs = analytic_costs(model(), HOST)
    on_device, on_cpu = (
        resolve_plan(costs.spec, {LANGUAGE_MODEL: ModulePlugin(offload_optimizer=offloads)})
        for offloads in (False, True)
    )
    step = stage_memories(costs, on_cpu)[LANGUAGE_MODEL, 0, 0].host_step
    assert optimizer_ms(costs, on_cpu) >= host_step_ms(HOST, step) > optimizer_ms(costs, on_device)
