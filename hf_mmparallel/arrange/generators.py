"""Arrangement of modality generators (the modules after the language model) with its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, Workloads
from ..plan.step_plan import BatchIndices, Replicas
from .colocated_modules import ColocatedModules, colocated_generators
from .estimate import Pipeline
from .exchange import Capacity
from .greedy import CapacityError


def generated(
    plan: ParallelPlan,
    workloads: Workloads,
    language: Sequence[Sequence[BatchIndices]],  # replica -> microbatch -> batch indices of the language model
) -> dict[str, Replicas]:
    """
    Arranges generators: generator -> replica -> microbatch -> batch indices with work.

    A sample is generated in its microbatch of the language model, since its hidden states are available there and wait
    for the gradient. Token limits are respected as far as the language model's microbatches allow it.
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
        # the group's samples of a turn, split over its replicas by work
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
