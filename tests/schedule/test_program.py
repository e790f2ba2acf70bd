"""Programs of any layout are complete, possible, and read back from their text."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import LANGUAGE_MODEL, sync_groups
from hf_mmparallel.schedule import (
    Action,
    Message,
    Program,
    ProgramError,
    Task,
    build_graph,
    build_program,
    in_flight_limits,
)
from tests.schedule.builders import Case, cases, chain, make_plan, make_step, shared, uneven
from tests.schedule.checker import DeadlockError, check_program
from tests.schedule.plain import predecessors
from tests.schedule.replayed import replay

SETTINGS = settings(max_examples=60, suppress_health_check=list(HealthCheck))
CASES = st.one_of(cases(), cases(("image_generator",)), cases(("image_generator", "audio_generator")))


def program_of(case: Case, **options) -> Program:
    return build_program(case.plan, case.step, case.sync_groups, **options)


def replaced(program: Program, rank: int, actions) -> Program:
    return Program({**program.actions, rank: tuple(actions)})


def refuse(case: Case, program: Program, error: type[ProgramError] = ProgramError, match: str = "") -> None:
    """The checker refuses a program of a case."""
    with pytest.raises(error, match=match):
        check_program(case.plan, case.step, case.sync_groups, program)


def least_ms(case: Case, training: bool) -> float:
    """No order of the tasks is faster: the work of the busiest rank, and the longest way through the graph."""
    graph = build_graph(case.plan, case.step, training)
    busy: Counter[int] = Counter()
    end: list[float] = []
    for task, sources in zip(graph.tasks, predecessors(graph), strict=True):
        for rank in case.plan.stage(*task.stage_key).all_ranks:
            busy[rank] += uneven(task)
        end.append(uneven(task) + max((end[source] for source in sources), default=0.0))
    return max([*busy.values(), *end], default=0.0)


@SETTINGS
@given(CASES, st.booleans())
def test_any_layout_has_a_program_that_loses_nothing_and_reads_back(case, training):
    program = program_of(case, cost=uneven, training=training)
    check_program(case.plan, case.step, case.sync_groups, program, training)
    assert Program.parse(program.dump()) == program
    simulation = replay(case.plan, program, uneven)
    tasks = set(build_graph(case.plan, case.step, training).tasks)
    assert {span.task for span in simulation.spans} == tasks
    assert simulation.iteration_ms >= least_ms(case, training) - 1e-9
    limits = in_flight_limits(case.plan, case.step)
    # A microbatch is let in whole, so that its chunks may go over the limit by less than one; one without a backward,
    # which saves nothing, is let in at any time, and counts while it runs.
    passing = {task.stage_key for task in tasks if task.kind == "fwd" and Task("bwd", *task.key) not in tasks}
    peaks = simulation.peak_in_flight.items()
    assert all(peak < limits.get(key, math.inf) + 1 + (key in passing) for key, peak in peaks)
    assert all(program.has_backward(task) == (Task("bwd", *task.key) in tasks) for task in tasks if task.kind == "fwd")
    for number, group in enumerate(case.sync_groups):
        for rank in group.ranks:
            assert program.actions[rank].count(Action("sync", index=number)) == training


@SETTINGS
@given(cases(), st.data())
def test_what_the_checker_accepts_never_deadlocks(case, data):
    program = program_of(case, cost=uneven)
    for _ in range(8):
        rank = data.draw(st.sampled_from(sorted(program.actions)))
        actions = list(program.actions[rank])
        if len(actions) < 2:
            continue
        i, j = data.draw(st.integers(0, len(actions) - 1)), data.draw(st.integers(0, len(actions) - 1))
        change = data.draw(st.sampled_from(["swap", "move", "drop"]))
        if change == "swap":
            actions[i], actions[j] = actions[j], actions[i]
        elif change == "move":
            actions.insert(j, actions.pop(i))
        else:
            actions.pop(i)
        mutant = replaced(program, rank, actions)
        try:
            check_program(case.plan, case.step, case.sync_groups, mutant)
        except ProgramError:
            assert mutant != program
            continue
        assert change != "drop"
        replay(case.plan, mutant, uneven)
        assert meets_over_ordered_channels(case, mutant)


def test_each_missing_doubled_or_foreign_action_is_rejected():
    case = shared()
    program = program_of(case)
    for rank, actions in program.actions.items():
        for i, action in enumerate(actions):
            refuse(case, replaced(program, rank, actions[:i] + actions[i + 1 :]))
            refuse(case, replaced(program, rank, (*actions, action)), match="twice")
        foreign = next(action for action in program.actions[1 - rank] if action not in actions)
        refuse(case, replaced(program, rank, (*actions, foreign)), match="not among its actions")
        refuse(case, replaced(program, rank, (*actions, Action("sync", index=9))), match="not among its actions")


def test_sums_in_opposite_orders_deadlock_and_the_error_names_each_rank():
    case = shared()
    program = program_of(case)
    syncs = [action for action in program.actions[1] if action.op == "sync"]
    first, second = (case.sync_groups[action.index].stages for action in syncs[:2])
    assert first != second
    mutant = replaced(program, 1, [a for a in program.actions[1] if a.op != "sync"] + syncs[::-1])
    refuse(case, mutant, DeadlockError, r"rank 0 waits at `sync \d`\nrank 1 waits at `sync \d`")
    with pytest.raises(DeadlockError, match=r"rank 0 waits at `sync \d`\nrank 1 waits at `sync \d`"):
        replay(case.plan, mutant)


def test_late_gradients_are_rejected():
    spec, plan = make_plan({LANGUAGE_MODEL: [[(0,)], [(1,)]]})
    case = Case(plan, make_step({LANGUAGE_MODEL: [[[0]], [[1]]]}), sync_groups(spec, plan))
    program = program_of(case)
    fwd, bwd, sync = program.actions[0]
    refuse(case, replaced(program, 0, (fwd, sync, bwd)), match="after the sum")
    refuse(case, replaced(program, 0, (bwd, fwd, sync)), match="before what it follows")
    case = chain(2, 2)
    program = program_of(case)
    actions = list(program.actions[1])
    first, second, *_ = (i for i, action in enumerate(actions) if action.op == "recv")
    actions[first], actions[second] = actions[second], actions[first]
    refuse(case, replaced(program, 1, actions), match="after the task that needs it")


def test_text_forms():
    task = Task("fwd", "vision.tower", 0, 1, 3, 2)
    assert str(task) == "fwd vision.tower.r0.s1 mb3.c2"
    message = Message("act", task, Task("fwd", LANGUAGE_MODEL, 0, 0, 3))
    assert message.crosses_boundary
    texts = [str(Action.run(task)), f"send {message}", f"recv {message}", "sync 3"]
    for text in texts:
        assert str(Action.parse(text)) == text
    for wrong in ("fwd vision mb0", "send fwd", "sync x", "jump", "act fwd a.r0.s0 mb0.c0"):
        with pytest.raises(ValueError, match="is not a"):
            Action.parse(wrong)
    for a, b in itertools.combinations(map(Action.parse, texts), 2):
        assert (a < b) != (b < a)


def test_a_receive_stands_one_task_ahead_of_its_own():
    """But not ahead of what the same ranks have sent each other before."""
    first, last = (
        [str(action).replace(LANGUAGE_MODEL, "lm") for action in actions if action.op != "sync"]
        for actions in program_of(chain(2, 2)).actions.values()
    )
    act, grad = (
        [f"{kind} {task} {ends[0]}.r0.s0 mb{i}.c0 -> {task} {ends[1]}.r0.s0 mb{i}.c0" for i in range(2)]
        for kind, task, ends in (("act", "fwd", ("vision", "lm")), ("grad", "bwd", ("lm", "vision")))
    )
    fwd, bwd, own, back = (
        [f"{task} {name}.r0.s0 mb{i}.c0" for i in range(2)] for name in ("vision", "lm") for task in ("fwd", "bwd")
    )
    sent = [fwd[0], f"send {act[0]}", fwd[1], f"send {act[1]}"]
    assert first == [*sent, f"recv {grad[0]}", f"recv {grad[1]}", *bwd]
    early = [f"recv {act[0]}", own[0], f"recv {act[1]}", back[0], f"send {grad[0]}"]
    assert last == [*early, own[1], back[1], f"send {grad[1]}"]


def meets_over_ordered_channels(case: Case, program: Program) -> bool:
    """
    Whether a program ends where each transfer waits for all earlier ones of its channel, in both directions, for both
    ranks, and for the tasks before it on both; a backward waits for the sends of its forward, too.
    """
    members: dict[tuple, set[int]] = {}  # ranks that run a task, those of other replicas with it, or a sum
    issued: dict[tuple[int, int], dict[int, list[tuple]]] = {}
    wanted: dict[tuple[int, Task], set[tuple]] = {}  # transfers that a task waits for on a rank
    transfers: dict[tuple[int, Action], list[tuple]] = {}
    for rank, actions in program.actions.items():
        for action in actions:
            if action.message is None:
                members.setdefault(meeting_of(case, action), set()).add(rank)
                continue
            message, sends = action.message, action.op == "send"
            source, target = (case.plan.stage(*t.stage_key).all_ranks for t in (message.source, message.target))
            # what ranks have that are at both ends stays on them
            for other in set() if {*source} == {*target} else {*(target if sends else source)} - {rank}:
                ends = (rank, other) if sends else (other, rank)
                transfer = (tuple(sorted(ends)), message, ends)
                transfers.setdefault((rank, action), []).append(transfer)
                waiting = Task("bwd", *message.source.key) if sends else message.target
                if not sends or message.kind == "act":
                    wanted.setdefault((rank, waiting), set()).add(transfer)
    at, done = dict.fromkeys(program.actions, 0), set()
    moved = True
    while moved:
        moved = False
        for rank, actions in program.actions.items():
            while at[rank] < len(actions) and actions[at[rank]].message is not None:
                for transfer in transfers.get((rank, actions[at[rank]]), ()):
                    issued.setdefault(transfer[0], {}).setdefault(rank, []).append(transfer)
                at[rank], moved = at[rank] + 1, True
        for channel, ends in issued.items():
            while all(ends.get(rank) for rank in channel) and len({ends[rank][0] for rank in channel}) == 1:
                done.add([ends[rank].pop(0) for rank in channel][0])
                moved = True
        for meeting, ranks in members.items():
            here = [program.actions[rank][at[rank]] for rank in ranks if at[rank] < len(program.actions[rank])]
            are_here = len(here) == len(ranks) and all(
                action.message is None and meeting_of(case, action) == meeting for action in here
            )
            if are_here and all(
                wanted.get((rank, action.task), set()) <= done for rank, action in zip(ranks, here, strict=True)
            ):
                at.update({rank: at[rank] + 1 for rank in ranks})
                moved = True
    return all(at[rank] == len(actions) for rank, actions in program.actions.items())


def meeting_of(case: Case, action: Action) -> tuple:
    """What ranks do together: a sum, or a task of replicas that run jointly."""
    if action.task is None:
        return ("sync", action.index)
    size = case.plan.modules[action.task.module].joint_replicas
    return (action.task.kind, replace(action.task, replica=action.task.replica // size * size))


@SETTINGS
@given(CASES, st.booleans())
def test_any_program_ends_over_channels_that_keep_one_order_for_both_directions(case, training):
    assert meets_over_ordered_channels(case, program_of(case, cost=uneven, training=training))
