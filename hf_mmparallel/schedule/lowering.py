"""From an order of tasks to the actions of every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from ..plan import ParallelPlan, StepPlan, SyncGroup
from .actions import Action, Program, StageKey, Task
from .checks import verify
from .graph import TaskGraph, build_graph
from .parts import Part, condense
from .policies import may_alternate, policy_caps
from .scheduler import Cost, Timeline, default_cost, order_tasks


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
    actions: dict[int, tuple[Action, ...]] = {}
    times: dict[Task, tuple[float, float]] = {}
    for part in parts:
        groups = part.groups if training else ()
        graph, _, timeline = order_part(part, cost or default_cost, training, caps)
        program = lower(part.plan, graph, timeline, groups)
        if check:
            verify(part.plan, graph, groups, program, is_part=True)
        program = part.condensed(program)
        actions.update(program.actions)
        times.update(program.times_ms)
    return Program(actions, times)


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
    times_ms = [cost(task) for task in graph.tasks]
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
    by_rank: list[list[int]] = [[] for _ in range(plan.world_size)]
    ranks = _ranks(plan, graph)
    for index in sorted(range(len(graph.tasks)), key=timeline.started.__getitem__):
        for rank in ranks[index]:
            by_rank[rank].append(index)

    order = sorted(
        range(len(graph.messages)),
        key=lambda i: (timeline.finished[graph.ends[i][0]], timeline.started[graph.ends[i][1]]),
    )
    outgoing: list[list[int]] = [[] for _ in graph.tasks]
    incoming: list[list[int]] = [[] for _ in range(plan.world_size)]
    for message in order:
        source, target = graph.ends[message]
        outgoing[source].append(message)
        for rank in ranks[target]:
            incoming[rank].append(message)

    runs = [Action.run(task) for task in graph.tasks]
    sends = [Action("send", message=message) for message in graph.messages]
    recvs = [Action("recv", message=message) for message in graph.messages]
    syncs = _syncs_of_ranks(plan, graph, timeline, groups)
    actions: dict[int, tuple[Action, ...]] = {}
    for rank in range(plan.world_size):
        lanes = _Lanes(incoming[rank], graph, ranks)
        row: list[Action] = []
        waiting = iter([*syncs[rank], (math.inf, -1)])
        instant, group = next(waiting)
        for index in by_rank[rank]:
            while instant < timeline.started[index]:
                row.append(Action("sync", index=group))
                instant, group = next(waiting)
            row.extend(recvs[message] for message in lanes.take(index))
            row.append(runs[index])
            row.extend(sends[message] for message in outgoing[index])
        while group >= 0:
            row.append(Action("sync", index=group))
            instant, group = next(waiting)
        actions[rank] = tuple(row)
    times = {task: (timeline.start_ms[i], timeline.end_ms[i]) for i, task in enumerate(graph.tasks)}
    return Program(actions, times)


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


def _ranks(plan: ParallelPlan, graph: TaskGraph) -> list[tuple[int, ...]]:
    """The ranks of each task of the graph."""
    by_stage: dict[StageKey, tuple[int, ...]] = {
        (name, replica, index): stage.all_ranks
        for name, module in plan.modules.items()
        for replica, index, stage in module.stages()
    }
    return [by_stage[task.stage_key] for task in graph.tasks]


def sync_instants(graph: TaskGraph, timeline: Timeline, groups: Sequence[SyncGroup]) -> list[int]:
    """
    For each gradient sum, the event of a timeline behind which it comes; idle groups come with the next one.

    Args:
        graph (`TaskGraph`): The tasks.
        timeline (`Timeline`): Their order.
        groups (`Sequence[SyncGroup]`): The gradient sums.
    """
    last: dict[StageKey, int] = {}
    for index, task in enumerate(graph.tasks):
        if task.kind == "bwd":
            last[task.stage_key] = max(last.get(task.stage_key, -1), timeline.finished[index])
    instants = [max((last.get(stage, -1) for stage in group.stages), default=-1) for group in groups]
    following = 2 * len(graph.tasks)
    for number in reversed(range(len(groups))):
        following = instants[number] = following if instants[number] < 0 else instants[number]
    return list(accumulate(instants, max))


def _syncs_of_ranks(
    plan: ParallelPlan, graph: TaskGraph, timeline: Timeline, groups: Sequence[SyncGroup]
) -> list[list[tuple[float, int]]]:
    """For each rank, (instant, group) of its gradient sums in order."""
    result: list[list[tuple[float, int]]] = [[] for _ in range(plan.world_size)]
    for number, instant in enumerate(sync_instants(graph, timeline, groups)):
        for rank in groups[number].ranks:
            result[rank].append((instant, number))
    return result


class _Lanes:
    """
    The messages to one rank, cut into lanes whose sources share no rank. Posting each lane in the order of its sends
    keeps the order between every two ranks.
    """

    def __init__(self, messages: Iterable[int], graph: TaskGraph, ranks: Sequence[tuple[int, ...]]):
        self.queues: list[list[int]] = []
        self.posted: list[int] = []
        self.wanted: dict[int, list[tuple[int, int]]] = {}
        messages = list(messages)
        lane_of = self._lanes({ranks[graph.ends[message][0]] for message in messages})
        for message in messages:
            source, target = graph.ends[message]
            lane = lane_of[ranks[source]]
            self.wanted.setdefault(target, []).append((lane, len(self.queues[lane])))
            self.queues[lane].append(message)

    def _lanes(self, sources: set[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Gives each set of source ranks the lane of all sets that it overlaps with."""
        lanes: list[tuple[set[int], list[tuple[int, ...]]]] = []
        for ranks in sorted(sources):
            merged: tuple[set[int], list[tuple[int, ...]]] = (set(ranks), [ranks])
            apart = []
            for lane in lanes:
                if lane[0].isdisjoint(merged[0]):
                    apart.append(lane)
                else:
                    merged = (merged[0] | lane[0], merged[1] + lane[1])
            lanes = [*apart, merged]
        self.queues = [[] for _ in lanes]
        self.posted = [0] * len(lanes)
        return {ranks: number for number, (_, members) in enumerate(lanes) for ranks in members}

    def take(self, target: int) -> list[int]:
        """The messages to post before `target`: its own, and those sent before them in their lanes."""
        result = []
        for lane, place in self.wanted.get(target, ()):
            result.extend(self.queues[lane][self.posted[lane] : place + 1])
            self.posted[lane] = max(self.posted[lane], place + 1)
        return result
