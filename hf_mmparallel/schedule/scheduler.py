"""From a task graph to an order: list scheduling, which is a simulation of the ranks under a policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan
from .actions import StageKey, Task
from .graph import TaskCounts, TaskGraph
from .policies import task_phases
from .windows import Windows

Cost = Callable[[Task], float]
"""Task -> milliseconds. If it has a method `of_graph`, [`TaskGraph`] -> times of its tasks, that is asked."""

_MANY_TASKS = 2048  # of a part, from which on all stages are simulated at once


def task_times(cost: Cost, graph: TaskGraph) -> list[float]:
    """What each task of a graph takes."""
    of_graph = getattr(cost, "of_graph", None)
    return [cost(task) for task in graph.tasks] if of_graph is None else of_graph(graph).tolist()


@dataclass(frozen=True)
class Timeline:
    """
    When each task of a graph runs in the simulation. Events are numbered in the order in which they happen, so that
    the numbers also order what happens at one time.

    Args:
        start_ms (`tuple[float, ...]`): Of each task, in the order of the graph.
        end_ms (`tuple[float, ...]`): Of each task.
        started (`tuple[int, ...]`): Number of the event that each task starts.
        finished (`tuple[int, ...]`): Number of the event that each task is done.
    """

    start_ms: tuple[float, ...]
    end_ms: tuple[float, ...]
    started: tuple[int, ...]
    finished: tuple[int, ...]


def default_cost(task: Task) -> float:
    """1 ms for a forward, 2 ms for a backward."""
    return 1.0 if task.kind == "fwd" else 2.0


class _Tables:
    """
    What a simulation reads, as lists of numbers, over which an event takes a few microseconds: tasks are places in the
    graph, stages numbers, cells as in [`TaskCounts`]. An *island* are stages that share ranks; where these
    are all on the same ranks, one rank stands for them.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        graph: TaskGraph,
        times_ms: Sequence[float],
        caps: Mapping[StageKey, float],
        parts: NDArray | None = None,
    ):
        self.graph, self.times_ms, self.num_ranks = graph, times_ms, plan.world_size
        self.caps = [caps.get(key, math.inf) for key in graph.stages]
        ranks = [stage.all_ranks for module in plan.modules.values() for _, _, stage in module.stages()]
        self.islands = _islands(ranks)
        self.island_of = [0] * len(ranks)
        for island, stages in enumerate(self.islands):
            for stage in stages:
                self.island_of[stage] = island
        parts = np.zeros(len(ranks), np.int64) if parts is None else parts
        count = int(parts.max(initial=-1)) + 1
        of_island = parts[[stages[0] for stages in self.islands]]
        self.islands_of_part = _lists(of_island, np.arange(len(self.islands)), count)
        self.tasks_of_part = _lists(parts[graph.columns[0]], np.arange(graph.num_tasks), count)
        self.in_turn = [len({ranks[stage] for stage in stages}) == 1 for stages in self.islands]
        self.ranks = [own[:1] if self.in_turn[i] else own for own, i in zip(ranks, self.island_of, strict=True)]
        self.first_rank = [own[0] for own in self.ranks]
        self.phases = _phases(plan, graph)
        self.num_forwards = graph.num_forwards

        first, counts = graph.num_forwards, TaskCounts.of(graph)
        self.missing, self.backwards_left = counts.missing.tolist(), counts.backwards.tolist()
        # One list for all, since many short ones would keep the garbage collector busy.
        self.followers = counts.followers.tolist()
        self.stops = [0, *np.cumsum(counts.num_followers).tolist()]
        self.forwards = _lists(graph.columns[0, :first], np.arange(first), len(graph.stages))
        self.cell, self.opens = counts.cell.tolist(), counts.opens.tolist()
        self.stage_of, self.microbatch, self.chunk = graph.columns.tolist()


def _lists(keys: NDArray, values: NDArray, count: int) -> list[list[int]]:
    """The values of each key from 0 to `count`."""
    flat = values[np.argsort(keys, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(keys, minlength=count)).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class _Simulation:
    """A discrete-event simulation: ranks run the best task that they can, tasks end, others become possible."""

    def __init__(self, tables: _Tables, alternate: bool = False):
        self.tables, self.alternate = tables, alternate
        self.could_wait = False  # whether a stage took another backward, for which it would wait where it alternates
        num_stages, num_tasks = len(tables.ranks), tables.graph.num_tasks
        self.next = [0] * num_stages  # place of the next forward in those of the stage
        self.backwards: list[list[int]] = [[] for _ in range(num_stages)]  # heaps of those that could run
        self.live = [0] * num_stages  # microbatches of which a backward is left
        self.forward_due = [False] * num_stages  # what ran last was a backward
        self.missing, self.backwards_left = list(tables.missing), list(tables.backwards_left)
        self.busy = [False] * tables.num_ranks
        self.phases = None if tables.phases is None else _Phases(tables)
        self.running: list[tuple[float, int]] = []
        self.events = 0
        self.start_ms, self.end_ms = [0.0] * num_tasks, [0.0] * num_tasks
        self.started, self.finished = [0] * num_tasks, [0] * num_tasks

    def run(self, part: int, limit_ms: float = math.inf) -> float | None:
        """
        Simulates until every task of a part is done, and says when that is; `None` if stages that alternate wait for
        each other in a circle, or if it takes no less than the limit.
        """
        self.could_wait, self.events, self.running = False, 0, []
        tables, running, left, now = self.tables, self.running, len(self.tables.tasks_of_part[part]), 0.0
        stage_of, first_rank, island_of = tables.stage_of, tables.first_rank, tables.island_of
        followers, stops, num_forwards = tables.followers, tables.stops, tables.num_forwards
        missing, busy = self.missing, self.busy
        push, pop, dispatch, finish = heapq.heappush, heapq.heappop, self._dispatch, self._finish
        for island in tables.islands_of_part[part]:
            dispatch(island, now)
        while left:
            if self.alternate and not running:
                return None
            if running and running[0][0] >= limit_ms:
                return None
            assert running, "caps below those of `live_caps` leave nothing to run"
            dirty: set[int] = set()
            limit = running[0][0] * (1 + 1e-12) + 1e-9
            while running and running[0][0] <= limit:
                now, index = pop(running)
                left -= 1
                finish(index)
                dirty.add(island_of[stage_of[index]])
                for other in followers[stops[index] : stops[index + 1]]:
                    missing[other] -= 1
                    if not missing[other]:
                        stage = stage_of[other]
                        if other >= num_forwards:
                            push(self.backwards[stage], other)
                        if not busy[first_rank[stage]]:  # else it is looked at when it is free
                            dirty.add(island_of[stage])
            for island in sorted(dirty):
                dispatch(island, now)
        return now

    def adopt(self, other: _Simulation, part: int) -> _Simulation:
        """This one, with the order of a part as in another."""
        for index in self.tables.tasks_of_part[part]:
            self.start_ms[index], self.end_ms[index] = other.start_ms[index], other.end_ms[index]
            self.started[index], self.finished[index] = other.started[index], other.finished[index]
        return self

    def _candidate(self, stage: int) -> int:
        """The task that the stage would run next, or -1."""
        tables, phases, forward, fits = self.tables, self.phases, -1, False
        queue, place = tables.forwards[stage], self.next[stage]
        if place < len(queue):
            index = queue[place]
            fits = not tables.opens[index] or self.live[stage] < tables.caps[stage]
            if fits and not self.missing[index] and (phases is None or phases.is_due(index)):
                forward = index
        backwards = self.backwards[stage]
        if not backwards:
            return forward
        due = self.forward_due[stage]
        if due and (fits if self.alternate else forward >= 0):
            return forward
        if phases is None or phases.is_due(backwards[0]):
            self.could_wait |= due and fits
            return backwards[0]
        return forward

    def _dispatch(self, island: int, now: float) -> None:
        """Starts tasks on the island's free ranks, the best first, until none can start."""
        stages, tables, busy = self.tables.islands[island], self.tables, self.busy
        if tables.in_turn[island]:  # all stages are on the same ranks
            if busy[tables.ranks[stages[0]][0]]:
                return
            if len(stages) == 1:
                index = self._candidate(stages[0])
                if index >= 0:
                    self._start(index, now)
                return
            found = [index for index in map(self._candidate, stages) if index >= 0]
            if found:
                self._start(found[0] if len(found) == 1 else min(found, key=self._priority), now)
            return
        while True:
            free = (stage for stage in stages if not any(map(busy.__getitem__, tables.ranks[stage])))
            found = [index for index in map(self._candidate, free) if index >= 0]
            if not found:
                return
            self._start(min(found, key=self._priority), now)

    def _priority(self, index: int) -> tuple[bool, int, int, int, int]:
        """What comes first among stages that share ranks: backwards, and forwards that are due."""
        tables = self.tables
        is_late = index < tables.num_forwards and not self.forward_due[tables.stage_of[index]]
        return is_late, tables.microbatch[index], tables.chunk[index], tables.stage_of[index], index

    def _start(self, index: int, now: float) -> None:
        tables = self.tables
        stage = tables.stage_of[index]
        if index < tables.num_forwards:
            self.forward_due[stage] = False
            self.next[stage] += 1
            self.live[stage] += tables.opens[index]
        else:
            self.forward_due[stage] = True
            heapq.heappop(self.backwards[stage])
        for rank in tables.ranks[stage]:
            self.busy[rank] = True
        self.started[index] = self.events
        self.events += 1
        self.start_ms[index] = now
        self.end_ms[index] = end_ms = now + tables.times_ms[index]
        heapq.heappush(self.running, (end_ms, index))

    def _finish(self, index: int) -> None:
        tables = self.tables
        stage = tables.stage_of[index]
        if index >= tables.num_forwards:
            cell = tables.cell[index]
            self.backwards_left[cell] -= 1
            self.live[stage] -= not self.backwards_left[cell]
        for rank in tables.ranks[stage]:
            self.busy[rank] = False
        if self.phases is not None:
            self.phases.finish(index)
        self.finished[index] = self.events
        self.events += 1


class _Phases:
    """Which phase each rank is in: the earliest that it has a task of left."""

    def __init__(self, tables: _Tables):
        assert tables.phases is not None
        self.of_task = tables.phases
        self.ranks = [tables.ranks[stage] for stage in tables.stage_of]
        self.left = [[0] * (1 + max(self.of_task, default=0)) for _ in range(tables.num_ranks)]
        for phase, own in zip(self.of_task, self.ranks, strict=True):
            for rank in own:
                self.left[rank][phase] += 1

    def is_due(self, index: int) -> bool:
        """Whether all earlier phases of the task's ranks are done."""
        phase = self.of_task[index]
        return not phase or not any(any(self.left[rank][:phase]) for rank in self.ranks[index])

    def finish(self, index: int) -> None:
        """Counts a task as done."""
        for rank in self.ranks[index]:
            self.left[rank][self.of_task[index]] -= 1


def _phases(plan: ParallelPlan, graph: TaskGraph) -> list[int] | None:
    """The phase of each task; `None` where there is one."""
    phases = task_phases(plan)
    if not any(phases.values()):
        return None
    of_stage = np.array([[phases[key[0], kind] for kind in ("fwd", "bwd")] for key in graph.stages]).reshape(-1, 2)
    return of_stage[graph.columns[0], (graph.forward >= 0).astype(int)].tolist()


def _islands(ranks: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Groups stages that share ranks, directly or through others."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for own in ranks:
        first = root(own[0])
        for rank in own[1:]:
            parent[root(rank)] = first
    groups: dict[int, list[int]] = {}
    for stage, own in enumerate(ranks):
        groups.setdefault(root(own[0]), []).append(stage)
    return list(groups.values())


def schedule_tasks(
    plan: ParallelPlan,
    graph: TaskGraph,
    cost: Cost | None = None,
    caps: Mapping[StageKey, float] | None = None,
    alternate: bool = False,
) -> Timeline:
    """
    Orders the tasks of a graph.

    A stage runs a forward after each backward, else backwards first, and holds at most as many microbatches in flight
    as its cap says. The phases of the policy come one after the other on each rank, see [`task_phases`]. (Backwards
    come in bunches where samples are deferred. If all of them went first, the stages behind would run out of work.)
    Forwards of a stage run in the order of its chunks, backwards as their gradients arrive.

    A stage whose forward after a backward has not come in yet takes another backward, if there is one. The forwards
    then come in bunches, too, and hold up the backwards that the stages before wait for. With `alternate` a second
    order is simulated, in which such a stage waits for its forward as in textbook 1F1B, and the one that ends first is
    taken. Both keep as many microbatches in flight.

    The order is read off a simulation that has happened, so that it can't deadlock.

    Args:
        plan (`ParallelPlan`): The layout and the name of the policy.
        graph (`TaskGraph`): The tasks.
        cost (`Callable[[Task], float]`, *optional*): Task -> milliseconds; [`default_cost`] when left out.
        caps (`Mapping[tuple[str, int, int], float]`, *optional*):
            (module, replica, stage) -> the most microbatches in flight, such as [`policy_caps`] gives; a stage that
            is not in it has no cap.
        alternate (`bool`, *optional*, defaults to `False`): Whether to look at the order that waits, too.

    Returns:
        `Timeline`: When each task runs.
    """
    return order_tasks(plan, graph, task_times(cost or default_cost, graph), caps or {}, alternate)


def order_tasks(
    plan: ParallelPlan,
    graph: TaskGraph,
    times_ms: Sequence[float],
    caps: Mapping[StageKey, float],
    alternate: bool = False,
    parts: NDArray | None = None,
) -> Timeline:
    """
    [`schedule_tasks`] with the time of each task of the graph.

    Args:
        parts (`np.ndarray`, *optional*):
            int64 `[stages]`: the number of the part, see [`Part`], of each stage. Parts are ordered one by one,
            and the events of each are numbered from 0; all is one part when left out.
    """
    if parts is None and graph.num_tasks >= _MANY_TASKS:
        found = _in_windows(plan, graph, times_ms, caps, alternate)
        if found is not None:
            return found
    tables = _Tables(plan, graph, times_ms, caps, parts)
    found, other = _Simulation(tables), None
    for part in range(len(tables.tasks_of_part)):
        end_ms = found.run(part)
        assert end_ms is not None
        if alternate and found.could_wait:
            other = other or _Simulation(tables, True)
            if other.run(part, end_ms) is not None:
                found = other if parts is None else found.adopt(other, part)
    return Timeline(tuple(found.start_ms), tuple(found.end_ms), tuple(found.started), tuple(found.finished))


def _in_windows(
    plan: ParallelPlan,
    graph: TaskGraph,
    times_ms: Sequence[float],
    caps: Mapping[StageKey, float],
    alternate: bool,
) -> Timeline | None:
    """What the events one by one give, where [`Windows`] can give it."""
    grids = [set(stage.all_ranks) for module in plan.modules.values() for _, _, stage in module.stages()]
    if sum(map(len, grids)) > len(set().union(*grids)) or any(task_phases(plan).values()):
        return None
    of_stage = [caps.get(key, math.inf) for key in graph.stages]
    counts = TaskCounts.of(graph)
    found = Windows(graph, counts, times_ms, of_stage, False)
    if not found.run():
        return None
    assert found.is_done, "caps below those of `live_caps` leave nothing to run"
    if alternate and found.could_wait:
        other = Windows(graph, counts, times_ms, of_stage, True)
        if not other.run():
            return None
        if other.is_done and other.end_ms.max() < found.end_ms.max():
            found = other
    return Timeline(*(tuple(own.tolist()) for own in (found.start_ms, found.end_ms, *found.events())))
