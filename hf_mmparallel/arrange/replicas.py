"""Assignment of samples to the data-parallel replicas of the language model."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .exchange import exchange

_ROUNDS = 5


def deal_samples(
    work: NDArray,  # [num_samples] workload in the language model
    order: NDArray,  # [num_samples] the samples in order
    counts: NDArray,  # [num_replicas] microbatches
) -> NDArray:
    """Assigns samples in order, each to the replica with the least work per microbatch."""
    replicas = np.zeros(len(work), np.int64)
    if len(counts) == 1 or not len(work):
        return replicas
    loads = [(0.0, index) for index in range(len(counts))]
    paces, owners, put = (1 / counts).tolist(), [], heapq.heapreplace
    if (counts == counts[0]).all():
        for added in (work[order] * paces[0]).tolist():
            load, index = loads[0]
            put(loads, (load + added, index))
            owners.append(index)
    else:
        for item in work[order].tolist():
            load, index = loads[0]
            put(loads, (load + item * paces[index], index))
            owners.append(index)
    replicas[order] = owners
    return replicas


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
    replicas = deal_samples(language, np.lexsort((-language, -encoders.sum(axis=1))), counts)
    if len(counts) == 1 or not len(language):
        return replicas
    totals = np.append(language[:, None], encoders, axis=1)
    # A replica's share is proportional to its microbatches; on this scale all weights count equally.
    weights = totals / np.maximum(totals.sum(axis=0), 1e-300)
    targets = np.where(weights.any(axis=0), (counts / counts.sum())[:, None], 0.0)[None]
    return exchange(replicas, weights, targets, _ROUNDS * weights.shape[1])
