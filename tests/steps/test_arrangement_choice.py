"""The arrangement that is chosen where nobody names one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.plan.methods import ARRANGEMENT_CANDIDATES, ARRANGEMENTS
from hf_mmparallel.steps.representatives import ArrangementChoice, choose_arrangement
from hf_mmparallel.steps.step_planner import StepPlanner

SPEC = PUBLISHED_MODELS["llama3-1b"].spec
BATCHES = [PUBLISHED["synthchartnet"].draw(64, seed) for seed in range(2)]


def planner(packing: bool, size: int = 4, **settings: Any) -> StepPlanner:
    plan = resolve_plan(
        SPEC, {"vision": ModulePlugin(dp_size=2, pp_size=3), LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)}
    )
    costs = replace(analytic_costs(SPEC, find_device("a40")), packing=packing)
    return StepPlanner(costs, plan, sync_groups(SPEC, plan), size, **settings)


def simulated(own: StepPlanner, arrangement: str, sizes: SampleSizes) -> float:
    """The step with all ranks, as the report has it."""
    own = replace(own, arrangement=arrangement, sizes=sizes.take)
    return own.predict(own(GlobalBatch(tuple(range(sizes.num_samples))))).step_ms


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("size", [4, 8])
def test_the_choice_is_at_least_as_good_as_every_other(packing: bool, size: int):
    own = planner(packing, size)
    choice = choose_arrangement(own, BATCHES[:1])
    steps = {arrangement: simulated(own, arrangement, BATCHES[0]) for arrangement in ARRANGEMENT_CANDIDATES}
    assert choice.step_ms == pytest.approx(steps)
    assert steps[choice.arrangement] <= min(steps.values()) * (1 + 1e-6)
    assert choice_repeats(own, choice)
    others = [simulated(own, arrangement, BATCHES[1]) for arrangement in {*ARRANGEMENTS} - {*ARRANGEMENT_CANDIDATES}]
    assert simulated(own, choice.arrangement, BATCHES[1]) <= min(others)


def choice_repeats(own: StepPlanner, choice: ArrangementChoice) -> bool:
    """Whether the same question has the same answer."""
    return choose_arrangement(own, BATCHES[:1]) == choice


def test_the_reason_names_the_others():
    text = str(ArrangementChoice("tapered", {"hierarchical": 14.0, "tapered": 12.5}))
    assert text == "predicted to be fastest, 12.5 ms a step (`hierarchical` 14)"


def test_equally_fast_ones_are_no_winner():
    every = ArrangementChoice("tapered", {"hierarchical": 8.3201, "tapered": 8.32, "disttrain": 8.3221})
    assert str(every) == (
        "all are predicted to take 8.32 ms a step within 0.1 %, so that it hardly matters which (`hierarchical` 8.32, "
        "`disttrain` 8.322)"
    )
    some = ArrangementChoice("tapered", {"hierarchical": 8.3201, "tapered": 8.32, "contiguous": 9.5})
    assert str(some) == (
        "predicted to be fastest, 8.32 ms a step, `hierarchical` as fast within 0.1 % (`contiguous` 9.5)"
    )
