"""The hierarchical arrangement as a whole."""

import dataclasses
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import arrange_step, num_microbatches
from hf_mmparallel.arrange.arrangements import hierarchical, tapered
from hf_mmparallel.arrange.assigned_batch import Batch
from hf_mmparallel.arrange.colocated_modules import ColocatedModules
from hf_mmparallel.arrange.greedy import CapacityError
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlan,
    ModulePlugin,
    ParallelPlan,
    Stage,
    StepPlan,
    Workloads,
    resolve_plan,
)
from tests.arrange.builders import batch_indices_of, check_samples, draw, loads, plan_of, workloads_of
from tests.plan.specs import model_spec
from tests.schedule.builders import task_times, timeline_of


def make_plan(vision: int, language: int, stages: int = 1) -> ParallelPlan:
    """Replicas of both modules, each of `stages` stages."""
    plugins = {"vision": ModulePlugin(vision, stages), LANGUAGE_MODEL: ModulePlugin(language, stages)}
    return resolve_plan(model_spec(), plugins)


def limited(work: Workloads, **token_limits: int) -> Workloads:
    return dataclasses.replace(work, token_limits=token_limits)


def check(plan: ParallelPlan, work: Workloads, step: StepPlan) -> None:
    """What holds for every step: all samples once where they have work, and nothing later than one microbatch."""
    check_samples(plan, work, step)
    assert len({len(replica) for replicas in step.microbatches.values() for replica in replicas}) == 1
    for name, replicas in step.microbatches.items():
        for batch_index in batch_indices_of(replicas):
            later = step.location_of[LANGUAGE_MODEL, batch_index][1] - step.location_of[name, batch_index][1]
            assert later in (0, 1)
        if name in work.token_limits:
            assert loads(replicas, work.tokens[name]).max(initial=0) <= work.token_limits[name]


@settings(max_examples=70)
@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.integers(1, 5)),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.booleans(),
    st.none() | st.floats(1.0, 3.0),
)
def test_any_sizes_with_and_without_limits(seed, sizes, text, whole, capacity):
    vision, language, num_samples, microbatch_size = sizes
    plan = make_plan(vision, language)
    work = draw(plan, num_samples, seed, text)
    if whole:
        work = dataclasses.replace(work, forward_ms={name: np.ceil(own) for name, own in work.forward_ms.items()})
    if capacity is not None:
        # With fewer replicas than the language model an encoder takes the samples of several.
        several = {"vision": max(1, -(-language // vision)), LANGUAGE_MODEL: 1}
        largest = {name: work.tokens[name].max(initial=0) for name in several}
        work = limited(work, **{name: max(1, int(capacity * own * largest[name])) for name, own in several.items()})
    step = arrange_step(plan, range(num_samples), work, microbatch_size)
    check(plan, work, step)
    if capacity is None:
        assert len(step.microbatches[LANGUAGE_MODEL][0]) <= num_microbatches(num_samples, microbatch_size, language)


@settings(max_examples=30)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 3)]),
    st.integers(1, 40),
    st.floats(0.05, 0.9),
    st.sampled_from([hierarchical, tapered]),
)
def test_a_sample_above_the_limit_gets_a_microbatch_of_its_own(seed, replicas, num_samples, share, arrangement):
    plan = make_plan(*replicas)
    work = draw(plan, num_samples, seed)
    work = limited(work, **{name: max(1, int(share * tokens.max())) for name, tokens in work.tokens.items()})
    microbatches = arrangement(plan, work, 4)
    for name, limit in work.token_limits.items():
        if name == "vision" and replicas[0] < replicas[1]:
            continue  # Where replicas share an encoder, only the limit of the language model may be what can hold.
        tokens = work.tokens[name]
        for batch_indices in (list(batch_indices) for replica in microbatches[name] for batch_indices in replica):
            assert tokens[batch_indices].sum() <= limit or (tokens[batch_indices] > 0).sum() == 1


def test_only_the_sample_above_the_limit_is_alone():
    plan = make_plan(1, 1)
    tokens = np.array([10] * 15 + [100])
    work = limited(workloads_of(vision=tokens, language_model=tokens), language_model=50)
    (microbatches,) = hierarchical(plan, work, 4)[LANGUAGE_MODEL]
    assert (15,) in microbatches and len(microbatches) <= 6
    assert max(tokens[list(batch_indices)].sum() for batch_indices in microbatches if 15 not in batch_indices) <= 50


@pytest.mark.parametrize("arrangement", ["hierarchical", "tapered"])
@pytest.mark.parametrize("capacity", [1.0, 1.5, 2.0])
def test_replicas_that_share_an_encoder_fit_beside_each_other_in_it(capacity, arrangement):
    plan = make_plan(1, 4)
    work = draw(plan, 64)
    limit = int(capacity * work.tokens["vision"].max())
    work = limited(work, vision=limit)
    step = arrange_step(plan, range(64), work, 4, arrangement)
    check(plan, work, step)
    assert len(step.microbatches["vision"][0]) < 1.5 * work.tokens["vision"].sum() / limit


def test_where_too_many_replicas_share_an_encoder_the_limit_of_the_language_model_holds(monkeypatch):
    copies = ColocatedModules.copies

    def full(self, replica, turn, count, capacity):
        if capacity is not None:
            raise CapacityError
        return copies(self, replica, turn, count, capacity)

    monkeypatch.setattr(ColocatedModules, "copies", full)
    plan = make_plan(1, 4)
    work = draw(plan, 32, text=0.0)
    limit = int(2 * work.tokens[LANGUAGE_MODEL].max())
    microbatches = tapered(plan, limited(work, vision=1000, language_model=limit), 4)
    assert loads(microbatches[LANGUAGE_MODEL], work.tokens[LANGUAGE_MODEL]).max() <= limit


def test_text_alone_is_spread_evenly():
    plan = make_plan(2, 2)
    work = draw(plan, 120, text=1.0)
    step = arrange_step(plan, range(120), work, 6, "hierarchical")
    sums = loads(step.microbatches[LANGUAGE_MODEL], work.forward_ms[LANGUAGE_MODEL])
    assert sums.shape == (2, 10) and sums.max() < 1.05 * sums.mean()


@pytest.mark.parametrize(("vision", "language"), [(2, 2), (1, 2), (4, 2), (3, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_microbatches_and_replicas_are_more_even_than_contiguous_ones(vision, language, seed):
    plan = make_plan(vision, language, 2)
    work = draw(plan, 128, seed)
    found = arrange_step(plan, range(128), work, 4, "hierarchical").microbatches
    other = arrange_step(plan, range(128), work, 4, "contiguous").microbatches
    for name in plan.modules:
        mine, theirs = (loads(kind[name], work.forward_ms[name]) for kind in (found, other))
        assert mine.max() <= theirs.max() and mine.std() < 0.5 * theirs.std()
        assert mine.sum(axis=1).max() <= theirs.sum(axis=1).max() * (1 + 1e-9)


def test_deferral_evens_out_what_the_encoder_leaves():
    # Encoder work is equal, so that the strata alone decide; one microbatch has all the long texts.
    work = workloads_of(vision=[4, 4, 2, 2, 2, 2], language_model=[1, 1, 3, 3, 2, 2])
    found = hierarchical(make_plan(1, 1), work, 3)
    assert {name: loads(found[name], own).tolist() for name, own in work.forward_ms.items()} == {
        "vision": [[8.0, 8.0]],
        LANGUAGE_MODEL: [[6.0, 6.0]],
    }


def test_orders_of_pairs_are_tried_where_single_samples_hold_up_the_others(monkeypatch):
    plan = make_plan(2, 2, 2)
    work = draw(plan, 128, text=0.0)
    for name, start in (("vision", 0), (LANGUAGE_MODEL, 4)):
        work.forward_ms[name][start : start + 4] = 30.0

    def estimates(trials: int) -> np.ndarray:
        monkeypatch.setattr(sys.modules[Batch.__module__], "_TRIALS", trials)
        found = hierarchical(plan, work, 4)
        assert found == hierarchical(plan, work, 4)
        own = {name: loads(found[name], work.forward_ms[name]) for name in found}
        return Batch(plan, work, 1).pipeline.iteration_ms(own)

    assert estimates(16).max() < 0.97 * estimates(1).max()


@pytest.mark.parametrize(("vision", "count"), [(4, 2), (2, 4)])
def test_the_fewest_microbatches_are_those_that_all_tokens_need(vision, count):
    plan = make_plan(vision, 4)
    work = workloads_of(vision=np.full(16, 10), language_model=np.full(16, 10))
    assert Batch(plan, work, 1).fewest.max() == 1
    assert Batch(plan, limited(work, vision=20), 1).fewest.max() == count


@pytest.mark.parametrize("merged", [False, True])
def test_several_encoders(merged):
    plan = plan_of(audio=2, vision=ModulePlugin(colocate_with="audio") if merged else 3, language_model=2)
    work = draw(plan, 128, text=0.3)
    step = arrange_step(plan, range(128), work, 8, "hierarchical")
    check(plan, work, step)
    contiguous = arrange_step(plan, range(128), work, 8, "contiguous")
    for group in [("audio", "vision")] if merged else [("audio",), ("vision",)]:
        mine, theirs = (
            np.sum([loads(kind.microbatches[name], work.forward_ms[name]) for name in group], axis=0)
            for kind in (step, contiguous)
        )
        assert mine.std() < 0.5 * theirs.std()
    both = [batch_index for batch_index in range(128) if ("audio", batch_index) in step.location_of]
    both = [batch_index for batch_index in both if ("vision", batch_index) in step.location_of]
    assert both and (not merged or all(step.location_of["audio", i] == step.location_of["vision", i] for i in both))


def test_encoders_on_the_same_ranks_may_have_other_numbers_of_replicas():
    plan = plan_of(audio=2, vision=1, language_model=1)
    vision = ModulePlan(((Stage((0, 4), ((0,),)), Stage((4, 8), ((1,),))),))
    plan = dataclasses.replace(plan, modules={**plan.modules, "vision": vision})
    work = draw(plan, 32)
    check(plan, work, arrange_step(plan, range(32), work, 2))


def test_programs_can_be_built_and_end_sooner_with_smaller_microbatches_at_the_ends():
    plan = make_plan(1, 1, 2)
    work = draw(plan, 96, text=0.0)

    def time_ms(arrangement: str) -> float:
        step = arrange_step(plan, range(96), work, 6, arrangement)
        check(plan, work, step)
        cost = task_times(plan, step, work.forward_ms)
        return timeline_of(plan, step, (), cost).iteration_ms

    assert time_ms("tapered") < time_ms("hierarchical") < time_ms("contiguous")


def test_it_is_the_default():
    plan = make_plan(1, 1, 3)
    work = draw(plan, 128, text=0.0)
    assert arrange_step(plan, range(128), work, 4) == arrange_step(plan, range(128), work, 4, "hierarchical")
