"""The tasks and gradient sums of a step over time: from an order and durations, and all that follows from both."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..plan import StageKey, StepPlan
from .graph import TaskGraph, build_graph
from .in_flight import in_flight_limits, may_alternate, occupied_ranks
from .kinds import ADDS_GRADIENTS, BACKWARD, CLOSES, OPENS, Task
from .lowering import sum_instants
from .parts import Representatives
from .scheduler import Cost, Order, default_cost, order_tasks, task_times


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """A task on a rank, predicted or measured."""

    rank: int
    task: Task
    start_ms: float
    end_ms: float
    # Time in which the rank waits for ranks with more work: those of replicas that run the task jointly. Drawn at its
    # end, though it is spread over the layers. A measured task has it within.
    wait_ms: float = 0.0

    @property
    def busy_end_ms(self) -> float:
        """End of the rank's own work."""
        return self.end_ms - self.wait_ms


@dataclass(frozen=True, order=True, slots=True)
class SumSpan:
    """Consecutive gradient sums on a rank, from the start of the first to the end of the last."""

    rank: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, order=True, slots=True)
class TransferSpan:
    """Communication of weights or gradients on a rank, or the optimizer's update between both."""

    rank: int
    start_ms: float
    end_ms: float
    op: Literal["gather", "sum", "update"]  # of weights, of gradients, of the optimizer
    is_exposed: bool  # whether the rank computes nothing beside it


@dataclass(frozen=True)
class Durations:
    """Milliseconds of all that takes time in a step."""

    tasks: NDArray  # [tasks], of a task by itself, also where it runs jointly with longer ones
    messages: NDArray  # [messages], from the end of the source until the target can start
    sums: NDArray  # [gradient sums of the representatives]


@dataclass(frozen=True, eq=False)
class Timeline:
    """
    A step over time: its tasks in an order, with starts and ends that follow from durations.

    Each task starts as soon as its ranks are free and its messages have arrived, and a gradient sum once all of its
    ranks have reached it and their earlier sums are done; tasks go on beside it. Sends and receives take no time on a
    rank.
    """

    layout: Representatives
    graph: TaskGraph
    order: Order
    parts: NDArray  # [stages], see [`Representatives.parts_of_stages`]
    durations: Durations
    start_ms: NDArray  # [tasks]
    end_ms: NDArray  # [tasks]
    sum_start_ms: NDArray  # [gradient sums of the representatives]
    # for pictures: rank -> its communication beside and between its tasks, by start time; `None` if unknown
    transfers: Callable[[int], Sequence[TransferSpan]] | None = field(default=None, repr=False)

    def with_durations(self, durations: Durations) -> Timeline:
        """The same order with other durations."""
        return retime(self.layout, self.graph, self.order, self.parts, durations)

    @property
    def num_ranks(self) -> int:
        """The ranks of the plan, with idle ones."""
        return self.layout.whole_plan.world_size

    @cached_property
    def iteration_ms(self) -> float:
        """Time from the first start to the end of the last task or gradient sum."""
        ends = np.concatenate([self.end_ms, self.sum_start_ms + self.durations.sums])
        return float(ends.max(initial=0.0))

    @cached_property
    def waits_ms(self) -> NDArray:
        """Part of each task in which its ranks wait for a larger one that runs jointly `[tasks]`."""
        return self.graph.longest(self.durations.tasks) - self.durations.tasks

    @cached_property
    def _ranks(self) -> list[tuple[int, ...]]:
        return [stage.all_ranks for module in self.layout.whole_plan.modules.values() for *_, stage in module.stages()]

    @cached_property
    def task_times(self) -> dict[Task, tuple[float, float]]:
        """Task -> its start and end."""
        times = zip(self.start_ms.tolist(), self.end_ms.tolist(), strict=True)
        return dict(zip(self.graph.tasks, times, strict=True))

    @cached_property
    def tasks_of_rank(self) -> list[list[Task]]:
        """The tasks of each rank in the order in which it runs them."""
        result: list[list[Task]] = [[] for _ in range(self.num_ranks)]
        stages, tasks = self.graph.columns[0].tolist(), self.graph.tasks
        for index in np.argsort(self.order.started, kind="stable").tolist():
            for rank in self._ranks[stages[index]]:
                result[rank].append(tasks[index])
        return result

    @cached_property
    def has_forwards_first(self) -> bool:
        """Whether no rank runs a forward behind a backward."""
        directions = ([task.row.direction for task in tasks] for tasks in self.tasks_of_rank)
        return all(own == sorted(own, key=BACKWARD.__eq__) for own in directions)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every task on every rank, by start time."""
        columns = (self.graph.columns[0], self.start_ms, self.end_ms, self.waits_ms)
        rows = zip(self.graph.tasks, *(column.tolist() for column in columns), strict=True)
        spans = [Span(rank, task, *times) for task, stage, *times in rows for rank in self._ranks[stage]]
        return tuple(sorted(spans, key=lambda span: (span.start_ms, span.rank, span.end_ms)))

    def sum_start_of(self, index: int) -> float:
        """The time at which a gradient sum of the plan starts to take time of its own."""
        return float(self.sum_start_ms[self.layout.number_of_sum(index)])

    @cached_property
    def sums(self) -> tuple[SumSpan, ...]:
        """The time that gradient sums take beside no task of their ranks, by start time."""
        result: dict[int, list[SumSpan]] = {}
        for number, (start, duration_ms) in enumerate(
            zip(self.sum_start_ms.tolist(), self.durations.sums.tolist(), strict=True)
        ):
            if not duration_ms:
                continue
            groups = (self.layout.whole_sync_groups[index].ranks for index in self.layout.represented[number])
            for rank in dict.fromkeys(chain.from_iterable(groups)):
                spans = result.setdefault(rank, [])
                for first, end in _outside(start, start + duration_ms, self._tasks_ms[rank]):
                    if spans and spans[-1].end_ms == first:  # consecutive sums are one span
                        first = spans.pop().start_ms
                    spans.append(SumSpan(rank, first, end))
        return tuple(sorted(chain.from_iterable(result.values()), key=lambda span: (span.start_ms, span.rank)))

    @cached_property
    def _tasks_ms(self) -> list[list[tuple[float, float]]]:
        """Start and end of each task of each rank, in order."""
        result: list[list[tuple[float, float]]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            result[span.rank].append((span.start_ms, span.end_ms))
        return result

    @cached_property
    def busy_ms(self) -> dict[int, float]:
        """Rank -> total time of its own work."""
        return self.busy_of(self.durations.tasks)

    def busy_of(self, task_ms: NDArray) -> dict[int, float]:
        """Rank -> total time of its tasks, if these take `task_ms` `[tasks]`."""
        by_stage = np.bincount(self.graph.columns[0], task_ms, len(self.graph.stages))
        busy = dict.fromkeys(range(self.num_ranks), 0.0)
        for ranks, stage_ms in zip(self._ranks, by_stage.tolist(), strict=True):
            for rank in ranks:
                busy[rank] += stage_ms
        return busy

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the time of all ranks in which they do not work."""
        total = self.iteration_ms * self.num_ranks
        return 1 - sum(self.busy_ms.values()) / total if total else 0.0

    @property
    def unlike_fraction(self) -> float:
        """Part of `bubble_fraction` within tasks: waits for the largest of replicas that run jointly."""
        total = self.iteration_ms * self.num_ranks
        counts = np.array(list(map(len, self._ranks)))[self.graph.columns[0]]
        return float((self.waits_ms * counts).sum()) / total if total else 0.0

    @property
    def idle_fraction(self) -> float:
        """Part of `bubble_fraction` outside of tasks, which is what a run measures."""
        return self.bubble_fraction - self.unlike_fraction

    @cached_property
    def peak_in_flight(self) -> dict[StageKey, float]:
        """
        (module, replica, stage) -> most microbatches whose forward has started and whose backward has not ended; a
        chunk counts as its fraction of the microbatch.
        """
        return self._most_open(CLOSES)

    @cached_property
    def peak_held(self) -> dict[StageKey, float]:
        """The same until all gradients of the microbatch are added."""
        return self._most_open(ADDS_GRADIENTS)

    def _most_open(self, ends: NDArray) -> dict[StageKey, float]:
        """The most microbatches of each stage that have started, and not ended with tasks of some kinds."""
        graph = self.graph
        opening = np.flatnonzero(OPENS[graph.kind])
        if not len(opening):
            return {}
        stage, microbatch, _ = graph.columns[:, opening]
        closing = np.flatnonzero(ends[graph.kind])
        last = np.arange(graph.num_tasks)  # the task that closes a chunk, or the only one
        last[graph.first[closing]] = closing
        _, cell, counts = np.unique(
            stage * (microbatch.max() + 1) + microbatch, return_inverse=True, return_counts=True
        )
        share = 1 / counts[cell]
        times = np.concatenate([self.start_ms[opening], self.end_ms[last[opening]]])
        changes, stage = np.concatenate([share, -share]), np.concatenate([stage, stage])
        order = np.lexsort((changes, times, stage))
        in_flight = np.cumsum(changes[order])  # 0 at the end of every stage
        stages, starts = np.unique(stage[order], return_index=True)
        peaks = np.maximum.reduceat(in_flight, starts).tolist()
        return {graph.stages[s]: round(max(peak, 0.0), 6) for s, peak in zip(stages.tolist(), peaks, strict=True)}


def _outside(start: float, end: float, taken: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The parts of a time that are in none of others, which are in order."""
    for other_start, other_end in taken[bisect_right(taken, start, key=lambda own: own[1]) :]:
        if other_start > start:
            yield start, min(other_start, end)
        start = other_end
        if start >= end:
            return
    yield start, end


def simulate(
    layout: Representatives,
    step: StepPlan,
    cost: Cost | None = None,  # task -> milliseconds; `default_cost` when left out
    messages_ms: float | Callable[[TaskGraph], Sequence[float]] = 0.0,  # transfer times of all messages
    sync_ms: float | Callable[[int], float] = 0.0,  # of the gradient sum of each of `layout.sync_groups`
    *,
    order_cost: Cost | None = None,  # the cost by which tasks are ordered; `cost` when left out
    training: bool = True,
    fitting_in_flight: Mapping[StageKey, float] | None = None,  # see `in_flight_limits`
) -> Timeline:
    """Orders and times a step as it runs under [`program_of_parts`], without writing and verifying the program."""
    plan = layout.plan
    cost, order_cost = cost or default_cost, order_cost or cost or default_cost
    # all parts in one graph
    graph = build_graph(plan, step, training)
    times_ms = task_times(order_cost, graph)
    parts = layout.parts_of_stages(step)
    limits = in_flight_limits(plan, step, fitting_in_flight)
    order = order_tasks(plan, graph, times_ms, limits, training and may_alternate(plan), parts)
    if order_cost is not cost:
        times_ms = task_times(cost, graph)
    sums = range(len(layout.sync_groups)) if training else ()
    durations = Durations(
        np.array(times_ms, float),
        np.array(messages_ms(graph) if callable(messages_ms) else [messages_ms] * graph.num_messages, float),
        np.array([sync_ms(index) if callable(sync_ms) else sync_ms for index in sums], float),
    )
    return retime(layout, graph, order, parts, durations)


def retime(layout: Representatives, graph: TaskGraph, order: Order, parts: NDArray, durations: Durations) -> Timeline:
    """Times an order: the longest path through its messages and what comes before on each rank."""
    heads = np.arange(graph.num_tasks) if graph.joint is None else np.unique(graph.joint)
    sync_groups = layout.sync_groups[: len(durations.sums)]
    ranks = [*occupied_ranks(layout.plan), *(group.ranks for group in sync_groups)]
    first_sum = graph.num_tasks
    place = [*graph.columns[0].tolist(), *range(len(ranks) - len(sync_groups), len(ranks))]
    times_ms = [*graph.longest(durations.tasks).tolist(), *durations.sums.tolist()]
    # The messages to task `i` are numbers `stops[i]` to `stops[i + 1]`: one list for all, since many short ones would
    # keep the garbage collector busy.
    links = graph.links if graph.joint is None else graph.joint[graph.links]
    by_target = np.argsort(links[1], kind="stable")
    sources, messages_ms = links[0, by_target].tolist(), durations.messages[by_target].tolist()
    stops = [0, *np.cumsum(np.bincount(links[1], minlength=len(times_ms))).tolist()]
    # of each rank: the end of its last task, and of its last gradient sum
    free_ms, summed_ms = ([0.0] * layout.plan.world_size for _ in range(2))
    start_ms, end_ms = [0.0] * len(times_ms), [0.0] * len(times_ms)
    for index in _run_order(layout, graph, order, parts, heads, len(sync_groups)):
        own, is_sum = ranks[place[index]], index >= first_sum
        start = max([free_ms[rank] for rank in own])
        if is_sum:
            start = max(start, max([summed_ms[rank] for rank in own]))
        for number in range(stops[index], stops[index + 1]):
            start = max(start, end_ms[sources[number]] + messages_ms[number])
        start_ms[index] = start
        end_ms[index] = end = start + times_ms[index]
        ended_ms = summed_ms if is_sum else free_ms
        for rank in own:
            ended_ms[rank] = end
    starts, ends = np.array(start_ms), np.array(end_ms)
    of_tasks = np.arange(first_sum) if graph.joint is None else graph.joint
    return Timeline(layout, graph, order, parts, durations, starts[of_tasks], ends[of_tasks], starts[first_sum:])


def _run_order(
    layout: Representatives, graph: TaskGraph, order: Order, parts: NDArray, heads: NDArray, num_sums: int
) -> list[int]:
    """Tasks (the first of joint ones) and, after all of them, gradient sums, each behind all that it waits for."""
    number, part, instant = sum_instants(graph, order, layout.sync_groups[:num_sums], parts)
    # the next sum of its part behind each task: all parts reach it before it starts
    width = 2 * graph.num_tasks + 1
    key = part * width + instant
    place = np.searchsorted(key, parts[graph.columns[0, heads]] * width + order.started[heads])
    is_last = (place == len(key)) | (np.append(part, -1)[place] != parts[graph.columns[0, heads]])
    before = np.where(is_last, num_sums, np.append(number, num_sums)[place])
    nodes = np.concatenate([heads, graph.num_tasks + np.arange(num_sums)])
    keys = (
        np.concatenate([order.started[heads], np.zeros(num_sums, np.int64)]),
        np.repeat([False, True], [len(heads), num_sums]),
        np.concatenate([before, np.arange(num_sums)]),
    )
    return nodes[np.lexsort(keys)].tolist()


def microbatch_forward_ms(spans: Iterable[Span]) -> dict[tuple[str, int], np.ndarray]:
    """Returns (module, replica) -> forward milliseconds, float64 `[num_microbatches]`, 0 for those without samples."""
    times: dict[Task, float] = {}
    for span in spans:
        if span.task.row.opens:
            # of several ranks the slowest counts
            times[span.task] = max(times.get(span.task, 0.0), span.end_ms - span.start_ms)
    counts: dict[tuple[str, int], int] = {}
    for task in times:
        key = (task.module, task.replica)
        counts[key] = max(counts.get(key, 0), task.microbatch + 1)
    result = {key: np.zeros(count) for key, count in sorted(counts.items())}
    for task in sorted(times):
        # over the stages and chunks of a microbatch
        result[task.module, task.replica][task.microbatch] += times[task]
    return result
