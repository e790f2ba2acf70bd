"""Subset sums of many small sets of numbers at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_ITEMS = 62  # a subset is a bit mask in an int64


@dataclass(frozen=True)
class SubsetSums:
    """Reachable sums, with a subset for each of them; all fields are `[num_sets, num_sums]`."""

    sums: NDArray  # float64, not sorted; infinite padding
    subsets: NDArray  # int64; bit `i` is set if item `i` is in the subset
    extra: NDArray  # float64; the subset's sum of a second set of numbers

    def nearest(self, targets: NDArray) -> NDArray:
        """Index `[num_sets, num_targets]` of the sum closest to each target `[num_sets, num_targets]`."""
        return np.abs(self.sums[:, None, :] - targets[:, :, None]).argmin(axis=2)

    def take(self, sets: NDArray) -> SubsetSums:
        """The sums of the sets at some indices."""
        return SubsetSums(self.sums[sets], self.subsets[sets], self.extra[sets])


def subset_sums(
    weights: NDArray,  # [num_sets, num_items] at least 0; padded with zeros
    max_sums: int,  # maximum length of a list, a power of two
    extra: NDArray | None = None,  # [num_sets, num_items] second numbers to add up for the same subsets
) -> SubsetSums:
    """
    Computes the sums of all subsets of at most the first 62 items by dynamic programming (Entrain, section 4.5.2).

    If a list exceeds `max_sums`, its sums are put into `max_sums` cells of equal width, with one sum per cell, which
    is the exact sum of its subset. With `n` items and cells of width `q = total / (max_sums - 1)`, every reachable sum
    has one in the list at a distance of at most `q max(0, n - log2(max_sums))`. All sums are present if `2^n <=
    max_sums`, and if the weights are integers with a total below `max_sums`.
    """
    num_sets, num_items = weights.shape
    added = [weights] if extra is None else [weights, extra]
    subsets, tables = np.zeros((num_sets, 1), np.int64), [np.zeros((num_sets, 1)) for _ in added]
    width = np.maximum(weights.sum(axis=1), 1e-300) / (max_sums - 1)
    in_cells = False
    for item in range(min(num_items, MAX_ITEMS)):
        more, bit = [values[:, item : item + 1] for values in added], np.int64(1 << item)
        if 2 * subsets.shape[1] <= max_sums:
            subsets = np.concatenate([subsets, subsets | bit], axis=1)
            tables = [np.concatenate([old, old + new], axis=1) for old, new in zip(tables, more, strict=True)]
            continue
        grow = np.flatnonzero(more[0][:, 0] > 0)
        if not len(grow):
            continue
        without = [table[grow] for table in tables], subsets[grow]
        within = [old + new[grow] for old, new in zip(without[0], more, strict=True)], without[1] | bit
        cells = without
        if not in_cells:
            empty = np.full_like(without[0][0], np.inf)
            cells = [empty, *map(np.zeros_like, without[0][1:])], np.zeros_like(without[1])
            _put_into_cells(cells, without, width[grow])
            in_cells = True
        _put_into_cells(cells, within, width[grow])
        subsets[grow] = cells[1]
        for table, cell in zip(tables, cells[0], strict=True):
            table[grow] = cell
    return SubsetSums(tables[0], subsets, tables[1] if extra is not None else np.zeros_like(tables[0]))


def _put_into_cells(
    cells: tuple[list[NDArray], NDArray], entries: tuple[list[NDArray], NDArray], width: NDArray
) -> None:
    """Writes entries into the cells of their sums (the last wins); both are sums, second sums and subsets."""
    sums, count = entries[0][0], entries[1].shape[1]
    index = np.flatnonzero(np.isfinite(sums))
    row = index // count
    cell = (sums.ravel()[index] / width[row] + 1e-9).astype(np.int64)
    cell += row * count
    for table, values in zip((*cells[0], cells[1]), (*entries[0], entries[1]), strict=True):
        table.ravel()[cell] = values.ravel()[index]
