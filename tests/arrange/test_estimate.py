"""The fast estimate of a step's time against its closed form and a replay, and the sizes that are best by it."""

import itertools

import numpy as np
import pytest

from hf_mmparallel.arrange.estimate import Pipeline, stage_share
from hf_mmparallel.arrange.microbatch_counts import MAX_RELATIVE_SIZE, Sizes, best_count, best_sizes
from hf_mmparallel.plan import LANGUAGE_MODEL, Edge, ModulePlugin
from hf_mmparallel.plan.parallel_plan import Schedule
from tests.arrange.builders import AUDIO, IMAGE, plan_of

RATIOS = {"vision": 2.0, LANGUAGE_MODEL: 2.0, IMAGE: 2.0, AUDIO: 1.0}


def pipeline_of(stages: dict[str, int], schedule: Schedule = "1f1b", frozen: tuple[str, ...] = ()) -> Pipeline:
    """Modules of eight layers with so many stages."""
    plan = plan_of(schedule, **{name: ModulePlugin(pp_size=own) for name, own in stages.items()})
    return Pipeline.of(plan, {name: 0.0 if name in frozen else RATIOS.get(name, 1.0) for name in stages})


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
        needs = [(way, index, s) for s in (behind[stage] if way else pipeline.before[stage])]
        start = max([free[stage], *(end[task] for task in needs)])
        end[way, index, stage] = free[stage] = start + cost[way, index, stage]
    return max(end.values())


def check_random_loads(pipeline: Pipeline, count: int) -> None:
    rng = np.random.default_rng(0)
    loads = {name: rng.lognormal(0, 1, (6, count)) for name in pipeline.modules}
    expected = [replayed(pipeline, {name: own[row] for name, own in loads.items()}) for row in range(6)]
    assert pipeline.iteration_ms(loads) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("stages", "count"),
    [((1, 1), 1), ((2, 2), 8), ((4, 4), 3), ((1, 4), 16), ((1, 1, 1), 1), ((2, 2, 4), 8), ((1, 4, 2), 3)],
)
def test_equal_microbatches_take_the_closed_form(stages, count, schedule):
    pipeline = pipeline_of(dict(zip(("vision", LANGUAGE_MODEL, IMAGE), stages, strict=False)), schedule)
    loads = {name: np.full((1, count), float(own)) for name, own in zip(pipeline.modules, stages, strict=True)}
    assert pipeline.num_stages == sum(stages)
    assert pipeline.iteration_ms(loads) == pytest.approx(3 * (count + sum(stages) - 1))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("frozen", [(), ("vision",)])
@pytest.mark.parametrize(("vision", "language", "count"), [(1, 3, 5), (3, 2, 9), (4, 4, 2)])
def test_any_loads_take_what_their_tasks_take(vision, language, count, frozen, schedule):
    pipeline = pipeline_of({"vision": vision, LANGUAGE_MODEL: language}, schedule, frozen)
    check_random_loads(pipeline, count)
    assert pipeline.backwards == ((True,) * language + (not frozen,) * vision)


def test_encoders_side_by_side_end_before_the_language_model():
    pipeline = pipeline_of({"audio": 3, "vision": 1, LANGUAGE_MODEL: 1})
    assert pipeline.depth == (3, 2, 0, 1, 2) and pipeline.before == ((1, 4), (), (), (2,), (3,))
    check_random_loads(pipeline, 6)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", LANGUAGE_MODEL)])
def test_generators_side_by_side_start_behind_the_language_model(schedule, frozen):
    pipeline = pipeline_of({"vision": 1, LANGUAGE_MODEL: 2, IMAGE: 3, AUDIO: 1}, schedule, frozen)
    assert pipeline.depth == (1, 2, 0, 3, 4, 5, 3)
    assert pipeline.before == ((2,), (0,), (), (1,), (3,), (4,), (1,))
    check_random_loads(pipeline, 6)


def test_modules_on_the_same_ranks_are_one_stage():
    shared = plan_of(vision=ModulePlugin(pp_size=2), language_model=ModulePlugin(colocate_with="vision"))
    pipeline = Pipeline.of(shared, RATIOS)
    assert pipeline.num_stages == 2
    assert pipeline.shares == ((0.5, 0.5), (0.5, 0.5)) and pipeline.before == ((), (0,))
    loads = {"vision": np.full((1, 4), 2.0), LANGUAGE_MODEL: np.full((1, 4), 4.0)}
    assert pipeline.iteration_ms(loads) == pytest.approx(9 * (4 + 2 - 1))
    assert pipeline.bottleneck == {"vision": 1.5, LANGUAGE_MODEL: 1.5}


def test_a_generator_on_the_ranks_of_the_language_model_adds_to_its_stages():
    behind = ModulePlugin(colocate_with=LANGUAGE_MODEL)
    plan = plan_of(vision=1, language_model=ModulePlugin(pp_size=2), image_generator=behind)
    pipeline = Pipeline.of(plan, RATIOS)
    assert pipeline.depth == (1, 2, 0) and pipeline.before == ((2,), (0,), ())
    assert dict(zip(pipeline.modules, pipeline.shares, strict=True))[IMAGE] == (0.5, 0.5, 0.0)


def test_tensor_parallel_ranks_share_a_stage():
    plan = plan_of(vision=ModulePlugin(pp_size=2, tp_size=2), language_model=1)
    shares = [stage_share(plan, "vision", stage) for stage in plan.modules["vision"].replicas[0]]
    assert shares == [0.25, 0.25] and plan.edges == (Edge("vision", LANGUAGE_MODEL, (0,)),)


ONE = {"vision": 1.0, LANGUAGE_MODEL: 1.0}


def time_ms(pipeline: Pipeline, totals, sizes: Sizes) -> float:
    parts = dict(zip(["vision", LANGUAGE_MODEL], (sizes.encoder, sizes.language), strict=True))
    return float(pipeline.iteration_ms({m: np.array([parts[m]]) * totals[m] / len(parts[m]) for m in parts})[0])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("vision", "language", "count"), [(1, 1, 8), (2, 2, 12), (1, 4, 10)])
def test_steps_end_sooner_than_with_equal_sizes_or_any_that_are_tried(schedule, vision, language, count):
    pipeline = pipeline_of({"vision": vision, LANGUAGE_MODEL: language}, schedule)
    totals = {"vision": float(vision), LANGUAGE_MODEL: float(language)}
    sizes = best_sizes(pipeline, totals, count, largest=9.0)
    best = time_ms(pipeline, totals, sizes)
    equal = time_ms(pipeline, totals, Sizes.even(count))
    assert best < 0.99 * equal or (sizes == Sizes.even(count) and schedule == "gpipe")
    rng = np.random.default_rng(0)
    start = np.array([sizes.encoder, sizes.language])
    for _ in range(200):
        trial = start * np.exp(0.2 * rng.normal(size=start.shape) * (rng.random(start.shape) < 0.3))
        trial *= count / trial.sum(axis=1, keepdims=True)
        taken, encoded = np.cumsum(trial[1]), np.cumsum(trial[0])
        if (taken <= encoded + 1e-9).all() and (taken[1:] >= encoded[:-1] - 1e-9).all():
            assert time_ms(pipeline, totals, Sizes(tuple(trial[0]), tuple(trial[1]))) > 0.99 * best


def test_sizes_are_small_at_the_ends_one_on_average_and_within_limits():
    pipeline, totals = pipeline_of({"vision": 4, LANGUAGE_MODEL: 4}), {"vision": 4.0, LANGUAGE_MODEL: 4.1}
    for smallest in (0.0, 0.3, 0.6):
        sizes = best_sizes(pipeline, totals, 24, smallest)
        for own in (sizes.encoder, sizes.language):
            assert np.mean(own) == pytest.approx(1)
            assert min(own) == min(own[0], own[-1]) < 0.8 and max(own) <= MAX_RELATIVE_SIZE * 1.01
            assert min(own) >= smallest - 0.01
    twice = {name: 2 * total for name, total in totals.items()}
    assert best_sizes(pipeline, totals, 24) == best_sizes(pipeline, twice, 24)


def test_many_microbatches_are_equal_in_the_middle():
    sizes = best_sizes(pipeline_of(dict.fromkeys(ONE, 1)), ONE, 100)
    assert len(sizes.encoder) == len(sizes.language) == 100 and np.mean(sizes.encoder) == pytest.approx(1)
    assert np.count_nonzero(np.isclose(sizes.encoder, max(sizes.encoder))) > 70


@pytest.mark.parametrize(
    ("stages", "count", "settings"),
    [(2, 12, {"smallest": 1.0}), (2, 12, {"largest": 1.0}), (4, 2, {}), (2, 1, {})],
)
def test_equal_sizes_where_others_are_not_possible_or_not_worth_it(stages, count, settings):
    assert best_sizes(pipeline_of(dict.fromkeys(ONE, stages)), ONE, count, **settings) == Sizes.even(count)


@pytest.mark.parametrize(("vision", "frozen"), [(1.0, ("vision",)), (0.0, ())])
def test_a_frozen_encoder_and_one_without_work_are_possible(vision, frozen):
    pipeline, totals = pipeline_of(dict.fromkeys(ONE, 2), frozen=frozen), {"vision": vision, LANGUAGE_MODEL: 1.0}
    sizes = best_sizes(pipeline, totals, 12)
    assert time_ms(pipeline, totals, sizes) < time_ms(pipeline, totals, Sizes.even(12))


def test_fewer_microbatches_only_where_single_samples_are_very_large():
    pipeline, totals = pipeline_of(dict.fromkeys(ONE, 1)), dict.fromkeys(ONE, 16.0)
    assert best_count(pipeline, totals, 16, {"vision": np.array([[1.1, 0.5]])}) == 16
    assert best_count(pipeline, totals, 16, {"vision": np.array([[8.0, 0.5], [4.0, 4.0]])}) < 16
    # A long pipeline would take too long to fill.
    assert best_count(pipeline_of(dict.fromkeys(ONE, 8)), totals, 16, {"vision": np.array([[2.0, 1.5]])}) == 16


def test_no_microbatch_has_no_size():
    pipeline = pipeline_of({"vision": 1, LANGUAGE_MODEL: 6})
    sizes = best_sizes(pipeline, {"vision": 1.0, LANGUAGE_MODEL: 0.4}, 12)
    assert min(*sizes.encoder, *sizes.language) > 0.04
