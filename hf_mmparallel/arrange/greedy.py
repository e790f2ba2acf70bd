"""List scheduling of many problems at once: heaviest items first, each to the bin with the lowest resulting load."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .exchange import Capacity, padded

_FEW_BINS, _FEW_PROBLEMS = 128, 6  # limits of problem sizes for which the vectorized version is faster


class CapacityError(Exception):
    """An item fits no bin, so that more bins are needed."""


def fill_bins(
    problem: NDArray,  # [num_items] the problem of each item
    weights: NDArray,  # [num_items, num_weights] on comparable scales, at least 0
    order: NDArray,  # [num_items] the items in order
    shares: NDArray,  # [num_bins] target load of each bin, relative to the others
    # [num_problems, num_bins, num_weights] initial; by default nothing, for the problems that occur
    loads: NDArray | None = None,
    capacity: Capacity | None = None,  # limits of every bin
    used: NDArray | None = None,  # [num_problems, num_bins, num_limits] initial sizes
) -> NDArray:
    """
    Assigns items to bins one after the other, each to the bin with the lowest maximum of its resulting loads.

    With one weight and equal shares this is the greedy algorithm with Graham's bound of `2 - 1 / num_bins`, in any
    order, and `4/3` from the heaviest to the lightest (Entrain, section 4.5.1). Raises [`CapacityError`] if an item
    fits no bin.
    """
    num_items, num_bins = len(problem), len(shares)
    bins = np.zeros(num_items, np.int64)
    if not num_items:
        return bins
    num_problems = int(problem.max()) + 1 if loads is None else len(loads)
    is_uniform = weights.shape[1] == 1 and capacity is None and (shares == shares[0]).all()
    if is_uniform and num_problems * (_FEW_BINS - num_bins) < _FEW_PROBLEMS * _FEW_BINS:
        for number in range(num_problems):
            items = order[problem[order] == number]
            start = np.zeros(num_bins) if loads is None else loads[number, :, 0]
            bins[items] = _fill_uniform(weights[items, 0], 1 / shares[0], start)
        return bins
    loads = np.zeros((num_problems, num_bins, weights.shape[1])) if loads is None else loads.copy()
    turns = padded(problem[order], num_problems).T  # one item of each problem per turn
    turns = np.append(order, num_items)[turns]
    weights = np.append(weights, np.zeros((1, weights.shape[1])), axis=0)
    inverse, problems = 1 / shares[:, None], np.arange(num_problems)
    free, sizes = None, np.zeros(0)
    if capacity is not None:
        free = capacity.limits - (np.zeros((num_problems, num_bins, len(capacity.limits))) if used is None else used)
        sizes = np.append(capacity.sizes, capacity.sizes[:1] * 0, axis=0)
    simple = weights.shape[1] == 1
    chosen = np.empty_like(turns)
    for turn, items in enumerate(turns):
        added = weights[items][:, None, :]
        after = (loads + added) * inverse
        cost = after[:, :, 0] if simple else np.where(added > 0, after, 0.0).max(axis=2)
        if free is not None:
            cost = np.where((sizes[items][:, None, :] > free).any(axis=2), np.inf, cost)
        best = cost.argmin(axis=1)
        if free is not None:
            if not np.isfinite(cost[problems, best]).all():
                raise CapacityError
            free[problems, best] -= sizes[items]
        loads[problems, best] += added[:, 0]
        chosen[turn] = best
    result = np.empty(num_items + 1, np.int64)
    result[turns] = chosen
    return result[:-1]


def _fill_uniform(
    weights: NDArray,  # [num_items] in order
    inverse: float,  # one over the share
    loads: NDArray,  # [num_bins] initial
) -> list[int]:
    """[`fill_bins`] for one problem with one weight and equal shares, where the lowest bin is the best one."""
    bins_of: dict[float, list[int]] = {}  # load -> heap of the bins with this load
    for index, load in enumerate(loads.tolist()):
        bins_of.setdefault(load, []).append(index)
    heights = sorted(bins_of)
    result = []
    for weight in weights.tolist():
        height, equal = heapq.heappop(heights), []
        end = (height + weight) * inverse
        # Among bins with equal resulting loads (by rounding, even from different loads), the first one.
        while heights and (heights[0] + weight) * inverse == end:
            equal.append(heapq.heappop(heights))
        if equal:
            equal.append(height)
            height = min(equal, key=lambda load: bins_of[load][0])
            for load in equal:
                if load != height:
                    heapq.heappush(heights, load)
        bins, filled = bins_of[height], height + weight
        index = heapq.heappop(bins)
        if bins:
            heapq.heappush(heights, height)
        else:
            del bins_of[height]
        if filled in bins_of:
            heapq.heappush(bins_of[filled], index)
        else:
            bins_of[filled] = [index]
            heapq.heappush(heights, filled)
        result.append(index)
    return result
