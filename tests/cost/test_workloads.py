"""What samples cost in a module, against tasks of a plan with one stage a module, and limits of tokens."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.cost import StepCost, analytic_costs, batch_workloads, find_device
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.schedule import Task
from tests.cost.models import PLAIN, model
from tests.schedule.builders import make_step

SIZES = SampleSizes.of_sequences({"vision": [[40, 40], [], [90]], LANGUAGE_MODEL: [[200], [50], [120]]})
ALONE = make_step({"vision": [[[0], [1], [2]]], LANGUAGE_MODEL: [[[0], [1], [2]]]})


@pytest.mark.parametrize("frozen", [(), ("vision",), (LANGUAGE_MODEL,), ("vision", LANGUAGE_MODEL)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sample_costs_what_a_task_of_it_alone_does(frozen, checkpointing):
    spec = model(frozen)
    costs = analytic_costs(spec, replace(PLAIN, memory_gb_per_s=1e30))  # reading weights takes no time
    plan = resolve_plan(spec, {"vision": ModulePlugin(activation_checkpointing=checkpointing)})
    cost = StepCost(costs, plan, ALONE, SIZES)
    found = batch_workloads(costs, plan, SIZES)
    assert found.token_limits == {} and found.tokens["vision"].tolist() == [80, 0, 90]
    assert found.forward_ms["vision"][1] == 0
    for name in plan.modules:
        forward, backward = ([cost(Task(kind, name, 0, 0, index)) for index in range(3)] for kind in ("fwd", "bwd"))
        assert found.forward_ms[name] == pytest.approx(forward)
        assert found.backward_ratio[name] * sum(forward) == pytest.approx(sum(backward))
        assert (found.forward_ms[name] == found.forward_ms[name].astype(np.float32)).all()


def test_stages_and_ranks_do_not_change_what_a_sample_costs():
    spec = model((LANGUAGE_MODEL,), tied=False)
    costs = analytic_costs(spec, replace(PLAIN, link_gb_per_s=1e30, memory_gb_per_s=1e30))
    whole = batch_workloads(costs, resolve_plan(spec, {}), SIZES)
    cut = {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(pp_size=4, tp_size=2)}
    parts = batch_workloads(costs, resolve_plan(spec, cut), SIZES)
    assert parts.backward_ratio == pytest.approx(whole.backward_ratio)
    assert all((parts.forward_ms[name] == whole.forward_ms[name]).all() for name in whole.forward_ms)


def test_the_tighter_limit_counts():
    spec = model()
    costs = analytic_costs(spec, find_device("h100"))
    plan = resolve_plan(spec, {})
    assert batch_workloads(costs, plan, SIZES, 77).token_limits == {LANGUAGE_MODEL: 77}
    fits = batch_workloads(costs, plan, SIZES, None, 1e8).token_limits
    assert set(fits) == set(plan.modules)
    less = batch_workloads(costs, plan, SIZES, fits[LANGUAGE_MODEL] - 1, 1e8).token_limits
    assert less == {**fits, LANGUAGE_MODEL: fits[LANGUAGE_MODEL] - 1}
    assert batch_workloads(costs, plan, SIZES, fits[LANGUAGE_MODEL] + 1, 1e8).token_limits == fits
