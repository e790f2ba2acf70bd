"""Balancing of bins by exchanges of items, for many pairs of bins at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PAIRS = 16_000  # pairs of items per round
_FEWEST, _MOST = 12, 48  # limits of the number of items per bin among them
_SPARE = 2  # empty slots of a bin
_PROGRESS, _PATIENCE = 0.005, 3  # minimum relative progress of the sum of squares, and rounds that may miss it
_CLOSE = 1e-3  # relative distance from the target that is not worth a round


def stable_order(numbers: NDArray, limit: int) -> NDArray:
    """Stable argsort of integers from 0 to `limit`."""
    small = numbers.astype(np.uint16) if limit <= 1 << 16 else numbers  # NumPy sorts uint16 by radix
    return np.argsort(small, kind="stable")


def padded(
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
    members = padded(bins, num_bins, _SPARE)
    values, goals = weights, targets.reshape(num_bins, num_weights)
    if capacity is not None:
        values = np.append(weights, capacity.sizes, axis=1)
        goals = np.append(goals, np.broadcast_to(capacity.limits, (num_bins, len(capacity.limits))), axis=1)
    values = np.append(values, np.zeros((1, values.shape[1])), axis=0)
    excess = values[members].sum(axis=1) - goals
    close, before, idle = _CLOSE * goals[:, :num_weights], np.inf, 0
    seen_at_once = min(max(math.isqrt(_PAIRS // (num_problems * half)), _FEWEST), _MOST)
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
