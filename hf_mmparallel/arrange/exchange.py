"""Bins of equal load by exchanges of items, many pairs of bins at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PAIRS = 16_000  # pairs of items that are looked at in one round
_FEWEST, _MOST = 12, 48  # items of a bin among them
_SPARE = 2  # places in a bin for items to come
_PATIENCE = 3  # rounds of each weight in which nothing is found
_CLOSE = 1e-3  # of the target; nearer is not worth a round


def padded(bins: NDArray, num_bins: int, spare: int = 0) -> NDArray:
    """
    The items of each bin side by side.

    Args:
        bins (`numpy.ndarray` of shape `[num_items]`): The bin of each item.
        num_bins (`int`): Bins.
        spare (`int`, *optional*, defaults to 0): Empty places at the end of the fullest bin.

    Returns:
        `numpy.ndarray`: int64 `[num_bins, places]`, each bin's items in ascending order; empty places have the number
        of items.
    """
    counts = np.bincount(bins, minlength=num_bins)
    items = np.argsort(bins, kind="stable")
    place = np.arange(len(bins)) - np.repeat(np.cumsum(counts) - counts, counts)
    members = np.full((num_bins, int(counts.max(initial=0)) + spare), len(bins))
    members[bins[items], place] = items
    return members


@dataclass(frozen=True)
class Room:
    """
    Limits that bins keep to.

    Args:
        sizes (`numpy.ndarray` of shape `[num_items, num_limits]`): What each item takes of each limit.
        limits (`numpy.ndarray` of shape `[num_limits]`): What a bin has.
    """

    sizes: NDArray
    limits: NDArray


def exchange(bins: NDArray, weights: NDArray, targets: NDArray, rounds: int, room: Room | None = None) -> NDArray:
    """
    Exchanges single items between bins of a problem, or moves them, until loads are near their targets.

    In each round the bin that is furthest above its target works with the one furthest below, the second with the
    second, and so on, by one of the weights in turn. A pair makes the exchange after which the sum of squares of their
    distances from the targets, over all weights, is least; it never grows.

    Args:
        bins (`numpy.ndarray` of shape `[num_items]`): The bin of each item; problem `p` has the bins from
            `p * bins_per_problem`.
        weights (`numpy.ndarray` of shape `[num_items, num_weights]`): Of each item, on comparable scales.
        targets (`numpy.ndarray` of shape `[num_problems, bins_per_problem, num_weights]`): Wanted sums.
        rounds (`int`): Most rounds.
        room ([`Room`], *optional*): Limits that hold afterwards if they held before.

    Returns:
        `numpy.ndarray`: The bin of each item, int64 `[num_items]`.
    """
    num_problems, per_problem, num_weights = targets.shape
    if per_problem < 2 or not len(bins):
        return bins
    num_bins, half = num_problems * per_problem, per_problem // 2
    members = padded(bins, num_bins, _SPARE)
    weights = np.append(weights, np.zeros((1, num_weights)), axis=0)
    excess = weights[members].sum(axis=1) - targets.reshape(num_bins, num_weights)
    sizes = np.zeros((len(weights), 0)) if room is None else np.append(room.sizes, room.sizes[:1] * 0, axis=0)
    left = (np.zeros(0) if room is None else room.limits) - sizes[members].sum(axis=1)
    seen_at_once = min(max(math.isqrt(_PAIRS // (num_problems * half)), _FEWEST), _MOST)
    first, stride, idle = np.arange(num_problems)[:, None] * per_problem, -(-members.shape[1] // seen_at_once), 0
    close = _CLOSE * targets.reshape(num_bins, num_weights)
    for turn in range(rounds):
        if (excess <= close).all():
            break
        order = np.argsort(-excess[:, turn % num_weights].reshape(num_problems, -1), axis=1, kind="stable") + first
        light = np.roll(order[:, : -half - 1 : -1], turn // num_weights, axis=1).ravel()
        heavy = order[:, :half].ravel()
        seen = slice(turn % stride, None, stride)
        given, taken = members[heavy, seen], members[light, seen]
        best, gain = _best(weights, excess[heavy] - excess[light], given, taken, sizes, (left[heavy], left[light]))
        useful = np.flatnonzero(gain > 1e-9)
        idle = 0 if len(useful) else idle + 1
        if idle == _PATIENCE * num_weights * stride:
            break
        heavy, light, best = heavy[useful], light[useful], best[useful]
        there, here = np.divmod(best, taken.shape[1])
        mine, theirs = given[useful, there], taken[useful, here]
        members[heavy, seen.start + stride * there], members[light, seen.start + stride * here] = theirs, mine
        for state, change, sign in ((excess, weights, 1), (left, sizes, -1)):
            moved = sign * (change[mine] - change[theirs])
            state[heavy] -= moved
            state[light] += moved
    result = np.empty(len(bins) + 1, np.int64)
    result[members] = np.arange(num_bins)[:, None]
    return result[:-1]


def _best(
    weights: NDArray, gap: NDArray, given: NDArray, taken: NDArray, sizes: NDArray, left: tuple[NDArray, NDArray]
) -> tuple[NDArray, NDArray]:
    """For each pair of bins, the best pair of places (as one index) and by what it lowers the sum of squares."""
    score = np.zeros((len(gap), given.shape[1], taken.shape[1]))
    for number in range(weights.shape[1]):
        values = weights[:, number]
        distance = (values[given] - gap[:, number, None] / 2)[:, :, None] - values[taken][:, None, :]
        score += distance * distance
    for number in range(sizes.shape[1]):
        moved = sizes[given, number][:, :, None] - sizes[taken, number][:, None, :]
        score[(moved > left[1][:, number, None, None]) | (-moved > left[0][:, number, None, None])] = np.inf
    flat = score.reshape(len(gap), -1)
    best = flat.argmin(axis=1)
    before = (gap * gap).sum(axis=1) / 4
    return best, np.where(before > 0, 1 - flat[np.arange(len(gap)), best] / np.maximum(before, 1e-300), 0)
