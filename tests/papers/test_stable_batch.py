"""The profiling batch size is as stable as it says, and as Entrain's tables have it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.papers.allocation import Rounding, proportional_allocations
from hf_mmparallel.papers.stable_batch import (
    StabilityReport,
    StabilityTest,
    draw_from,
    minimum_stable_batch,
    split_stability,
    stability_lines,
)
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, SampleSizes, resolve_plan

CASES = [(name, model) for name in PUBLISHED for model in PUBLISHED_MODELS]


def published(name: str, model: str, test: StabilityTest) -> StabilityReport:
    return minimum_stable_batch(
        lambda num, rng: PUBLISHED[name].draw(num, int(rng.integers(2**63))),
        lambda sizes: PUBLISHED_MODELS[model].workloads(sizes).forward_ms,
        16,
        1,
        test,
    )


def passed(name: str, model: str, batch_size: int, rounding: Rounding = "nearest", num_seeds: int = 8) -> float:
    """The share of seeds with which one batch size passes."""
    one = StabilityTest(start=batch_size, limit=batch_size, rounding=rounding)
    tests = [replace(one, seed=seed) for seed in range(num_seeds)]
    return float(np.mean([published(name, model, test).batch_size == batch_size for test in tests]))


@pytest.mark.parametrize(("name", "model"), CASES)
def test_published_data_are_stable_where_the_paper_says_so(name, model):
    stated = PUBLISHED[name].stated
    stable_from = stated.stable_from[model]
    assert passed(name, model, 1) == 0 and passed(name, model, 256) == 1
    # The paper itself is stable at 4 with two of its eight tables, and at 16 with two more. At 64 LLaVA-150k passes
    # with a part of the seeds, with both models.
    for batch_size in (4, 16, 64)[: 2 if name == "llava-150k" else 3]:
        assert (passed(name, model, batch_size, num_seeds=40) > 0.5) == (batch_size >= stable_from)
    report = published(name, model, StabilityTest(rounding="nearest"))
    assert report.split == stated.splits[model] and report.history[-1].reference == report.split
    assert report.batch_size is not None and report.batch_size <= 256
    assert not any(trials.passed for trials in report.history[:-1])


def population(means, deviations, num_samples=20_000, seed=0):
    """Work of three modules, or two, with means and relative deviations."""
    rng = np.random.default_rng(seed)
    names = ("vision", "language_model", "audio")
    return {
        name: mean * rng.gamma(deviation**-2, deviation**2, num_samples)
        for name, mean, deviation in zip(names, means, deviations, strict=False)
    }


def test_what_passed_agrees_as_often_as_promised():
    work = population([1.0, 1.7, 0.4], [0.9, 0.5, 1.5])
    rng, rates = np.random.default_rng(1), []
    for seed in range(20):
        report = minimum_stable_batch(draw_from(work), None, 24, 2, StabilityTest(seed=seed))
        assert report.batch_size is not None
        fresh = draw_from(work)(400 * report.batch_size, rng)
        batches = np.stack([values.reshape(400, -1).sum(axis=1) for values in fresh.values()], axis=1)
        splits = proportional_allocations(batches, 12)
        rates.append((splits != report.history[-1].reference).any(axis=1).mean())
    assert np.mean(np.array(rates) > 0.05) <= 0.2  # 5 % for each size that was tried
    assert max(rates) < 0.15


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(["fastest", "nearest"]))
def test_the_border_lies_where_the_split_changes(seed, rounding: Rounding):
    rng = np.random.default_rng(seed)
    work = population(rng.uniform(0.2, 2, 3), rng.uniform(0.1, 1, 3), 500, seed)
    report = minimum_stable_batch(draw_from(work), None, 12, 1, StabilityTest(limit=4, rounding=rounding, seed=seed))
    border, means = report.boundary, np.array([share.mean for share in report.shares.values()])
    assert border is not None and sum(border.neighbor) == 12 and means.sum() == pytest.approx(1)
    moved = (np.array(border.neighbor) - border.split) * border.distance
    before, after = (
        proportional_allocations((means + factor * moved)[None], 12, rounding=rounding)[0] for factor in (0.999, 1.001)
    )
    if tuple(before) == border.split:  # no other border is nearer
        assert tuple(after) == border.neighbor
    assert tuple(proportional_allocations(means[None], 12, rounding=rounding)[0]) == report.split == border.split


def test_of_two_modules_the_border_is_exact():
    work = population([1.25, 1.0], [0.8, 0.3])
    borders: dict[Rounding, tuple[float, float]] = {"nearest": (8.5 / 16, 9.5 / 16), "fastest": (8 / 15, 9 / 15)}
    for rounding, (below, above) in borders.items():
        report = minimum_stable_batch(draw_from(work), None, 16, 1, StabilityTest(rounding=rounding, limit=4096))
        (share, _), border = report.shares.values(), report.boundary
        assert border is not None and border.split == (9, 7)
        assert border.distance == pytest.approx(min(above - share.mean, share.mean - below))
        assert border.needed_batch_size == pytest.approx((6 * border.deviation / border.distance) ** 2)
        assert border.needed_batch_size > (report.batch_size or np.inf)


def test_the_interval_holds_the_shares_of_batches():
    work = population([3.0, 1.0], [0.7, 0.7])
    report = minimum_stable_batch(draw_from(work), None, 8, 1)
    share = report.shares["vision"]
    drawn = draw_from(work)(2000 * report.history[-1].batch_size, np.random.default_rng(5))
    vision, language = (values.reshape(2000, -1).sum(axis=1) for values in drawn.values())
    inside = ((vision / (vision + language) >= share.low) & (vision / (vision + language) <= share.high)).mean()
    assert 0.93 <= inside <= 0.97
    exact = work["vision"].sum() / (work["vision"].sum() + work["language_model"].sum())
    assert abs(share.mean - exact) < 4 * share.error


def test_a_mean_on_a_border_is_told_with_what_would_be_enough():
    rng = np.random.default_rng(0)
    vision = rng.gamma(2.0, size=1000)
    work = {"vision": vision, "language_model": rng.permutation(vision)}  # halves of 3 ranks
    report = minimum_stable_batch(draw_from(work), None, 3, 1, StabilityTest(limit=256), dataset_size=200)
    assert report.batch_size is None and [trials.batch_size for trials in report.history] == [2**i for i in range(9)]
    assert set(report.history[-1].splits) == {(1, 2), (2, 1)}
    dataset, reason = report.notes
    assert report.boundary is not None and "256 samples" in dataset and "dataset of 200" in dataset
    assert "up to 256" in reason and "vision 1, language_model 2" in reason
    assert f"{report.boundary.needed_batch_size:.3g} samples" in reason


def test_a_pass_next_to_a_border_says_so():
    work = population([1.0, 1.0], [0.2, 0.2])
    work["language_model"] *= work["vision"].sum() / work["language_model"].sum()
    tests = [StabilityTest(error=0.6, seed=seed) for seed in range(20)]
    reports = [minimum_stable_batch(draw_from(work), None, 3, 1, test) for test in tests]
    assert tests[0].num_trials == 4  # so few agree by chance
    noted = [report for report in reports if any("less than its standard error" in note for note in report.notes)]
    assert len(noted) > 5 and all(report.batch_size is not None for report in noted)


def test_samples_that_are_alike_pass_at_once_and_one_split_has_no_border():
    alike = {"vision": np.full(10, 3.0), "language_model": np.full(10, 5.0)}
    report = minimum_stable_batch(draw_from(alike), None, 8, 1)
    assert report.batch_size == 1 and report.split == (3, 5) and report.notes == ()
    assert report.boundary is not None and report.boundary.deviation == pytest.approx(0, abs=1e-6)
    assert minimum_stable_batch(draw_from(alike), None, 4, 2).boundary is None


def test_the_number_of_trials_is_that_of_the_paper():
    assert StabilityTest().num_trials == 59
    report = minimum_stable_batch(draw_from(population([1.0, 2.0], [0.5, 0.5])), None, 16, 2)
    assert all(sum(trials.splits.values()) == 60 for trials in report.history)


def test_what_cannot_be_tested_is_refused():
    draw = draw_from({"vision": np.ones(3), "language_model": np.ones(3)})
    for num_ranks, dp_size, said in ((16, 3, "16 ranks .*`dp_size=3`"), (2, 2, "1 ranks are not 1 ")):
        with pytest.raises(ValueError, match=said):
            minimum_stable_batch(draw, None, num_ranks, dp_size)
    for wrong, said in (({"confidence": 95}, "`confidence=95`"), ({"start": 8, "limit": 4}, "`start=8`.*`limit=4`")):
        with pytest.raises(ValueError, match=said):
            StabilityTest(**wrong)


SPEC = PUBLISHED_MODELS["llama3-1b"].spec
COSTS = analytic_costs(SPEC, find_device("a40"))
SIZES = PUBLISHED["synthchartnet"].draw(512, 0)


def plan_of(vision: dict, language: dict) -> ParallelPlan:
    return resolve_plan(SPEC, {"vision": ModulePlugin(**vision), LANGUAGE_MODEL: ModulePlugin(**language)})


def test_a_split_has_a_minimum_stable_batch_and_smaller_ones_are_told_of():
    plan = plan_of({"dp_size": 2, "pp_size": 5}, {"dp_size": 2, "pp_size": 3})
    report = split_stability(COSTS, plan, SIZES)
    assert report is not None and report.batch_size is not None and sum(report.split) == 8
    (split, text), (warning, below) = stability_lines(COSTS, plan, SIZES, report.batch_size - 1)
    assert (split, warning) == ("Split", "Warning") and f" {report.batch_size} samples" in text
    assert f" {report.batch_size - 1} samples" in below and f"`--global-batch-size {report.batch_size}`" in below
    assert stability_lines(COSTS, plan, SIZES, report.batch_size) == [(split, text)]


def test_without_a_split_there_is_none():
    shared, one_rank_each = plan_of({"dp_size": 2}, {"colocate_with": "vision"}), plan_of({}, {})
    assert split_stability(COSTS, shared, SIZES) is None and split_stability(COSTS, one_rank_each, SIZES) is None
    nothing = SampleSizes.uniform(dict.fromkeys(SPEC.modules, 0), 4)
    assert split_stability(COSTS, plan_of({"pp_size": 2}, {"pp_size": 2}), nothing) is None
