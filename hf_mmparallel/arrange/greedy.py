"""List scheduling of many problems in step: the heaviest items first, each to the bin that it fills least."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .exchange import Room, padded


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
