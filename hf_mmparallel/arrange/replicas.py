"""Assignment of samples to the data-parallel replicas of the language model."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .exchange import exchange

_ROUNDS = 5


def deal_samples(
    work: NDArray,  # [num_samples]
    order: NDArray,  # [num_dealt] the samples to deal, in order
    paces: NDArray,  # [num_groups] load of a group for each unit of work
    loads: NDArray | None = None,  # [num_groups] initial; 0 by default
) -> NDArray:
    """Deals samples in order, each to the group with the least load, the first of equal ones: `[num_dealt]` groups."""
    if len(paces) == 1:
        return np.zeros(len(order), np.int64)
    starts = [0.0] * len(paces) if loads is None else loads.tolist()
    heap = [(load, group) for group, load in enumerate(starts)]
    heapq.heapify(heap)
    pace_of, groups, put = paces.tolist(), [], heapq.heapreplace
    for item in work[order].tolist():
        load, group = heap[0]
        put(heap, (load + item * pace_of[group], group))
        groups.append(group)
    return np.array(groups, np.int64)


def assign_replicas(
    language: NDArray,  # [num_samples] workload
    encoders: NDArray,  # [num_samples, num_encoders] workload
    counts: NDArray,  # [num_replicas] microbatches
) -> NDArray:
    """
    Assigns samples to replicas such that all have similar work per microbatch, in every module.

    Samples go in the order of decreasing encoder workload, each to the replica with the least work in the language
    model (Entrain, section 4.3); samples without encoder work come last, longest first. Exchanges then balance the
    totals.
    """
    order = np.lexsort((-language, -encoders.sum(axis=1)))
    replicas = np.zeros(len(language), np.int64)
    replicas[order] = deal_samples(language, order, 1 / counts)
    if len(counts) == 1 or not len(language):
        return replicas
    totals = np.append(language[:, None], encoders, axis=1)
    # A replica's share is proportional to its microbatches; on this scale all weights count equally.
    weights = totals / np.maximum(totals.sum(axis=0), 1e-300)
    targets = np.where(weights.any(axis=0), (counts / counts.sum())[:, None], 0.0)[None]
    return exchange(replicas, weights, targets, _ROUNDS * weights.shape[1])
