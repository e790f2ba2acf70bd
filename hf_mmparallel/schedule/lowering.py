"""Lowering: from an order of tasks to the actions of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..plan import ParallelPlan, StageKey, StepPlan, SyncGroup
from .action_lists import PartActions, Program, ProgramActions, TaskTimes
from .actions import Action
from .graph import StageRanks, TaskGraph, build_graph
from .in_flight import in_flight_limits, may_alternate
from .parts import Part, find_representatives
from .program_checks import verify
from .scheduler import Cost, Timeline, default_cost, order_tasks, task_times

# Position of a task at its start event. Its receives come before, at `c * m + i`: with `m` messages in the order of
# their sends, message `i` comes with message `c` of its receive queue, which the task needs, so that the receives of a
# task are sorted by `c` and then by `i`. Its sends come after, at `_RUN + 1 + i`. Fewer than 2**31 messages fit.
_RUN = 2**62


def build_program(
    plan: ParallelPlan,
    step: StepPlan,
    sync_groups: Sequence[SyncGroup],
    cost: Cost | None = None,  # task -> milliseconds; `default_cost` when left out
    training: bool = True,  # if not, no backwards and no gradient sums
    # microbatches that fit into memory, see `in_flight_limits`
    fitting_in_flight: Mapping[StageKey, float] | None = None,
    check: bool = True,  # required if the program is to run
) -> Program:
    """Plans and verifies the actions of every rank; steps of equal `structure` and equal costs have equal programs."""
    representatives = find_representatives(plan, sync_groups)
    parts = representatives.parts(step)
    program = representatives.expand(program_of_parts(parts, cost, training, fitting_in_flight, check))
    return Program({rank: program.actions.get(rank, ()) for rank in range(plan.world_size)}, program.times_ms)


def program_of_parts(
    parts: Iterable[Part],
    cost: Cost | None = None,
    training: bool = True,
    fitting_in_flight: Mapping[StageKey, float] | None = None,
    check: bool = True,
) -> Program:
    """Does [`build_program`] for parts, on representatives; the program of a part does not depend on the others."""
    rows, times = [], []
    for part in parts:
        sync_groups = part.sync_groups if training else ()
        graph, _, timeline = order_part(part, cost or default_cost, training, fitting_in_flight)
        program = lower(part.plan, graph, timeline, sync_groups)
        if check:
            verify(
                part.plan,
                graph,
                sync_groups,
                program,
                is_part=True,
                order=blocking_order(graph, timeline, sync_groups),
            )
        rows.append(part.renumber(program))
        times.append((graph, timeline.start_ms, timeline.end_ms))
    return Program(ProgramActions(rows), TaskTimes(times))


def order_part(
    part: Part, cost: Cost, training: bool, fitting_in_flight: Mapping[StageKey, float] | None
) -> tuple[TaskGraph, list[float], Timeline]:
    """Returns the tasks of a part, their durations in milliseconds, and their order."""
    graph = build_graph(part.plan, part.step, training)
    times_ms = task_times(cost, graph)
    max_in_flight = in_flight_limits(part.plan, part.step, fitting_in_flight)
    alternate = training and may_alternate(part.plan)
    return graph, times_ms, order_tasks(part.plan, graph, times_ms, max_in_flight, alternate)


def lower(plan: ParallelPlan, graph: TaskGraph, timeline: Timeline, sync_groups: Sequence[SyncGroup]) -> Program:
    """
    Writes the action list of every rank.

    A send comes right after the task that produces the message, a receive before the task that needs it and, between
    two ranks, in the order of the sends. Gradient sums come in the order of `sync_groups` on every rank, each at the
    same instant of the simulation on all of its ranks: when the slowest of its stages, and of those of earlier sums,
    is done. (With sums after each rank's own last backward, ranks shared by several modules could deadlock.)
    """
    lists = _lists(plan, graph, timeline, sync_groups)
    return Program(ProgramActions([lists]), TaskTimes([(graph, timeline.start_ms, timeline.end_ms)]))


def _lists(plan: ParallelPlan, graph: TaskGraph, timeline: Timeline, sync_groups: Sequence[SyncGroup]) -> PartActions:
    """[`lower`] in arrays: the list of a rank is sorted by the event of each action and its position at the event."""
    started, finished = np.array(timeline.started, np.int64), np.array(timeline.finished, np.int64)
    num_tasks, num_messages = graph.num_tasks, graph.num_messages
    source, target = graph.links
    ranks = StageRanks(plan)
    # Tuples of rank, event, position at the event (see `_RUN`), code
    task, rank = ranks.of(graph.columns[0])
    actions = [(rank, started[task], np.full(len(task), _RUN), task)]
    order = np.empty(num_messages, np.int64)  # of the messages, by the time of their sends
    order[np.lexsort((started[target], finished[source]))] = np.arange(num_messages)
    message, rank = ranks.of(graph.columns[0, source])
    actions.append((rank, started[source[message]], _RUN + 1 + order[message], num_tasks + message))
    message, rank = ranks.of(graph.columns[0, target])
    event, position = _receives(ranks, graph, started[target], order, message, rank)
    actions.append((rank, event, position, num_tasks + num_messages + message))
    instants = np.array(sync_instants(graph, timeline, sync_groups), np.int64)
    number = np.repeat(np.arange(len(sync_groups)), [len(group.ranks) for group in sync_groups])
    rank = np.fromiter(chain.from_iterable(group.ranks for group in sync_groups), np.int64, len(number))
    actions.append((rank, instants[number], number, num_tasks + 2 * num_messages + number))
    rank, event, position, code = map(np.concatenate, zip(*actions, strict=True))
    by_event = rank * (2 * num_tasks + 1) + event
    starts = np.cumsum([0, *np.bincount(rank, minlength=plan.world_size).tolist()])
    return PartActions(graph, starts, code[np.lexsort((position, by_event))], {r: r for r in range(plan.world_size)})


def _receives(
    ranks: StageRanks, graph: TaskGraph, needed: NDArray, order: NDArray, message: NDArray, rank: NDArray
) -> tuple[NDArray, NDArray]:
    """
    Returns the event of each receive, and its position there, for the receives' `message` and `rank`, `[receives]`.

    A receive comes before the first task of its rank that needs the message or a later one of the same receive queue:
    the messages to a rank from sources that share ranks. Posting those in the order of the sends keeps the order
    between every two ranks. `needed` and `order`, `[messages]`, are the event that needs a message and its position in
    the order of all sends.
    """
    queue = _receive_queues(ranks, graph, message, rank)
    by_queue = np.lexsort((order[message], queue))
    sent, event, queue = order[message[by_queue]], needed[message[by_queue]], queue[by_queue]
    # For each receive, the receive of its queue from here to the end that is needed first: the one it comes with. A
    # running minimum from the end finds it, over keys of queue, event and index in one integer; later queues have
    # larger keys. With queues 0, 0, 0, 1, events 7, 5, 9, 4 (each below 10) and 4 receives the keys are 28, 21, 38,
    # 59, their minima 21, 21, 38, 59, and modulo 4 the receives 1, 1, 2, 3: the first comes with the second, at event
    # 5. A key is below queues x events x receives, which int64 holds for two million of each.
    count = len(queue)
    num_events = int(needed.max(initial=0)) + 1
    assert (int(queue.max(initial=0)) + 1) * num_events * max(count, 1) < 2**63, "too many receives for int64 keys"
    key = ((queue * num_events + event) * count + np.arange(count))[::-1]
    covering = (np.minimum.accumulate(key) % max(count, 1))[::-1]
    result = np.empty((2, count), np.int64)
    result[:, by_queue] = event[covering], sent[covering] * len(order) + sent
    return result[0], result[1]


def _receive_queues(ranks: StageRanks, graph: TaskGraph, message: NDArray, rank: NDArray) -> NDArray:
    """The receive queue of each receive, as an index."""
    receive, source = ranks.of(graph.columns[0, graph.links[0, message]])
    num_ranks = int(ranks.ranks.max(initial=0)) + 1
    channel, number = np.unique(rank[receive] * num_ranks + source, return_inverse=True)
    first = np.flatnonzero(np.diff(receive, prepend=-1))
    if len(first) == len(receive):  # each source is a single rank
        return number
    ends = (np.ones(len(receive)), (number, number[first][receive]))
    return connected_components(coo_array(ends, (len(channel), len(channel))), False)[1].astype(np.int64)[
        number[first]
    ]


def receive_ahead(actions: Sequence[Action]) -> list[Action]:
    """Moves each receive before the task that precedes the one that needs it, so that transfer and task overlap."""
    result: list[Action] = []
    last_task: int | None = None  # index of the last task
    for action in actions:
        if action.message is not None and action.op == "recv" and last_task is not None:
            before = result[last_task].task
            # A gradient's receive stays after its forward, whose output has the shape of the gradient.
            if before is not None and before.key != action.message.target.key:
                result.insert(last_task, action)
                last_task += 1
                continue
            last_task = None  # later receives must not overtake this one
        elif action.task is not None:
            last_task = len(result)
        result.append(action)
    return result


def sync_instants(graph: TaskGraph, timeline: Timeline, sync_groups: Sequence[SyncGroup]) -> list[int]:
    """Returns the event after which each gradient sum comes; groups without backwards come with the next one."""
    last = last_backwards(graph, timeline.finished)
    of_stage = dict(zip(graph.stages, last.tolist(), strict=True))
    instants = [max((of_stage.get(stage, -1) for stage in group.stages), default=-1) for group in sync_groups]
    next_instant = 2 * graph.num_tasks
    for number in reversed(range(len(sync_groups))):
        next_instant = instants[number] = next_instant if instants[number] < 0 else instants[number]
    return list(accumulate(instants, max))


def last_backwards(graph: TaskGraph, finished: Sequence[int]) -> NDArray:
    """Event at which the last backward of each stage ends, int64 `[stages]`; -1 without backwards."""
    last, first = np.full(len(graph.stages), -1), graph.num_forwards
    np.maximum.at(last, graph.columns[0, first:], np.array(finished[first:], np.int64))
    return last


def blocking_order(graph: TaskGraph, timeline: Timeline, sync_groups: Sequence[SyncGroup]) -> NDArray:
    """Returns each task's and sum's position in a timeline, int64 `[tasks + groups]`; joint tasks share one."""
    events = np.array([*timeline.started, *sync_instants(graph, timeline, sync_groups)], np.int64)
    order = np.empty(len(events), np.int64)
    order[np.argsort(events, kind="stable")] = np.arange(len(events))
    if graph.joint is not None:
        order[: graph.num_tasks] = order[graph.joint]
    return order
