"""What all arrangements have in common."""

import re

import numpy as np
import pytest

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, ParallelPlan, Workloads, resolve_plan
from tests.arrange.test_hierarchical import check
from tests.plan.specs import language_spec, vision_spec


def plan_of(language: ModulePlugin, **encoders: ModulePlugin) -> ParallelPlan:
    spec = ModelSpec({**{name: vision_spec() for name in encoders}, LANGUAGE_MODEL: language_spec()})
    return resolve_plan(spec, {**encoders, LANGUAGE_MODEL: language})


PLANS = {
    "no encoder": plan_of(ModulePlugin(3, 2)),
    "3 and 2": plan_of(ModulePlugin(2), vision=ModulePlugin(3)),
    "3 encoders": plan_of(
        ModulePlugin(2, 2), vision=ModulePlugin(2), audio=ModulePlugin(), video=ModulePlugin(colocate_with="vision")
    ),
}


def workloads_of(plan: ParallelPlan, **forward_ms: np.ndarray) -> Workloads:
    """One number of milliseconds for each sample; one token, too."""
    tokens = {name: np.ones(len(own), np.int64) for name, own in forward_ms.items()}
    return Workloads(forward_ms, dict.fromkeys(plan.modules, 2.0), tokens, {})


def odd_workloads(plan: ParallelPlan, kind: str) -> Workloads:
    """Random work, but for what `kind` says."""
    rng, size = np.random.default_rng(0), {"none": 0, "one": 1, "few": 3}.get(kind, 24)
    work = {name: rng.lognormal(0, 0.7, size) for name in plan.modules}
    for name, own in work.items():
        if kind == "nothing to do" or (kind == "text" and name != LANGUAGE_MODEL):
            own[:] = 0
        if kind == "giant":
            own[size // 2] = 1000.0
    if kind == "little text":
        work[LANGUAGE_MODEL][: 2 * size // 3] = 0
    return workloads_of(plan, **work)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kind", ["none", "one", "few", "text", "nothing to do", "giant", "little text"])
@pytest.mark.parametrize("name", PLANS)
def test_odd_batches(name, kind, arrangement):
    plan = PLANS[name]
    work = odd_workloads(plan, kind)
    step = arrange_step(plan, range(work.num_samples), work, 2, arrangement)
    if arrangement in ("hierarchical", "tapered"):
        check(plan, work, step)
    assert step == arrange_step(plan, range(work.num_samples), work, 2, arrangement)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("module", ["vision", LANGUAGE_MODEL])
def test_workloads_that_are_none_are_refused_with_sample_and_module(module, value, arrangement):
    plan = PLANS["3 and 2"]
    work = odd_workloads(plan, "any")
    work.forward_ms[module][3] = value
    with pytest.raises(ValueError, match=re.escape(f"Sample 103 has a workload of {value} ms in `{module}`")):
        arrange_step(plan, range(100, 124), work, 2, arrangement)
