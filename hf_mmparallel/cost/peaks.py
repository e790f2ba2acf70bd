"""The memory of each rank over a step: how much it holds at every time, and at most."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SampleSizes, StepPlan
from ..schedule import Span, Task, build_graph
from ..schedule.actions import StageKey
from .layers import CostModel
from .memory import held_sizes, sample_features
from .stage_memory import stage_memories


def memory_timeline(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    spans: Iterable[Span],
) -> dict[int, tuple[NDArray, NDArray]]:
    """
    The bytes of tensors that each rank holds over a step in which the optimizer has its state already.

    A chunk keeps what its backward needs from its forward to the end of that backward; while a task runs it counts as
    the most that it holds at one time. Gradients are there from the first backward of a stage on, the buffers of their
    sums from the last one on, and float32 copies of narrower gradients at the end, where their norm is computed.
    Features wait on the encoder's ranks until they are taken, as those of deferred samples do, and longer where their
    own backward needs them; then they are on the ranks that took them.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.
        spans (`Iterable[Span]`): All tasks of the step on one clock, such as those of a [`Simulation`].

    Returns:
        `dict[int, tuple[np.ndarray, np.ndarray]]`: Rank -> milliseconds `[changes]`, in order, and the bytes
        `[changes]` that it holds from each of them to the next one.
    """
    changes = _Changes(costs, plan, step, sizes, spans)
    changes.add_activations(with_gradients=True)
    changes.add_state()
    return {rank: _levels(found) for rank, found in changes.found.items()}


def activation_peaks(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    spans: Iterable[Span],
) -> dict[int, float]:
    """
    The most bytes that each rank holds at one time beside weights, gradients and optimizer state.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.
        spans (`Iterable[Span]`): All tasks of the step on one clock, such as those of a [`Simulation`].

    Returns:
        `dict[int, float]`: Rank -> bytes; see [`memory_timeline`] for what counts.
    """
    changes = _Changes(costs, plan, step, sizes, spans)
    changes.add_activations(with_gradients=False)
    return {rank: float(_levels(found)[1].max()) for rank, found in changes.found.items()}


class _Changes:
    """What is allocated and freed on each rank, and when."""

    def __init__(
        self, costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes, spans: Iterable[Span]
    ):
        self.costs, self.plan, self.step, self.sizes = costs, plan, step, sizes
        self.times = {span.task: (span.start_ms, span.end_ms) for span in spans}
        self.end_ms = max((end for _, end in self.times.values()), default=0.0)
        self.memories = stage_memories(costs, plan)
        self.held = held_sizes(costs, plan, step, sizes)
        self.found: dict[int, list[tuple[float, float]]] = {rank: [(0.0, 0.0)] for rank in range(plan.world_size)}

    def hold(self, key: StageKey, start_ms: float, end_ms: float, num_bytes: float) -> None:
        """On all ranks of a stage."""
        if num_bytes:
            for rank in self.plan.stage(*key).all_ranks:
                self.found[rank] += [(start_ms, num_bytes), (end_ms, -num_bytes)]

    def released_ms(self, task: Task) -> float:
        """When what a forward left is not needed on its ranks any more."""
        return self.times.get(Task("bwd", *task.key), self.times[task])[1]

    def add_activations(self, with_gradients: bool) -> None:
        """What tasks keep and hold, features, and the inputs of the step."""
        first: dict[StageKey, Task] = {}
        for task in sorted(self.times, key=lambda task: self.times[task]):
            if task.kind == "bwd":
                first.setdefault(task.stage_key, task)
        for task, (start_ms, end_ms) in self.times.items():
            memory, held = self.memories[task.stage_key], self.held[task.key[0], task.key[1], *task.key[3:]]
            kept = memory.kept_bytes(held)
            if task.kind == "fwd":
                self.hold(task.stage_key, start_ms, end_ms, memory.forward_bytes(held) - kept)
                self.hold(task.stage_key, start_ms, self.released_ms(task), kept)
            else:
                is_first = with_gradients and first[task.stage_key] == task
                self.hold(task.stage_key, start_ms, end_ms, memory.backward_bytes(held, is_first) - kept)
                if is_first:
                    self.hold(task.stage_key, end_ms, np.inf, memory.state.gradients)
        self._add_features()
        for key, memory in self.memories.items():
            tokens = sum(at[1] for chunk, at in self.held.items() if chunk[:2] == key[:2])
            self.hold(key, 0.0, np.inf, memory.input_bytes * tokens)

    def _add_features(self) -> None:
        """Features at both ends of a boundary."""
        known = {name: sample_features(self.costs, self.sizes, name) for name in self.costs.spec.encoders}
        for message in build_graph(self.plan, self.step, training=False).messages:
            source, target = message.source, message.target
            if not message.crosses_boundary or source.module not in known or not {source, target} <= self.times.keys():
                continue
            taken = set(self._slots(target))
            num_bytes = known[source.module][[slot for slot in self._slots(source) if slot in taken]].sum()
            if self.memories[source.stage_key].hands_on_only:
                self.hold(source.stage_key, self.times[source][1], self.times[target][0], num_bytes)
            num_rows = self.memories[target.stage_key].num_rows
            self.hold(target.stage_key, self.times[target][0], self.released_ms(target), num_bytes / num_rows)

    def _slots(self, task: Task) -> tuple[int, ...]:
        return self.step.chunks[task.module, task.replica, task.microbatch][task.chunk]

    def add_state(self) -> None:
        """Weights, optimizer state, and what sums of gradients need."""
        for key, memory in self.memories.items():
            self.hold(key, 0.0, np.inf, memory.state.weights + memory.state.optimizer)
            ends = [end for task, (_, end) in self.times.items() if task.kind == "bwd" and _is_copy(task, key)]
            self.hold(key, max(ends, default=self.end_ms), np.inf, memory.summed)


def _is_copy(task: Task, key: StageKey) -> bool:
    return (task.module, task.stage) == (key[0], key[2])


def _levels(changes: list[tuple[float, float]]) -> tuple[NDArray, NDArray]:
    """Times and what is held from each on; at one time what is freed goes first."""
    times, deltas = np.array(sorted(change for change in changes if np.isfinite(change[0]))).T
    return times, np.cumsum(deltas)
