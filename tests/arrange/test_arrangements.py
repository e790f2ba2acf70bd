"""What all arrangements have in common, the contiguous one, and what a step plan says about itself."""

import dataclasses
import re
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step, contiguous_step, num_microbatches
from hf_mmparallel.arrange.balance import compare_with_contiguous, excess, measured_balance, step_balance
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, StepPlan, sync_groups
from hf_mmparallel.schedule import Span, Task, build_program
from tests.arrange.builders import batch_indices_of, loads, odd_workloads, plan_of, workloads_of
from tests.arrange.test_hierarchical import check
from tests.plan.specs import model_spec
from tests.schedule.builders import cases, make_step

PLANS = {
    "no encoder": plan_of(language_model=ModulePlugin(3, 2)),
    "3 and 2": plan_of(vision=3, language_model=2),
    "3 encoders": plan_of(
        vision=2, audio=1, video=ModulePlugin(colocate_with="vision"), language_model=ModulePlugin(2, 2)
    ),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kind", ["none", "one", "few", "text", "nothing to do", "giant", "little text"])
@pytest.mark.parametrize("name", PLANS)
def test_odd_batches(name, kind, arrangement):
    plan = PLANS[name]
    work = odd_workloads(plan, kind)
    step = arrange_step(plan, range(work.num_samples), work, 2, arrangement)
    if arrangement in ("hierarchical", "tapered"):
        check(plan, work, step)
    assert step == arrange_step(plan, range(work.num_samples), work, 2, arrangement)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("module", ["vision", LANGUAGE_MODEL])
def test_workloads_that_are_none_are_refused_with_sample_and_module(module, value, arrangement):
    plan = PLANS["3 and 2"]
    work = odd_workloads(plan, "any")
    work.forward_ms[module][3] = value
    with pytest.raises(ValueError, match=re.escape(f"Sample 103 has a workload of {value} ms in `{module}`")):
        arrange_step(plan, range(100, 124), work, 2, arrangement)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 30), st.integers(1, 5))
def test_every_sample_is_once_in_every_module_and_in_order(vision, language, size, microbatch_size):
    plan = plan_of(vision=vision, language_model=language)
    samples = [100 - i for i in range(size)]
    step = contiguous_step(plan, samples, microbatch_size, epoch=3)
    step.check(plan)
    assert step.samples == tuple(samples) and step.epoch == 3
    assert step.targets == {"vision": (LANGUAGE_MODEL,)}
    count = num_microbatches(size, microbatch_size, language)
    assert count == max(1, ceil(size / (microbatch_size * language)))
    encoders, decoders = step.microbatches["vision"], step.microbatches[LANGUAGE_MODEL]
    assert (len(encoders), len(decoders)) == (vision, language)
    assert all(len(replica) == count for replica in (*encoders, *decoders))
    assert sorted(batch_indices_of(encoders)) == sorted(batch_indices_of(decoders)) == list(range(size))
    for index in range(count):
        first = index * microbatch_size * language
        block = list(range(first, min(first + microbatch_size * language, size)))
        for replicas in (encoders, decoders):
            assert [batch_index for replica in replicas for batch_index in replica[index]] == block
        sizes = [len(replica[index]) for replica in encoders]
        assert max(sizes) - min(sizes) <= 1
        assert all(len(replica[index]) <= microbatch_size for replica in decoders)
    if vision == language and size == count * microbatch_size * language:
        assert encoders == decoders, "samples stay with the copy of the same number"


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))
def test_encoder_copies_take_turns_in_who_gets_one_more(vision, microbatch_size, turns):
    plan, count = plan_of(vision=vision, language_model=1), turns * vision
    step = contiguous_step(plan, range(count * microbatch_size), microbatch_size)
    sizes = {len(batch_indices_of([replica])) for replica in step.microbatches["vision"]}
    assert sizes == {turns * microbatch_size}


# Vision microbatch 0 feeds the microbatches 0 and 1 of a replica; batch index 3 has no images.
MOVED = StepPlan(
    (10, 11, 12, 13),
    {"vision": (((0, 2, 1), ()),), LANGUAGE_MODEL: (((1,), (0, 3)), ((2,), ()))},
    {"vision": (LANGUAGE_MODEL,)},
)


def changed(**microbatches) -> StepPlan:
    return dataclasses.replace(MOVED, microbatches={**MOVED.microbatches, **microbatches})


def test_structure_is_all_that_a_program_reads():
    plan = plan_of(vision=1, language_model=2)
    groups = sync_groups(model_spec(8, 8), plan)
    actions = build_program(plan, MOVED, groups).actions
    renamed = dataclasses.replace(changed(vision=(((3, 2, 1), ()),)), samples=(1, 2, 3, 4))
    assert renamed.structure == MOVED.structure
    assert build_program(plan, renamed, groups).actions == actions
    other = changed(language_model=(((), (0, 3)), ((2, 1), ())))
    assert other.structure != MOVED.structure
    assert build_program(plan, other, groups).actions != actions


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
    plan = plan_of(vision=1, language_model=2)
    MOVED.check(plan)
    with pytest.raises(AssertionError):
        changed(**change).check(plan)


DEFERRED = make_step({"vision": [[[0, 1], [2]]], LANGUAGE_MODEL: [[[0], [1, 2, 3]]]})


def test_a_deferred_sample_counts_where_each_module_takes_it():
    balance = step_balance(DEFERRED, workloads_of(vision=[1, 2, 4, 0], language_model=[10, 20, 40, 80]))
    assert balance.deferred_ms[LANGUAGE_MODEL][0].tolist() == [0, 20]  # sample 3 has no image and is not deferred
    assert balance.deferred_fraction == 0.25 and balance.num_microbatches == 2
    assert balance.std_ms("vision") == 0.5 and balance.std_ms(LANGUAGE_MODEL) == 65
    assert balance.microbatch_excess(LANGUAGE_MODEL) == pytest.approx(140 / 75 - 1)
    assert balance.replica_excess("vision") == 0


def test_replicas_are_compared_by_all_that_they_do():
    step = make_step({LANGUAGE_MODEL: [[[0], [1]], [[2], []]]})
    balance = step_balance(step, workloads_of(language_model=[1, 2, 5]))
    assert balance.replica_excess(LANGUAGE_MODEL) == pytest.approx(5 / 4 - 1)
    assert balance.microbatch_excess(LANGUAGE_MODEL) == pytest.approx((2 / 1.5 - 1 + 5 / 2.5 - 1) / 2)
    assert balance.std_ms(LANGUAGE_MODEL) == pytest.approx((0.5 + 2.5) / 2)
    assert excess([0.0, 0.0]) == 0


def test_forwards_that_ran_are_summed_over_stages_and_chunks():
    spans = [
        Span(0, Task("fwd", "vision", 0, 0, 0, 0), 1.0, 2.0),
        Span(0, Task("fwd", "vision", 0, 0, 0, 1), 3.0, 5.0),
        Span(0, Task("bwd", "vision", 0, 0, 0, 1), 5.0, 64.0),
        Span(1, Task("fwd", LANGUAGE_MODEL, 0, 0, 0, 0), 4.0, 8.0),
        Span(2, Task("fwd", LANGUAGE_MODEL, 0, 1, 0, 0), 9.0, 17.0),
    ]
    balance = measured_balance(DEFERRED, spans)
    assert balance.forward_ms["vision"][0].tolist() == [3, 0]
    assert balance.forward_ms[LANGUAGE_MODEL][0].tolist() == [12, 0]
    assert balance.deferred_fraction == 0.25


@given(cases(), st.data())
def test_every_sample_counts_once_and_is_deferred_or_not(case, data):
    step = case.step
    times = {name: np.array([data.draw(st.integers(1, 9)) for _ in step.samples]) for name in step.microbatches}
    balance = step_balance(step, workloads_of(**times))
    late = np.zeros(len(step.samples), bool)  # samples that an encoder takes before their turn in the language model
    for name in step.targets:
        for replica, microbatches in enumerate(step.microbatches[name]):
            turns = step.consumer_turns(name, replica, LANGUAGE_MODEL)
            for index, batch_indices in enumerate(microbatches):
                late[[i for i in batch_indices if index < turns[i]]] = True
    assert balance.deferred_fraction == (late.mean() if len(late) else 0)
    deferred = times[LANGUAGE_MODEL] * late
    for replica, microbatches in enumerate(step.microbatches[LANGUAGE_MODEL]):
        wanted = loads([microbatches], deferred)[0]
        assert balance.deferred_ms[LANGUAGE_MODEL][replica].tolist() == wanted.tolist()
    for name, replicas in step.microbatches.items():
        for replica, microbatches in enumerate(replicas):
            assert balance.forward_ms[name][replica].tolist() == loads([microbatches], times[name])[0].tolist()


def test_before_is_the_order_of_the_sampler():
    own = (((0, 3), (1, 2)),)
    step = StepPlan((7, 3, 5, 9), {"vision": own, LANGUAGE_MODEL: own}, {"vision": ("x",)})
    work = workloads_of(vision=[4, 3, 2, 1], language_model=[1, 1, 1, 5])
    before, after = compare_with_contiguous(plan_of(vision=1, language_model=1), step, work, 2)
    assert before.forward_ms["vision"][0].tolist() == [7, 3] and after.forward_ms["vision"][0].tolist() == [5, 5]
    assert before.std_ms(LANGUAGE_MODEL) == after.std_ms(LANGUAGE_MODEL) == 2
