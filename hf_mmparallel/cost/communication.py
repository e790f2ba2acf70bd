"""Communication of a predicted step: what crosses the boundaries of modules, and that of each rank, for pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import Edge, StageKey, SyncGroup
from ..schedule import Span, Timeline, TransferSpan
from . import CostModel, StepCost
from .gradient_sums import optimizer_times
from .memory import sample_features
from .step_planner import Prediction

_ROUNDING = 1e-9  # relative to the step


@dataclass(frozen=True, eq=False)
class BoundaryCost:
    """What crosses a boundary between two modules in a step."""

    edge: Edge
    feature_bytes: float | None  # from an encoder, in one direction; `None` from other modules
    message_ms: NDArray  # of each message of both directions
    has_gradients: bool  # whether gradients go back
    exposed_ms: float  # by how much the step is shorter where these messages take no time


def boundaries_of(costs: CostModel, prediction: Prediction) -> list[BoundaryCost]:
    """Returns what crosses each boundary of a plan."""
    timeline, result = prediction.timeline, []
    modules = np.array([key[0] for key in timeline.graph.stages])[timeline.graph.columns[0]]
    sources, targets = modules[timeline.graph.links]
    durations = timeline.durations
    for edge in prediction.plan.edges:
        back = (sources == edge.target) & (targets == edge.source)
        crossing = ((sources == edge.source) & (targets == edge.target)) | back
        num_bytes = None
        if costs.spec.modules[edge.source].is_encoder:
            num_bytes = float(sample_features(costs, prediction.sizes, edge.source).sum())
        without = timeline.with_durations(replace(durations, messages=np.where(crossing, 0.0, durations.messages)))
        exposed_ms = timeline.iteration_ms - without.iteration_ms
        result.append(BoundaryCost(edge, num_bytes, durations.messages[crossing], bool(back.any()), exposed_ms))
    return result


def with_communication(prediction: Prediction, costs: CostModel, sync_groups: Sequence[SyncGroup]) -> Timeline:
    """Adds to a training step's timeline the communication beside and between its tasks."""
    # computed when a picture asks for that of a rank
    return replace(prediction.timeline, transfers=_Communication(prediction, costs, sync_groups).of_rank)


class _Communication:
    """What [`with_communication`] adds, from the costs that made the timeline."""

    def __init__(self, prediction: Prediction, costs: CostModel, sync_groups: Sequence[SyncGroup]):
        plan, planned = prediction.plan, prediction.planned
        self.timeline = prediction.timeline
        self.cost = StepCost(costs, plan, planned.step, prediction.sizes, sync_groups)
        self.sync_groups = sync_groups

    def of_rank(self, rank: int) -> list[TransferSpan]:
        """Returns the communication of a rank, by start time; consecutive transfers of one kind are one."""
        pieces = [*self._in_passes(rank), *self._sums(rank), *self._optimizer(rank)]
        pieces.sort(key=lambda piece: piece.start_ms)
        result: list[TransferSpan] = []
        for piece in pieces:
            last = result[-1] if result else None
            if last is not None and piece.start_ms < last.end_ms:
                # Two at the same time are sums that slow down the end of one backward: the later one is cut.
                piece = replace(piece, start_ms=min(last.end_ms, piece.end_ms))
            alike = last is not None and (last.op, last.is_exposed) == (piece.op, piece.is_exposed)
            if last is not None and alike and piece.start_ms - last.end_ms <= self._rounding_ms:
                result[-1] = replace(last, end_ms=piece.end_ms)
            elif piece.end_ms > piece.start_ms:
                result.append(piece)
        return result

    @cached_property
    def _optimizer_times(self) -> dict[int, tuple[float, float]]:
        return optimizer_times(self.cost.costs, self.cost.plan, self.sync_groups)

    @property
    def _rounding_ms(self) -> float:
        return _ROUNDING * self.timeline.iteration_ms

    @cached_property
    def _spans(self) -> dict[int, list[Span]]:
        """Rank -> its tasks."""
        result: dict[int, list[Span]] = defaultdict(list)
        for span in self.timeline.spans:
            result[span.rank].append(span)
        return result

    @cached_property
    def _last_end_ms(self) -> dict[StageKey, float]:
        """Stage -> end of its last task."""
        result: dict[StageKey, float] = {}
        for span in self.timeline.spans:
            result[span.task.stage_key] = max(result.get(span.task.stage_key, 0.0), span.end_ms)
        return result

    def _in_passes(self, rank: int) -> Iterator[TransferSpan]:
        """The transfers in the tasks of a rank."""
        for span in self._spans.get(rank, ()):
            for transfer in self.cost.timed_transfers(span.task):
                op = "gather" if transfer.action.op == "gather" else "sum"
                times = (transfer.start_ms, transfer.end_ms, transfer.computed_ms)
                yield from _split(rank, op, *(span.start_ms + ms for ms in times))

    def _sums(self, rank: int) -> Iterator[TransferSpan]:
        """The gradient sums that start in or after the last backwards of a rank."""
        drawn: set[int] = set()
        starts = self._sum_starts(rank)
        for index, start_ms in starts.items():
            if index in drawn:
                continue
            times = self.cost.sum_times(index)
            members = [index, *(other for other in sorted(set(times.index.tolist())) if other in starts)]
            # Other sums of the rank may come between the backward and what this one adds.
            ended_ms = max(self._last_end_ms.get(key, 0.0) for key in self.sync_groups[index].stages)
            for start, end in zip(times.start_ms.tolist(), times.end_ms.tolist(), strict=True):
                for piece in _split(rank, "sum", start, end, times.computed_ms):
                    from_ms = start_ms if piece.is_exposed else min(start_ms, ended_ms)
                    yield replace(piece, start_ms=from_ms + piece.start_ms, end_ms=from_ms + piece.end_ms)
            now = start_ms + float(times.exposed_ms.sum())
            for member in dict.fromkeys(members):
                after_ms = self.cost.sums.after_ms(member)
                yield TransferSpan(rank, now, now + after_ms, "sum", True)
                now += after_ms
            drawn.update(members)

    def _sum_starts(self, rank: int) -> dict[int, float]:
        """Index of each sum of a rank -> the time from which it adds to the step."""
        return {
            index: self.timeline.sum_start_of(index)
            if self.cost.sync_ms(index)
            else max(self._last_end_ms.get(key, 0.0) for key in group.stages)
            for index, group in enumerate(self.sync_groups)
            if rank in group.ranks
        }

    def _optimizer(self, rank: int) -> Iterator[TransferSpan]:
        """The optimizer's update and the gathering of the updated weights."""
        now = self.timeline.iteration_ms
        update_ms, gather_ms = self._optimizer_times[rank]
        yield TransferSpan(rank, now, now + update_ms, "update", True)
        yield TransferSpan(rank, now + update_ms, now + update_ms + gather_ms, "gather", True)


def _split(rank: int, op, start_ms: float, end_ms: float, computed_ms: float) -> Iterator[TransferSpan]:
    """A transfer as its part beside computation and its part after it."""
    if start_ms < computed_ms:
        yield TransferSpan(rank, start_ms, min(end_ms, computed_ms), op, False)
    if end_ms > computed_ms:
        yield TransferSpan(rank, max(start_ms, computed_ms), end_ms, op, True)
