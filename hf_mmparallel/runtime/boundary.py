"""
Which rows of a message go from which rank to which: the layout change between two grids of ranks, as pure functions.

A message carries rows (tokens or patches) of one task's output to another task. Both sides hold their rows on every
tensor-parallel rank of their grid, so each row crosses once: the rows are cut in as many equal parts as the target
grid has ranks, part `i` goes from source rank `i mod a` to target rank `i`, and the target ranks gather the parts
among themselves. The gradient takes the same way back: target rank `i` returns part `i` (its gradient is replicated
too), and the source grid sums what its ranks received. That is the adjoint, never an average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..plan import FeatureSpec


@dataclass(frozen=True)
class Part:
    """
    Rows `start:stop` of a message, from one rank to another.

    Args:
        index (`int`): The target rank's place in its grid.
        source (`int`): Global rank that has the rows.
        target (`int`): Global rank that takes them.
        start (`int`): First row.
        stop (`int`): The row after the last.
    """

    index: int
    source: int
    target: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def part_size(num_rows: int, num_parts: int) -> int:
    """Rows of each part; the last ones may be shorter."""
    return -(-num_rows // num_parts)


def parts(num_rows: int, sources: Sequence[int], targets: Sequence[int]) -> list[Part]:
    """The parts of a message of `num_rows` rows between two grids of ranks, without the empty ones."""
    size = part_size(num_rows, len(targets))
    result = []
    for index, target in enumerate(targets):
        start, stop = min(index * size, num_rows), min((index + 1) * size, num_rows)
        if stop > start:
            result.append(Part(index, sources[index % len(sources)], target, start, stop))
    return result


class RowSpace:
    """
    The rows of a task's features: one block for each feature, in it the rows of each sample in turn.

    Args:
        features (`Sequence[FeatureSpec]`): The features, in order.
        slots (`Sequence[int]`): The samples, in order.
        rows (`Mapping[str, Sequence[int]]`): Modality -> rows of each of these samples.
    """

    def __init__(self, features: Sequence[FeatureSpec], slots: Sequence[int], rows: Mapping[str, Sequence[int]]):
        self.starts: dict[tuple[int, int], tuple[int, int]] = {}
        self.sizes = []
        row = 0
        for index, feature in enumerate(features):
            first = row
            for slot, count in zip(slots, rows[feature.modality], strict=True):
                self.starts[index, slot] = (row, count)
                row += count
            self.sizes.append(row - first)
        self.num_features = len(features)
        self.num_rows = row

    def positions(self, slots: Sequence[int]) -> torch.Tensor:
        """The rows of `slots`, feature by feature: int64 `[num_rows]`."""
        pieces = []
        for index in range(self.num_features):
            for slot in slots:
                start, count = self.starts[index, slot]
                pieces.append(torch.arange(start, start + count))
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)

    def count(self, slots: Sequence[int]) -> int:
        """How many rows `slots` have."""
        return sum(self.starts[index, slot][1] for index in range(self.num_features) for slot in slots)
