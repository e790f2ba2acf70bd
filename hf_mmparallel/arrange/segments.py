"""
Whole segments to ranks: only what has to be cut is gathered.

Attention never leaves a segment, so the segments of a row may come in any order. The row is laid out as

    [ segments that are cut, in blocks dealt to all ranks | section of one rank | section of the next | ... ]

A segment is cut when it is longer than a rank's tokens or has more work than the mean rank. All others lie whole in
one section. Only where no division of them fills the ranks without overflow (after some padding, if allowed) do
sections run over their ends, by one segment at each of the `num_ranks - 1` borders, which is then gathered too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .blocks import BLOCK, PARTIAL_COST, block_workloads, distribute
from .context import ContextAssignment, assign_rows, padded_length
from .sections import GOOD, Sections

_MANY_SEGMENTS = 1024  # more are bundled with their neighbours, so that the search stays short
_CORRECTIONS = 10


@dataclass(frozen=True)
class _Segments:
    """Start and length, `[num_segments]`, of parts of a row that do not see each other."""

    start: NDArray
    length: NDArray


def independent_segments(segment_ids: ArrayLike) -> tuple[NDArray, NDArray]:
    """
    Divides a row into consecutive parts such that no segment lies in two.

    Args:
        segment_ids (array of shape `[num_tokens]`, integers): The segment of each token, from 1; 0 is padding.

    Returns:
        `tuple[numpy.ndarray, numpy.ndarray]`: Start and length of each part, int64. Each token of padding that lies in
        no segment is a part by itself.
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
    first: ArrayLike,
    last: ArrayLike,
    segment_ids: ArrayLike,
    num_ranks: int,
    block: int = BLOCK,
    max_padding: float = 0.02,
) -> ContextAssignment:
    """
    Hands whole segments to ranks, and blocks of those that must be cut.

    Args:
        first (array of shape `[num_tokens]`, integers): The first place that each token sees.
        last (array of shape `[num_tokens]`, integers): The last place that each token sees; less than `first` for a
            token that sees nothing.
        segment_ids (array of shape `[num_tokens]`, integers): The segment of each token, from 1; 0 is padding.
        num_ranks (`int`): Ranks.
        block (`int`, *optional*, defaults to 128): Tokens of a block.
        max_padding (`float`, *optional*, defaults to 0.02):
            How much longer a rank's tokens may become, as a share, to keep segments whole.

    Returns:
        [`ContextAssignment`]: In mode `"row"` where all blocks would be gathered anyway.
    """
    first, last, ids = np.asarray(first), np.asarray(last), np.asarray(segment_ids)
    least = padded_length(len(first), num_ranks, block) // num_ranks
    segments = _segments_of(ids)
    lengths = range(least, least + max(int(max_padding * least), 0) + 1, block)
    work = _segment_work(first, last, segments, block)
    frames = (_Frame.of(first, last, segments, work, num_ranks, length, block) for length in lengths)
    divided = ((frame, frame.sections.divide()) for frame in frames)
    frame, owner = shortest = next(divided)
    if not frame.sections.fit(owner):
        frame, owner = next(((frame, owner) for frame, owner in divided if frame.sections.fit(owner)), shortest)
    exact = frame.exchanged if frame.sections.fit(owner) else frame.assignment
    found = exact(first, last, owner)
    return found if found.gathered.size < found.blocks.size else assign_rows(first, last, num_ranks, block)


def _segments_of(ids: NDArray) -> _Segments:
    """All segments; short neighbours in bundles when there are very many."""
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
    return _Segments(start[seen], length[seen])


def _segment_work(first: NDArray, last: NDArray, segments: _Segments, block: int) -> NDArray:
    """Work `[3, num_segments]` of each segment by where it starts, as [`Sections`] wants it."""
    # Each segment on blocks of its own, all of them moved from the first token of a block to the last.
    size = -(-segments.length // block) + 1
    head = np.cumsum(size) - size
    everything = np.ones(len(size), dtype=bool)
    work = np.zeros((3, len(size)))
    for row, offset in zip(work, (0, min(1, block - 1), block - 1), strict=True):
        layout = _sources(segments, head * block + offset, everything, int(size.sum()) * block)
        if len(head):
            row[:] = np.add.reduceat(_work_in_place(first, last, layout, block), head)
    return work


@dataclass(frozen=True)
class _Frame:
    """
    The new row for one number of tokens a rank, before whole segments have a rank.

    Args:
        segments (`_Segments`): All segments.
        whole (`numpy.ndarray`): Indices of the segments that are not cut.
        place (`numpy.ndarray` of shape `[num_segments]`): Where the cut ones start.
        rank_of_block (`numpy.ndarray` of shape `[num_blocks]`): Who holds each block.
        ranks (`list[int]`): In the order of their sections.
        start (`int`): Where the first section starts: the tokens of cut segments.
        sections (`Sections`): Of the segments that are not cut.
    """

    segments: _Segments
    whole: NDArray
    place: NDArray
    rank_of_block: NDArray
    ranks: list[int]
    start: int
    sections: Sections

    @classmethod
    def of(
        cls,
        first: NDArray,
        last: NDArray,
        segments: _Segments,
        work: NDArray,
        num_ranks: int,
        length: int,
        block: int,
    ) -> _Frame:
        """Deals the blocks of the segments that are cut, when a rank has `length` tokens."""
        cut = (segments.length > length) | (work[0] > work[0].sum() / num_ranks)
        place = np.zeros(len(cut), dtype=np.int64)
        place[cut] = np.cumsum(segments.length[cut]) - segments.length[cut]
        start = int(segments.length[cut].sum())
        num_cut = -(-start // block)
        cut_work = _work_in_place(first, last, _sources(segments, place, cut, num_cut * block), block)
        dealt = distribute(cut_work, num_ranks)
        rank_of_block = np.empty(num_ranks * length // block, dtype=np.int64)
        rank_of_block[dealt] = np.arange(num_ranks)[:, None]  # those past `num_cut` are written again below
        loads = np.bincount(rank_of_block[:num_cut], weights=cut_work, minlength=num_ranks)
        room = length - block * np.bincount(rank_of_block[:num_cut], minlength=num_ranks)
        # The rank with the last block that is cut comes first, since its section begins inside that block.
        head = int(rank_of_block[num_cut - 1]) if num_cut else 0
        ranks = [head, *(rank for rank in range(num_ranks) if rank != head)]
        rank_of_block[num_cut:] = np.repeat(ranks, room[ranks] // block)
        room[head] += num_cut * block - start
        offset = np.zeros(num_ranks, dtype=np.int64)
        offset[head] = start % block
        whole = np.flatnonzero(~cut)
        sections = Sections(segments.length[whole], work[:, whole], room, loads, offset, block, 1 + PARTIAL_COST)
        return cls(segments, whole, place, rank_of_block, ranks, start, sections)

    def assignment(self, first: NDArray, last: NDArray, owner: NDArray) -> ContextAssignment:
        """What downstream reads."""
        place = self._places(owner)
        everything = np.ones(len(place), dtype=bool)
        block, num_ranks = self.sections.block, self.sections.num_ranks
        layout = _sources(self.segments, place, everything, len(self.rank_of_block) * block)
        left = np.ones(len(first), dtype=bool)
        left[layout[layout >= 0]] = False
        padding, free = np.flatnonzero(left), np.flatnonzero(layout < 0)
        layout[free[: len(padding)]] = padding

        blocks = np.argsort(self.rank_of_block, kind="stable").reshape(num_ranks, -1)
        gathered = _gathered(self._needed_elsewhere(place)[blocks])
        work = _work_in_place(first, last, layout, block)[blocks].sum(axis=1)
        return ContextAssignment(layout, blocks, gathered, work, len(first), block, "segments")

    def exchanged(self, first: NDArray, last: NDArray, owner: NDArray) -> ContextAssignment:
        """The best of some assignments, each after exchanges that go by what the one before it turned out to cost."""
        sections, ranks, found = self.sections, range(self.sections.num_ranks), []
        for _ in range(_CORRECTIONS):
            owner = sections.exchange(owner)
            found.append(self.assignment(first, last, owner))
            if found[-1].imbalance <= 1 + GOOD:
                break
            # What an image adds, say, depends on where it lies in its blocks, which the sections do not know.
            expected = np.array([sections.rank_work(owner, rank) for rank in ranks])
            sections = replace(sections, loads=sections.loads + found[-1].work - expected)
        return min(found, key=lambda assignment: assignment.work.max())

    def _places(self, owner: NDArray) -> NDArray:
        """
        Where each segment starts.

        A section that is too short is filled up with padding while there is some; one that is too long or can't be
        filled moves the next one, and the segment at the border is cut. The shortest ones lie at such borders.
        """
        place, sections, fits = self.place.copy(), self.sections, self.sections.fit(owner)
        spare = int(sections.room.sum() - sections.length.sum())
        cursor = border = self.start
        for rank in self.ranks:
            mine = np.flatnonzero(owner == rank)
            if fits:
                mine = sections.order(mine, cursor)
            else:
                mine = mine[np.argsort(sections.length[mine], kind="stable")]
                inner = sections.order(mine[2:], cursor + int(sections.length[mine[:1]].sum()))
                mine = np.concatenate([mine[:1], inner, mine[1:2]])
            sizes = sections.length[mine]
            place[self.whole[mine]] = cursor + np.cumsum(sizes) - sizes
            cursor += int(sizes.sum())
            border += int(sections.room[rank])
            if 0 < border - cursor <= spare:
                spare -= border - cursor
                cursor = border
        return place

    def _needed_elsewhere(self, place: NDArray) -> NDArray:
        """Which blocks have tokens of a segment that lies on more than one rank."""
        block = self.sections.block
        head, tail = place // block, (place + self.segments.length - 1) // block
        changes = np.cumsum(np.diff(self.rank_of_block, prepend=self.rank_of_block[:1]) != 0)
        spans = changes[head] != changes[tail]
        marks = np.zeros(len(self.rank_of_block) + 1, dtype=np.int64)
        np.add.at(marks, head[spans], 1)
        np.add.at(marks, tail[spans] + 1, -1)
        return np.cumsum(marks)[:-1] > 0


def _sources(segments: _Segments, place: NDArray, which: NDArray, length: int) -> NDArray:
    """Index into the row for each place of the new one, -1 where nothing lies."""
    sizes = segments.length[which]
    inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    layout = np.full(length, -1, dtype=np.int64)
    layout[np.repeat(place[which], sizes) + inside] = np.repeat(segments.start[which], sizes) + inside
    return layout


def _work_in_place(first: NDArray, last: NDArray, layout: NDArray, block: int) -> NDArray:
    """Work of each block of the new row."""
    source = np.maximum(layout, 0)
    shift = np.arange(len(layout)) - source
    used = layout >= 0
    if not len(first):
        return np.zeros(len(layout) // block)
    return block_workloads(np.where(used, first[source] + shift, 1), np.where(used, last[source] + shift, 0), block)


def _gathered(needed: NDArray) -> NDArray:
    """The rank's own blocks that it gives, as many on each rank: the needed ones, then the lowest others."""
    count = int(needed.sum(axis=1).max())
    return np.sort(np.argsort(~needed, axis=1, kind="stable")[:, :count], axis=1)
