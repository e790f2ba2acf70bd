"""From an order of tasks to the actions of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..plan import ParallelPlan, StepPlan, SyncGroup
from .action_lists import PartRows, ProgramRows, TaskTimes
from .actions import Action, StageKey
from .graph import StageRanks, TaskGraph, build_graph
from .parts import Part, condense
from .policies import may_alternate, policy_caps
from .program import Program
from .program_checks import verify
from .scheduler import Cost, Timeline, default_cost, order_tasks, task_times


def build_program(
    plan: ParallelPlan,
    step: StepPlan,
    groups: Sequence[SyncGroup],
    cost: Cost | None = None,
    training: bool = True,
    caps: Mapping[StageKey, float] | None = None,
    check: bool = True,
) -> Program:
    """
    Plans the actions of every rank for one global batch, and checks them.

    Args:
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement of the global batch.
        groups (`Sequence[SyncGroup]`): What [`sync_groups`] gives; not used without training.
        cost (`Callable[[Task], float]`, *optional*): Task -> milliseconds; a backward is two forwards when left out.
        training (`bool`, *optional*, defaults to `True`): Whether there are backwards and gradient sums.
        caps (`Mapping[tuple[str, int, int], float]`, *optional*):
            (module, replica, stage) -> microbatches in flight that memory allows, for the schedule `"eager"`; see
            [`policy_caps`].
        check (`bool`, *optional*, defaults to `True`): Whether the program is verified; one that runs has to be.

    Returns:
        `Program`: The actions with predicted times. Steps of equal `step.structure` have equal programs when the
        cost is the same.
    """
    condensed = condense(plan, groups)
    program = condensed.expand(condensed_program(condensed.parts(step), cost, training, caps, check))
    return Program({rank: program.actions.get(rank, ()) for rank in range(plan.world_size)}, program.times_ms)


def condensed_program(
    parts: Iterable[Part],
    cost: Cost | None = None,
    training: bool = True,
    caps: Mapping[StageKey, float] | None = None,
    check: bool = True,
) -> Program:
    """
    [`build_program`] for some of the parts of a step, with one rank for all that run the same list. What a part gets
    does not depend on the others.

    Args:
        parts (`Iterable[Part]`): What [`Condensed.parts`] gives; costs and caps of other parts are not asked for.
    """
    rows, times = [], []
    for part in parts:
        groups = part.groups if training else ()
        graph, _, timeline = order_part(part, cost or default_cost, training, caps)
        program = lower(part.plan, graph, timeline, groups)
        if check:
            verify(part.plan, graph, groups, program, is_part=True, order=blocking_order(graph, timeline, groups))
        rows.append(part.condensed(program))
        times.append((graph, timeline.start_ms, timeline.end_ms))
    return Program(ProgramRows(rows), TaskTimes(times))


def order_part(
    part: Part, cost: Cost, training: bool, caps: Mapping[StageKey, float] | None
) -> tuple[TaskGraph, list[float], Timeline]:
    """
    The tasks of a part, what each takes, and their order.

    Args:
        part (`Part`): The part.
        cost (`Callable[[Task], float]`): Task -> milliseconds.
        training (`bool`): Whether there are backwards.
        caps (`Mapping[tuple[str, int, int], float]`, *optional*): See [`build_program`].
    """
    graph = build_graph(part.plan, part.step, training)
    times_ms = task_times(cost, graph)
    own_caps = policy_caps(part.plan, part.step, caps)
    return graph, times_ms, order_tasks(part.plan, graph, times_ms, own_caps, training and may_alternate(part.plan))


def lower(plan: ParallelPlan, graph: TaskGraph, timeline: Timeline, groups: Sequence[SyncGroup]) -> Program:
    """
    Writes the list of every rank.

    Sends stand right after the task that produces, receives before the task that needs them and, between two ranks,
    in the order of the sends. Gradient sums stand in the order of `groups` on every rank, each on all of its ranks at
    one instant of the simulation: when the slowest of its stages is done, and those of the sums before it. (After
    each rank's own last backward, ranks that are shared by several modules can wait for each other in a circle.)

    Args:
        plan (`ParallelPlan`): The layout.
        graph (`TaskGraph`): The tasks.
        timeline (`Timeline`): Their order.
        groups (`Sequence[SyncGroup]`): The gradient sums.

    Returns:
        `Program`: The program.
    """
    rows = _rows(plan, graph, timeline, groups)
    return Program(ProgramRows([rows]), TaskTimes([(graph, timeline.start_ms, timeline.end_ms)]))


def _rows(plan: ParallelPlan, graph: TaskGraph, timeline: Timeline, groups: Sequence[SyncGroup]) -> PartRows:
    """[`lower`], as numbers: every action gets an event and a place at it, by which the lists are sorted."""
    started, finished = np.array(timeline.started, np.int64), np.array(timeline.finished, np.int64)
    num_tasks, num_messages = graph.num_tasks, graph.num_messages
    source, target = graph.links
    ranks = StageRanks(plan)
    # [rank, event, what comes first at an event, code]
    task, rank = ranks.of(graph.columns[0])
    found = [(rank, started[task], np.full(len(task), _RUN), task)]
    order = np.empty(num_messages, np.int64)  # of the messages, by their sends
    order[np.lexsort((started[target], finished[source]))] = np.arange(num_messages)
    message, rank = ranks.of(graph.columns[0, source])
    found.append((rank, started[source[message]], _RUN + 1 + order[message], num_tasks + message))
    message, rank = ranks.of(graph.columns[0, target])
    event, place = _receives(ranks, graph, started[target], order, message, rank)
    found.append((rank, event, place, num_tasks + num_messages + message))
    instants = np.array(sync_instants(graph, timeline, groups), np.int64)
    number = np.repeat(np.arange(len(groups)), [len(group.ranks) for group in groups])
    rank = np.fromiter(chain.from_iterable(group.ranks for group in groups), np.int64, len(number))
    found.append((rank, instants[number], number, num_tasks + 2 * num_messages + number))
    rank, event, place, code = (np.concatenate([own[i] for own in found]) for i in range(4))
    by_event = rank * (2 * num_tasks + 1) + event
    starts = np.cumsum([0, *np.bincount(rank, minlength=plan.world_size).tolist()])
    return PartRows(graph, starts, code[np.lexsort((place, by_event))], {r: r for r in range(plan.world_size)})


_RUN = 2**62  # behind all receives of a task, and before its sends


def _receives(
    ranks: StageRanks, graph: TaskGraph, needed: NDArray, order: NDArray, message: NDArray, rank: NDArray
) -> tuple[NDArray, NDArray]:
    """
    The event of the task that each receive stands before, and its place there: that of the first task of the rank that
    needs the message itself, or one that is sent later in its lane. (A lane are messages to a rank whose sources share
    ranks. To post each in the order of its sends keeps the order between every two ranks.)

    Args:
        needed (`np.ndarray` of shape `[messages]`): The event at which each message is needed.
        order (`np.ndarray` of shape `[messages]`): The place of each message in the order of all sends.
        message (`np.ndarray` of shape `[receives]`): The message of each receive.
        rank (`np.ndarray` of shape `[receives]`): The rank of each receive.
    """
    lane = _lanes(ranks, graph, message, rank)
    by_lane = np.lexsort((order[message], lane))
    sent, event, lane = order[message[by_lane]], needed[message[by_lane]], lane[by_lane]
    # The least event from here to the end of the lane, and where it is; later lanes have larger keys.
    count = len(lane)
    span = int(needed.max(initial=0)) + 1
    key = ((lane * span + event) * count + np.arange(count))[::-1]
    covering = (np.minimum.accumulate(key) % max(count, 1))[::-1]
    result = np.empty((2, count), np.int64)
    result[:, by_lane] = event[covering], sent[covering] * len(order) + sent
    return result[0], result[1]


def _lanes(ranks: StageRanks, graph: TaskGraph, message: NDArray, rank: NDArray) -> NDArray:
    """For each receive the number of its lane."""
    receive, source = ranks.of(graph.columns[0, graph.links[0, message]])
    size = int(ranks.ranks.max(initial=0)) + 1
    channel, number = np.unique(rank[receive] * size + source, return_inverse=True)
    first = np.flatnonzero(np.diff(receive, prepend=-1))
    if len(first) == len(receive):  # every source is one rank
        return number
    ends = (np.ones(len(receive)), (number, number[first][receive]))
    return connected_components(coo_array(ends, (len(channel), len(channel))), False)[1].astype(np.int64)[
        number[first]
    ]


def receive_ahead(actions: Sequence[Action]) -> list[Action]:
    """
    Moves each receive in front of the task before the one that needs it, so that its message can come in meanwhile.

    All else, and the receives among themselves, keep their order. The receive of a gradient, whose shape is that of
    what the forward gave, stays behind that forward.

    Args:
        actions (`Sequence[Action]`): The list of a rank.

    Returns:
        `list[Action]`: The same actions.
    """
    result: list[Action] = []
    place: int | None = None  # of the task that ran last
    for action in actions:
        if action.message is not None and action.op == "recv" and place is not None:
            before = result[place].task
            if before is not None and before.key != action.message.target.key:
                result.insert(place, action)
                place += 1
                continue
            place = None  # what comes after must not overtake
        elif action.task is not None:
            place = len(result)
        result.append(action)
    return result


def sync_instants(graph: TaskGraph, timeline: Timeline, groups: Sequence[SyncGroup]) -> list[int]:
    """
    For each gradient sum, the event of a timeline behind which it comes; idle groups come with the next one.

    Args:
        graph (`TaskGraph`): The tasks.
        timeline (`Timeline`): Their order.
        groups (`Sequence[SyncGroup]`): The gradient sums.
    """
    last = last_backwards(graph, timeline.finished)
    of_stage = dict(zip(graph.stages, last.tolist(), strict=True))
    instants = [max((of_stage.get(stage, -1) for stage in group.stages), default=-1) for group in groups]
    following = 2 * graph.num_tasks
    for number in reversed(range(len(groups))):
        following = instants[number] = following if instants[number] < 0 else instants[number]
    return list(accumulate(instants, max))


def last_backwards(graph: TaskGraph, finished: Sequence[int]) -> NDArray:
    """int64 `[stages]`: the event that the last backward of each stage is done; -1 without one."""
    last, first = np.full(len(graph.stages), -1), graph.num_forwards
    np.maximum.at(last, graph.columns[0, first:], np.array(finished[first:], np.int64))
    return last


def blocking_order(graph: TaskGraph, timeline: Timeline, groups: Sequence[SyncGroup]) -> NDArray:
    """int64 `[tasks + groups]`: the place of each task, and of each gradient sum, in the order of a timeline."""
    events = np.array([*timeline.started, *sync_instants(graph, timeline, groups)], np.int64)
    order = np.empty(len(events), np.int64)
    order[np.argsort(events, kind="stable")] = np.arange(len(events))
    return order
