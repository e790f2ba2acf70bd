"""Which data-parallel replica of the language model takes which sample."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .exchange import exchange

_ROUNDS = 5


def assign_replicas(language: NDArray, encoders: NDArray, pace: NDArray) -> NDArray:
    """
    Divides samples among replicas such that all have about the same work in every module.

    Samples go from the largest encoder workload to the smallest, each to the replica that has the least to do in the
    language model (Entrain, section 4.3); samples without encoder work come last, from the longest to the shortest.
    Exchanges follow that bring the totals of all modules together.

    Args:
        language (`numpy.ndarray` of shape `[num_samples]`): Workload in the language model.
        encoders (`numpy.ndarray` of shape `[num_samples, num_encoders]`): Workload in encoders.
        pace (`numpy.ndarray` of shape `[num_replicas]`): Time of each replica for a unit of work.

    Returns:
        `numpy.ndarray`: The replica of each sample, int64 `[num_samples]`.
    """
    replicas = np.zeros(len(language), np.int64)
    if len(pace) == 1 or not len(language):
        return replicas
    loads = [(0.0, index) for index in range(len(pace))]
    paces, work = pace.tolist(), language.tolist()
    order = np.lexsort((-language, -encoders.sum(axis=1)))
    taken = []
    for slot in order.tolist():
        load, index = loads[0]
        heapq.heapreplace(loads, (load + work[slot] * paces[index], index))
        taken.append(index)
    replicas[order] = taken
    totals = np.append(language[:, None], encoders, axis=1)
    # The shares of a replica are as its pace; on this scale all weights count alike.
    weights = totals / np.maximum(totals.sum(axis=0), 1e-300)
    shares = (1 / pace) / (1 / pace).sum()
    targets = np.where(weights.any(axis=0), shares[:, None], 0.0)[None]
    return exchange(replicas, weights, targets, _ROUNDS * weights.shape[1])
