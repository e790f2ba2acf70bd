"""Which sums the subsets of a few numbers have, for many sets of numbers at once."""

from __future__ import annotations

from collections.abc import Sequence
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
    extra = np.zeros_like(weights) if extra is None else extra
    sums, subsets, extras = np.zeros((num_sets, 1)), np.zeros((num_sets, 1), np.int64), np.zeros((num_sets, 1))
    width = np.maximum(weights.sum(axis=1), 1e-300) / (max_sums - 1)
    in_cells = False
    for item in range(min(num_items, MAX_ITEMS)):
        more, beside, bit = weights[:, item : item + 1], extra[:, item : item + 1], np.int64(1 << item)
        if 2 * sums.shape[1] <= max_sums:
            sums = np.concatenate([sums, sums + more], axis=1)
            subsets = np.concatenate([subsets, subsets | bit], axis=1)
            extras = np.concatenate([extras, extras + beside], axis=1)
            continue
        grow = np.flatnonzero(more[:, 0] > 0)
        if not len(grow):
            continue
        without = sums[grow], subsets[grow], extras[grow]
        added = without[0] + more[grow], without[1] | bit, without[2] + beside[grow]
        cells = without
        if not in_cells:
            cells = np.full_like(without[0], np.inf), np.zeros_like(without[1]), np.zeros_like(without[2])
            _put_into_cells(cells, without, width[grow])
            in_cells = True
        _put_into_cells(cells, added, width[grow])
        sums[grow], subsets[grow], extras[grow] = cells
    return SubsetSums(sums, subsets, extras)


def _put_into_cells(cells: Sequence[NDArray], found: Sequence[NDArray], width: NDArray) -> None:
    """Puts sums, and what belongs to them, into their cells in place of what is there; the last of several is kept."""
    row, column = np.nonzero(np.isfinite(found[0]))
    cell = (found[0][row, column] / width[row] + 1e-9).astype(np.int64)
    for values, own in zip(cells, found, strict=True):
        values[row, cell] = own[row, column]
