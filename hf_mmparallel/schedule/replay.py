"""Simulates the parts of a step from the order of their tasks, without action lists, to compare many plans fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, StageKey, StepPlan, SyncGroup
from .graph import TaskGraph, build_graph
from .in_flight import JointTasks, in_flight_limits, may_alternate
from .lowering import last_backwards
from .parts import Representatives
from .scheduler import Cost, Timeline, default_cost, order_tasks, task_times
from .simulator import Simulation, Span, SumSpan


def simulate_parts(
    representatives: Representatives,
    step: StepPlan,
    cost: Cost | None = None,  # task -> milliseconds; `default_cost` when left out
    # transfer times of the messages of a graph; 0 when left out
    messages_ms: Callable[[TaskGraph], Sequence[float]] | None = None,
    sync_ms: Callable[[int], float] | None = None,  # of the gradient sum of a group; 0 when left out
    *,
    order_cost: Cost | None = None,  # the cost by which tasks are ordered; `cost` when left out
    training: bool = True,
    fitting_in_flight: Mapping[StageKey, float] | None = None,  # see `in_flight_limits`
) -> Replay:
    """Simulates [`program_of_parts`] without writing and verifying it: simulated orders can't deadlock."""
    plan = representatives.plan
    cost, order_cost = cost or default_cost, order_cost or cost or default_cost
    # all parts in one graph
    graph = build_graph(plan, step, training)
    times_ms = task_times(order_cost, graph)
    parts = representatives.parts_of_stages(step)
    alternate = training and may_alternate(plan)
    max_in_flight = in_flight_limits(plan, step, fitting_in_flight)
    timeline = order_tasks(plan, graph, times_ms, max_in_flight, alternate, parts)
    if order_cost is not cost:
        times_ms = task_times(cost, graph)
    replay = Replay(plan, graph, timeline, times_ms, parts, messages_ms)
    if training:
        replay.run_sums(representatives.sync_groups, sync_ms)
    replay.finish()
    return replay


class Replay:
    """A simulation in which each task starts as soon as its ranks are free and its messages have arrived."""

    def __init__(
        self,
        plan: ParallelPlan,
        graph: TaskGraph,
        timeline: Timeline,
        times_ms: list[float],
        parts: NDArray,
        messages_ms: Callable[[TaskGraph], Sequence[float]] | None,
    ):
        self.sums: dict[int, list[SumSpan]] = {}
        self.graph, self.parts = graph, parts
        self.own_ms = self.times_ms = times_ms
        self.ranks = [stage.all_ranks for module in plan.modules.values() for _, _, stage in module.stages()]
        self.stage_of, self.started = graph.columns[0].tolist(), timeline.started
        self.finished = timeline.finished
        # Of joint tasks, which start and end together, the first runs in place of all.
        self.joint = np.arange(graph.num_tasks) if graph.joint is None else graph.joint
        self.occupied, heads = self.ranks, np.arange(graph.num_tasks)
        if graph.joint is not None:
            joint = JointTasks(plan, graph, graph.joint)
            heads, self.times_ms = joint.tasks, joint.spread(joint.longest(times_ms))
            self.occupied = joint.occupied
        self.incoming: list[list[tuple[int, float]]] = [[] for _ in range(graph.num_tasks)]
        travel_ms = [0.0] * graph.num_messages if messages_ms is None else messages_ms(graph)
        for source, target, message_ms in zip(*self.joint[graph.links].tolist(), travel_ms, strict=True):
            self.incoming[target].append((source, message_ms))
        of_task = parts[graph.columns[0, heads]]
        order = heads[np.lexsort((np.array(timeline.started, np.int64)[heads], of_task))]
        self.num_parts = int(parts.max(initial=-1)) + 1
        ends = np.cumsum(np.bincount(of_task, minlength=self.num_parts)).tolist()
        self.order = [tasks.tolist() for tasks in np.split(order, ends[:-1])]
        self.num_done = [0] * self.num_parts
        self.free_ms = [0.0] * plan.world_size
        self.start_ms, self.end_ms = [0.0] * graph.num_tasks, [0.0] * graph.num_tasks

    def run_until(self, part: int, instant: float) -> None:
        """Runs the tasks of a part that start before an event of its timeline."""
        started, free_ms, end_ms, order = self.started, self.free_ms, self.end_ms, self.order[part]
        for position in range(self.num_done[part], len(order)):
            index = order[position]
            if started[index] > instant:
                return
            self.num_done[part] = position + 1
            ranks = self.occupied[self.stage_of[index]]
            start = max([free_ms[rank] for rank in ranks])
            for source, travel_ms in self.incoming[index]:
                start = max(start, end_ms[source] + travel_ms)
            self.start_ms[index] = start
            end_ms[index] = end = start + self.times_ms[index]
            for rank in ranks:
                free_ms[rank] = end

    def finish(self) -> None:
        """Runs the remaining tasks."""
        for part in range(self.num_parts):
            self.run_until(part, math.inf)
        if self.graph.joint is not None:
            joint = self.joint.tolist()
            self.start_ms = [self.start_ms[index] for index in joint]
            self.end_ms = [self.end_ms[index] for index in joint]

    def run_sums(self, sync_groups: Sequence[SyncGroup], sync_ms: Callable[[int], float] | None) -> None:
        """Runs gradient sums one by one, each once all parts have reached it, and records those that take time."""
        instants = self._instants(sync_groups)
        for number, group in enumerate(sync_groups):
            for part, instant in instants[number].items():
                self.run_until(part, instant)
            start = max(self.free_ms[rank] for rank in group.ranks)
            duration_ms = 0.0 if sync_ms is None else sync_ms(number)
            end = start + duration_ms
            for rank in group.ranks:
                self.free_ms[rank] = end
                if not duration_ms:
                    continue
                spans, first = self.sums.setdefault(rank, []), start
                if spans and spans[-1].end_ms == first:  # consecutive sums are one span
                    first = spans.pop().start_ms
                spans.append(SumSpan(rank, first, end))

    def _instants(self, sync_groups: Sequence[SyncGroup]) -> list[dict[int, float]]:
        """For each gradient sum, part -> the event of its timeline after which it comes, as in [`sync_instants`]."""
        last = last_backwards(self.graph, self.finished)
        numbers = {key: number for number, key in enumerate(self.graph.stages)}
        part_of_rank = np.zeros(len(self.free_ms), np.int64)
        for ranks, part in zip(self.ranks, self.parts.tolist(), strict=True):
            part_of_rank[list(ranks)] = part
        result: list[dict[int, float]] = []
        for group in sync_groups:
            stages = [numbers[key] for key in group.stages]
            latest = np.full(self.num_parts, -1)
            np.maximum.at(latest, self.parts[stages], last[stages])
            parts = np.unique(part_of_rank[list(group.ranks)])
            result.append(dict(zip(parts.tolist(), latest[parts].tolist(), strict=True)))
        next_instant: dict[int, float] = {}
        for instants in reversed(result):  # a sum without backwards comes with the next one
            for part, instant in instants.items():
                next_instant[part] = instants[part] = next_instant.get(part, math.inf) if instant < 0 else instant
        latest_of: dict[int, float] = {}
        for instants in result:
            for part, instant in instants.items():
                latest_of[part] = instants[part] = max(instant, latest_of.get(part, -1))
        return result

    @property
    def iteration_ms(self) -> float:
        """Time from the first start to the end of the last action."""
        return max(self.free_ms, default=0.0)

    @property
    def waits_ms(self) -> list[float]:
        """Part of each task in which its ranks wait for a larger one that runs jointly."""
        if self.graph.joint is None:
            return [0.0] * self.graph.num_tasks
        return (np.array(self.times_ms)[self.joint] - self.own_ms).tolist()

    def simulation(self) -> Simulation:
        """The result, on representatives."""
        times = zip(self.graph.tasks, self.stage_of, self.start_ms, self.end_ms, self.waits_ms, strict=True)
        spans = [Span(rank, task, *span) for task, stage, *span in times for rank in self.ranks[stage]]
        spans.sort(key=lambda span: (span.start_ms, span.rank))
        sums = sorted(
            (span for spans in self.sums.values() for span in spans), key=lambda span: (span.start_ms, span.rank)
        )
        return Simulation(tuple(spans), self.iteration_ms, len(self.free_ms), self.peak_in_flight(), tuple(sums))

    def peak_in_flight(self) -> dict[StageKey, float]:
        """Maximum microbatches in flight, see [`Simulation`]."""
        graph, first = self.graph, self.graph.num_forwards
        if not first:
            return {}
        stage, microbatch, _ = graph.columns[:, :first]
        last = np.arange(first)  # the backward of each forward, or the forward itself
        last[graph.forward[first:]] = np.arange(first, graph.num_tasks)
        _, cell, counts = np.unique(
            stage * (microbatch.max() + 1) + microbatch, return_inverse=True, return_counts=True
        )
        share = 1 / counts[cell]
        times = np.concatenate([np.array(self.start_ms[:first]), np.array(self.end_ms)[last]])
        changes, stage = np.concatenate([share, -share]), np.concatenate([stage, stage])
        order = np.lexsort((changes, times, stage))
        in_flight = np.cumsum(changes[order])  # 0 at the end of every stage
        stages, starts = np.unique(stage[order], return_index=True)
        peaks = np.maximum.reduceat(in_flight, starts).tolist()
        return {graph.stages[s]: round(max(peak, 0.0), 6) for s, peak in zip(stages.tolist(), peaks, strict=True)}
