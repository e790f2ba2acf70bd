"""How many microbatches each replica gets: the fastest numbers, those of the plan, and what they give."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.arrange import (
    ARRANGEMENTS,
    arrange_step,
    fastest_counts,
    num_microbatches,
    plan_for_batch,
    with_fastest_counts,
)
from hf_mmparallel.arrange.balance import step_balance
from hf_mmparallel.arrange.microbatch_counts import microbatch_counts
from hf_mmparallel.plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from hf_mmparallel.schedule import in_flight_1f1b
from tests.arrange.builders import check_samples, draw, workloads_of
from tests.schedule.builders import make_plan, module_spec, task_times, timeline_of

VISION = "vision"
BY_WORK = ("hierarchical", "tapered", "entrain", "disttrain")  # these balance the work of replicas


def plan_of(
    encoder: list[int], language: list[int], counts: tuple[int, ...] | None = None, num_microbatches: int = 1
) -> ParallelPlan:
    """A plan whose replicas have these numbers of stages, each stage on a rank of its own."""
    ranks = itertools.count()
    sizes = {VISION: encoder, LANGUAGE_MODEL: language}
    modules = {name: [[(next(ranks),) for _ in range(count)] for count in own] for name, own in sizes.items()}
    specs = {VISION: module_spec(VISION, 12, feature_layers=(0,)), LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL, 12)}
    plan = make_plan(modules, specs)[1]
    return replace(plan, num_microbatches=num_microbatches, replica_microbatches=counts)


LAYOUTS = st.integers(1, 4).flatmap(
    lambda dp_size: st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=4),
        st.lists(st.integers(1, 4), min_size=dp_size, max_size=dp_size),
        st.lists(st.integers(1, 9), min_size=dp_size, max_size=dp_size).map(tuple),
    )
)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.floats(1, 30), st.floats(0.5, 9)), min_size=1, max_size=4), st.integers(0, 8))
def test_the_last_replica_ends_as_early_as_possible(paces, more):
    total = len(paces) + more
    counts = fastest_counts(*map(list, zip(*paces, strict=True)), total)
    assert sum(counts) == total and min(counts) >= 1

    def end_ms(counts) -> float:
        return max(fill + (count - 1) * slowest for (fill, slowest), count in zip(paces, counts, strict=True))

    ways = (way for way in itertools.product(range(1, total + 1), repeat=len(paces)) if sum(way) == total)
    assert end_ms(counts) == pytest.approx(min(map(end_ms, ways)), rel=1e-9)


def test_equally_fast_numbers_are_those_with_the_fewest_replicas_at_the_limit():
    counts = fastest_counts([120.0] * 3, [30.0, 40.0, 60.0], 24)
    assert counts == [11, 8, 5]  # 11, 7 and 6 take as long, 420, with two replicas at the limit
    assert fastest_counts([120.0] * 3, [40.0] * 3, 25) == [9, 8, 8]
    with pytest.raises(ValueError, match="2 microbatches are too few for 3 pipelines"):
        fastest_counts([1.0] * 3, [1.0] * 3, 2)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 400))
def test_smaller_batches_keep_the_proportions(counts, total):
    plan = plan_of([1], [1] * len(counts), tuple(counts))
    assert plan.microbatches_for(sum(counts)) == tuple(counts)
    found = plan.microbatches_for(total)
    assert min(found) >= 1 and total <= sum(found) < total + len(counts)
    for count, own in zip(counts, found, strict=True):
        assert 0 <= own - count * total / sum(counts) < 1


@settings(max_examples=60)
@given(LAYOUTS, st.sampled_from(list(ARRANGEMENTS)), st.integers(1, 3), st.floats(0, 1), st.integers(0, 10**6))
def test_every_arrangement_keeps_the_counts_of_the_plan(layout, arrangement, microbatch_size, left, seed):
    plan = plan_of(*layout)
    full = plan.total_microbatches * microbatch_size
    num_samples = max(1, round(left * full))
    step = arrange_step(plan, range(num_samples), draw(plan, num_samples, seed), microbatch_size, arrangement)
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
@given(st.tuples(*[st.integers(1, 4)] * 2), st.integers(1, 9), st.sampled_from(list(ARRANGEMENTS)), st.integers(0, 60))
def test_equal_counts_are_no_special_case(sizes, count, arrangement, num_samples):
    equal = plan_of([1] * sizes[0], [2] * sizes[1], num_microbatches=count)
    given_counts = replace(equal, replica_microbatches=(count,) * sizes[1])
    workloads = draw(equal, num_samples, num_samples)
    steps = [arrange_step(plan, range(num_samples), workloads, 2, arrangement) for plan in (equal, given_counts)]
    assert steps[0] == steps[1]


def test_a_plan_with_the_predicted_counts():
    unlike = plan_of([1, 1, 1], [4, 3, 2], num_microbatches=8)
    workloads = draw(unlike, 48)
    workloads.forward_ms[VISION][:] *= 0.1  # so that encoders of one stage hold nobody up
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
    with pytest.raises(ValueError, match=r"`replica_microbatches=\[5, 2\]` .* 7 microbatches, .* 10"):
        plan_for_batch(plan, 20, 2)


def unlike(num_encoders: int) -> ParallelPlan:
    """Language-model replicas with 4, 3 and 2 stages, and encoder replicas of one stage each."""
    return plan_of([1] * num_encoders, [4, 3, 2])


def iteration_ms(plan: ParallelPlan, step: StepPlan, workloads: Workloads) -> float:
    cost = task_times(plan, step, workloads.forward_ms)
    return timeline_of(plan, step, [], cost).iteration_ms


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("num_encoders", [1, 3])
def test_every_arrangement_follows_the_counts(arrangement, num_encoders):
    plan = unlike(num_encoders)
    workloads = PUBLISHED_MODELS["llama3-3b"].workloads(PUBLISHED["llava-150k"].draw(96, 0))
    workloads.forward_ms["vision"][:] *= 0.1  # so that encoders of one stage hold nobody up
    workloads.forward_ms["vision"][::7] = 0  # text alone
    counts = microbatch_counts(plan, workloads, 24)
    step = arrange_step(plan, range(96), workloads, 4, arrangement)
    check_samples(plan, workloads, step)
    assert counts.sum() == 24 and list(counts) == sorted(counts, reverse=True) and counts[0] > counts[2]
    if arrangement != "entrain":  # which makes fewer where single samples are large
        assert [len(own) for own in step.microbatches[LANGUAGE_MODEL]] == counts.tolist()
    # No replica is far from its share of the work, and nothing is taken before it is encoded.
    loads = np.array([own.sum() for own in step_balance(step, workloads).forward_ms[LANGUAGE_MODEL]])
    if arrangement not in ("contiguous", "batch_rebalance", "sub_microbatches"):
        assert loads / loads.sum() == pytest.approx(counts / counts.sum(), rel=0.06)
    parts = 2 if arrangement == "sub_microbatches" else 1
    for replica in range(num_encoders):
        for batch_index, turn in step.consumer_turns("vision", replica, LANGUAGE_MODEL).items():
            assert step.location_of["vision", batch_index][1] // parts <= turn
    cost = task_times(plan, step, workloads.forward_ms)
    simulation = timeline_of(plan, step, [], cost)
    max_in_flight = in_flight_1f1b(plan, step)
    assert all(peak < max_in_flight[key] + 1 for key, peak in simulation.peak_in_flight.items())


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_step_with_the_counts_of_the_plan(arrangement):
    """Of 24 equal microbatches, 11, 7 and 6 take 420 ms, as the predicted 11, 8 and 5 do; eight each take 540 ms."""
    workloads = workloads_of(vision=[0.0] * 24, language_model=[40.0] * 24)
    plan, step_ms = unlike(3), {}
    for counts in [(11, 7, 6), (8, 8, 8), None]:
        plan = replace(plan, replica_microbatches=counts)
        step = arrange_step(plan, range(24), workloads, 1, arrangement)
        found = tuple(len(own) for own in step.microbatches[LANGUAGE_MODEL])
        assert found == (counts or (11, 8, 5))
        step_ms[counts] = iteration_ms(plan, step, workloads)
    assert step_ms[11, 7, 6] == step_ms[None] == pytest.approx(420)
    assert step_ms[8, 8, 8] == pytest.approx(540)


def test_microbatches_of_a_shared_encoder_come_when_each_replica_needs_them():
    plan, workloads = unlike(1), workloads_of(vision=[1.0] * 24, language_model=[40.0] * 24)
    step = arrange_step(plan, range(24), workloads, 1, "contiguous")
    counts = [len(own) for own in step.microbatches[LANGUAGE_MODEL]]
    (encoder,) = step.microbatches["vision"]
    assert len(encoder) == max(counts)
    # After any number of turns, each replica has had its share of its microbatches.
    for turns in range(len(encoder) + 1):
        had = set(itertools.chain.from_iterable(encoder[:turns]))
        for own, count in zip(step.microbatches[LANGUAGE_MODEL], counts, strict=True):
            taken = had & set(itertools.chain.from_iterable(own))
            assert abs(len(taken) - turns * count / len(encoder)) <= 0.5 + 1e-9
    assert list(itertools.chain.from_iterable(encoder)) == list(range(24))
