"""Replicas that exchange weights or gradients in their tasks (ZeRO-2 and 3) run these tasks at the same time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import LANGUAGE_MODEL, ShardingSettings, sync_groups
from hf_mmparallel.schedule import (
    DeadlockError,
    Program,
    Task,
    build_graph,
    build_program,
    check_program,
    find_representatives,
    in_flight_limits,
    lower,
    program_of_parts,
    schedule_tasks,
    simulate,
)
from hf_mmparallel.schedule.lowering import blocking_order
from hf_mmparallel.schedule.program_checks import Proof
from hf_mmparallel.schedule.replay import simulate_parts
from hf_mmparallel.steps.representatives import on_plan
from tests.schedule.builders import Case, cases, make_plan, make_step, uneven

SETTINGS = settings(max_examples=80, suppress_health_check=list(HealthCheck))
CASES = st.one_of(cases(joint=True), cases(("image",), joint=True))


def first_of(case: Case, task: Task) -> Task:
    size = case.plan.modules[task.module].joint_replicas
    return replace(task, replica=task.replica // size * size)


@SETTINGS
@given(CASES, st.booleans())
def test_replicas_of_a_group_have_the_same_tasks_which_run_at_the_same_time(case, training):
    program = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    check_program(case.plan, case.step, case.sync_groups, program, training)
    together: dict[Task, list[Task]] = {}
    for task in program.times_ms:
        together.setdefault(first_of(case, task), []).append(task)
    for first, tasks in together.items():
        size = case.plan.modules[first.module].joint_replicas
        assert sorted(task.replica for task in tasks) == list(range(first.replica, first.replica + size))
        assert len({program.times_ms[task] for task in tasks}) == 1
        start_ms, end_ms = program.times_ms[first]
        assert end_ms - start_ms == pytest.approx(max(map(uneven, tasks)))
    # Ranks with tasks of the same groups run them in one order.
    orders = {
        rank: [first_of(case, action.task) for action in actions if action.task is not None]
        for rank, actions in program.actions.items()
    }
    for order in orders.values():
        for other in orders.values():
            assert [task for task in order if task in set(other)] == [task for task in other if task in set(order)]


@SETTINGS
@given(CASES)
def test_each_chunk_with_samples_has_its_tasks_and_messages_once(case):
    graph = build_graph(case.plan, case.step)
    apart = {name: replace(module, sharding=ShardingSettings()) for name, module in case.plan.modules.items()}
    plain = build_graph(replace(case.plan, modules=apart), case.step)
    assert set(plain.tasks) <= set(graph.tasks) and len(set(graph.tasks)) == graph.num_tasks
    assert set(plain.messages) <= set(graph.messages) and len(set(graph.messages)) == graph.num_messages
    for message in set(graph.messages) - set(plain.messages):  # to a backward that only other replicas need
        assert message.kind == "grad" and message.target not in plain.tasks
    for task in set(graph.tasks) - set(plain.tasks):
        chunks = case.step.chunks.of_replica(task.module, task.replica)
        is_empty = task.microbatch >= len(chunks) or task.chunk >= len(chunks[task.microbatch])
        assert is_empty or task.kind == "bwd"


@SETTINGS
@given(CASES, st.booleans())
def test_the_proof_holds_for_joint_tasks_and_needs_them_at_one_position(case, training):
    graph = build_graph(case.plan, case.step, training)
    groups = case.sync_groups if training else []
    timeline = schedule_tasks(case.plan, graph, uneven, in_flight_limits(case.plan, case.step))
    (lists,) = lower(case.plan, graph, timeline, groups).actions.parts
    order = blocking_order(graph, timeline, groups)
    assert Proof(case.plan, graph, groups, lists).holds(order, in_order=True)
    apart = np.flatnonzero(np.arange(graph.num_tasks) != graph.joint) if graph.joint is not None else []
    if len(apart):
        order = 2 * order
        order[apart[0]] += 1
        assert not Proof(case.plan, graph, groups, lists).holds(order, in_order=True)


@SETTINGS
@given(CASES, st.booleans())
def test_a_replay_of_all_parts_takes_what_their_program_takes(case, training):
    representatives = find_representatives(case.plan, case.sync_groups)
    program = program_of_parts(representatives.parts(case.step), uneven, training)
    messages_ms, sums_ms = (lambda message: uneven(message.source) / 9), (lambda index: float(index % 3))
    expected = simulate(representatives.plan, program, uneven, messages_ms, sums_ms)
    found = simulate_parts(
        representatives,
        case.step,
        uneven,
        lambda graph: list(map(messages_ms, graph.messages)),
        sums_ms,
        training=training,
    ).simulation()
    assert found.iteration_ms == pytest.approx(expected.iteration_ms)
    assert found.peak_in_flight == pytest.approx(expected.peak_in_flight)
    for mine, other in zip(sorted(found.spans), sorted(expected.spans), strict=True):
        assert (mine.rank, mine.task) == (other.rank, other.task)
        times = (mine.start_ms, mine.busy_end_ms, mine.end_ms)
        assert times == pytest.approx((other.start_ms, other.busy_end_ms, other.end_ms))
        assert mine.busy_end_ms - mine.start_ms == pytest.approx(uneven(mine.task))


def two_replicas(microbatches: list[list[list[int]]]) -> Case:
    spec, plan = make_plan({LANGUAGE_MODEL: [[(0,)], [(1,)]]}, sharding={LANGUAGE_MODEL: ShardingSettings(3)})
    return Case(plan, make_step({LANGUAGE_MODEL: microbatches}), sync_groups(spec, plan))


def test_ranks_that_run_joint_tasks_in_different_orders_are_a_deadlock():
    case = two_replicas([[[0], [1]], [[2], [3]]])
    program = build_program(case.plan, case.step, case.sync_groups)
    first, second = (
        [action for action in program.actions[1] if action.task is not None and action.task.microbatch == index]
        for index in range(2)
    )
    sums = [action for action in program.actions[1] if action.op == "sync"]
    wrong = Program({**program.actions, 1: (*second, *first, *sums)})
    with pytest.raises(DeadlockError, match="rank 0 waits at `fwd language_model.r0.s0 mb0.c0`"):
        check_program(case.plan, case.step, case.sync_groups, wrong)


def test_a_rank_that_waits_for_a_larger_replica_does_not_work():
    """The second replica's tasks take twice as long as those of the first, which waits in the same tasks."""
    case = two_replicas([[[0], [1]], [[2], [3]]])
    representatives = find_representatives(case.plan, case.sync_groups)

    def cost(task: Task) -> float:
        return 1.0 + task.replica

    program = build_program(case.plan, case.step, case.sync_groups, cost)
    replayed = simulate_parts(representatives, case.step, cost).simulation()
    for found in (simulate(case.plan, program, cost), on_plan(replayed, case.plan)):
        assert found.iteration_ms == 8.0 and found.busy_ms == {0: 4.0, 1: 8.0}
        assert found.bubble_fraction == found.unlike_fraction == 0.25 and found.idle_fraction == 0.0
