"""Replays the parts of a step in the order of their tasks, without the lists of ranks: many plans are compared so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from .actions import Message, StageKey
from .graph import TaskGraph
from .lowering import order_part, sync_instants
from .parts import Condensed, Part
from .scheduler import Cost, Timeline, default_cost, task_times
from .simulator import Simulation, Span, SumSpan


def simulate_parts(
    condensed: Condensed,
    parts: Iterable[Part],
    cost: Cost | None = None,
    message_ms: Callable[[Message], float] | None = None,
    sync_ms: Callable[[int], float] | None = None,
    *,
    order_cost: Cost | None = None,
    training: bool = True,
    caps: Mapping[StageKey, float] | None = None,
) -> Simulation:
    """
    What [`simulate`] gives for the program of [`condensed_program`], which is neither written nor checked: tasks that
    run in an order which has been simulated can't deadlock.

    Args:
        condensed ([`Condensed`]): The layout.
        parts (`Iterable[Part]`): All parts of a step.
        cost (`Callable[[Task], float]`, *optional*): Task -> milliseconds; a backward is two forwards when left out.
        message_ms (`Callable[[Message], float]`, *optional*): Time that a message travels; none when left out.
        sync_ms (`Callable[[int], float]`, *optional*): Time of the gradient sum of a group; none when left out.
        order_cost (`Callable[[Task], float]`, *optional*): What tasks are ordered by, if that is not `cost`.
        training (`bool`, *optional*, defaults to `True`): Whether there are backwards and gradient sums.
        caps (`Mapping[tuple[str, int, int], float]`, *optional*): See [`condensed_program`].
    """
    cost, order_cost = cost or default_cost, order_cost or cost or default_cost
    replays = []
    for part in parts:
        graph, times_ms, timeline = order_part(part, order_cost, training, caps)
        if order_cost is not cost:
            times_ms = task_times(cost, graph)
        replays.append(_PartReplay(part, graph, timeline, times_ms, message_ms))
    sums: dict[int, list[SumSpan]] = {}
    if training:
        _run_sums(replays, sync_ms, sums)
    for replay in replays:
        replay.run_until(math.inf)
    spans = [span for replay in replays for span in replay.spans()]
    spans.sort(key=lambda span: (span.start_ms, span.rank))
    ordered = sorted((span for own in sums.values() for span in own), key=lambda span: (span.start_ms, span.rank))
    end = max((time for replay in replays for time in replay.free_ms), default=0.0)
    peaks = {key: peak for replay in replays for key, peak in replay.peak_in_flight().items()}
    return Simulation(tuple(spans), end, condensed.plan.world_size, peaks, tuple(ordered))


def _run_sums(
    replays: list[_PartReplay], sync_ms: Callable[[int], float] | None, sums: dict[int, list[SumSpan]]
) -> None:
    """Runs gradient sums one after the other, each when all parts have come to it; notes those that take time."""
    members: dict[int, list[tuple[_PartReplay, float, tuple[int, ...]]]] = {}
    for replay in replays:
        part = replay.part
        instants = sync_instants(replay.graph, replay.timeline, part.groups)
        for number, instant, group in zip(part.sums, instants, part.groups, strict=True):
            members.setdefault(number, []).append((replay, instant, group.ranks))
    for number in sorted(members):
        for replay, instant, _ in members[number]:
            replay.run_until(instant)
        start = max(replay.free_ms[rank] for replay, _, ranks in members[number] for rank in ranks)
        duration_ms = 0.0 if sync_ms is None else sync_ms(number)
        end = start + duration_ms
        for replay, _, ranks in members[number]:
            for rank in ranks:
                replay.free_ms[rank] = end
                if not duration_ms:
                    continue
                own, first = sums.setdefault(replay.part.ranks[rank], []), start
                if own and own[-1].end_ms == first:  # one right after the other is one span
                    first = own.pop().start_ms
                own.append(SumSpan(replay.part.ranks[rank], first, end))


class _PartReplay:
    """The tasks of a part, each as soon as its ranks are free and its messages are there."""

    def __init__(
        self,
        part: Part,
        graph: TaskGraph,
        timeline: Timeline,
        times_ms: list[float],
        message_ms: Callable[[Message], float] | None,
    ):
        self.part, self.graph, self.timeline, self.times_ms = part, graph, timeline, times_ms
        ranks = {
            (name, replica, index): stage.all_ranks
            for name, module in part.plan.modules.items()
            for replica, index, stage in module.stages()
        }
        self.ranks = [ranks[task.stage_key] for task in graph.tasks]
        self.incoming: list[list[tuple[int, float]]] = [[] for _ in graph.tasks]
        for message, (source, target) in zip(graph.messages, graph.ends, strict=True):
            self.incoming[target].append((source, 0.0 if message_ms is None else message_ms(message)))
        self.order = sorted(range(len(graph.tasks)), key=timeline.started.__getitem__)
        self.num_done = 0
        self.free_ms = [0.0] * part.plan.world_size
        self.start_ms, self.end_ms = [0.0] * len(graph.tasks), [0.0] * len(graph.tasks)

    def run_until(self, instant: float) -> None:
        """Runs the tasks whose start is before an event of the timeline."""
        started, free_ms, end_ms = self.timeline.started, self.free_ms, self.end_ms
        for index in self.order[self.num_done :]:
            if started[index] > instant:
                break
            self.num_done += 1
            start = max([free_ms[rank] for rank in self.ranks[index]])
            for source, travel_ms in self.incoming[index]:
                start = max(start, end_ms[source] + travel_ms)
            self.start_ms[index] = start
            end_ms[index] = end = start + self.times_ms[index]
            for rank in self.ranks[index]:
                free_ms[rank] = end

    def spans(self) -> list[Span]:
        """Of every task on each of its ranks, by the numbers of the condensed plan."""
        numbers = self.part.ranks
        return [
            Span(numbers[rank], task, start, end)
            for task, ranks, start, end in zip(self.graph.tasks, self.ranks, self.start_ms, self.end_ms, strict=True)
            for rank in ranks
        ]

    def peak_in_flight(self) -> dict[StageKey, float]:
        """See [`Simulation`]."""
        stages: dict[StageKey, int] = {}
        forwards: list[tuple[int, int, int]] = []  # stage, microbatch, place of the task
        last = list(range(len(self.graph.tasks)))  # of each forward its backward, or itself
        for index, task in enumerate(self.graph.tasks):
            if task.kind == "fwd":
                forwards.append((stages.setdefault(task.stage_key, len(stages)), task.microbatch, index))
            else:
                last[self.graph.predecessors[index][0]] = index
        if not forwards:
            return {}
        stage, microbatch, place = np.array(forwards).T
        _, same, counts = np.unique(
            stage * (microbatch.max() + 1) + microbatch, return_inverse=True, return_counts=True
        )
        share = 1 / counts[same]
        times = np.concatenate([np.array(self.start_ms)[place], np.array(self.end_ms)[np.array(last)[place]]])
        changes, stage = np.concatenate([share, -share]), np.concatenate([stage, stage])
        order = np.lexsort((changes, times, stage))
        live = np.cumsum(changes[order])  # every stage ends with none
        peaks = np.maximum.reduceat(live, np.searchsorted(stage[order], np.arange(len(stages))))
        return {key: round(max(peak, 0.0), 6) for key, peak in zip(stages, peaks.tolist(), strict=True)}
