"""Bins of equal load by exchanges of items, many pairs of bins at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PAIRS = 16_000  # pairs of items that are looked at in one round
_FEWEST, _MOST = 12, 48  # items of a bin among them
_SPARE = 2  # places in a bin for items to come
_PROGRESS, _PATIENCE = 0.005, 3  # the least that counts, as a share of the sum of squares; for how long it may miss
_CLOSE = 1e-3  # of the target; nearer is not worth a round


def stable_order(numbers: NDArray, limit: int) -> NDArray:
    """The places of whole numbers from 0 below `limit` in ascending order, equal ones as they stand."""
    small = numbers.astype(np.uint16) if limit <= 1 << 16 else numbers  # which NumPy sorts by radix
    return np.argsort(small, kind="stable")


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
    items = stable_order(bins, num_bins)
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
    values, goals = weights, targets.reshape(num_bins, num_weights)
    if room is not None:
        values = np.append(weights, room.sizes, axis=1)
        goals = np.append(goals, np.broadcast_to(room.limits, (num_bins, len(room.limits))), axis=1)
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
        given, taken = members[heavy, seen], members[light, seen]
        best = _best(values, excess[heavy], excess[light], given, taken, num_weights)
        useful = np.flatnonzero(best >= 0)
        heavy, light = heavy[useful], light[useful]
        there, here = np.divmod(best[useful], taken.shape[1])
        mine, theirs = given[useful, there], taken[useful, here]
        members[heavy, seen.start + stride * there], members[light, seen.start + stride * here] = theirs, mine
        moved = values[mine] - values[theirs]
        excess[heavy] -= moved
        excess[light] += moved
    result = np.empty(len(bins) + 1, np.int64)
    result[members] = np.arange(num_bins)[:, None]
    return result[:-1]


def _best(
    values: NDArray, above: NDArray, below: NDArray, given: NDArray, taken: NDArray, num_weights: int
) -> NDArray:
    """For each pair of bins the places of the best exchange, as one index, or -1; limits come after the weights."""
    half = (above - below) / 2
    here, there = values[given], values[taken]
    score, distance = np.zeros((2, len(given), given.shape[1], taken.shape[1]))
    for number in range(num_weights):
        wanted = np.ascontiguousarray(here[:, :, number] - half[:, number, None])
        np.subtract(wanted[:, :, None], np.ascontiguousarray(there[:, :, number])[:, None, :], out=distance)
        np.multiply(distance, distance, out=distance)
        score += distance
    for number in range(num_weights, values.shape[1]):
        moved = here[:, :, None, number] - there[:, None, :, number]
        full = (moved > -below[:, number, None, None]) | (-moved > -above[:, number, None, None])
        score[full] = np.inf
    flat = score.reshape(len(given), -1)
    best = flat.argmin(axis=1)
    before = (half[:, :num_weights] ** 2).sum(axis=1)
    return np.where(flat[np.arange(len(flat)), best] < (1 - 1e-9) * before, best, -1)
