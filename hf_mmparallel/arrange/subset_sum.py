"""Which sums the subsets of a few numbers have, for many sets of numbers at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_ITEMS = 62  # a subset is the bits of an int64


@dataclass(frozen=True)
class SubsetSums:
    """
    Sums that subsets reach, and a subset for each of them.

    Args:
        sums (`numpy.ndarray` of shape `[num_sets, num_sums]`): float64, not sorted; infinite where a set has fewer.
        subsets (`numpy.ndarray` of shape `[num_sets, num_sums]`): int64; bit `i` says that item `i` is in it.
        extra (`numpy.ndarray` of shape `[num_sets, num_sums]`): float64; the same subset's sum of other numbers.
    """

    sums: NDArray
    subsets: NDArray
    extra: NDArray

    def nearest(self, targets: NDArray) -> NDArray:
        """For each target `[num_sets, num_targets]`, the place `[num_sets, num_targets]` of the nearest sum."""
        return np.abs(self.sums[:, None, :] - targets[:, :, None]).argmin(axis=2)

    def take(self, sets: NDArray) -> SubsetSums:
        """The sums of some of the sets."""
        return SubsetSums(self.sums[sets], self.subsets[sets], self.extra[sets])


def subset_sums(weights: NDArray, max_sums: int, extra: NDArray | None = None) -> SubsetSums:
    """
    Lists the sums of all subsets by dynamic programming, item by item (Entrain, section 4.5.2).

    As soon as a list would get longer than `max_sums`, its sums are put into `max_sums` cells of equal width, and one
    sum is kept in each. What is kept is the true sum of its subset. With `n` items and cells of width `q = total /
    (max_sums - 1)`, every sum that can be reached has one in the list that is at most `q max(0, n - log2(max_sums))`
    away. All sums are there when `2^n <= max_sums`, and when the weights are whole numbers that add up to less than
    `max_sums`.

    Args:
        weights (`numpy.ndarray` of shape `[num_sets, num_items]`):
            Each at least 0; sets with fewer items end with zeros.
        max_sums (`int`): The longest list, a power of two.
        extra (`numpy.ndarray` of shape `[num_sets, num_items]`, *optional*): Numbers that are added up beside.

    Returns:
        [`SubsetSums`]: For each set. Subsets hold at most the first 62 items.
    """
    num_sets, num_items = weights.shape
    added = [weights] if extra is None else [weights, extra]
    subsets, tables = np.zeros((num_sets, 1), np.int64), [np.zeros((num_sets, 1)) for _ in added]
    width = np.maximum(weights.sum(axis=1), 1e-300) / (max_sums - 1)
    in_cells = False
    for item in range(min(num_items, MAX_ITEMS)):
        more, bit = [own[:, item : item + 1] for own in added], np.int64(1 << item)
        if 2 * subsets.shape[1] <= max_sums:
            subsets = np.concatenate([subsets, subsets | bit], axis=1)
            tables = [np.concatenate([own, own + one], axis=1) for own, one in zip(tables, more, strict=True)]
            continue
        grow = np.flatnonzero(more[0][:, 0] > 0)
        if not len(grow):
            continue
        without = [own[grow] for own in tables], subsets[grow]
        within = [own + one[grow] for own, one in zip(without[0], more, strict=True)], without[1] | bit
        cells = without
        if not in_cells:
            empty = np.full_like(without[0][0], np.inf)
            cells = [empty, *map(np.zeros_like, without[0][1:])], np.zeros_like(without[1])
            _put_into_cells(cells, without, width[grow])
            in_cells = True
        _put_into_cells(cells, within, width[grow])
        subsets[grow] = cells[1]
        for own, one in zip(tables, cells[0], strict=True):
            own[grow] = one
    return SubsetSums(tables[0], subsets, tables[1] if extra is not None else np.zeros_like(tables[0]))


def _put_into_cells(
    cells: tuple[list[NDArray], NDArray], found: tuple[list[NDArray], NDArray], width: NDArray
) -> None:
    """
    Puts sums, and what belongs to them, into their cells in place of what is there; the last of several is kept. All
    are tables of one shape: sums, other sums, and subsets.
    """
    sums, count = found[0][0], found[1].shape[1]
    place = np.flatnonzero(np.isfinite(sums))
    row = place // count
    cell = (sums.ravel()[place] / width[row] + 1e-9).astype(np.int64)
    cell += row * count
    for table, own in zip((*cells[0], cells[1]), (*found[0], found[1]), strict=True):
        table.ravel()[cell] = own.ravel()[place]
