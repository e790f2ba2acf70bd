"""How even microbatches are: every sample is counted once, what is deferred is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.arrange.balance import compare_with_contiguous, excess, measured_balance, step_balance
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, StepPlan, Workloads, resolve_plan
from hf_mmparallel.schedule import Span, Task
from tests.plan.specs import model_spec
from tests.schedule.builders import cases, make_step


def workloads(**forward_ms: list[float]) -> Workloads:
    """Workloads of which only the forwards matter."""
    values = {name: np.array(times, dtype=float) for name, times in forward_ms.items()}
    return Workloads(values, dict.fromkeys(values, 2.0), {}, {})


DEFERRED = make_step({"vision": [[[0, 1], [2]]], LANGUAGE_MODEL: [[[0], [1, 2, 3]]]})


def test_a_deferred_sample_counts_where_each_module_takes_it():
    balance = step_balance(DEFERRED, workloads(vision=[1, 2, 4, 0], language_model=[10, 20, 40, 80]))
    (vision,), (language,) = balance.forward_ms["vision"], balance.forward_ms[LANGUAGE_MODEL]
    assert vision.tolist() == [3, 4] and language.tolist() == [10, 140]
    assert balance.deferred_ms[LANGUAGE_MODEL][0].tolist() == [0, 20]  # sample 3 has no image and is not deferred
    assert balance.deferred_fraction == 0.25 and balance.num_microbatches == 2
    assert balance.std_ms("vision") == 0.5 and balance.std_ms(LANGUAGE_MODEL) == 65
    assert balance.microbatch_excess(LANGUAGE_MODEL) == pytest.approx(140 / 75 - 1)
    assert balance.replica_excess("vision") == 0


def test_replicas_are_compared_by_all_that_they_do():
    step = make_step({LANGUAGE_MODEL: [[[0], [1]], [[2], []]]})
    balance = step_balance(step, workloads(language_model=[1, 2, 5]))
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
    times = {name: [data.draw(st.integers(1, 9)) for _ in step.samples] for name in step.microbatches}
    balance = step_balance(step, workloads(**times))
    late = []
    for batch_index in range(len(step.samples)):
        replica, taken = step.location_of[LANGUAGE_MODEL, batch_index]
        encoders = [
            (name, *step.location_of[name, batch_index])
            for name in step.targets
            if (name, batch_index) in step.location_of
        ]
        found = False
        for name, copy, index in encoders:
            # Turns: the microbatches of that replica, of those that this copy feeds, which has most of them.
            fed = {
                step.location_of[LANGUAGE_MODEL, other][0]
                for batch_indices in step.microbatches[name][copy]
                for other in batch_indices
            }
            sizes = {d: len(step.microbatches[LANGUAGE_MODEL][d]) for d in fed}
            found |= index < int((taken + 0.5) * max(sizes.values()) / sizes[replica])
        late.append(found)
    assert balance.deferred_fraction == (np.mean(late) if late else 0)
    for name, replicas in step.microbatches.items():
        for replica, microbatches in enumerate(replicas):
            wanted = [sum(times[name][batch_index] for batch_index in batch_indices) for batch_indices in microbatches]
            assert balance.forward_ms[name][replica].tolist() == wanted
            if name == LANGUAGE_MODEL:
                wanted = [
                    sum(times[name][batch_index] for batch_index in batch_indices if late[batch_index])
                    for batch_indices in microbatches
                ]
                assert balance.deferred_ms[name][replica].tolist() == wanted


def test_before_is_the_order_of_the_sampler():
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(), LANGUAGE_MODEL: ModulePlugin()})
    step = StepPlan(
        (7, 3, 5, 9), {"vision": (((0, 3), (1, 2)),), LANGUAGE_MODEL: (((0, 3), (1, 2)),)}, {"vision": ("x",)}
    )
    before, after = compare_with_contiguous(plan, step, workloads(vision=[4, 3, 2, 1], language_model=[1, 1, 1, 5]), 2)
    assert before.forward_ms["vision"][0].tolist() == [7, 3] and after.forward_ms["vision"][0].tolist() == [5, 5]
    assert before.std_ms(LANGUAGE_MODEL) == after.std_ms(LANGUAGE_MODEL) == 2
