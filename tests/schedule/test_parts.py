"""A rank plans the replicas that it exchanges tensors with; that gives the program that planning all of them gives."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlugin,
    ShardingSettings,
    StepPlan,
    Workloads,
    resolve_plan,
    sync_groups,
)
from hf_mmparallel.schedule import (
    Action,
    Program,
    Task,
    build_graph,
    build_program,
    find_representatives,
    in_flight_limits,
    lower,
    order_tasks,
    program_of_parts,
)
from hf_mmparallel.schedule import lowering as lowering_module
from hf_mmparallel.schedule.action_lists import ProgramActions
from hf_mmparallel.schedule.in_flight import may_alternate
from hf_mmparallel.schedule.lowering import Proof, blocking_order
from tests.plan.specs import model_spec
from tests.schedule.builders import Case, cases, make_plan, make_step, timed, timeline_of, uneven
from tests.schedule.checker import DeadlockError, check, check_program
from tests.schedule.replayed import replay

SETTINGS = settings(max_examples=60, suppress_health_check=list(HealthCheck))
CASES = st.one_of(cases(), cases(generators=("image",)))
ALL_CASES = st.one_of(CASES, cases(("image",), joint=True))
LM = LANGUAGE_MODEL


def connected(sets: Sequence[frozenset[int]]) -> list[list[int]]:
    """The places of the sets in groups that have something in common, directly or through others."""
    groups: list[list[int]] = []
    for place, own in enumerate(sets):
        touching = [group for group in groups if any(own & sets[other] for other in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([*itertools.chain.from_iterable(touching), place])
    return sorted(map(sorted, groups))


def exchanging(case) -> dict[int, frozenset[int]]:
    """Rank -> the ranks that it shares a task, a message or another rank with, by the tasks of the whole step."""
    ranks = {
        (name, *place): frozenset(stage.all_ranks)
        for name, module in case.plan.modules.items()
        for *place, stage in module.stages()
    }
    keys = [
        [key for key in ranks if key[0] == name and key[1] // module.joint_replicas == group]
        for name, module in case.plan.modules.items()
        for group in range(module.dp_size // module.joint_replicas)
    ]
    keys += [[m.source.stage_key, m.target.stage_key] for m in build_graph(case.plan, case.step).messages]
    sets = list({frozenset().union(*map(ranks.__getitem__, own)) for own in keys})
    together = [frozenset().union(*map(sets.__getitem__, group)) for group in connected(sets)]
    return {rank: own for own in together for rank in own}


@SETTINGS
@given(ALL_CASES, st.booleans())
def test_a_rank_gets_from_its_part_what_it_gets_from_the_program_of_all_ranks(case, training):
    whole = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    together, representatives = exchanging(case), find_representatives(case.plan, case.sync_groups)
    for rank in range(case.plan.world_size):
        if rank not in together:
            assert whole.actions[rank] == () and not list(representatives.parts(case.step, rank))
            continue
        part = representatives.expand(program_of_parts(representatives.parts(case.step, rank), uneven, training))
        assert set(part.actions) == together[rank]
        assert part.of_rank(rank) == whole.of_rank(rank)


@SETTINGS
@given(CASES)
def test_parts_are_what_one_simulation_gives_each_with_the_better_of_two_orders(case):
    """The plan as one part, and without gradient sums."""
    graph, limits = build_graph(case.plan, case.step), in_flight_limits(case.plan, case.step)
    timeline = order_tasks(case.plan, graph, list(map(uneven, graph.tasks)), limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering_module, "may_alternate", lambda plan: False)
        lists = Program(ProgramActions([lower(case.plan, graph, timeline, ())]))
        assert build_program(case.plan, case.step, (), uneven) == lists
    order = order_tasks(case.plan, graph, list(map(uneven, graph.tasks)), limits, may_alternate(case.plan))
    as_one = timed(case.plan, graph, order, [uneven(task) for task in graph.tasks])
    assert timeline_of(case.plan, case.step, (), uneven).iteration_ms <= as_one.iteration_ms + 1e-9


@SETTINGS
@given(CASES, st.randoms(use_true_random=False))
def test_gradient_sums_stand_in_one_order_on_all_ranks_whatever_it_is(case, random):
    groups, modules = list(case.sync_groups), list(case.plan.modules)
    ends = [min((modules.index(name), index) for name, _, index in group.stages) for group in groups]
    assert ends == sorted(ends, reverse=True), "in the order in which backwards end"
    random.shuffle(groups)
    program = build_program(case.plan, case.step, groups, uneven)
    check_program(case.plan, case.step, groups, program)
    number = find_representatives(case.plan, groups).numbers
    keys = [(frozenset(number[rank] for rank in group.ranks), group.stages, group.parameters) for group in groups]
    for row in program.actions.values():
        # For each sum the index of the first with the same representatives.
        order = [(keys.index(keys[action.index]), action.index) for action in row if action.index is not None]
        assert order == sorted(order)


def test_the_work_of_a_rank_does_not_grow_with_the_number_of_replicas():
    """Of one replica of the language model and the two encoders that work for it, however many others are alike."""
    work, spec = [], model_spec()
    for dp_size in (4, 32):
        sizes = {"vision": ModulePlugin(2 * dp_size), LM: ModulePlugin(dp_size, pp_size=2, tp_size=2)}
        plan = resolve_plan(spec, sizes)
        step = arrange_step(plan, range(16 * dp_size), Workloads.alike(plan.modules, 16 * dp_size), 4)
        representatives = find_representatives(plan, sync_groups(spec, plan))
        asked: list[Task] = []
        (part,) = representatives.parts(step, 0)

        def cost(task: Task, asked=asked) -> float:
            asked.append(task)
            return uneven(task)

        program = representatives.expand(program_of_parts([part], cost))
        assert set(asked) <= set(build_graph(part.plan, part.step).tasks)
        work.append((len(asked), len(program.actions)))
    assert work[0] == work[1] and work[0][1] == 2 + 2 * 2


def test_a_part_whose_ranks_could_not_come_to_the_sums_in_order_is_refused():
    """Encoder and language model on the same rank, which sums the encoder's gradients first."""
    spec, plan = make_plan({"vision": [[(0,)], [(1,)]], LM: [[(0,)], [(1,)]]})
    rows = [[[0]], [[1]]]
    step = make_step({"vision": rows, LM: rows})
    groups = sync_groups(spec, plan)
    assert [group.stages[0][0] for group in groups] == [LM, "vision"]
    program = build_program(plan, step, groups, uneven)
    assert [a.index for a in program.actions[0] if a.index is not None] == [0, 1]
    part = next(find_representatives(plan, groups).parts(step))
    graph = build_graph(part.plan, part.step)
    tasks = [action for action in program.actions[0] if action.index is None]
    swapped = Program({0: (*tasks, Action("sync", index=1), Action("sync", index=0))})
    check(part.plan, graph, part.sync_groups, swapped)  # alone it ends
    with pytest.raises(DeadlockError, match="waits at `sync"):
        check(part.plan, graph, part.sync_groups, swapped, is_part=True)


def test_the_checksum_of_a_part_tells_of_its_order_and_its_replicas():
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(dp_size=2), LM: ModulePlugin(dp_size=2, pp_size=2)})
    step: StepPlan = arrange_step(plan, range(16), Workloads.alike(plan.modules, 16), 2)
    representatives = find_representatives(plan, sync_groups(spec, plan))
    programs = {r: representatives.expand(program_of_parts(representatives.parts(step, r), uneven)) for r in range(6)}
    replicas = {rank: program.replicas(LM) for rank, program in programs.items()}
    assert sorted(map(sorted, set(replicas.values()))) == [[0], [1]]
    assert not list(representatives.parts(step, plan.world_size))
    for rank, other in itertools.combinations(programs, 2):
        same = programs[rank].checksum == programs[other].checksum
        assert same == (replicas[rank] == replicas[other])


JOINT_SETTINGS = settings(max_examples=80, suppress_health_check=list(HealthCheck))
JOINT_CASES = st.one_of(cases(joint=True), cases(("image",), joint=True))


def first_of(case: Case, task: Task) -> Task:
    size = case.plan.modules[task.module].joint_replicas
    return replace(task, replica=task.replica // size * size)


@JOINT_SETTINGS
@given(JOINT_CASES, st.booleans())
def test_replicas_of_a_group_have_the_same_tasks_which_run_at_the_same_time(case, training):
    program = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    check_program(case.plan, case.step, case.sync_groups, program, training)
    together: dict[Task, list[Task]] = {}
    times = timeline_of(case.plan, case.step, case.sync_groups, uneven, training=training).task_times
    for task in times:
        together.setdefault(first_of(case, task), []).append(task)
    for first, tasks in together.items():
        size = case.plan.modules[first.module].joint_replicas
        assert sorted(task.replica for task in tasks) == list(range(first.replica, first.replica + size))
        assert len({times[task] for task in tasks}) == 1
        start_ms, end_ms = times[first]
        assert end_ms - start_ms == pytest.approx(max(map(uneven, tasks)))
    # Ranks with tasks of the same groups run them in one order.
    orders = {
        rank: [first_of(case, action.task) for action in actions if action.task is not None]
        for rank, actions in program.actions.items()
    }
    for order in orders.values():
        for other in orders.values():
            assert [task for task in order if task in set(other)] == [task for task in other if task in set(order)]


@JOINT_SETTINGS
@given(JOINT_CASES)
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


@JOINT_SETTINGS
@given(JOINT_CASES, st.booleans())
def test_the_proof_holds_for_joint_tasks_and_needs_them_at_one_position(case, training):
    graph = build_graph(case.plan, case.step, training)
    groups = case.sync_groups if training else []
    timeline = order_tasks(case.plan, graph, list(map(uneven, graph.tasks)), in_flight_limits(case.plan, case.step))
    lists = lower(case.plan, graph, timeline, groups)
    order = blocking_order(graph, timeline, groups)
    assert Proof(case.plan, graph, groups, lists).breach(order) is None
    apart = np.flatnonzero(np.arange(graph.num_tasks) != graph.joint) if graph.joint is not None else []
    if len(apart):
        order = 2 * order
        order[apart[0]] += 1
        assert "jointly" in (Proof(case.plan, graph, groups, lists).breach(order) or "")


@JOINT_SETTINGS
@given(JOINT_CASES, st.booleans())
def test_a_timeline_is_what_a_replay_of_the_program_of_all_ranks_gives(case, training):
    program = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    numbers = {
        i: n for n, own in enumerate(find_representatives(case.plan, case.sync_groups).represented) for i in own
    }
    messages_ms, sums_ms = (lambda message: uneven(message.source) / 9), (lambda index: float(numbers[index] % 3))
    expected = replay(case.plan, program, uneven, messages_ms, sums_ms)
    found = timeline_of(case.plan, case.step, case.sync_groups, uneven, messages_ms, sums_ms, training=training)
    assert sorted(found.sums) == [
        replace(span, start_ms=pytest.approx(span.start_ms), end_ms=pytest.approx(span.end_ms))
        for span in sorted(expected.sums)
    ]
    for rank, actions in program.actions.items():
        assert found.tasks_of_rank[rank] == [action.task for action in actions if action.task is not None]
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

    def cost(task: Task) -> float:
        return 1.0 + task.replica

    found = timeline_of(case.plan, case.step, case.sync_groups, cost)
    assert found.iteration_ms == 8.0 and found.busy_ms == {0: 4.0, 1: 8.0}
    assert found.bubble_fraction == found.unlike_fraction == 0.25 and found.idle_fraction == 0.0
