"""
Runs the lists of a program as ranks do, without times: what the proof of the package is tested against. It knows the
graph of a step and nothing of an order or a schedule.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hf_mmparallel.plan import ParallelPlan, StepPlan, SyncGroup
from hf_mmparallel.schedule import Action, Program, ProgramError, Task, TaskGraph, build_graph


class DeadlockError(ProgramError):
    """A program whose ranks wait for each other forever."""


def check_program(
    plan: ParallelPlan, step: StepPlan, sync_groups: Sequence[SyncGroup], program: Program, training: bool = True
) -> None:
    """See [`check`]; of the graph of a step."""
    check(plan, build_graph(plan, step, training), sync_groups if training else (), program)


def check(
    plan: ParallelPlan, graph: TaskGraph, sync_groups: Sequence[SyncGroup], program: Program, is_part: bool = False
) -> None:
    """
    Raises `ProgramError` if a list has not each action of its rank once, or one before what it needs on the rank, and
    `DeadlockError`, with the action that each rank waits at, if the lists do not end. The gradient sums of a [`Part`]
    also have to come in the order of `sync_groups`.
    """
    ranks = [plan.stage(*task.stage_key).all_ranks for task in graph.tasks]
    expected: dict[int, list[Action]] = {rank: [] for rank in range(plan.world_size)}
    for action, own in _actions(graph, ranks, sync_groups):
        for rank in own:
            expected[rank].append(action)
    if {rank: Counter(actions) for rank, actions in program.actions.items()} != {
        rank: Counter(actions) for rank, actions in expected.items()
    }:
        raise ProgramError("A rank lacks an action, or has one of others or one twice.")
    places = {rank: {action: i for i, action in enumerate(own)} for rank, own in program.actions.items()}
    for first, second in _needs(graph, sync_groups):
        for rank, own in places.items():
            if own.get(first, -1) > own.get(second, len(own)):
                raise ProgramError(f"Rank {rank} has `{second}` before `{first}`.")
    waiting = _run(plan, program, is_part)
    if waiting:
        table = "\n".join(f"rank {rank} waits at `{waiting[rank]}`" for rank in sorted(waiting))
        raise DeadlockError(f"The program deadlocks:\n{table}")


def _actions(
    graph: TaskGraph, ranks: Sequence[Iterable[int]], sync_groups: Sequence[SyncGroup]
) -> Iterator[tuple[Action, Iterable[int]]]:
    """All actions of a step with their ranks."""
    yield from zip(map(Action.run, graph.tasks), ranks, strict=True)
    for message, (source, target) in zip(graph.messages, graph.ends, strict=True):
        yield Action("send", message=message), ranks[source]
        yield Action("recv", message=message), ranks[target]
    for number, group in enumerate(sync_groups):
        yield Action("sync", index=number), group.ranks


def _needs(graph: TaskGraph, sync_groups: Sequence[SyncGroup]) -> Iterator[tuple[Action, Action]]:
    """Actions, and others that no rank that has both may have before them."""
    runs, after = [*map(Action.run, graph.tasks)], graph.after.tolist()
    yield from ((runs[before], run) for before, run in zip(after, runs, strict=True) if before >= 0)
    for number, group in enumerate(sync_groups):
        adding = (run for run in runs if run.op in ("bwd", "bwd_weight") and run.task.stage_key in group.stages)  # type: ignore[union-attr]
        yield from ((run, Action("sync", index=number)) for run in adding)
    for message, (source, target) in zip(graph.messages, graph.ends, strict=True):
        send, recv = Action("send", message=message), Action("recv", message=message)
        yield from ((runs[source], send), (send, recv), (recv, runs[target]))
        if after[target] >= 0:  # the forward sizes the gradient that a backward waits for
            yield runs[after[target]], recv


def _meeting_of(plan: ParallelPlan, action: Action) -> tuple:
    """What ranks do together: a sum, or a task of replicas that run jointly."""
    if action.task is None:
        return ("sync", action.index)
    size = plan.modules[action.task.module].joint_replicas
    return (action.task.kind, replace(action.task, replica=action.task.replica // size * size))


def _run(plan: ParallelPlan, program: Program, in_order: bool) -> dict[int, Action]:
    """
    Rank -> the action at which it waits forever, where each transfer waits for all earlier ones of its channel, in
    both directions, for both ranks, and for the tasks before it on both; a backward waits for the sends of its
    forward, too. With `in_order` a gradient sum waits for those before it.
    """
    members: dict[tuple, set[int]] = {}  # ranks that run a task, those of other replicas with it, or a sum
    issued: dict[tuple[int, int], dict[int, list[tuple]]] = {}
    wanted: dict[tuple[int, Task], set[tuple]] = {}  # transfers that a task waits for on a rank
    transfers: dict[tuple[int, Action], list[tuple]] = {}
    for rank, actions in program.actions.items():
        for action in actions:
            if action.message is None:
                members.setdefault(_meeting_of(plan, action), set()).add(rank)
                continue
            message, sends = action.message, action.op == "send"
            source, target = (plan.stage(*t.stage_key).all_ranks for t in (message.source, message.target))
            # what ranks have that are at both ends stays on them
            for other in set() if {*source} == {*target} else {*(target if sends else source)} - {rank}:
                ends = (rank, other) if sends else (other, rank)
                transfer = (tuple(sorted(ends)), message, ends)
                transfers.setdefault((rank, action), []).append(transfer)
                waiting = Task("bwd", *message.source.key) if sends else message.target
                if not sends or message.kind == "act":
                    wanted.setdefault((rank, waiting), set()).add(transfer)
    at, done, num_sums = dict.fromkeys(program.actions, 0), set(), 0
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
                action.message is None and _meeting_of(plan, action) == meeting for action in here
            )
            if in_order and meeting[0] == "sync" and meeting[1] != num_sums:
                continue
            if are_here and all(
                wanted.get((rank, action.task), set()) <= done for rank, action in zip(ranks, here, strict=True)
            ):
                num_sums += meeting[0] == "sync"
                at.update({rank: at[rank] + 1 for rank in ranks})
                moved = True
    return {rank: own[at[rank]] for rank, own in program.actions.items() if at[rank] < len(own)}
