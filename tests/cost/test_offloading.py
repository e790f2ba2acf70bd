"""What the CPU keeps: the time of the optimizer's step there, and of frozen layers that come over the link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_mmparallel.cost import analytic_costs
from hf_mmparallel.cost.devices import HostStep, host_step_ms
from hf_mmparallel.cost.gradient_sums import optimizer_ms
from hf_mmparallel.cost.sharded_passes import streamed_transfers, transfers_in_passes
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.cost.stage_times import stage_costs
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from tests.cost.models import LAYER_MATRICES, LAYERS, PLAIN, model

HOST = replace(PLAIN, host_link_gb_per_s=10.0, host_memory_gb_per_s=80.0, host_memory_gib=64, node_size=8)
LAYER_MS = 2 * (LAYER_MATRICES + 64) / 10e6  # two bytes a weight, with the norm


def frozen_costs(device=HOST):
    return analytic_costs(model(("vision",)), device)


def test_the_slowest_of_three_counts():
    assert host_step_ms(HOST, HostStep(memory_bytes=1e7)) == pytest.approx(1.0)  # an eighth of 80 GB/s
    assert host_step_ms(HOST, HostStep(1e7, received_bytes=3e7)) == pytest.approx(3.0)
    assert host_step_ms(HOST, HostStep(1e7, 3e7, sent_bytes=5e7)) == pytest.approx(5.0)
    assert host_step_ms(replace(HOST, host_link_gb_per_s=None), HostStep(1e7)) == 0.0


@pytest.mark.parametrize("master_weights", [None, False])
def test_an_optimizer_step_on_the_cpu(master_weights):
    costs = frozen_costs()
    on_device, on_cpu = (
        resolve_plan(costs.spec, {LANGUAGE_MODEL: ModulePlugin(offload_optimizer=own, master_weights=master_weights)})
        for own in (False, True)
    )
    memories = stage_memories(costs, on_cpu)
    step = memories[LANGUAGE_MODEL, 0, 0].host_step
    count = sum(p.num_elements for p in costs.spec.language_model.parameters)
    wide = 4 if master_weights is None else 2
    assert step == HostStep(count * (6 * wide + 2 * 4 + 2), 4.0 * count, 2.0 * count)
    assert memories["vision", 0, 0].host_step == HostStep()
    assert optimizer_ms(costs, on_cpu) >= host_step_ms(HOST, step) > optimizer_ms(costs, on_device)


def test_what_the_computation_does_not_hide_of_streamed_layers_is_waited_for():
    costs = frozen_costs()
    transfers = streamed_transfers(costs, "vision", (0, LAYERS), 1)
    assert transfers is not None and transfers.gather_ms == pytest.approx((LAYER_MS,) * LAYERS)
    assert streamed_transfers(frozen_costs(replace(HOST, host_link_gb_per_s=None)), "vision", (0, LAYERS), 1) is None
    plans = [resolve_plan(costs.spec, {"vision": ModulePlugin(offload_params=own)}) for own in (False, True)]
    kept, streamed = (stage_costs(costs, plan)["vision", 0, 0] for plan in plans)
    few, many = (1.0, 1.0), (1e6, 1e9)  # tokens and squared tokens
    assert streamed.forward_ms(*few) == pytest.approx(LAYERS * LAYER_MS, rel=0.05)
    hidden = streamed.forward_ms(*many) - kept.forward_ms(*many)
    assert hidden == pytest.approx(LAYER_MS, rel=1e-6)  # of the first layer alone
    found = [transfers_in_passes(costs, plans[1], name, 0) for name in ("vision", LANGUAGE_MODEL)]
    assert found[0] is not None and found[1] is None
