"""Entrain's hierarchical microbatch assignment as it is published: algorithm 4, without exchanges."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from .contiguous import Replicas, counts_of
from .deferral import possible_pairs
from .matching import bottleneck_matching
from .replicas import deal_samples
from .tracks import cut, tracks_of


def entrain(
    plan: ParallelPlan, workloads: Workloads, microbatch_size: int, deferral: bool = True
) -> dict[str, Replicas]:
    """
    Arranges a global batch by Entrain's algorithm 4 (sections 4.3, 4.5.1 and 4.5.2), line by line.

    - Lines 1 and 2: samples go from the largest encoder workload to the smallest, each to the replica with the least
      work of the language model.
    - Line 3: a replica makes at most as many microbatches as its encoder work is times that of its largest sample.
    - Lines 4 to 6: samples above the median of the language model come first, then the others, each from the largest
      encoder workload to the smallest, to the microbatch with the least encoder work. The largest microbatch is
      within `2 - 1 / K` of the optimum for `K` microbatches.
    - Lines 7 to 15: [`deferred_pairs`].

    What the paper leaves open is decided here: all encoders count as one by the sum of their forwards; samples without
    work in them come last, to the microbatch with the least work of the language model; with an odd number of
    microbatches the middle one has no partner and comes last; and where an encoder has other numbers of replicas than
    the language model, they divide microbatches as in `hierarchical`. Limits of tokens are not looked at.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): The forward times are used.
        microbatch_size (`int`): Samples of a microbatch of one language-model replica, on average.
        deferral (`bool`, *optional*, defaults to `True`): Without it, lines 7 to 15 are left out.

    Returns:
        `dict[str, tuple[tuple[tuple[int, ...], ...], ...]]`: Module -> replica -> microbatch -> the slots it takes, of
        encoders and language model.
    """
    language = np.asarray(workloads.forward_ms[LANGUAGE_MODEL], dtype=float)
    encoder = np.zeros(len(language))
    for name in plan.encoders:
        encoder += workloads.forward_ms[name]
    counts = np.array(counts_of(plan, workloads, microbatch_size))
    long_first = np.where(encoder > 0, 0.0, -language)
    replica = deal_samples(language, np.lexsort((long_first, -encoder)), counts)
    bins = np.zeros(len(replica), np.int64)
    for index in range(len(counts)):
        own = np.flatnonzero(replica == index)
        counts[index] = effective_count(encoder[own], int(counts[index]))
        bins[own] = stratified(encoder[own], language[own], int(counts[index]))
    taken = bins.copy()
    for count in np.unique(counts).tolist() if deferral else ():  # replicas with as many microbatches in one go
        alike = np.flatnonzero(counts == count)
        own = np.flatnonzero(np.isin(replica, alike))
        rows = np.searchsorted(alike, replica[own]) * count + bins[own]
        bins[own], taken[own] = deferred_pairs(rows, language[own], len(alike), count)
    result: dict[str, Replicas] = {}
    for track in tracks_of(plan, workloads, dict.fromkeys(plan.modules, 1.0)):
        turn = track.turn(replica, bins, counts)
        copy = track.copies(replica, turn, int(counts.max()), None)
        result.update(dict.fromkeys(track.modules, track.microbatches(copy, turn, counts)))
    result[LANGUAGE_MODEL] = cut(np.arange(len(replica)), replica, taken, counts)
    return result


def effective_count(encoder: NDArray, count: int) -> int:
    """The effective number of microbatches (algorithm 4, line 3): at most `count`, `count` without encoder work."""
    largest = float(encoder.max(initial=0.0))
    return max(1, min(count, int(encoder.sum() / largest * (1 + 1e-12)))) if largest else count


def stratified(encoder: NDArray, language: NDArray, count: int) -> NDArray:
    """
    Lines 4 to 6: the microbatch of each sample of a replica.

    Args:
        encoder (`numpy.ndarray` of shape `[num_samples]`): Workload in the encoders.
        language (`numpy.ndarray` of shape `[num_samples]`): Workload in the language model.
        count (`int`): Microbatches.

    Returns:
        `numpy.ndarray`: int64 `[num_samples]`.
    """
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
    """Writes into `bins` where each item of `order` goes: to the bin with the least load, the first of equals."""
    heap = [(float(load), index) for index, load in enumerate(loads)]
    heapq.heapify(heap)
    for item, own in zip(order.tolist(), work[order].tolist(), strict=True):
        load, index = heap[0]
        bins[item] = index
        heapq.heapreplace(heap, (load + own, index))
    return [load for load, _ in heap]


def deferred_pairs(rows: NDArray, language: NDArray, num_replicas: int, count: int) -> tuple[NDArray, NDArray]:
    """
    Lines 7 to 15: pairs of an overloaded and an underloaded microbatch, whose work in the language model is brought
    together by one deferral, in the order `(ol_0, ul_0, ol_1, ul_1, ...)`.

    The threshold is the lowest for which each overloaded microbatch keeps to it alone or with an underloaded partner
    of its own. Those that keep to it alone defer nothing.

    Args:
        rows (`numpy.ndarray` of shape `[num_samples]`): `replica * count + microbatch` of each sample.
        language (`numpy.ndarray` of shape `[num_samples]`): Workload in the language model.
        num_replicas (`int`): Replicas, each with `count` microbatches.
        count (`int`): Microbatches.

    Returns:
        For each sample the microbatch of the encoders and that of the language model in their new order, int64.
    """
    loads = np.bincount(rows, language, num_replicas * count).reshape(num_replicas, count)
    half = count // 2
    late = np.zeros(len(rows), dtype=bool)
    if not half:
        return rows % count, rows % count
    pairs = possible_pairs(rows, language, loads)
    partner = bottleneck_matching(pairs.costs)
    reached = np.take_along_axis(pairs.costs, partner[:, :, None], 2)[:, :, 0]
    alone = np.take_along_axis(loads, pairs.over, 1)
    critical = alone > reached.max(axis=1, keepdims=True) * (1 + 1e-12)
    for problem, number in np.argwhere(critical).tolist():
        late[pairs.moved(problem, number, int(partner[problem, number]))] = True
    under = np.take_along_axis(pairs.under, partner, 1)
    order = np.stack([pairs.over, under], axis=2).reshape(num_replicas, 2 * half)
    order = np.append(order, np.argsort(-loads, axis=1, kind="stable")[:, half : count - half], axis=1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(count), order.shape), 1)
    bins = place.ravel()[rows]
    return bins, bins + late
