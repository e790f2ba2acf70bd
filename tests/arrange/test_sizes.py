"""How large microbatches should be: optimal where samples can be divided at will."""

import numpy as np
import pytest

from hf_mmparallel.arrange.estimate import Pipeline
from hf_mmparallel.arrange.microbatch_sizes import LARGEST, Sizes, best_count, best_sizes
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from hf_mmparallel.plan.parallel_plan import Schedule
from tests.plan.specs import model_spec


def pipeline_of(vision: int, language: int, schedule: Schedule = "1f1b", ratio: float = 2.0) -> Pipeline:
    """Stages of both modules; `ratio` is of the encoder."""
    plugins = {"vision": ModulePlugin(pp_size=vision), LANGUAGE_MODEL: ModulePlugin(pp_size=language)}
    plan = resolve_plan(model_spec(8, 8), plugins, schedule=schedule)
    return Pipeline.of(plan, {"vision": ratio, LANGUAGE_MODEL: 2.0})


def time_ms(pipeline: Pipeline, totals, sizes: Sizes) -> float:
    parts = dict(zip(["vision", LANGUAGE_MODEL], (sizes.encoder, sizes.language), strict=True))
    return float(pipeline.iteration_ms({m: np.array([parts[m]]) * totals[m] / len(parts[m]) for m in parts})[0])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("vision", "language", "count"), [(1, 1, 8), (2, 2, 12), (1, 4, 10)])
def test_steps_end_sooner_than_with_equal_sizes_or_any_that_are_tried(schedule, vision, language, count):
    pipeline = pipeline_of(vision, language, schedule)
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
    pipeline, totals = pipeline_of(4, 4), {"vision": 4.0, LANGUAGE_MODEL: 4.1}
    for smallest in (0.0, 0.3, 0.6):
        sizes = best_sizes(pipeline, totals, 24, smallest)
        for own in (sizes.encoder, sizes.language):
            assert np.mean(own) == pytest.approx(1)
            assert min(own) == min(own[0], own[-1]) < 0.8 and max(own) <= LARGEST * 1.01
            assert min(own) >= smallest - 0.01
    twice = {name: 2 * total for name, total in totals.items()}
    assert best_sizes(pipeline, totals, 24) == best_sizes(pipeline, twice, 24)


def test_many_microbatches_are_equal_in_the_middle():
    sizes = best_sizes(pipeline_of(1, 1), {"vision": 1.0, LANGUAGE_MODEL: 1.0}, 100)
    assert len(sizes.encoder) == len(sizes.language) == 100 and np.mean(sizes.encoder) == pytest.approx(1)
    assert np.count_nonzero(np.isclose(sizes.encoder, max(sizes.encoder))) > 70


@pytest.mark.parametrize(
    ("stages", "count", "settings"),
    [((2, 2), 12, {"smallest": 1.0}), ((2, 2), 12, {"largest": 1.0}), ((4, 4), 2, {}), ((2, 2), 1, {})],
)
def test_equal_sizes_where_others_are_not_possible_or_not_worth_it(stages, count, settings):
    sizes = best_sizes(pipeline_of(*stages), {"vision": 1.0, LANGUAGE_MODEL: 1.0}, count, **settings)
    assert sizes == Sizes.even(count)


@pytest.mark.parametrize(("vision", "ratio"), [(1.0, 0.0), (0.0, 2.0)])
def test_a_frozen_encoder_and_one_without_work_are_possible(vision, ratio):
    pipeline, totals = pipeline_of(2, 2, ratio=ratio), {"vision": vision, LANGUAGE_MODEL: 1.0}
    sizes = best_sizes(pipeline, totals, 12)
    assert time_ms(pipeline, totals, sizes) < time_ms(pipeline, totals, Sizes.even(12))


def test_fewer_microbatches_only_where_single_samples_are_very_large():
    pipeline, totals = pipeline_of(1, 1), {"vision": 16.0, LANGUAGE_MODEL: 16.0}
    assert best_count(pipeline, totals, 16, {"vision": np.array([[1.1, 0.5]])}) == 16
    assert best_count(pipeline, totals, 16, {"vision": np.array([[8.0, 0.5], [4.0, 4.0]])}) < 16
    # A long pipeline would take too long to fill.
    long = pipeline_of(8, 8)
    assert best_count(long, totals, 16, {"vision": np.array([[2.0, 1.5]])}) == 16


def test_no_microbatch_has_no_size():
    pipeline = pipeline_of(1, 6)
    sizes = best_sizes(pipeline, {"vision": 1.0, LANGUAGE_MODEL: 0.4}, 12)
    assert min(*sizes.encoder, *sizes.language) > 0.04
