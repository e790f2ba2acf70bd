"""List scheduling of many problems at once: heaviest items first, each to the bin with the lowest resulting load."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Balancing of bins by exchanges of items, for many pairs of bins at once.

_PAIRS_PER_ROUND = 16_000  # pairs of items per round
_FEWEST, _MOST = 12, 48  # limits of the number of items per bin among them
_SPARE_SLOTS = 2  # empty slots of a bin
_PROGRESS, _PATIENCE = 0.005, 3  # minimum relative progress of the sum of squares, and rounds that may miss it
_TARGET_TOLERANCE = 1e-3  # relative distance from the target that is not worth a round


def stable_order(numbers: NDArray, limit: int) -> NDArray:
    """Stable argsort of integers from 0 to `limit`."""
    small = numbers.astype(np.uint16) if limit <= 1 << 16 else numbers  # NumPy sorts uint16 by radix
    return np.argsort(small, kind="stable")


def members_by_bin(
    bins: NDArray,  # [num_items]
    num_bins: int,
    spare: int = 0,  # empty slots at the end of the fullest bin
) -> NDArray:
    """Lists each bin's items, ascending: int64 `[num_bins, slots]`; empty slots contain the number of items."""
    counts = np.bincount(bins, minlength=num_bins)
    items = stable_order(bins, num_bins)
    slot = np.arange(len(bins)) - np.repeat(np.cumsum(counts) - counts, counts)
    members = np.full((num_bins, int(counts.max(initial=0)) + spare), len(bins))
    members[bins[items], slot] = items
    return members


@dataclass(frozen=True)
class Capacity:
    """Limits of bins."""

    sizes: NDArray  # [num_items, num_limits]
    limits: NDArray  # [num_limits] maximum size of a bin


def exchange(
    bins: NDArray,  # [num_items]; those of problem `p` start at `p * bins_per_problem`
    weights: NDArray,  # [num_items, num_weights] on comparable scales
    targets: NDArray,  # [num_problems, bins_per_problem, num_weights] sums
    rounds: int,  # at most
    capacity: Capacity | None = None,  # limits that hold afterwards if they held before
) -> NDArray:
    """
    Exchanges or moves single items between the bins of a problem until loads are close to their targets.

    In each round the bin furthest above its target is paired with the one furthest below, the second with the second,
    and so on, by one of the weights in turn. A pair makes the exchange that minimizes the sum of squared distances
    from the targets over all weights; the sum never grows.
    """
    num_problems, per_problem, num_weights = targets.shape
    if per_problem < 2 or not len(bins):
        return bins
    num_bins, half = num_problems * per_problem, per_problem // 2
    members = members_by_bin(bins, num_bins, _SPARE_SLOTS)
    values, goals = weights, targets.reshape(num_bins, num_weights)
    if capacity is not None:
        values = np.append(weights, capacity.sizes, axis=1)
        goals = np.append(goals, np.broadcast_to(capacity.limits, (num_bins, len(capacity.limits))), axis=1)
    values = np.append(values, np.zeros((1, values.shape[1])), axis=0)
    excess = values[members].sum(axis=1) - goals
    close, before, idle = _TARGET_TOLERANCE * goals[:, :num_weights], np.inf, 0
    seen_at_once = min(max(math.isqrt(_PAIRS_PER_ROUND // (num_problems * half)), _FEWEST), _MOST)
    first, stride = np.arange(num_problems)[:, None] * per_problem, -(-members.shape[1] // seen_at_once)
    for turn in range(rounds):
        if turn % (num_weights * stride) == 0:
            distance = float((excess[:, :num_weights] ** 2).sum())
            idle, before = (idle + 1 if distance > (1 - _PROGRESS) * before else 0), distance
            if idle == _PATIENCE or (excess[:, :num_weights] <= close).all():
                break
        order = np.argsort(-excess[:, turn % num_weights].reshape(num_problems, -1), axis=1, kind="stable") + first
        heavy = order[:, :half].ravel()
        light = order[:, -1 - (np.arange(half) + turn // num_weights) % half].ravel()
        seen = slice(turn % stride, None, stride)
        from_heavy, from_light = members[heavy, seen], members[light, seen]
        best = _best(values, excess[heavy], excess[light], from_heavy, from_light, num_weights)
        useful = np.flatnonzero(best >= 0)
        heavy, light = heavy[useful], light[useful]
        from_index, to_index = np.divmod(best[useful], from_light.shape[1])
        down, up = from_heavy[useful, from_index], from_light[useful, to_index]
        members[heavy, seen.start + stride * from_index], members[light, seen.start + stride * to_index] = up, down
        moved = values[down] - values[up]
        excess[heavy] -= moved
        excess[light] += moved
    result = np.empty(len(bins) + 1, np.int64)
    result[members] = np.arange(num_bins)[:, None]
    return result[:-1]


def _best(
    values: NDArray, above: NDArray, below: NDArray, from_heavy: NDArray, from_light: NDArray, num_weights: int
) -> NDArray:
    """For each pair of bins the slots of the best exchange as one index, or -1; limits come after the weights."""
    half = (above - below) / 2
    down, up = values[from_heavy], values[from_light]
    score, distance = np.zeros((2, len(from_heavy), from_heavy.shape[1], from_light.shape[1]))
    for number in range(num_weights):
        wanted = np.ascontiguousarray(down[:, :, number] - half[:, number, None])
        np.subtract(wanted[:, :, None], np.ascontiguousarray(up[:, :, number])[:, None, :], out=distance)
        np.multiply(distance, distance, out=distance)
        score += distance
    for number in range(num_weights, values.shape[1]):
        moved = down[:, :, None, number] - up[:, None, :, number]
        full = (moved > -below[:, number, None, None]) | (-moved > -above[:, number, None, None])
        score[full] = np.inf
    flat = score.reshape(len(from_heavy), -1)
    best = flat.argmin(axis=1)
    before = (half[:, :num_weights] ** 2).sum(axis=1)
    return np.where(flat[np.arange(len(flat)), best] < (1 - 1e-9) * before, best, -1)


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
    turns = members_by_bin(problem[order], num_problems).T  # one item of each problem per turn
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
