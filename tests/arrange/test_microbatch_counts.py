"""How many microbatches each replica gets: the fastest numbers, those of the plan, and their proportions."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import (
    ARRANGEMENTS,
    arrange_step,
    fastest_counts,
    num_microbatches,
    plan_for_batch,
    with_fastest_counts,
)
from hf_mmparallel.plan import LANGUAGE_MODEL, Edge, ModulePlan, ParallelPlan, Stage, Workloads

VISION = "vision"
BY_WORK = ("hierarchical", "tapered", "entrain", "disttrain")  # these balance the work of replicas


def plan_of(
    encoder: list[int], language: list[int], counts: tuple[int, ...] | None = None, num_microbatches: int = 1
) -> ParallelPlan:
    """A plan whose replicas have these numbers of stages, each stage on a rank of its own."""
    ranks = itertools.count()

    def module(stages: list[int]) -> ModulePlan:
        cuts = [[12 * index // count for index in range(count + 1)] for count in stages]
        return ModulePlan(
            tuple(tuple(Stage(layers, ((next(ranks),),)) for layers in itertools.pairwise(own)) for own in cuts)
        )

    modules = {VISION: module(encoder), LANGUAGE_MODEL: module(language)}
    edges = (Edge(VISION, LANGUAGE_MODEL),)
    return ParallelPlan(modules, edges, num_microbatches=num_microbatches, replica_microbatches=counts)


def workloads_of(num_samples: int, seed: int, sigma: float = 0.6) -> Workloads:
    """Samples of which some have no image."""
    rng = np.random.default_rng(seed)
    language = rng.lognormal(0, sigma, num_samples)
    vision = rng.lognormal(0, sigma, num_samples) * (rng.random(num_samples) < 0.7)
    forward_ms = {VISION: vision, LANGUAGE_MODEL: language}
    tokens = {name: np.ceil(10 * times).astype(np.int64) for name, times in forward_ms.items()}
    return Workloads(forward_ms, dict.fromkeys(forward_ms, 2.0), tokens, {})


layouts = st.integers(1, 4).flatmap(
    lambda dp_size: st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=4),
        st.lists(st.integers(1, 4), min_size=dp_size, max_size=dp_size),
        st.lists(st.integers(1, 9), min_size=dp_size, max_size=dp_size).map(tuple),
    )
)


@settings(max_examples=80)
@given(st.data(), st.integers(1, 4), st.integers(0, 8))
def test_the_last_replica_ends_as_early_as_possible(data, num_replicas, more):
    fill = data.draw(st.lists(st.integers(1, 30), min_size=num_replicas, max_size=num_replicas))
    slowest = data.draw(st.lists(st.integers(1, 9), min_size=num_replicas, max_size=num_replicas))
    total = num_replicas + more
    counts = fastest_counts(fill, slowest, total)
    assert sum(counts) == total and min(counts) >= 1

    def end_ms(counts) -> int:
        return max(first + (count - 1) * own for first, own, count in zip(fill, slowest, counts, strict=True))

    ways = (way for way in itertools.product(range(1, total + 1), repeat=num_replicas) if sum(way) == total)
    assert end_ms(counts) == min(map(end_ms, ways))


def test_replicas_of_four_three_and_two_stages_share_24_microbatches():
    counts = fastest_counts([120.0] * 3, [30.0, 40.0, 60.0], 24)
    assert counts == [11, 8, 5]  # 11, 7 and 6 take as long, 420, with two replicas at the limit
    assert fastest_counts([120.0] * 3, [40.0] * 3, 25) == [9, 8, 8]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 400))
def test_smaller_batches_keep_the_proportions(counts, total):
    plan = plan_of([1], [1] * len(counts), tuple(counts))
    assert plan.microbatches_for(sum(counts)) == tuple(counts)
    found = plan.microbatches_for(total)
    assert min(found) >= 1 and total <= sum(found) < total + len(counts)
    for count, own in zip(counts, found, strict=True):
        assert 0 <= own - count * total / sum(counts) < 1


@settings(max_examples=60)
@given(layouts, st.sampled_from(list(ARRANGEMENTS)), st.integers(1, 3), st.floats(0, 1), st.integers(0, 10**6))
def test_every_arrangement_keeps_the_counts_of_the_plan(layout, arrangement, microbatch_size, left, seed):
    plan = plan_of(*layout)
    full = plan.total_microbatches * microbatch_size
    num_samples = max(1, round(left * full))
    step = arrange_step(plan, range(num_samples), workloads_of(num_samples, seed), microbatch_size, arrangement)
    step.check(plan)  # every sample once
    found = [len(microbatches) for microbatches in step.microbatches[LANGUAGE_MODEL]]
    expected = plan.microbatches_for(num_microbatches(num_samples, microbatch_size))
    if arrangement in ("hierarchical", "tapered", "entrain"):  # fewer where single samples are large
        assert all(own <= most for own, most in zip(found, expected, strict=True))
    else:
        assert found == list(expected)
    if arrangement not in BY_WORK and num_samples == full and arrangement != "batch_rebalance":
        sizes = [sum(map(len, microbatches)) for microbatches in step.microbatches[LANGUAGE_MODEL]]
        assert sizes == [microbatch_size * count for count in expected]


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(list(ARRANGEMENTS)),
    st.integers(0, 60),
    st.integers(0, 10**6),
)
def test_equal_counts_are_no_special_case(encoder_dp_size, dp_size, count, arrangement, num_samples, seed):
    equal = plan_of([1] * encoder_dp_size, [2] * dp_size, num_microbatches=count)
    given_counts = replace(equal, replica_microbatches=(count,) * dp_size)
    workloads = workloads_of(num_samples, seed)
    steps = [arrange_step(plan, range(num_samples), workloads, 2, arrangement) for plan in (equal, given_counts)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("num_samples", [192, 131])
def test_replicas_get_their_share_of_the_work(arrangement, num_samples):
    """Also in an incomplete global batch, of the samples as of the work."""
    plan = plan_of([1, 1, 1], [1, 1, 1], (12, 8, 4))
    workloads = workloads_of(num_samples, 0)
    step = arrange_step(plan, range(num_samples), workloads, 8, arrangement)
    locations, _ = step.locations[LANGUAGE_MODEL]
    work = np.bincount(locations, workloads.forward_ms[LANGUAGE_MODEL], 3)
    expected = np.array([12, 8, 4]) / 24
    tolerance = 0.1 if arrangement in BY_WORK else 0.3  # disttrain deals the largest samples last
    assert work / work.sum() == pytest.approx(expected, rel=tolerance)
    # A replica of the encoder encodes for the language-model replica of the same number, and nothing else.
    encoders, _ = step.locations[VISION]
    if arrangement != "contiguous" or num_samples == 192:
        assert (encoders[encoders >= 0] == locations[encoders >= 0]).all()


def test_a_plan_with_the_predicted_counts():
    workloads = workloads_of(48, 0)
    workloads.forward_ms[VISION][:] *= 0.1  # so that encoders of one stage hold nobody up
    unlike = plan_of([1, 1, 1], [4, 3, 2], num_microbatches=8)
    counts = with_fastest_counts(unlike, workloads).replica_microbatches
    assert counts is not None and sum(counts) == 24 and counts[0] > counts[1] > counts[2]
    for arrangement in ("contiguous", "hierarchical"):
        steps = [
            arrange_step(plan, range(48), workloads, 2, arrangement)
            for plan in (unlike, replace(unlike, replica_microbatches=counts))
        ]
        assert steps[0] == steps[1]
    given_counts = replace(unlike, replica_microbatches=(7, 8, 9))
    assert with_fastest_counts(given_counts, workloads) is given_counts
    alike = plan_of([1, 1], [2, 2], num_microbatches=8)
    assert with_fastest_counts(alike, workloads) is alike


def test_a_plan_takes_the_number_of_microbatches_of_its_batch_or_refuses_it():
    assert plan_for_batch(plan_of([1], [1, 1]), 20, 3).num_microbatches == 4
    plan = plan_of([1], [1, 1], (5, 2))
    assert plan.num_microbatches == 4 and plan_for_batch(plan, 20, 3) == plan
    with pytest.raises(ValueError, match=r"`replica_microbatches=\[5, 2\]` .* are 7 microbatches, .* has 10"):
        plan_for_batch(plan, 20, 2)
