"""Frozen layers from host memory, beside the computation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_mmparallel.cost import analytic_costs
from hf_mmparallel.cost.sharded_passes import streamed_transfers, transfers_in_passes
from hf_mmparallel.cost.stage_times import stage_costs
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan

from .models import LAYER_MATRICES, LAYERS, PLAIN, model

HOST = replace(PLAIN, host_link_gb_per_s=10.0)
STREAMED = {"vision": ModulePlugin(offload_params=True)}
KEY = ("vision", 0, 0)
LAYER_MS = 2 * (LAYER_MATRICES + 64) / 10e6  # two bytes a weight, with the norm


def frozen_costs(device=HOST):
    return analytic_costs(model(("vision",)), device)


def test_bytes_of_layers_over_the_link():
    transfers = streamed_transfers(frozen_costs(), "vision", (0, LAYERS), 1)
    assert transfers is not None and transfers.gather_ms == pytest.approx((LAYER_MS,) * LAYERS)
    assert streamed_transfers(frozen_costs(replace(HOST, host_link_gb_per_s=None)), "vision", (0, LAYERS), 1) is None


def test_what_the_computation_does_not_hide_is_waited_for():
    costs = frozen_costs()
    kept, streamed = (stage_costs(costs, resolve_plan(costs.spec, modules))[KEY] for modules in ({}, STREAMED))
    few, many = (1.0, 1.0), (1e6, 1e9)  # tokens and squared tokens
    assert streamed.forward_ms(*few) == pytest.approx(LAYERS * LAYER_MS, rel=0.05)
    hidden = streamed.forward_ms(*many) - kept.forward_ms(*many)
    assert hidden == pytest.approx(LAYER_MS, rel=1e-6)  # of the first layer alone


def test_a_module_that_stays_on_the_device_streams_nothing():
    costs = frozen_costs()
    plan = resolve_plan(costs.spec, STREAMED)
    assert transfers_in_passes(costs, plan, LANGUAGE_MODEL, 0) is None
    assert transfers_in_passes(costs, plan, "vision", 0) is not None
