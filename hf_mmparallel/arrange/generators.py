"""Arrangement of modality generators (the modules after the language model) with its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, Workloads
from ..plan.step_plan import BatchIndices
from .colocated_modules import ColocatedModules, colocated_generators
from .estimate import Pipeline
from .exchange import Capacity
from .greedy import CapacityError

Replicas = tuple[tuple[BatchIndices, ...], ...]


def generated(
    plan: ParallelPlan, workloads: Workloads, language: Sequence[Sequence[BatchIndices]]
) -> dict[str, Replicas]:
    """
    Microbatches of generators.

    A sample is generated in its microbatch of the language model, since its hidden states are available there and wait
    for the gradient. The samples of the language model replicas of a group in one turn are split over the generator's
    replicas of the group by its work, see [`ColocatedModules`]. Samples without work in a generator are in none of its
    microbatches.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): Workloads of the samples. Token limits are respected as far as the language model's
            microbatches allow it.
        language (`Sequence[Sequence[tuple[int, ...]]]`): Replica -> microbatch -> batch indices of the language model.

    Returns:
        `dict[str, tuple[tuple[tuple[int, ...], ...], ...]]`: Generator -> replica -> microbatch -> its batch indices.
    """
    if not plan.generators:
        return {}
    replica, microbatch = (np.zeros(workloads.num_samples, np.int64) for _ in range(2))
    for number, microbatches in enumerate(language):
        for index, batch_indices in enumerate(microbatches):
            replica[list(batch_indices)], microbatch[list(batch_indices)] = number, index
    counts = np.array([len(microbatches) for microbatches in language])
    result = {}
    for colocated in colocated_generators(plan, workloads, Pipeline.of(plan, workloads.backward_ratio).bottleneck):
        turn = colocated.turn(replica, microbatch, counts)
        copy = _copies(colocated, workloads, replica, turn, int(counts.max()))
        result.update(dict.fromkeys(colocated.modules, colocated.microbatches(copy, turn, counts)))
    return result


def _copies(colocated: ColocatedModules, workloads: Workloads, replica: NDArray, turn: NDArray, count: int) -> NDArray:
    """Replica of each sample in colocated modules, within its token limits if possible."""
    names = [name for name in colocated.modules if name in workloads.token_limits]
    if names:
        sizes = np.stack([workloads.tokens_of_limit(name) for name in names], axis=1).astype(float)
        capacity = Capacity(sizes, np.array([workloads.token_limits[name] for name in names], dtype=float))
        with suppress(CapacityError):  # some arrangements ignore limits
            return colocated.copies(replica, turn, count, capacity)
    return colocated.copies(replica, turn, count, None)
