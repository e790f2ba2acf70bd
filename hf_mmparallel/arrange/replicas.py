"""How many microbatches each data-parallel replica of the language model has, and which samples it takes."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .exchange import exchange

_ROUNDS = 5


def replica_counts(total: int, fill: NDArray, slowest: NDArray) -> NDArray:
    """
    Divides equal microbatches among replicas such that the last replica ends as soon as it can.

    A replica with `n` of them ends after `fill + (n - 1) * slowest` (Entrain, equation 4.2), so that the next
    microbatch always goes to the replica that ends first with one more. That is the optimum: ends only grow, and with
    fewer than it gets below the threshold that is left at the end, some other replica would go over it.

    Args:
        total (`int`): Microbatches of all replicas, at least one for each.
        fill (`numpy.ndarray` of shape `[num_replicas]`): Time of a microbatch through all stages of each.
        slowest (`numpy.ndarray` of shape `[num_replicas]`): Time of a microbatch on the slowest stage of each.

    Returns:
        `numpy.ndarray`: int64 `[num_replicas]`, at least 1 each.
    """
    size = len(fill)
    if (fill == fill[0]).all() and (slowest == slowest[0]).all():
        return np.full(size, total // size) + (np.arange(size) < total % size)
    counts, steps = np.ones(size, np.int64), slowest.tolist()
    ends = [(end + step, index) for index, (end, step) in enumerate(zip(fill.tolist(), steps, strict=True))]
    heapq.heapify(ends)
    for _ in range(total - size):
        end, index = ends[0]
        heapq.heapreplace(ends, (end + steps[index], index))
        counts[index] += 1
    return counts


def deal_samples(work: NDArray, order: NDArray, counts: NDArray) -> NDArray:
    """
    Deals samples out, each to the replica that has the least to do, for each of its microbatches.

    Args:
        work (`numpy.ndarray` of shape `[num_samples]`): Workload in the language model.
        order (`numpy.ndarray` of shape `[num_samples]`): The samples as they are dealt.
        counts (`numpy.ndarray` of shape `[num_replicas]`): Microbatches of each replica.

    Returns:
        `numpy.ndarray`: The replica of each sample, int64 `[num_samples]`.
    """
    replicas = np.zeros(len(work), np.int64)
    if len(counts) == 1 or not len(work):
        return replicas
    loads = [(0.0, index) for index in range(len(counts))]
    paces, taken, put = (1 / counts).tolist(), [], heapq.heapreplace
    if (counts == counts[0]).all():
        for added in (work[order] * paces[0]).tolist():
            load, index = loads[0]
            put(loads, (load + added, index))
            taken.append(index)
    else:
        for item in work[order].tolist():
            load, index = loads[0]
            put(loads, (load + item * paces[index], index))
            taken.append(index)
    replicas[order] = taken
    return replicas


def assign_replicas(language: NDArray, encoders: NDArray, counts: NDArray) -> NDArray:
    """
    Divides samples among replicas such that all have about the same work for each microbatch, in every module.

    Samples go from the largest encoder workload to the smallest, each to the replica that has the least to do in the
    language model (Entrain, section 4.3); samples without encoder work come last, from the longest to the shortest.
    Exchanges follow that bring the totals of all modules together.

    Args:
        language (`numpy.ndarray` of shape `[num_samples]`): Workload in the language model.
        encoders (`numpy.ndarray` of shape `[num_samples, num_encoders]`): Workload in encoders.
        counts (`numpy.ndarray` of shape `[num_replicas]`): Microbatches of each replica, which its share follows.

    Returns:
        `numpy.ndarray`: The replica of each sample, int64 `[num_samples]`.
    """
    replicas = deal_samples(language, np.lexsort((-language, -encoders.sum(axis=1))), counts)
    if len(counts) == 1 or not len(language):
        return replicas
    totals = np.append(language[:, None], encoders, axis=1)
    # The shares of a replica are as its microbatches; on this scale all weights count alike.
    weights = totals / np.maximum(totals.sum(axis=0), 1e-300)
    targets = np.where(weights.any(axis=0), (counts / counts.sum())[:, None], 0.0)[None]
    return exchange(replicas, weights, targets, _ROUNDS * weights.shape[1])
