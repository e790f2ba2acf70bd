"""Contiguous arrangements, and what a step plan says about itself."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.arrange import contiguous_step, num_microbatches
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, StepPlan, resolve_plan, sync_groups
from hf_mmparallel.schedule import build_program
from tests.plan.specs import model_spec

SPEC = model_spec()


def make_plan(vision: int, language: int) -> ParallelPlan:
    return resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=vision), LANGUAGE_MODEL: ModulePlugin(dp_size=language)})


def flat(replicas) -> list[int]:
    return [
        batch_index for microbatches in replicas for batch_indices in microbatches for batch_index in batch_indices
    ]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 30), st.integers(1, 5))
def test_every_sample_is_once_in_every_module_and_in_order(vision, language, size, microbatch_size):
    plan = make_plan(vision, language)
    samples = [100 - i for i in range(size)]
    step = contiguous_step(plan, samples, microbatch_size, epoch=3)
    step.check(plan)
    assert step.samples == tuple(samples) and step.epoch == 3
    assert step.targets == {"vision": (LANGUAGE_MODEL,)}
    count = num_microbatches(size, microbatch_size, language)
    encoders, decoders = step.microbatches["vision"], step.microbatches[LANGUAGE_MODEL]
    assert (len(encoders), len(decoders)) == (vision, language)
    assert all(len(replica) == count for replica in (*encoders, *decoders))
    assert sorted(flat(encoders)) == sorted(flat(decoders)) == list(range(size))
    for index in range(count):
        block = [batch_index for replica in decoders for batch_index in replica[index]]
        first = index * microbatch_size * language
        assert block == list(range(first, min(first + microbatch_size * language, size)))
        assert [batch_index for replica in encoders for batch_index in replica[index]] == block
        sizes = [len(replica[index]) for replica in encoders]
        assert max(sizes) - min(sizes) <= 1
        assert all(len(replica[index]) <= microbatch_size for replica in decoders)


@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 5))
def test_no_more_microbatches_than_needed(size, microbatch_size, dp_size):
    count = num_microbatches(size, microbatch_size, dp_size)
    assert count * microbatch_size * dp_size >= size
    assert count == 1 or (count - 1) * microbatch_size * dp_size < size


def test_a_small_batch_leaves_microbatches_empty():
    step = contiguous_step(make_plan(2, 3), [7, 8, 9], 2)
    assert step.microbatches[LANGUAGE_MODEL] == (((0, 1),), ((2,),), ((),))
    assert step.microbatches["vision"] == (((0, 1),), ((2,),))
    assert step.chunks[LANGUAGE_MODEL, 2, 0] == ()
    assert step.chunks["vision", 0, 0] == ((0, 1),)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))
def test_encoder_copies_take_turns_in_who_gets_one_more(vision, microbatch_size, turns):
    count = turns * vision
    step = contiguous_step(make_plan(vision, 1), range(count * microbatch_size), microbatch_size)
    assert {sum(len(batch_indices) for batch_indices in replica) for replica in step.microbatches["vision"]} == {
        turns * microbatch_size
    }


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_samples_stay_with_the_copy_of_the_same_number_when_all_are_full(dp_size, microbatch_size, count):
    step = contiguous_step(make_plan(dp_size, dp_size), range(dp_size * microbatch_size * count), microbatch_size)
    assert step.microbatches["vision"] == step.microbatches[LANGUAGE_MODEL]


def moved() -> StepPlan:
    """Vision microbatch 0 feeds the microbatches 0 and 1 of a replica; batch index 3 has no images."""
    return StepPlan(
        (10, 11, 12, 13),
        {"vision": (((0, 2, 1), ()),), LANGUAGE_MODEL: (((1,), (0, 3)), ((2,), ()))},
        {"vision": (LANGUAGE_MODEL,)},
    )


def test_an_encoder_microbatch_is_cut_by_who_takes_it():
    step = moved()
    assert step.chunks == {
        ("vision", 0, 0): ((2, 1), (0,)),
        ("vision", 0, 1): (),
        (LANGUAGE_MODEL, 0, 0): ((1,),),
        (LANGUAGE_MODEL, 0, 1): ((0, 3),),
        (LANGUAGE_MODEL, 1, 0): ((2,),),
        (LANGUAGE_MODEL, 1, 1): (),
    }
    assert step.location_of[LANGUAGE_MODEL, 3] == (0, 1)
    assert step.location_of["vision", 2] == (0, 0)
    assert ("vision", 3) not in step.location_of


def test_structure_is_all_that_a_program_reads():
    plan = make_plan(1, 2)
    groups = sync_groups(SPEC, plan)
    step = moved()
    renamed = dataclasses.replace(
        step,
        samples=(1, 2, 3, 4),
        microbatches={"vision": (((3, 2, 1), ()),), LANGUAGE_MODEL: (((1,), (0, 3)), ((2,), ()))},
    )
    assert renamed.structure == step.structure
    assert build_program(plan, renamed, groups).actions == build_program(plan, step, groups).actions
    other = dataclasses.replace(step, microbatches={**step.microbatches, LANGUAGE_MODEL: (((), (0, 3)), ((2, 1), ()))})
    assert other.structure != step.structure
    assert build_program(plan, other, groups).actions != build_program(plan, step, groups).actions


@pytest.mark.parametrize(
    "change",
    [
        {LANGUAGE_MODEL: (((1,), (0, 3)), ((), ()))},
        {LANGUAGE_MODEL: (((1,), (0, 3)), ((2, 1), ()))},
        {LANGUAGE_MODEL: (((1,), (0, 3, 4)), ((2,), ()))},
        {LANGUAGE_MODEL: (((1, 2), (0, 3)),)},
        {"vision": (((0, 2, 1), (0,)),)},
        {"vision": (((0, 2, 4), ()),)},
    ],
)
def test_check_finds_lost_and_repeated_samples(change):
    plan, step = make_plan(1, 2), moved()
    step.check(plan)
    with pytest.raises(AssertionError):
        dataclasses.replace(step, microbatches={**step.microbatches, **change}).check(plan)
