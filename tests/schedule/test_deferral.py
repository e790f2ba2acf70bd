"""Samples that are taken a microbatch after they are encoded: limits, order, times, and what eager forwards give."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.plan.parallel_plan import Schedule
from hf_mmparallel.schedule import (
    build_graph,
    build_program,
    in_flight_1f1b,
    in_flight_eager,
    in_flight_limits,
    microbatch_forward_ms,
    schedule_tasks,
    simulate,
    stage_depths,
)
from hf_mmparallel.schedule.scheduler import default_cost
from tests.schedule.builders import Case, chain, deferred, make_plan, make_step, straight


def balanced(case: Case):
    """Microbatches of a module take equally long, a chunk its share of one; a backward takes two forwards."""

    def cost(task):
        batch_indices = case.step.chunks[task.module, task.replica, task.microbatch][task.chunk]
        whole = case.step.microbatches[task.module][task.replica][task.microbatch]
        return len(batch_indices) / len(whole) * default_cost(task)

    return cost


def last_end(case: Case, max_in_flight) -> float:
    return max(schedule_tasks(case.plan, build_graph(case.plan, case.step), balanced(case), max_in_flight).end_ms)


def iteration_ms(case: Case, schedule: Schedule) -> float:
    plan = replace(case.plan, schedule=schedule)
    cost = balanced(case)
    return simulate(plan, build_program(plan, case.step, case.sync_groups, cost), cost).iteration_ms


def test_an_encoder_needs_one_more_in_flight_when_samples_are_deferred():
    plain, late = chain(4, 8), deferred(1, 3, 8)
    assert in_flight_1f1b(plain.plan, plain.step) == stage_depths(plain.plan)
    depths = stage_depths(late.plan)
    assert depths["vision", 0, 0] == 4
    assert in_flight_1f1b(late.plan, late.step) == {**depths, ("vision", 0, 0): 5}


def test_samples_taken_before_their_place_and_far_behind_it_count_too():
    _, plan = make_plan({"vision": [[(0,)]], LANGUAGE_MODEL: [[(1,)], [(2,)]]})
    # Both copies take from one encoder; sample 0 is taken three microbatches later.
    step = make_step({"vision": [[[i] for i in range(8)]], LANGUAGE_MODEL: [[[1], [2], [3], [0]], [[4, 5], [6, 7]]]})
    # Before its first backward the encoder has run all microbatches up to the 6th, which copy 1 begins with.
    assert in_flight_1f1b(plan, step)["vision", 0, 0] == 1 + 6


def test_deferral_does_not_stall_1f1b():
    case = deferred(1, 3, 16)
    unlimited = last_end(case, {})
    assert last_end(case, in_flight_1f1b(case.plan, case.step)) == pytest.approx(unlimited)
    assert last_end(case, stage_depths(case.plan)) > unlimited + 2


@pytest.mark.parametrize(("stages", "loss"), [((1, 3), 1.0), ((3, 3), 1.04), ((5, 3), 1.06), ((8, 3), 1.07)])
def test_eager_is_as_fast_as_unlimited_memory_and_1f1b_nearly(stages, loss):
    case = deferred(stages[0], stages[1], 32)
    unlimited = last_end(case, {})
    assert iteration_ms(case, "eager") == pytest.approx(unlimited)
    assert unlimited <= iteration_ms(case, "1f1b") <= loss * unlimited * (1 + 1e-9)
    assert (iteration_ms(case, "1f1b") > unlimited) == (stages != (1, 3))


def test_a_forward_runs_after_each_backward():
    case = deferred(5, 3, 32)
    actions = build_program(case.plan, case.step, case.sync_groups, balanced(case)).actions[0]
    ops = [action.op for action in actions if action.op in ("fwd", "bwd")]
    last_forward = len(ops) - ops[::-1].index("fwd")
    bunches = [len(bunch) for bunch in "".join(op[0] for op in ops[:last_forward]).split("f") if bunch]
    assert max(bunches) == 2 and bunches.count(1) > bunches.count(2)


def test_eager_takes_the_caps_that_it_is_given_but_none_below_1f1b():
    case = deferred(2, 2, 16, "eager")
    least = in_flight_1f1b(case.plan, case.step)
    given = {("vision", 0, 0): 9.0, ("vision", 0, 1): 1.0, (LANGUAGE_MODEL, 0, 0): 2.0}
    assert in_flight_limits(case.plan, case.step, given) == {**least, ("vision", 0, 0): 9.0}
    program = build_program(case.plan, case.step, case.sync_groups, fitting_in_flight=given)
    peaks = simulate(case.plan, program).peak_in_flight
    assert least["vision", 0, 0] < peaks["vision", 0, 0] < 10  # chunks of an admitted microbatch are not held back
    assert in_flight_limits(case.plan, case.step) == in_flight_eager(case.plan, case.step)
    assert list(in_flight_eager(case.plan, case.step).values()) == [2, 1, 7, 6]  # the language model, then the encoder


@settings(max_examples=60)
@given(st.permutations(range(12)), st.integers(3, 12), st.integers(1, 6), st.randoms(use_true_random=False))
def test_1f1b_caps_let_any_arrangement_through(order, num_encoded, num_taken, random):
    _, plan = make_plan({"vision": [[(0,), (1,)]], LANGUAGE_MODEL: [[(2,), (3,)], [(4,)]]})
    encoded = [order[index::num_encoded] for index in range(num_encoded)]
    taken = [[list(range(12))[index :: 2 * num_taken] for index in range(d, 2 * num_taken, 2)] for d in range(2)]
    case = Case(plan, make_step({"vision": [encoded], LANGUAGE_MODEL: taken}), [])
    times = {task: random.random() for task in build_graph(plan, case.step).tasks}
    simulation = simulate(plan, build_program(plan, case.step, [], times.__getitem__), times.__getitem__)
    max_in_flight = in_flight_1f1b(plan, case.step)
    # A microbatch is let in whole, so that its chunks may go over the limit by less than one.
    assert all(peak < max_in_flight[key] + 1 for key, peak in simulation.peak_in_flight.items())


@pytest.mark.parametrize("schedule", ["1f1b", "eager"])
def test_what_was_not_deferred_goes_back_first(schedule):
    case = deferred(1, 2, 6, schedule)
    program = build_program(case.plan, case.step, case.sync_groups, balanced(case))
    order = [(a.task.microbatch, a.task.chunk) for a in program.actions[0] if a.op == "bwd"]
    assert order == [place for index in range(0, 6, 2) for place in ((index, 0), (index, 1), (index + 1, 0))]
    times = {str(task): own for task, own in program.times_ms.items()}
    assert times["bwd vision.r0.s0 mb0.c0"][0] == times["bwd language_model.r0.s0 mb0.c0"][1]
    assert times["bwd vision.r0.s0 mb0.c1"][0] >= times["bwd language_model.r0.s0 mb1.c0"][1]


@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_an_encoder_never_waits_for_what_it_sent_to_be_taken(frozen):
    plan = straight({"vision": 1, LANGUAGE_MODEL: 2}, 8, "eager", frozen).plan
    step = deferred(1, 2, 8).step

    def cost(task):
        return 10.0 if task.module == LANGUAGE_MODEL else 1.0

    program = build_program(plan, step, [], cost, fitting_in_flight={("vision", 0, 0): math.inf})
    actions = program.actions[0]
    forwards = [index for index, action in enumerate(actions) if action.op == "fwd"]
    assert all(actions[index + 1].op == "send" for index in forwards)
    assert forwards == list(range(0, 2 * len(forwards), 2))
    spans = [s for s in simulate(plan, program, cost, comm_ms=3.0).spans if s.rank == 0 and s.task.kind == "fwd"]
    assert [span.start_ms for span in spans] == list(range(12))
    # What is taken later is never asked for before what is taken earlier.
    received = [a.message for a in program.actions[1] if a.op == "recv" and a.message is not None]
    assert [m.source for m in received if m.crosses_boundary] == [span.task for span in spans]


def test_a_rank_needs_its_own_part_only():
    case = deferred(2, 2, 8, "eager")
    program = build_program(case.plan, case.step, case.sync_groups)
    for rank, actions in program.actions.items():
        own = pickle.loads(pickle.dumps(program.of_rank(rank)))
        assert own.actions == {rank: actions}
        tasks = [action.task for action in actions if action.task is not None]
        assert own.times_ms == {task: program.times_ms[task] for task in tasks}
        assert all(own.has_backward(task) == program.has_backward(task) for task in tasks)
    assert program.of_rank(99).actions == {99: ()}


def test_forward_times_of_microbatches():
    case = deferred(2, 2, 4)
    spans = simulate(case.plan, build_program(case.plan, case.step, case.sync_groups), balanced(case)).spans
    found = microbatch_forward_ms(spans)
    assert list(found) == [(LANGUAGE_MODEL, 0), ("vision", 0)]
    assert all(np.allclose(times, [2.0] * 4) for times in found.values())  # two stages of one millisecond
    slower = [replace(span, end_ms=span.end_ms + 1, rank=7) for span in spans if span.task.kind == "fwd"]
    assert microbatch_forward_ms([*slower, *spans])[LANGUAGE_MODEL, 0] == pytest.approx([4.0] * 4)
    assert microbatch_forward_ms([]) == {}
