"""A prediction with one rank for all that run the same list says what one of the program of all ranks says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.drawing.timeline import gantt_text
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.planner.text import plan_cells
from hf_mmparallel.schedule import Simulation, simulate
from hf_mmparallel.steps.representatives import on_all_ranks, predict_arranged, simulate_arranged
from hf_mmparallel.steps.step_planner import StepPlanner
from tests.cost.models import h100, model
from tests.search.test_search import sizes_of

LAYOUTS = {
    "a common divisor": (ModulePlugin(dp_size=4), ModulePlugin(dp_size=2, pp_size=2, tp_size=2)),
    "no common divisor": (ModulePlugin(dp_size=3), ModulePlugin(dp_size=5, pp_size=2)),
    "few language models": (ModulePlugin(dp_size=7, tp_size=2), ModulePlugin(dp_size=2)),
}
SAMPLES = 30


def planner_of(layout: str, schedule: str, sizes: SampleSizes | None) -> StepPlanner:
    spec = model(())
    vision, language = LAYOUTS[layout]
    plan = replace(resolve_plan(spec, {"vision": vision, LANGUAGE_MODEL: language}), schedule=schedule)
    costs = h100(spec)
    known = None if sizes is None else lambda _: sizes
    return StepPlanner(costs, plan, sync_groups(spec, plan), 2, "hierarchical", known)


def assert_same(few: Simulation, whole: Simulation, plan: ParallelPlan) -> None:
    """Equal in all that a report and its picture show."""
    assert few.iteration_ms == whole.iteration_ms and few.num_ranks == whole.num_ranks
    assert few.peak_in_flight == whole.peak_in_flight
    assert sorted(few.spans) == sorted(whole.spans) and sorted(few.sums) == sorted(whole.sums)
    assert plan_cells(plan, None, few, None) == plan_cells(plan, None, whole, None)
    assert gantt_text(few) == gantt_text(whole)


@pytest.mark.parametrize("schedule", ["1f1b", "eager", "gpipe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_report_of_representatives_is_that_of_all_ranks(layout: str, schedule: str):
    sizes = sizes_of(SAMPLES, 1)
    planner, draw = planner_of(layout, schedule, sizes), GlobalBatch(tuple(range(SAMPLES)), epoch=2)
    whole = planner.predict(planner(draw))
    found = on_all_ranks(predict_arranged(planner, planner.arrange_batch(draw)))
    assert found.planned.step == whole.planned.step and found.planned.step.epoch == 2
    assert_same(found.simulation, whole.simulation, planner.plan)
    assert found.memory == whole.memory and found.step_ms == whole.step_ms
    assert found.flops_utilisation == whole.flops_utilisation
    cells = [plan_cells(planner.plan, planner.costs.spec, own.simulation, own.memory) for own in (found, whole)]
    assert cells[0] == cells[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_of_unknown_sizes_are_predicted_on_representatives_as_well(layout: str):
    planner, draw = planner_of(layout, "eager", None), GlobalBatch(tuple(range(SAMPLES)))
    assumed = SampleSizes.uniform({"vision": 64, LANGUAGE_MODEL: 200}, SAMPLES)
    planned, arranged = planner(draw), planner.arrange_batch(draw)
    whole = planner.predict(planned, assumed)
    found = on_all_ranks(predict_arranged(planner, arranged, assumed))
    assert_same(found.simulation, whole.simulation, planner.plan)
    assert found.memory == whole.memory
    plain = simulate(planner.plan, planned.program)
    assert_same(simulate_arranged(planner, arranged), plain, planner.plan)


def test_limits_of_a_run_count_when_a_draw_is_arranged():
    sizes = sizes_of(SAMPLES, 1)
    planner = planner_of("a common divisor", "1f1b", sizes)
    draw = GlobalBatch(tuple(range(SAMPLES)))
    limit = int(np.median(sizes.tokens[LANGUAGE_MODEL]))
    few = replace(planner, token_limits={LANGUAGE_MODEL: limit}).arrange_batch(draw).step
    own = planner.arrange_batch(replace(draw, token_limits={LANGUAGE_MODEL: limit})).step
    assert few == own != planner.arrange_batch(draw).step
