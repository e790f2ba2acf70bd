"""The activations of each rank over a step: how much it keeps at once."""

from __future__ import annotations

from collections.abc import Iterable

from ..plan import ParallelPlan, SampleSizes, StepPlan
from ..schedule import Span, Task, build_graph
from .layers import CostModel
from .memory import stage_memories
from .step import chunk_sizes, message_tokens


def activation_peaks(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    spans: Iterable[Span],
) -> dict[int, float]:
    """
    The most bytes of activations that each rank keeps at one time.

    A chunk keeps what its backward needs from the start of its forward to the end of that backward. Features wait on
    the encoder's ranks until they are taken, as those of deferred samples do, and longer where their own backward
    needs them; then they are on the ranks that took them. They count one row for each token of the encoder's layers,
    as far as the sample has tokens in the language model: more than there are where an encoder merges neighbours.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.
        spans (`Iterable[Span]`): All tasks of the step on one clock, such as those of a [`Simulation`].

    Returns:
        `dict[int, float]`: Rank -> bytes, beside weights, gradients and optimizer state.
    """
    times = {span.task: (span.start_ms, span.end_ms) for span in spans}
    memories = stage_memories(costs, plan)
    chunks = chunk_sizes(step, sizes)
    events: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(plan.world_size)}

    def released_ms(task: Task) -> float:
        """When what a forward left is not needed on its ranks any more."""
        return times.get(Task("bwd", *task.key), times[task])[1]

    def keep(task: Task, start_ms: float, end_ms: float, num_bytes: float) -> None:
        for rank in plan.stage(*task.stage_key).all_ranks:
            events[rank] += [(start_ms, num_bytes), (end_ms, -num_bytes)]

    for task, (start_ms, _) in times.items():
        if task.kind == "fwd":
            tokens = chunks[task.module, task.replica, task.microbatch, task.chunk][0]
            keep(task, start_ms, released_ms(task), memories[task.stage_key].bytes_per_token * tokens)
    for message in build_graph(plan, step, training=False).messages:
        if message.crosses_boundary:
            source, target = message.source, message.target
            width = costs.spec.modules[target.module].hidden_size
            num_bytes = costs.value_bytes * width * message_tokens(step, sizes, source, target)
            keep(source, times[source][1], max(times[target][0], released_ms(source)), num_bytes)
            taken_bytes = num_bytes / len(plan.stage(*target.stage_key).ranks)
            keep(target, times[target][0], released_ms(target), taken_bytes)
    return {rank: _peak(changes) for rank, changes in events.items()}


def _peak(changes: list[tuple[float, float]]) -> float:
    """The highest sum of changes that happen at given times; at one time what is freed goes first."""
    live = peak = 0.0
    for _, change in sorted(changes):
        live += change
        peak = max(peak, live)
    return peak
