"""Memory of each rank over the time of a step, and its peak."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SampleSizes, StageKey, StepPlan
from ..schedule import Span, Task, build_graph
from .layers import CostModel
from .memory import activation_sizes, sample_features
from .stage_memory import stage_memories


def memory_timeline(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    spans: Iterable[Span],
) -> dict[int, tuple[NDArray, NDArray]]:
    """
    Bytes of the tensors on each rank over a step, with optimizer state already allocated.

    A chunk has saved activations from its forward to the end of its backward; a running task counts with its peak.
    Gradients exist from the first backward of a stage on, the buffers of their all-reduces from the last one on.

    Returns:
        `dict[int, tuple[np.ndarray, np.ndarray]]`: Rank -> times in ms `[changes]`, in order, and the bytes
        `[changes]` from each of them until the next one.
    """
    timeline = _MemoryEvents(costs, plan, step, sizes, spans)
    timeline.add_activations(with_gradients=True)
    timeline.add_state()
    return {rank: _levels(events) for rank, events in timeline.events.items()}


def activation_peaks(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    spans: Iterable[Span],
) -> dict[int, float]:
    """Peak bytes of each rank besides weights, gradients and optimizer state, see [`memory_timeline`]."""
    timeline = _MemoryEvents(costs, plan, step, sizes, spans)
    timeline.add_activations(with_gradients=False)
    return {rank: float(_levels(events)[1].max()) for rank, events in timeline.events.items()}


class _MemoryEvents:
    """Allocations and frees on each rank, with their times."""

    def __init__(
        self, costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes, spans: Iterable[Span]
    ):
        self.costs, self.plan, self.step, self.sizes = costs, plan, step, sizes
        self.times = {span.task: (span.start_ms, span.end_ms) for span in spans}
        self.end_ms = max((end for _, end in self.times.values()), default=0.0)
        self.memories = stage_memories(costs, plan)
        self.activations = activation_sizes(costs, plan, step, sizes)
        self.events: dict[int, list[tuple[float, float]]] = {rank: [(0.0, 0.0)] for rank in range(plan.world_size)}

    def allocate(self, key: StageKey, start_ms: float, end_ms: float, num_bytes: float) -> None:
        """Adds an allocation on all ranks of a stage, and its free."""
        if num_bytes:
            for rank in self.plan.stage(*key).all_ranks:
                self.events[rank] += [(start_ms, num_bytes), (end_ms, -num_bytes)]

    def released_ms(self, task: Task) -> float:
        """Time when the saved activations of a forward are freed."""
        return self.times.get(Task("bwd", *task.key), self.times[task])[1]

    def add_activations(self, with_gradients: bool) -> None:
        """Adds activations of tasks, features, and the inputs of the step."""
        first: dict[StageKey, Task] = {}
        for task in sorted(self.times, key=lambda task: self.times[task]):
            if task.kind == "bwd":
                first.setdefault(task.stage_key, task)
        for task, (start_ms, end_ms) in self.times.items():
            if not self._batch_indices(task):  # only takes part in collectives
                continue
            memory = self.memories[task.stage_key]
            size = self.activations[task.key[0], task.key[1], *task.key[3:]]
            saved = memory.saved_bytes(size)
            if task.kind == "fwd":
                self.allocate(task.stage_key, start_ms, end_ms, memory.forward_bytes(size) - saved)
                self.allocate(task.stage_key, start_ms, self.released_ms(task), saved)
            else:
                is_first = with_gradients and first[task.stage_key] == task
                self.allocate(task.stage_key, start_ms, end_ms, memory.backward_bytes(size, is_first) - saved)
                if is_first:
                    self.allocate(task.stage_key, end_ms, np.inf, memory.state.gradients)
        self._add_features()
        for key, memory in self.memories.items():
            tokens = sum(size[1] for chunk, size in self.activations.items() if chunk[:2] == key[:2])
            self.allocate(key, 0.0, np.inf, memory.kept_bytes + memory.input_bytes * tokens)

    def _add_features(self) -> None:
        """Adds features at the producer and at the consumer."""
        features = {name: sample_features(self.costs, self.sizes, name) for name in self.costs.spec.encoders}
        for message in build_graph(self.plan, self.step, training=False).messages:
            source, target = message.source, message.target
            if not message.crosses_boundary or source.module not in features:
                continue
            if not {source, target} <= self.times.keys():
                continue
            received = set(self._batch_indices(target))
            num_bytes = features[source.module][
                [batch_index for batch_index in self._batch_indices(source) if batch_index in received]
            ].sum()
            # until they are sent, which is later for deferred samples; else they stay for the encoder's backward
            if self.memories[source.stage_key].frees_features:
                self.allocate(source.stage_key, self.times[source][1], self.times[target][0], num_bytes)
            cp_size = self.memories[target.stage_key].cp_size
            self.allocate(target.stage_key, self.times[target][0], self.released_ms(target), num_bytes / cp_size)

    def _batch_indices(self, task: Task) -> tuple[int, ...]:
        return self.step.chunk(task.module, task.replica, task.microbatch, task.chunk)

    def add_state(self) -> None:
        """Adds weights, optimizer state, and the buckets and slices of gradient sums."""
        for key, memory in self.memories.items():
            self.allocate(key, 0.0, np.inf, memory.state.weights + memory.state.optimizer)
            ends = [end for task, (_, end) in self.times.items() if task.kind == "bwd" and _is_copy(task, key)]
            self.allocate(key, max(ends, default=self.end_ms), np.inf, memory.bucket_bytes + memory.slice_bytes)


def _is_copy(task: Task, key: StageKey) -> bool:
    return (task.module, task.stage) == (key[0], key[2])


def _levels(changes: list[tuple[float, float]]) -> tuple[NDArray, NDArray]:
    """Times of changes, and bytes from each on; frees come before allocations at the same time."""
    times, deltas = np.array(sorted(change for change in changes if np.isfinite(change[0]))).T
    return times, np.cumsum(deltas)
