"""List scheduling of many problems in step: the heaviest items first, each to the bin that it fills least."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .exchange import Room, padded

_FEW_BINS, _FEW_PROBLEMS = 128, 6  # so that problems in step are faster than one after the other


class NoRoomError(Exception):
    """An item fits no bin: there are too few of them."""


def fill_bins(
    problem: NDArray,
    weights: NDArray,
    order: NDArray,
    shares: NDArray,
    loads: NDArray | None = None,
    room: Room | None = None,
    used: NDArray | None = None,
) -> NDArray:
    """
    Puts items into bins, one after the other, each where the largest of the loads that it adds to ends lowest.

    With one weight and equal shares that is the greedy that Graham's bound of `2 - 1 / num_bins` holds for, in any
    order, and `4/3` from the heaviest to the lightest (Entrain, section 4.5.1).

    Args:
        problem (`numpy.ndarray` of shape `[num_items]`): The problem of each item.
        weights (`numpy.ndarray` of shape `[num_items, num_weights]`): Comparable, at least 0; some may be 0.
        order (`numpy.ndarray` of shape `[num_items]`): The items as they are taken.
        shares (`numpy.ndarray` of shape `[num_bins]`): How much each bin is to have, relative to the others.
        loads (`numpy.ndarray` of shape `[num_problems, num_bins, num_weights]`): What bins have at the start; nothing
            when left out, in which case the problems are those that occur.
        room ([`Room`], *optional*): Limits of every bin.
        used (`numpy.ndarray` of shape `[num_problems, num_bins, num_limits]`, *optional*): What is taken of them.

    Returns:
        `numpy.ndarray`: The bin of each item within its problem, int64 `[num_items]`.

    Raises:
        `NoRoomError`: When an item fits no bin.
    """
    num_items, num_bins = len(problem), len(shares)
    bins = np.zeros(num_items, np.int64)
    if not num_items:
        return bins
    num_problems = int(problem.max()) + 1 if loads is None else len(loads)
    is_alike = weights.shape[1] == 1 and room is None and (shares == shares[0]).all()
    if is_alike and num_problems * (_FEW_BINS - num_bins) < _FEW_PROBLEMS * _FEW_BINS:
        for number in range(num_problems):
            own = order[problem[order] == number]
            start = np.zeros(num_bins) if loads is None else loads[number, :, 0]
            bins[own] = _fill_alike(weights[own, 0], 1 / shares[0], start)
        return bins
    loads = np.zeros((num_problems, num_bins, weights.shape[1])) if loads is None else loads.copy()
    turns = padded(problem[order], num_problems).T  # the items of a turn, one of each problem
    turns = np.append(order, num_items)[turns]
    weights = np.append(weights, np.zeros((1, weights.shape[1])), axis=0)
    inverse, rows = 1 / shares[:, None], np.arange(num_problems)
    free, sizes = None, np.zeros(0)
    if room is not None:
        free = room.limits - (np.zeros((num_problems, num_bins, len(room.limits))) if used is None else used)
        sizes = np.append(room.sizes, room.sizes[:1] * 0, axis=0)
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
            if not np.isfinite(cost[rows, best]).all():
                raise NoRoomError
            free[rows, best] -= sizes[items]
        loads[rows, best] += added[:, 0]
        chosen[turn] = best
    result = np.empty(num_items + 1, np.int64)
    result[turns] = chosen
    return result[:-1]


def _fill_alike(weights: NDArray, inverse: float, loads: NDArray) -> list[int]:
    """
    [`fill_bins`] of one problem with one weight and equal shares, where the lowest bin is the best one.

    Args:
        weights (`numpy.ndarray` of shape `[num_items]`): Of the items as they are taken.
        inverse (`float`): One over the share.
        loads (`numpy.ndarray` of shape `[num_bins]`): What bins have at the start.
    """
    bins_of: dict[float, list[int]] = {}  # load -> heap of the bins that have it
    for index, load in enumerate(loads.tolist()):
        bins_of.setdefault(load, []).append(index)
    heights = sorted(bins_of)
    result = []
    for weight in weights.tolist():
        height, alike = heapq.heappop(heights), []
        end = (height + weight) * inverse
        # Of bins that end alike, by rounding even from unlike loads, it is the first.
        while heights and (heights[0] + weight) * inverse == end:
            alike.append(heapq.heappop(heights))
        if alike:
            alike.append(height)
            height = min(alike, key=lambda load: bins_of[load][0])
            for load in alike:
                if load != height:
                    heapq.heappush(heights, load)
        own, filled = bins_of[height], height + weight
        index = heapq.heappop(own)
        if own:
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
