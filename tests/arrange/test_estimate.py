"""The fast estimate of a step's time against its closed form, and against tasks that wait for each other."""

import itertools

import numpy as np
import pytest

from hf_mmparallel.arrange.estimate import Pipeline, stage_share
from hf_mmparallel.plan import LANGUAGE_MODEL, Edge, ModelSpec, ModulePlugin, ParallelPlan, resolve_plan
from hf_mmparallel.plan.parallel_plan import Schedule
from tests.plan.specs import language_spec, model_spec, vision_spec

RATIOS = {"vision": 2.0, LANGUAGE_MODEL: 2.0}


def make_plan(vision: int, language: int, schedule: Schedule = "1f1b", **settings) -> ParallelPlan:
    """Stages of both modules, with eight layers each."""
    plugins = {"vision": ModulePlugin(pp_size=vision, **settings), LANGUAGE_MODEL: ModulePlugin(pp_size=language)}
    return resolve_plan(model_spec(8, 8), plugins, schedule=schedule)


def replayed(pipeline: Pipeline, loads: dict[str, np.ndarray]) -> float:
    """Tasks of one arrangement, each after the one before on its stage and after those that it needs."""
    count = len(next(iter(loads.values())))
    time_steps, stages = pipeline.time_steps(count), range(len(pipeline.depth))
    cost = np.einsum("wms,mk->wks", pipeline.costs, np.stack([loads[name] for name in pipeline.modules]))
    behind = {stage: [s for s in stages if stage in pipeline.before[s]] for stage in stages}
    end: dict[tuple[int, int, int], float] = {}
    free = dict.fromkeys(stages, 0.0)
    tasks = sorted(itertools.product(range(2), range(count), stages), key=lambda task: time_steps[task])
    for way, index, stage in tasks:
        if way and not pipeline.backwards[stage]:
            continue
        needs = [(0, index, s) for s in pipeline.before[stage]]
        if way:
            needs = [(1, index, s) for s in behind[stage]]
        start = max([free[stage], *(end[task] for task in needs)])
        end[way, index, stage] = free[stage] = start + cost[way, index, stage]
    return max(end.values())


@pytest.mark.parametrize(("vision", "language", "count"), [(1, 1, 1), (2, 2, 8), (4, 4, 3), (1, 4, 16)])
def test_equal_microbatches_take_the_closed_form(vision, language, count):
    pipeline = Pipeline.of(make_plan(vision, language), RATIOS)
    loads = {"vision": np.full((1, count), float(vision)), LANGUAGE_MODEL: np.full((1, count), float(language))}
    assert pipeline.num_stages == vision + language
    assert pipeline.iteration_ms(loads) == pytest.approx(3 * (count + vision + language - 1))
    gpipe = Pipeline.of(make_plan(vision, language, "gpipe"), RATIOS)
    assert gpipe.iteration_ms(loads) == pytest.approx(3 * (count + vision + language - 1))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("frozen", [False, True])
def test_any_loads_take_what_their_tasks_take(schedule, frozen):
    rng = np.random.default_rng(0)
    ratios = {**RATIOS, "vision": 0.0 if frozen else 2.0}
    for vision, language, count in [(1, 3, 5), (3, 2, 9), (4, 4, 2)]:
        pipeline = Pipeline.of(make_plan(vision, language, schedule), ratios)
        loads = {name: rng.lognormal(0, 1, (6, count)) for name in RATIOS}
        expected = [replayed(pipeline, {name: own[row] for name, own in loads.items()}) for row in range(6)]
        assert pipeline.iteration_ms(loads) == pytest.approx(expected)
        assert pipeline.backwards == ((True,) * language + (not frozen,) * vision)


def test_encoders_side_by_side_end_before_the_language_model():
    spec = ModelSpec({"audio": vision_spec(8), "vision": vision_spec(8), LANGUAGE_MODEL: language_spec(8)})
    plugins = {"audio": ModulePlugin(pp_size=3), "vision": ModulePlugin(pp_size=1), LANGUAGE_MODEL: ModulePlugin()}
    pipeline = Pipeline.of(resolve_plan(spec, plugins), {**RATIOS, "audio": 1.0})
    assert pipeline.depth == (3, 2, 0, 1, 2) and pipeline.before == ((1, 4), (), (), (2,), (3,))
    rng = np.random.default_rng(0)
    loads = {name: rng.random((3, 6)) for name in pipeline.modules}
    expected = [replayed(pipeline, {name: own[row] for name, own in loads.items()}) for row in range(3)]
    assert pipeline.iteration_ms(loads) == pytest.approx(expected)


def test_modules_on_the_same_ranks_are_one_stage():
    plan = make_plan(2, 2)
    shared = resolve_plan(
        model_spec(8, 8),
        {"vision": ModulePlugin(pp_size=2), LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")},
    )
    pipeline = Pipeline.of(shared, RATIOS)
    assert pipeline.num_stages == 2 and Pipeline.of(plan, RATIOS).num_stages == 4
    assert pipeline.shares == ((0.5, 0.5), (0.5, 0.5)) and pipeline.before == ((), (0,))
    loads = {"vision": np.full((1, 4), 2.0), LANGUAGE_MODEL: np.full((1, 4), 4.0)}
    assert pipeline.iteration_ms(loads) == pytest.approx(9 * (4 + 2 - 1))
    assert pipeline.bottleneck == {"vision": 1.5, LANGUAGE_MODEL: 1.5}


def test_tensor_parallel_ranks_share_a_stage():
    plan = make_plan(2, 1, tp_size=2)
    shares = [stage_share(plan, "vision", stage) for stage in plan.modules["vision"].replicas[0]]
    assert shares == [0.25, 0.25] and plan.edges == (Edge("vision", LANGUAGE_MODEL, (0,)),)
