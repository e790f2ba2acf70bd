"""Entrain's hierarchical microbatch assignment as published: algorithm 4, without exchanges."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from .colocated_modules import colocated_encoders, cut
from .contiguous import Replicas
from .deferral import possible_pairs
from .matching import bottleneck_matching
from .microbatch_counts import counts_of
from .replicas import deal_samples


def entrain(
    plan: ParallelPlan,
    workloads: Workloads,
    microbatch_size: int,  # mean samples of a microbatch of one language model replica
    deferral: bool = True,  # whether to run lines 7 to 15
) -> dict[str, Replicas]:
    """
    Arranges encoders and the language model by Entrain's algorithm 4 (sections 4.3, 4.5.1 and 4.5.2), line by line.

    The paper leaves some cases open. Here all encoders count as one, with the sum of their forward times; samples
    without encoder work come last, to the microbatch with the least work in the language model; with an odd number of
    microbatches the middle one has no partner and comes last; and if an encoder has another number of replicas than
    the language model, these split microbatches as in `hierarchical`. Token limits are ignored.
    """
    language = np.asarray(workloads.forward_ms[LANGUAGE_MODEL], dtype=float)
    encoder = np.zeros(len(language))
    for name in plan.encoders:
        encoder += workloads.forward_ms[name]
    counts = np.array(counts_of(plan, workloads, microbatch_size))
    long_first = np.where(encoder > 0, 0.0, -language)
    # lines 1 and 2: by decreasing encoder work, each to the replica with the least work in the language model
    replica = deal_samples(language, np.lexsort((long_first, -encoder)), counts)
    bins = np.zeros(len(replica), np.int64)
    for index in range(len(counts)):
        members = np.flatnonzero(replica == index)
        counts[index] = effective_count(encoder[members], int(counts[index]))
        bins[members] = stratified(encoder[members], language[members], int(counts[index]))
    late_bins = bins.copy()
    for count in np.unique(counts).tolist() if deferral else ():  # replicas with equal counts together
        equal = np.flatnonzero(counts == count)
        members = np.flatnonzero(np.isin(replica, equal))
        flat_bins = np.searchsorted(equal, replica[members]) * count + bins[members]
        bins[members], late_bins[members] = deferred_pairs(flat_bins, language[members], len(equal), count)
    result: dict[str, Replicas] = {}
    for colocated in colocated_encoders(plan, workloads, dict.fromkeys(plan.modules, 1.0)):
        turn = colocated.turn(replica, bins, counts)
        copy = colocated.copies(replica, turn, int(counts.max()), None)
        result.update(dict.fromkeys(colocated.modules, colocated.microbatches(copy, turn, counts)))
    result[LANGUAGE_MODEL] = cut(np.arange(len(replica)), replica, late_bins, counts)
    return result


def effective_count(encoder: NDArray, count: int) -> int:
    """Effective number of microbatches (line 3): at most `count`, and `count` without encoder work."""
    # at most the encoder work divided by that of the largest sample
    largest = float(encoder.max(initial=0.0))
    return max(1, min(count, int(encoder.sum() / largest * (1 + 1e-12)))) if largest else count


def stratified(
    encoder: NDArray,  # [num_samples] workload in the encoders
    language: NDArray,  # [num_samples] workload in the language model
    count: int,
) -> NDArray:
    """Lines 4 to 6: microbatches `[num_samples]` of a replica, the largest within `2 - 1 / count` of the optimum."""
    # Samples above the median of the language model come first, then the others, each by decreasing encoder work.
    fine = np.ones(len(language), dtype=bool)
    fine[np.argsort(-language, kind="stable")[: (len(language) + 1) // 2]] = False
    order = np.lexsort((-encoder, fine))
    bins = np.zeros(len(language), np.int64)
    loads = _fill(bins, order[encoder[order] > 0], encoder, [0.0] * count)
    if len(loads) and (encoder == 0).any():
        texts = np.argsort(-language, kind="stable")
        texts = texts[encoder[texts] == 0]
        some = encoder > 0
        _fill(bins, texts, language, np.bincount(bins[some], language[some], count).tolist())
    return bins


def _fill(bins: NDArray, order: NDArray, work: NDArray, loads: Sequence[float]) -> list[float]:
    """Writes the bin of each item of `order` into `bins`: the one with the least load, the first of equals."""
    heap = [(float(load), index) for index, load in enumerate(loads)]
    heapq.heapify(heap)
    for item, weight in zip(order.tolist(), work[order].tolist(), strict=True):
        load, index = heap[0]
        bins[item] = index
        heapq.heapreplace(heap, (load + weight, index))
    return [load for load, _ in heap]


def deferred_pairs(
    flat_bins: NDArray,  # [num_samples] `replica * count + microbatch`
    language: NDArray,  # [num_samples] workload in the language model
    num_replicas: int,
    count: int,  # microbatches of each replica
) -> tuple[NDArray, NDArray]:
    """
    Lines 7 to 15: pairs of microbatches whose work in the language model is balanced by one deferral.

    Returns for each sample the new index of its microbatch in encoders and in the language model, in the order
    `(ol_0, ul_0, ol_1, ul_1, ...)` of overloaded and underloaded microbatches.
    """
    loads = np.bincount(flat_bins, language, num_replicas * count).reshape(num_replicas, count)
    half = count // 2
    late = np.zeros(len(flat_bins), dtype=bool)
    if not half:
        return flat_bins % count, flat_bins % count
    pairs = possible_pairs(flat_bins, language, loads)
    partner = bottleneck_matching(pairs.costs)
    reached = np.take_along_axis(pairs.costs, partner[:, :, None], 2)[:, :, 0]
    alone = np.take_along_axis(loads, pairs.over, 1)
    # The threshold is the lowest one that each overloaded microbatch meets alone or together with its partner; those
    # that meet it alone defer nothing.
    critical = alone > reached.max(axis=1, keepdims=True) * (1 + 1e-12)
    for problem, number in np.argwhere(critical).tolist():
        late[pairs.moved(problem, number, int(partner[problem, number]))] = True
    under = np.take_along_axis(pairs.under, partner, 1)
    order = np.stack([pairs.over, under], axis=2).reshape(num_replicas, 2 * half)
    order = np.append(order, np.argsort(-loads, axis=1, kind="stable")[:, half : count - half], axis=1)
    position = np.empty_like(order)
    np.put_along_axis(position, order, np.broadcast_to(np.arange(count), order.shape), 1)
    bins = position.ravel()[flat_bins]
    return bins, bins + late
