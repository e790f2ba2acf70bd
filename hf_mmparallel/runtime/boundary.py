"""
Which rows of a message go from which rank to which: the layout change between two grids of ranks, as pure functions.

A message carries rows (tokens, patches or features) of one task's output to another task. A grid has rows of ranks:
each row of ranks has tokens of its own (context parallelism), and holds what it has on all of its tensor-parallel
ranks. So a message consists of legs, from a row of ranks to a row of ranks. Hidden states stay with their tokens: leg
`c` joins row `c` of both grids. Features go where the placeholder is that they replace.

In a leg each row crosses once: its rows are cut in as many equal parts as the target row has ranks, part `i` goes from
source rank `i mod a` to target rank `i`, and the target ranks gather the parts among themselves. The gradient takes
the same way back: target rank `i` returns part `i` (its gradient is replicated too), and the source ranks sum what
they received. That is the adjoint, never an average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class Leg:
    """
    The rows of a message between two rows of ranks.

    Args:
        before (`tuple[int, ...]`): Ranks of the task before, in the direction of the forward.
        after (`tuple[int, ...]`): Ranks of the task after.
        rows (`torch.Tensor`): int64 `[num_rows]`, ascending: which rows of the message.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    rows: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the leg, in the direction of the forward."""
        return parts(self.num_rows, self.before, self.after)


Grid = tuple[tuple[int, ...], ...]


def straight_legs(num_rows: int, before: Grid, after: Grid) -> list[Leg]:
    """The legs of hidden states, of which each row of ranks has `num_rows`."""
    rows = torch.arange(num_rows)
    return [Leg(sources, targets, rows) for sources, targets in zip(before, after, strict=True)]


def spread_legs(owners: torch.Tensor, before: Grid, after: Grid) -> list[Leg]:
    """
    The legs of features.

    Args:
        owners (`torch.Tensor`): int64 `[num_rows]`: for each row of the message, the row of `after` that takes it.
        before (`Grid`): Ranks of the encoder's stage: one row, which has all rows of the message.
        after (`Grid`): Ranks of the stage that takes them.
    """
    (sources,) = before
    return [Leg(sources, targets, (owners == row).nonzero()[:, 0]) for row, targets in enumerate(after)]


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

    def positions(self, slots: Sequence[int], features: Sequence[int] | None = None) -> torch.Tensor:
        """The rows of `slots`, feature by feature, of all features or of these: int64 `[num_rows]`."""
        pieces = []
        for index in range(self.num_features) if features is None else features:
            for slot in slots:
                start, count = self.starts[index, slot]
                pieces.append(torch.arange(start, start + count))
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


class Placement:
    """
    Where the rows of a task's features are: on which row of ranks, and at which place among the features there.

    Args:
        space (`RowSpace`): The rows of the features, of the whole grid.
        holders (`Sequence[tuple[torch.Tensor, torch.Tensor]]`):
            For each feature, int64 `[rows]` row of ranks and int64 `[rows]` place among those of the feature there.
        num_holders (`int`): Rows of ranks of the grid.
    """

    def __init__(self, space: RowSpace, holders: Sequence[tuple[torch.Tensor, torch.Tensor]], num_holders: int):
        self.space = space
        counts = torch.stack([owners.bincount(minlength=num_holders) for owners, _ in holders])
        starts = counts.cumsum(0) - counts
        self.owners = torch.cat([owners for owners, _ in holders])
        self.places = torch.cat([starts[i][owners] + places for i, (owners, places) in enumerate(holders)])
        self.sizes: list[list[int]] = counts.T.tolist()
        """For each row of ranks, its rows of each feature."""


def pick(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`rows[positions]`, without a copy when these are all rows in order."""
    if len(positions) == len(rows) and torch.equal(positions, torch.arange(len(rows))):
        return rows
    return rows[positions.to(rows.device)]
