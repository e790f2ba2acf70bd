"""List scheduling: orders the tasks of a graph by simulating the ranks under a schedule's policy."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..plan import ParallelPlan, StageKey
from ..plan.parallel_plan import virtual_stages
from .graph import TaskCounts, TaskGraph
from .in_flight import occupied_ranks, task_phases
from .kinds import ADDS_GRADIENTS, CLOSES, FILLS, IN_ORDER, KINDS, Task
from .windows import Windows, latest_equal

# task -> milliseconds; an object with a method `of_graph`, graph -> times of its tasks, is faster
Cost = Callable[[Task], float]

_MANY_TASKS = 2048  # tasks of a part above which the vectorised simulation is used


def task_times(cost: Cost, graph: TaskGraph) -> list[float]:
    """Duration of each task of a graph in milliseconds."""
    of_graph = getattr(cost, "of_graph", None)
    return [cost(task) for task in graph.tasks] if of_graph is None else of_graph(graph).tolist()


@dataclass(frozen=True, eq=False)
class Order:
    """
    The tasks of a graph in the order in which they run.

    Events are numbered as they happen, also at equal times, those of each part from 0; tasks that run jointly share
    theirs.
    """

    started: NDArray  # [tasks], event at which it starts
    finished: NDArray  # [tasks], event at which it ends


def default_cost(task: Task) -> float:
    """1 ms for a forward, 2 ms for a backward, 1 ms for each part of one that is split."""
    return float(sum(part in ("forward", "inputs", "weights") for part in task.row.work))


@dataclass(frozen=True)
class _Rules:
    """How a simulation orders the tasks of a rank, where several could be next."""

    alternate: bool = False  # a stage waits for a forward after each backward
    keeps_free: float = 0.0  # share of a task that fills in which stages rather wait for what can start
    encoders_last: bool = False  # on ranks of other modules


class _Tables:
    """
    The constants of a simulation as lists, with which an event takes a few microseconds.

    Tasks and stages are indices of the graph. A *cell* is a microbatch on a stage, see [`TaskCounts`]. A *component*
    is a connected component of stages that share ranks; where all are on the same ranks, the first rank stands for
    them.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        graph: TaskGraph,
        times_ms: Sequence[float],
        max_in_flight: Mapping[StageKey, float],
        parts: NDArray | None = None,
    ):
        self.graph, self.times_ms, self.num_ranks = graph, times_ms, plan.world_size
        self.max_in_flight = [float(max_in_flight.get(key, math.inf)) for key in graph.stages]
        most: dict[tuple[str, int], float] = {}  # of any stage of a replica
        for key, limit in zip(graph.stages, self.max_in_flight, strict=True):
            most[key[:2]] = max(most.get(key[:2], 0.0), limit)
        # what waits for gradients of weights may be as much as the first stage has in flight (Qi et al. 2023, ZB-H1)
        self.max_held = [most[key[:2]] for key in graph.stages]
        ranks = occupied_ranks(plan)
        # component -> its stages
        self.components = _connected_components(ranks)
        self.component_of = [0] * len(ranks)
        for component, stages in enumerate(self.components):
            for stage in stages:
                self.component_of[stage] = component
        # without those that run jointly with another one, whose tasks stand for theirs
        runs = np.bincount(graph.columns[0], minlength=len(ranks))
        self.components = [[stage for stage in own if runs[stage]] or own[:1] for own in self.components]
        parts = np.zeros(len(ranks), np.int64) if parts is None else parts
        count = int(parts.max(initial=-1)) + 1
        part_of_component = parts[[stages[0] for stages in self.components]]
        # part -> its components
        self.components_of_part = _lists(part_of_component, np.arange(len(self.components)), count)
        self.tasks_of_part = _lists(parts[graph.columns[0]], np.arange(graph.num_tasks), count)  # part -> its tasks
        # component -> whether all of its stages are on the same ranks
        self.one_at_a_time = [len({ranks[stage] for stage in stages}) == 1 for stages in self.components]
        self.ranks = [
            # stage -> its ranks, or the one that stands for them
            of_stage[:1] if self.one_at_a_time[component] else of_stage
            for of_stage, component in zip(ranks, self.component_of, strict=True)
        ]
        self.first_rank = [of_stage[0] for of_stage in self.ranks]
        self.is_encoder = [key[0] in plan.encoders for key in graph.stages]
        # stage -> the first virtual stage of its rank, in which the turns of all of them are counted; the number of
        # the virtual stage, and the microbatches that pass through it in turn
        self.turns_of, self.round, self.width = _virtual_stages(plan)
        # stage -> the stages that share ranks with it and itself, only where a component has others
        self.neighbours = self._neighbours()
        self.phases = _phases(plan, graph)
        self.in_order, self.closes = IN_ORDER[graph.kind].tolist(), CLOSES[graph.kind].tolist()
        self.fills, self.ends = FILLS[graph.kind].tolist(), ADDS_GRADIENTS[graph.kind].tolist()
        self.has_fills = any(self.fills)

        queued, counts = np.flatnonzero(IN_ORDER[graph.kind]), TaskCounts.of(graph)
        # task -> number of its dependencies; cell -> number of the tasks that close it, and that end it
        self.missing, self.closing_left = counts.missing.tolist(), counts.closing.tolist()
        self.holding_left = counts.holding.tolist()
        # The dependents of task `i` are `followers[stops[i] : stops[i + 1]]`: one list for all tasks, since many short
        # ones would keep the garbage collector busy.
        self.followers = counts.followers.tolist()
        self.stops = [0, *np.cumsum(counts.num_followers).tolist()]
        # stage -> its forwards, in order
        self.forwards = _lists(graph.columns[0, queued], queued, len(graph.stages))
        self.cell, self.opens = counts.cell.tolist(), counts.opens.tolist()
        self.stage_of, self.microbatch, self.chunk = graph.columns.tolist()

    def _neighbours(self) -> list[tuple[int, ...]]:
        result: list[tuple[int, ...]] = [()] * len(self.ranks)
        for stages, is_one in zip(self.components, self.one_at_a_time, strict=True):
            on_rank: dict[int, list[int]] = {}
            for stage in stages:
                for rank in self.ranks[stage]:
                    on_rank.setdefault(rank, []).append(stage)
            for stage in () if is_one else stages:
                result[stage] = tuple({other: None for rank in self.ranks[stage] for other in on_rank[rank]})
        return result


def _lists(keys: NDArray, values: NDArray, count: int) -> list[list[int]]:
    """The values with each key from 0 to `count - 1`."""
    flat = values[np.argsort(keys, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(keys, minlength=count)).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class _Simulation:
    """A discrete-event simulation: free ranks run the ready task of highest priority."""

    def __init__(self, tables: _Tables, rules: _Rules):
        self.tables, self.rules = tables, rules
        self.could_wait = False  # whether a stage ran a second backward in a row where alternating would have waited
        self.could_keep_free = False  # whether a stage filled a gap beyond the start of another task
        self.could_go_last = False  # whether tasks of an encoder and of others could start on shared ranks
        num_stages, num_tasks = len(tables.ranks), tables.graph.num_tasks
        self.next = [0] * num_stages  # index of the next forward of each stage
        self.backwards: list[list[int]] = [[] for _ in range(num_stages)]  # heaps of ready backwards
        self.filling: list[deque[int]] = [deque() for _ in range(num_stages)]  # ready tasks that fill
        self.in_flight = [0] * num_stages  # microbatches with an unfinished backward
        self.held = [0] * num_stages  # microbatches with unfinished gradients
        self.forward_due = [False] * num_stages  # whether the last task was a backward
        self.missing, self.closing_left = list(tables.missing), list(tables.closing_left)
        self.holding_left = list(tables.holding_left)
        # with tasks that fill: number of dependencies of each task that have not started, the last known end of them,
        # and for each stage the tasks of which all have
        self.unstarted, self.ready_ms = list(tables.missing), [0.0] * num_tasks
        self.expected: list[list[int]] = [[] for _ in range(num_stages)]
        self.busy = [False] * tables.num_ranks
        self.phases = None if tables.phases is None else _Phases(tables)
        self.running: list[tuple[float, int]] = []
        self.events = 0
        self.start_ms, self.end_ms = [0.0] * num_tasks, [0.0] * num_tasks
        self.started, self.finished = [0] * num_tasks, [0] * num_tasks

    def run(self, part: int, limit_ms: float = math.inf) -> float | None:
        """Simulates a part until its end time; `None` if alternating stages deadlock, or if it reaches the limit."""
        self.could_wait = self.could_keep_free = self.could_go_last = False
        self.events, self.running = 0, []
        tables, running, left, now = self.tables, self.running, len(self.tables.tasks_of_part[part]), 0.0
        stage_of, first_rank, component_of = tables.stage_of, tables.first_rank, tables.component_of
        followers, stops, in_order, fills = tables.followers, tables.stops, tables.in_order, tables.fills
        missing, busy, neighbours = self.missing, self.busy, tables.neighbours
        push, pop, dispatch, finish = heapq.heappush, heapq.heappop, self._dispatch, self._finish
        for component in tables.components_of_part[part]:
            dispatch(component, tables.components[component], now)
        while left:
            if self.rules.alternate and not running:
                return None
            if running and running[0][0] >= limit_ms:
                return None
            assert running, "limits below those of `in_flight_1f1b` deadlock"
            dirty: dict[int, set[int]] = {}  # component -> its stages that may be able to start a task
            event_ms = latest_equal(running[0][0])
            while running and running[0][0] <= event_ms:
                now, index = pop(running)
                left -= 1
                finish(index)
                stage = stage_of[index]
                dirty.setdefault(component_of[stage], set()).update(neighbours[stage])
                for other in followers[stops[index] : stops[index + 1]]:
                    missing[other] -= 1
                    if not missing[other]:
                        stage = stage_of[other]
                        if fills[other]:
                            self.filling[stage].append(other)
                        elif not in_order[other]:
                            push(self.backwards[stage], other)
                        if not busy[first_rank[stage]]:  # a busy stage is dispatched when it becomes free
                            dirty.setdefault(component_of[stage], set()).add(stage)
            for component in sorted(dirty):
                dispatch(component, dirty[component], now)
        return now

    def adopt(self, other: _Simulation, part: int) -> _Simulation:
        """Copies the times of a part from another simulation."""
        for index in self.tables.tasks_of_part[part]:
            self.start_ms[index], self.end_ms[index] = other.start_ms[index], other.end_ms[index]
            self.started[index], self.finished[index] = other.started[index], other.finished[index]
        return self

    def _candidate(self, stage: int, now: float) -> int:
        """The task that a stage would run next, -1 for none."""
        task, filling = self._due(stage), self.filling[stage]
        if task >= 0 or not filling or (self.phases is not None and not self.phases.is_due(filling[0])):
            return task
        length_ms = self.tables.times_ms[filling[0]]
        if self.rules.keeps_free:
            return -1 if self._starts_before(stage, now + self.rules.keeps_free * length_ms) else filling[0]
        self.could_keep_free = self.could_keep_free or self._starts_before(stage, now + length_ms)
        return filling[0]

    def _starts_before(self, stage: int, end_ms: float) -> bool:
        """Whether a stage will be able to start a task before a time, as far as the tasks that run now tell."""
        tables, missing, result = self.tables, self.missing, False
        self.expected[stage] = expected = [index for index in self.expected[stage] if missing[index]]
        for index in expected:
            is_next = not tables.in_order[index] or index == tables.forwards[stage][self.next[stage]]
            result |= is_next and self._fits(stage, index) and latest_equal(self.ready_ms[index]) < end_ms
        return result

    def _fits(self, stage: int, index: int) -> bool:
        """Whether the limits of a stage allow a task."""
        tables = self.tables
        if not tables.opens[index]:
            return True
        return self.in_flight[stage] < tables.max_in_flight[stage] and self.held[stage] < tables.max_held[stage]

    def _due(self, stage: int) -> int:
        """The task that a stage would run next but for what fills, -1 for none."""
        tables, phases, forward, fits = self.tables, self.phases, -1, False
        queue, position = tables.forwards[stage], self.next[stage]
        if position < len(queue):
            index = queue[position]
            fits = self._fits(stage, index)
            if fits and not self.missing[index] and (phases is None or phases.is_due(index)):
                forward = index
        backwards = self.backwards[stage]
        if not backwards:
            return forward
        due = self.forward_due[tables.turns_of[stage]]
        if due and (fits if self.rules.alternate else forward >= 0):
            return forward
        if phases is None or phases.is_due(backwards[0]):
            self.could_wait |= due and fits
            return backwards[0]
        return forward

    def _dispatch(self, component: int, changed: Iterable[int], now: float) -> None:
        """Starts tasks on the free ranks of a component, by priority, until none can start."""
        stages, tables, busy = self.tables.components[component], self.tables, self.busy
        if tables.one_at_a_time[component]:
            if busy[tables.ranks[stages[0]][0]]:
                return
            if len(stages) == 1:
                index = self._candidate(stages[0], now)
                if index >= 0:
                    self._start(index, now)
                return
            candidates = [index for index in (self._candidate(stage, now) for stage in stages) if index >= 0]
            if candidates:
                self._start(self._sorted(candidates)[0], now)
            return
        # Only stages that changed since the last time can start a task.
        free = [stage for stage in changed if not any(map(busy.__getitem__, tables.ranks[stage]))]
        candidates = [index for index in (self._candidate(stage, now) for stage in free) if index >= 0]
        # A start changes what no other stage could run next, only which ranks are free.
        for index in self._sorted(candidates):
            if not any(map(busy.__getitem__, tables.ranks[tables.stage_of[index]])):
                self._start(index, now)

    def _sorted(self, candidates: list[int]) -> list[int]:
        """Tasks that could start on the ranks of a component, by priority."""
        if len(candidates) > 1:
            is_encoder, stage_of = self.tables.is_encoder, self.tables.stage_of
            self.could_go_last = self.could_go_last or len({is_encoder[stage_of[index]] for index in candidates}) > 1
            candidates.sort(key=self._priority)
        return candidates

    def _priority(self, index: int) -> tuple[int, ...]:
        """Sort key of tasks of stages that share ranks: first backwards and forwards that are due, last what fills."""
        tables, stage = self.tables, self.tables.stage_of[index]
        goes_last = self.rules.encoders_last and tables.is_encoder[stage]
        in_order, due = tables.in_order[index], self.forward_due[tables.turns_of[stage]]
        width, microbatch = tables.width[stage], tables.microbatch[index]
        # Forwards of virtual stages that are due come before backwards of others, and groups of microbatches pass
        # through one stage of the rank after the other.
        if in_order:
            rank, turn = (-(width > 1) if due else 1), tables.round[stage]
        else:
            rank, turn = 0, -tables.round[stage]
        fills = tables.fills[index]
        return fills, goes_last, rank, microbatch // width, turn, microbatch, tables.chunk[index], stage, index

    def _start(self, index: int, now: float) -> None:
        tables = self.tables
        stage = tables.stage_of[index]
        if tables.in_order[index]:
            self.forward_due[tables.turns_of[stage]] = False
            self.next[stage] += 1
            self.in_flight[stage] += tables.opens[index]
            self.held[stage] += tables.opens[index]
        elif tables.fills[index]:
            self.filling[stage].popleft()
        else:
            self.forward_due[tables.turns_of[stage]] = True
            heapq.heappop(self.backwards[stage])
        for rank in tables.ranks[stage]:
            self.busy[rank] = True
        self.started[index] = self.events
        self.events += 1
        self.start_ms[index] = now
        self.end_ms[index] = end_ms = now + tables.times_ms[index]
        heapq.heappush(self.running, (end_ms, index))
        if tables.has_fills:
            for other in tables.followers[tables.stops[index] : tables.stops[index + 1]]:
                self.unstarted[other] -= 1
                self.ready_ms[other] = max(self.ready_ms[other], end_ms)
                if not self.unstarted[other] and not tables.fills[other]:
                    self.expected[tables.stage_of[other]].append(other)

    def _finish(self, index: int) -> None:
        tables = self.tables
        stage = tables.stage_of[index]
        if tables.closes[index]:
            cell = tables.cell[index]
            self.closing_left[cell] -= 1
            self.in_flight[stage] -= not self.closing_left[cell]
        if tables.ends[index]:
            cell = tables.cell[index]
            self.holding_left[cell] -= 1
            self.held[stage] -= not self.holding_left[cell]
        for rank in tables.ranks[stage]:
            self.busy[rank] = False
        if self.phases is not None:
            self.phases.finish(index)
        self.finished[index] = self.events
        self.events += 1


class _Phases:
    """The phase of each rank: the earliest one with unfinished tasks."""

    def __init__(self, tables: _Tables):
        assert tables.phases is not None
        self.of_task = tables.phases
        self.ranks = [tables.ranks[stage] for stage in tables.stage_of]
        self.left = [[0] * (1 + max(self.of_task, default=0)) for _ in range(tables.num_ranks)]
        for phase, ranks in zip(self.of_task, self.ranks, strict=True):
            for rank in ranks:
                self.left[rank][phase] += 1

    def is_due(self, index: int) -> bool:
        """Whether the task's ranks have finished all earlier phases."""
        phase = self.of_task[index]
        return not phase or not any(any(self.left[rank][:phase]) for rank in self.ranks[index])

    def finish(self, index: int) -> None:
        """Counts a task as done."""
        for rank in self.ranks[index]:
            self.left[rank][self.of_task[index]] -= 1


def _phases(plan: ParallelPlan, graph: TaskGraph) -> list[int] | None:
    """The phase of each task; `None` if there is only one."""
    phases = task_phases(plan)
    if not any(phases.values()):
        return None
    by_stage = np.array([[phases[key[0], kind] for kind in KINDS] for key in graph.stages]).reshape(-1, len(KINDS))
    return by_stage[graph.columns[0], graph.kind].tolist()


def _virtual_stages(plan: ParallelPlan) -> tuple[list[int], list[int], list[int]]:
    """The first virtual stage on the ranks of each stage, the number of the stage there, and its pipeline's ranks."""
    first, numbers, widths = [], [], []
    for module in plan.modules.values():
        for stages in module.replicas:
            start, vp_size = len(first), virtual_stages(stages)
            width = len(stages) // vp_size
            first += [start + index % width for index in range(len(stages))]
            numbers += [index // width for index in range(len(stages))]
            widths += [width if vp_size > 1 else 1] * len(stages)
    return first, numbers, widths


def _connected_components(ranks: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Sets of stages that share ranks, directly or through other stages."""
    num_ranks = 1 + max(map(max, ranks), default=0)
    stages = np.repeat(np.arange(len(ranks)), list(map(len, ranks)))
    ends = (np.ones(len(stages)), (stages, len(ranks) + np.fromiter(chain.from_iterable(ranks), np.int64)))
    shape = (len(ranks) + num_ranks,) * 2
    labels = connected_components(coo_array(ends, shape), False)[1][: len(ranks)]
    components: dict[int, list[int]] = {}
    for stage, label in enumerate(labels.tolist()):
        components.setdefault(label, []).append(stage)
    return list(components.values())


def order_tasks(
    plan: ParallelPlan,
    graph: TaskGraph,
    times_ms: Sequence[float],
    max_in_flight: Mapping[StageKey, float],
    alternate: bool = False,
    parts: NDArray | None = None,  # int64 [stages], the `Part` of each stage; one when left out
) -> Order:
    """
    Orders the tasks of a graph, given their durations in milliseconds.

    A stage runs a forward after each backward, otherwise backwards first, with at most `max_in_flight` microbatches in
    flight (no limit for stages left out). The phases of the schedule follow one after the other on each rank, see
    [`task_phases`]. (With deferral backwards arrive in bursts; if all of them ran first, later stages would run out of
    work.) Forwards of a stage run in the order of its chunks, backwards in the order in which their gradients arrive.

    What fills runs where a stage has nothing else to do. In further orders stages rather wait for what comes before
    half of it is done, or all of it. On shared ranks earlier microbatches come first; in another order encoders fill
    what the other modules leave (Optimus, Feng et al. 2024).

    If the input of the forward after a backward has not arrived, the stage runs another backward, if one is ready.
    Forwards then run in bursts, too, and delay the backwards that earlier stages wait for. With `alternate` another
    order is simulated, in which such a stage waits for the forward as in textbook 1F1B, and the fastest of all is
    returned. The order comes from a completed simulation, so it can't deadlock.
    """
    if graph.joint is not None:
        firsts, place = graph.join()
        longest_ms = np.empty(firsts.num_tasks)
        longest_ms[place] = graph.longest(np.asarray(times_ms))
        order = order_tasks(plan, firsts, longest_ms.tolist(), max_in_flight, alternate, parts)
        return Order(order.started[place], order.finished[place])
    if graph.num_tasks >= _MANY_TASKS:
        order = _in_windows(plan, graph, times_ms, max_in_flight, alternate, parts)
        if order is not None:
            return order
    tables = _Tables(plan, graph, times_ms, max_in_flight, parts)
    best = _Simulation(tables, _Rules())
    others: dict[_Rules, _Simulation] = {}
    # parts are ordered one by one, and the events of each are numbered from 0
    for part in range(len(tables.tasks_of_part)):
        end_ms = best.run(part)
        assert end_ms is not None
        for rules in _other_rules(best, alternate):
            if rules not in others:
                others[rules] = _Simulation(tables, rules)
            other = others[rules]
            other_ms = other.run(part, end_ms)
            if other_ms is not None:
                end_ms, best = other_ms, other if parts is None else best.adopt(other, part)
    return Order(np.array(best.started, np.int64), np.array(best.finished, np.int64))


def _other_rules(simulation: _Simulation, alternate: bool) -> Iterator[_Rules]:
    """Rules that may make another order than the default ones did in a simulation."""
    if simulation.could_keep_free:  # with what follows they make nothing faster
        yield from (_Rules(keeps_free=0.5), _Rules(keeps_free=1.0))
    for last in (False, True)[: 1 + simulation.could_go_last]:
        for waits in (False, True)[: 1 + (alternate and simulation.could_wait)]:
            if waits or last:
                yield _Rules(waits, encoders_last=last)


def _in_windows(
    plan: ParallelPlan,
    graph: TaskGraph,
    times_ms: Sequence[float],
    max_in_flight: Mapping[StageKey, float],
    alternate: bool,
    parts: NDArray | None = None,
) -> Order | None:
    """The vectorised simulation of all parts at once; `None` if [`Windows`] does not support the case."""
    occupied = occupied_ranks(plan)
    ranks = [set(occupied[stage]) for stage in np.unique(graph.columns[0]).tolist()]
    if sum(map(len, ranks)) > len(set().union(*ranks)) or any(task_phases(plan).values()):
        return None
    of_stages = [max_in_flight.get(key, math.inf) for key in graph.stages]
    counts = TaskCounts.of(graph)
    best = Windows(graph, counts, times_ms, of_stages, False)
    if not best.run():
        return None
    assert best.is_done, "limits below those of `in_flight_1f1b` deadlock"
    started, finished = best.events()
    if alternate and best.could_wait:
        waiting = Windows(graph, counts, times_ms, of_stages, True)
        if not waiting.run():
            return None
        part = np.zeros(graph.num_tasks, np.int64) if parts is None else parts[graph.columns[0]]
        ends = np.zeros((2, int(part.max(initial=0)) + 1))
        np.maximum.at(ends[0], part, best.end_ms)
        np.maximum.at(ends[1], part, waiting.end_ms)  # not a number for a part that deadlocks
        is_faster = (ends[1] < ends[0])[part]
        started, finished = np.where(is_faster, waiting.events(), (started, finished))
    return Order(started, finished)
