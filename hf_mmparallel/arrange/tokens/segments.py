"""
Assignment of whole segments to ranks: only segments that have to be split are gathered.

Attention stays within a segment, so the segments of a row may come in any order. The row is laid out as

    [ split segments, their blocks distributed over all ranks | bin of one rank | bin of the next | ... ]

A segment is split if it is longer than a rank's tokens or has more work than the mean rank. All others are whole in
one bin. Only if no assignment fits the capacities (with some padding, if allowed) do bins run over their ends, by one
segment at each of the `num_ranks - 1` boundaries, which is then gathered as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .assignment import ContextAssignment, assign_rows, padded_length
from .blocks import BLOCK, PARTIAL_COST, block_workloads, distribute
from .segment_bins import GOOD, SegmentBins

_MANY_SEGMENTS = 1024  # larger numbers are bundled with their neighbors to keep the search fast
_CORRECTIONS = 10


def independent_segments(
    segment_ids: ArrayLike,  # [num_tokens] the segment of each token, from 1; 0 is padding
) -> tuple[NDArray, NDArray]:
    """
    Splits a row into consecutive pieces such that no segment is in two of them; returns their starts and lengths.

    Each padding token outside of all segments is a piece of its own.
    """
    ids = np.asarray(segment_ids)
    if not len(ids):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    here = np.arange(len(ids))
    final = np.empty(int(ids.max()) + 1, dtype=np.int64)
    final[ids] = here
    reach = np.maximum.accumulate(np.where(ids > 0, final[ids], here))
    start = np.flatnonzero(np.append(True, reach[:-1] < here[1:]))
    return start, np.diff(start, append=len(ids))


def assign_segments(
    first: ArrayLike,  # [num_tokens] the first position that each token sees
    last: ArrayLike,  # [num_tokens] the last one; less than `first` for a token that sees nothing
    segment_ids: ArrayLike,  # [num_tokens] from 1; 0 is padding
    num_ranks: int,
    block: int = BLOCK,  # tokens of a block
    max_padding: float = 0.02,  # relative increase of a rank's tokens to keep segments whole
) -> ContextAssignment:
    """
    Assigns whole segments to ranks, and blocks of segments that have to be split.

    The result has mode `"row"` if all blocks would be gathered anyway.
    """
    first, last, ids = np.asarray(first), np.asarray(last), np.asarray(segment_ids)
    min_tokens = padded_length(len(first), num_ranks, block) // num_ranks
    lengths = range(min_tokens, min_tokens + max(int(max_padding * min_tokens), 0) + 1, block)
    row = _SegmentedRow.of(first, last, ids, block)
    split_rows = (_SplitRow.of(row, num_ranks, length) for length in lengths)
    divided = ((split_row, split_row.bins.divide()) for split_row in split_rows)
    split_row, owner = shortest = next(divided)
    if not split_row.bins.fit(owner):
        split_row, owner = next(
            ((split_row, owner) for split_row, owner in divided if split_row.bins.fit(owner)), shortest
        )
    assignment = split_row.exchanged(owner) if split_row.bins.fit(owner) else split_row.assignment(owner)
    if assignment.gathered.size < assignment.blocks.size:
        return assignment
    return assign_rows(first, last, num_ranks, block)


@dataclass(frozen=True)
class _SegmentedRow:
    """A row of tokens with its segments, which do not attend to each other."""

    first: NDArray  # [num_tokens] the first position that each token sees
    last: NDArray  # [num_tokens] the last one
    start: NDArray  # [num_segments]
    length: NDArray  # [num_segments]
    block: int  # tokens of a block

    @classmethod
    def of(cls, first: NDArray, last: NDArray, ids: NDArray, block: int) -> _SegmentedRow:
        """Finds all segments; bundles short neighbors if there are very many."""
        start, length = independent_segments(ids)
        seen = ids[start] > 0
        if len(start) > _MANY_SEGMENTS:
            size = -(-len(ids) // _MANY_SEGMENTS)
            bundle = (start + length - 1) // size
            short = (start // size == bundle) & seen
            begins = np.ones(len(start), dtype=bool)
            begins[1:] = ~(short[1:] & short[:-1] & (bundle[1:] == bundle[:-1]))
            heads = np.flatnonzero(begins)
            start, length, seen = start[heads], np.add.reduceat(length, heads), seen[heads]
        return cls(first, last, start[seen], length[seen], block)

    @cached_property
    def work(self) -> NDArray:
        """Work `[3, num_segments]` of each segment by its start position, see [`SegmentBins`]."""
        # Each segment on separate blocks, shifted from the first token of a block to the last.
        block = self.block
        size = -(-self.length // block) + 1
        head = np.cumsum(size) - size
        everything = np.ones(len(size), dtype=bool)
        work = np.zeros((3, len(size)))
        for values, offset in zip(work, (0, min(1, block - 1), block - 1), strict=True):
            layout = self.layout(head * block + offset, everything, int(size.sum()) * block)
            if len(head):
                values[:] = np.add.reduceat(self.block_work(layout), head)
        return work

    def layout(self, new_start: NDArray, included: NDArray, length: int) -> NDArray:
        """Index into the row for each of `length` positions of a new one, -1 for empty positions."""
        sizes = self.length[included]
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        layout = np.full(length, -1, dtype=np.int64)
        layout[np.repeat(new_start[included], sizes) + inside] = np.repeat(self.start[included], sizes) + inside
        return layout

    def block_work(self, layout: NDArray) -> NDArray:
        """Work of each block of a new row."""
        if not len(self.first):
            return np.zeros(len(layout) // self.block)
        source = np.maximum(layout, 0)
        shift = np.arange(len(layout)) - source
        used = layout >= 0
        first, last = np.where(used, self.first[source] + shift, 1), np.where(used, self.last[source] + shift, 0)
        return block_workloads(first, last, self.block)


@dataclass(frozen=True)
class _SplitRow:
    """The new row for one number of tokens per rank, before whole segments are assigned."""

    row: _SegmentedRow
    whole: NDArray  # indices of the segments that are not split
    new_start: NDArray  # [num_segments] new start of the split segments
    rank_of_block: NDArray  # [num_blocks]
    ranks: list[int]  # in the order of their bins
    start: int  # of the first bin: the number of tokens of split segments
    bins: SegmentBins  # for the segments that are not split

    @classmethod
    def of(cls, row: _SegmentedRow, num_ranks: int, length: int) -> _SplitRow:
        """Distributes the blocks of split segments, for `length` tokens per rank."""
        block, work = row.block, row.work
        cut = (row.length > length) | (work[0] > work[0].sum() / num_ranks)
        new_start = np.zeros(len(cut), dtype=np.int64)
        new_start[cut] = np.cumsum(row.length[cut]) - row.length[cut]
        start = int(row.length[cut].sum())
        num_cut = -(-start // block)
        cut_work = row.block_work(row.layout(new_start, cut, num_cut * block))
        distributed = distribute(cut_work, num_ranks)
        rank_of_block = np.empty(num_ranks * length // block, dtype=np.int64)
        rank_of_block[distributed] = np.arange(num_ranks)[:, None]  # overwritten below from `num_cut` on
        loads = np.bincount(rank_of_block[:num_cut], weights=cut_work, minlength=num_ranks)
        capacity = length - block * np.bincount(rank_of_block[:num_cut], minlength=num_ranks)
        # The rank with the last split block comes first, since its bin begins inside that block.
        head = int(rank_of_block[num_cut - 1]) if num_cut else 0
        ranks = [head, *(rank for rank in range(num_ranks) if rank != head)]
        rank_of_block[num_cut:] = np.repeat(ranks, capacity[ranks] // block)
        capacity[head] += num_cut * block - start
        offset = np.zeros(num_ranks, dtype=np.int64)
        offset[head] = start % block
        whole = np.flatnonzero(~cut)
        bins = SegmentBins(row.length[whole], work[:, whole], capacity, loads, offset, block, 1 + PARTIAL_COST)
        return cls(row, whole, new_start, rank_of_block, ranks, start, bins)

    def assignment(self, owner: NDArray) -> ContextAssignment:
        """The resulting assignment."""
        new_start = self._new_starts(owner)
        everything = np.ones(len(new_start), dtype=bool)
        block, num_ranks = self.row.block, self.bins.num_ranks
        layout = self.row.layout(new_start, everything, len(self.rank_of_block) * block)
        left = np.ones(len(self.row.first), dtype=bool)
        left[layout[layout >= 0]] = False
        padding, free = np.flatnonzero(left), np.flatnonzero(layout < 0)
        layout[free[: len(padding)]] = padding

        blocks = np.argsort(self.rank_of_block, kind="stable").reshape(num_ranks, -1)
        gathered = _gathered(self._needed_elsewhere(new_start)[blocks])
        work = self.row.block_work(layout)[blocks].sum(axis=1)
        return ContextAssignment(layout, blocks, gathered, work, len(self.row.first), block, "segments")

    def exchanged(self, owner: NDArray) -> ContextAssignment:
        """The best of several assignments, each after exchanges corrected by the actual work of the one before."""
        bins, ranks, assignments = self.bins, range(self.bins.num_ranks), []
        for _ in range(_CORRECTIONS):
            owner = bins.exchange(owner)
            assignments.append(self.assignment(owner))
            if assignments[-1].imbalance <= 1 + GOOD:
                break
            # The work of images, for example, depends on their position within blocks, which bins do not know.
            expected = np.array([bins.rank_work(owner, rank) for rank in ranks])
            bins = replace(bins, loads=bins.loads + assignments[-1].work - expected)
        return min(assignments, key=lambda assignment: assignment.work.max())

    def _new_starts(self, owner: NDArray) -> NDArray:
        """
        Start of each segment.

        A bin that is too short is padded while padding is left; one that is too long or can't be padded shifts the
        next one, and the segment at the boundary is split. The shortest segments are placed at such boundaries.
        """
        new_start, bins, fits = self.new_start.copy(), self.bins, self.bins.fit(owner)
        spare = int(bins.capacity.sum() - bins.length.sum())
        cursor = border = self.start
        for rank in self.ranks:
            mine = np.flatnonzero(owner == rank)
            if fits:
                mine = bins.order(mine, cursor)
            else:
                mine = mine[np.argsort(bins.length[mine], kind="stable")]
                inner = bins.order(mine[2:], cursor + int(bins.length[mine[:1]].sum()))
                mine = np.concatenate([mine[:1], inner, mine[1:2]])
            sizes = bins.length[mine]
            new_start[self.whole[mine]] = cursor + np.cumsum(sizes) - sizes
            cursor += int(sizes.sum())
            border += int(bins.capacity[rank])
            if 0 < border - cursor <= spare:
                spare -= border - cursor
                cursor = border
        return new_start

    def _needed_elsewhere(self, new_start: NDArray) -> NDArray:
        """Which blocks have tokens of a segment that spans ranks."""
        block = self.row.block
        head, tail = new_start // block, (new_start + self.row.length - 1) // block
        changes = np.cumsum(np.diff(self.rank_of_block, prepend=self.rank_of_block[:1]) != 0)
        spans = changes[head] != changes[tail]
        marks = np.zeros(len(self.rank_of_block) + 1, dtype=np.int64)
        np.add.at(marks, head[spans], 1)
        np.add.at(marks, tail[spans] + 1, -1)
        return np.cumsum(marks)[:-1] > 0


def _gathered(needed: NDArray) -> NDArray:
    """Indices of the rank's blocks to send, equally many on each rank: the needed ones, then the lowest others."""
    count = int(needed.sum(axis=1).max())
    return np.sort(np.argsort(~needed, axis=1, kind="stable")[:, :count], axis=1)
