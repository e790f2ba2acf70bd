"""How even microbatches are: every sample is counted once, what is deferred is found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.arrange.balance import compare_with_contiguous, excess, measured_balance, step_balance
from hf_mmparallel.plan import LANGUAGE_MODEL, StepPlan
from hf_mmparallel.schedule import Span, Task
from tests.arrange.builders import loads, plan_of, workloads_of
from tests.schedule.builders import cases, make_step

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
