"""
Assignment of whole segments to ranks: only segments that have to be split are gathered.

Attention stays within a segment, so the segments of a row may come in any order. The row is laid out as

    [ split segments, their blocks distributed over all ranks | bin of one rank | bin of the next | ... ]

A segment is split if it is longer than a rank's tokens or has more work than the mean rank. All others are whole in
one bin. Only if no assignment fits the capacities (with some padding, if allowed) do bins run over their ends, by one
segment at each of the `num_ranks - 1` boundaries, which is then gathered as well.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._portable import smallest
from .token_assignment import (
    BLOCK,
    PARTIAL_COST,
    ContextAssignment,
    Method,
    Mode,
    assign_rows,
    block_workloads,
    distribute,
    padded_length,
)

# Assignment of segments to the bins of ranks, with capacities in tokens and balanced work.

_FIRST_PHASE_TOLERANCE = 0.002  # relative excess of the maximum over the mean at which the first phase ends
BALANCE_TOLERANCE = 0.01  # and at which the more expensive exchanges end
_ROUNDS = 300
_TRIALS = 200  # exchanges that recompute the work of two ranks
_CANDIDATES = 6
_MAX_PAIRED_SEGMENTS = 24  # segments per rank of which pairs are considered
_OVERFLOW_PRICE = 10.0  # cost of a whole rank's tokens; twice the mean work costs 1


@dataclass(frozen=True)
class SegmentBins:
    """Segments that each go to one rank, and the capacities of the ranks."""

    length: NDArray  # [num_segments] tokens
    # [3, num_segments] work of each segment that starts at a block boundary, inside a block, and so late in a block
    # that it touches an additional one
    work: NDArray
    capacity: NDArray  # [num_ranks] tokens of each bin
    loads: NDArray  # [num_ranks] initial work
    offset: NDArray  # [num_ranks] tokens of its first block before the bin
    block: int  # tokens of a block
    shared: float  # work that two neighbors save by sharing a block

    @property
    def num_ranks(self) -> int:
        """Number of ranks, including those without capacity."""
        return len(self.capacity)

    @cached_property
    def mean_work(self) -> NDArray:
        """Work of each segment if its position within a block is unknown."""
        return self.work[1:].mean(axis=0)

    def tokens(self, owner: NDArray) -> NDArray:
        """Tokens in each rank's bin, float64."""
        return np.bincount(owner, weights=self.length, minlength=self.num_ranks)

    def estimate(self, owner: NDArray) -> NDArray:
        """Estimated work of each rank, for any order of its segments."""
        return self.loads + np.bincount(owner, weights=self.mean_work, minlength=self.num_ranks)

    def fits(self, owner: NDArray) -> bool:
        """Whether all bins are within their capacity."""
        return bool((self.tokens(owner) <= self.capacity).all())

    def order(self, mine: NDArray, offset: int) -> NDArray:
        """
        An order of the segments `mine` that visits few blocks.

        A segment that starts inside a block may touch one block more than necessary, which adds work in proportion to
        its length: the longest segment that does not comes next, or else the shortest.
        """
        mine = mine[np.argsort(self.length[mine], kind="stable")]
        sizes, left, order = self.length[mine].tolist(), list(range(len(mine))), []
        tails = [(size - 1) % self.block + 1 for size in sizes]
        while left:
            free = self.block - offset % self.block
            at = next((at for at in range(len(left) - 1, -1, -1) if tails[left[at]] <= free), 0)
            order.append(left.pop(at))
            offset += sizes[order[-1]]
        return mine[order]

    def rank_work(self, owner: NDArray, rank: int) -> float:
        """Work of a rank with its segments in the order of [`order`]."""
        offset = int(self.offset[rank])
        mine = self.order(np.flatnonzero(owner == rank), offset)
        begin = (offset + np.cumsum(self.length[mine]) - self.length[mine]) % self.block
        late = begin + (self.length[mine] - 1) % self.block >= self.block
        work = self.work[np.where(late, 2, np.minimum(begin, 1)), mine]
        return float(self.loads[rank] + work.sum() - self.shared * np.count_nonzero(begin))

    def divide(self) -> NDArray:
        """
        Assigns a rank to each segment.

        Longest first to the largest free capacity; then exchanges of a segment for another one or for nothing between
        the most expensive rank and any other, the best one each time. The cost of a rank is its squared deviation from
        the mean work plus a larger price for tokens above its capacity.
        """
        num_ranks = self.num_ranks
        owner = self._by_capacity()
        share = self.estimate(owner)
        if num_ranks == 1 or not len(owner) or not share.any():
            return owner
        # An empty segment on each rank turns moves into exchanges.
        length = np.append(self.length, np.zeros(num_ranks, np.int64))
        weight = np.append(self.mean_work, np.zeros(num_ranks)) / share.mean()
        tokens, share = self.tokens(owner), share / share.mean()
        owner = np.append(owner, np.arange(num_ranks))
        price = _OVERFLOW_PRICE / self.capacity.max()
        for _ in range(_ROUNDS):
            if (tokens <= self.capacity).all() and share.max() <= 1 + _FIRST_PHASE_TOLERANCE:
                break
            costs = (share - 1) ** 2 + price * np.maximum(tokens - self.capacity, 0)
            for rank in np.argsort(-costs, kind="stable").tolist():
                mine = np.flatnonzero(owner == rank)
                moved, shifted = length[mine, None] - length, weight[mine, None] - weight
                after = (share[rank] - shifted - 1) ** 2 + (share[owner] + shifted - 1) ** 2
                after += price * np.maximum(tokens[rank] - moved - self.capacity[rank], 0)
                after += price * np.maximum(tokens[owner] + moved - self.capacity[owner], 0)
                change = np.where(owner == rank, 0.0, after - costs[rank] - costs[owner])
                at = np.unravel_index(int(change.argmin()), change.shape)
                if change[at] < -1e-12:
                    break
            else:
                break
            here, there = mine[at[0]], at[1]
            for sums, amount in ((tokens, moved[at]), (share, shifted[at])):
                sums[rank] -= amount
                sums[owner[there]] += amount
            owner[here], owner[there] = owner[there], rank
        return owner[:-num_ranks]

    def _by_capacity(self) -> NDArray:
        """Assigns segments longest first to the rank with the largest free capacity."""
        owner = np.empty(len(self.length), dtype=np.int64)
        heap = [(-capacity, rank) for rank, capacity in enumerate(self.capacity.tolist())]
        heapq.heapify(heap)
        sizes = self.length.tolist()
        for index in np.argsort(-self.length, kind="stable").tolist():
            capacity, rank = heap[0]
            owner[index] = rank
            heapq.heapreplace(heap, (capacity + sizes[index], rank))
        return owner

    def exchange(self, owner: NDArray) -> NDArray:
        """
        Exchanges segments of the heaviest rank while its actual work decreases and all bins are within their capacity.

        Up to two segments are exchanged for up to two others: a long and a short one for two of medium length changes
        the work but not the tokens.
        """
        owner, trials = owner.copy(), 0
        tokens = self.tokens(owner)
        work = np.array([self.rank_work(owner, rank) for rank in range(self.num_ranks)])
        while trials < _TRIALS and work.max() > (1 + BALANCE_TOLERANCE) * work.mean():
            heavy = int(work.argmax())
            for light in np.argsort(work, kind="stable")[:-1].tolist():
                from_heavy, from_light = self._groups(owner, heavy), self._groups(owner, light)
                moved, shifted = (
                    np.append(values, 0)[from_heavy].sum(axis=1)[:, None]
                    - np.append(values, 0)[from_light].sum(axis=1)
                    for values in (self.length, self.mean_work)
                )
                expected = np.maximum(work[heavy] - shifted, work[light] + shifted)
                fits = (tokens[heavy] - moved <= self.capacity[heavy]) & (
                    tokens[light] + moved <= self.capacity[light]
                )
                expected[~fits] = np.inf
                best = smallest(expected, _CANDIDATES)
                after = None
                for at in best[expected.flat[best] < work[heavy]].tolist():
                    trial, trials = np.append(owner, heavy), trials + 1
                    trial[from_heavy[at // len(from_light)]] = light
                    trial[from_light[at % len(from_light)]] = heavy
                    after = [self.rank_work(trial[:-1], rank) for rank in (heavy, light)]
                    if max(after) < work[heavy] - 1e-9:
                        break
                    after = None
                if after:
                    break
            else:
                break
            owner = trial[:-1]
            tokens, work[[heavy, light]] = self.tokens(owner), after
        return owner

    def _groups(self, owner: NDArray, rank: int) -> NDArray:
        """Pairs of segments of a rank `[num_groups, 2]`; the index after the last segment stands for none."""
        mine, none = np.flatnonzero(owner == rank), len(owner)
        some = mine[:: -(-len(mine) // _MAX_PAIRED_SEGMENTS) or 1]
        left, right = np.triu_indices(len(some), 1)
        alone = np.stack([np.append(mine, none), np.full(len(mine) + 1, none)], axis=1)
        return np.concatenate([np.stack([some[left], some[right]], axis=1), alone])


_MAX_SEGMENTS = 1024  # larger numbers are bundled with their neighbors to keep the search fast
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
    if not split_row.bins.fits(owner):
        split_row, owner = next(
            ((split_row, owner) for split_row, owner in divided if split_row.bins.fits(owner)), shortest
        )
    assignment = split_row.exchange_segments(owner) if split_row.bins.fits(owner) else split_row.assignment(owner)
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
        if len(start) > _MAX_SEGMENTS:
            size = -(-len(ids) // _MAX_SEGMENTS)
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

    def exchange_segments(self, owner: NDArray) -> ContextAssignment:
        """The best of several assignments, each after exchanges corrected by the actual work of the one before."""
        bins, ranks, assignments = self.bins, range(self.bins.num_ranks), []
        for _ in range(_CORRECTIONS):
            owner = bins.exchange(owner)
            assignments.append(self.assignment(owner))
            if assignments[-1].imbalance <= 1 + BALANCE_TOLERANCE:
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
        new_start, bins, fits = self.new_start.copy(), self.bins, self.bins.fits(owner)
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


# The choice between whole-row and whole-segment assignment of a row, by predicted time.

_BACKWARD_FLOPS = 2.5  # of the forward: five matrix products instead of two
_BACKWARD_BYTES = 2.0  # keys and values are gathered again, and their gradients reduced


@dataclass(frozen=True)
class ContextCosts:
    """Costs of a layer on one rank, the mean where layers differ."""

    flops_per_pair: float  # forward FLOPs of attention per pair of query and key, all heads
    flops_per_token: float  # forward FLOPs of the rest of the layer
    bytes_per_token: float  # of keys and values
    flops_per_ms: float  # of a rank
    bytes_per_ms: float  # that a rank receives
    # of a token of a sample on several ranks, which go to others and back where a layer carries a state
    moved_bytes_per_token: float = 0.0

    @classmethod
    def of_layer(
        cls,
        num_heads: int,  # query heads
        num_kv_heads: int,
        head_dim: int,
        num_parameters: int,  # elements of the matrices that a token is multiplied with
        flops_per_ms: float,
        bytes_per_ms: float,
        bytes_per_value: int = 2,  # of keys and values
    ) -> ContextCosts:
        """Computes the costs of a layer from its sizes on the rank."""
        kv_bytes = 2.0 * num_kv_heads * head_dim * bytes_per_value
        return cls(4.0 * num_heads * head_dim, 2.0 * num_parameters, kv_bytes, flops_per_ms, bytes_per_ms)

    def layer_ms(self, assignment: ContextAssignment) -> float:
        """
        Predicts the forward and backward time of one layer on the rank with the most work.

        The gather overlaps with attention, so that only the longer of the two counts.
        """
        tokens, num_others = assignment.tokens_per_rank, assignment.num_ranks - 1
        compute = float(assignment.work.max()) * assignment.block**2 * self.flops_per_pair / self.flops_per_ms
        sent = assignment.gathered.shape[1] * assignment.block
        gather = num_others * sent * self.bytes_per_token / self.bytes_per_ms
        moved = 2 * sent * num_others / assignment.num_ranks * self.moved_bytes_per_token / self.bytes_per_ms
        attention = max(compute, gather) + max(_BACKWARD_FLOPS * compute, _BACKWARD_BYTES * gather)
        return attention + moved + 3 * tokens * self.flops_per_token / self.flops_per_ms


def assign_context(
    first: ArrayLike,  # [num_tokens] the first position that each token sees; gaps up to the last one count as seen
    last: ArrayLike,  # [num_tokens] the last one; less than `first` for a token that sees nothing, such as padding
    num_ranks: int,
    block: int = BLOCK,  # tokens of a block
    method: Method = "lpt",  # see `distribute`; other than "lpt" for whole rows only
    mode: Mode | Literal["auto"] = "row",
    segment_ids: ArrayLike | None = None,  # [num_tokens] from 1, 0 for padding; for "segments" and "auto"
    costs: ContextCosts | None = None,  # for "auto"
    seed: int = 0,  # of the method "random"
) -> ContextAssignment:
    """
    Assigns a row of tokens to context-parallel ranks, with the same result on all ranks for the same arguments.

    Mode `"row"` gathers the keys and values of the whole row, `"segments"` keeps segments whole if possible
    ([`assign_segments`]), `"auto"` uses the faster one by `costs`. Raises `ValueError` for arguments that contradict
    each other.
    """
    if mode not in ("row", "segments", "auto"):
        raise ValueError(f"`mode={mode!r}` is unknown. Use 'row', 'segments' or 'auto'.")
    if mode != "row" and segment_ids is None:
        raise ValueError(f"`mode={mode!r}` may reorder segments and needs to know them. Pass `segment_ids`.")
    if mode == "auto" and costs is None:
        raise ValueError("`mode='auto'` compares times and needs costs to predict them. Pass `costs`.")
    if mode == "segments" and method != "lpt":
        raise ValueError(f"`method={method!r}` distributes blocks, not whole segments. Use `mode='row'`.")
    if segment_ids is None or mode == "row":
        return assign_rows(first, last, num_ranks, block, method, seed)
    whole = assign_segments(first, last, segment_ids, num_ranks, block)
    if costs is None or mode == "segments":
        return whole
    return choose_faster(costs, assign_rows(first, last, num_ranks, block, method, seed), whole)


def choose_faster(costs: ContextCosts, *assignments: ContextAssignment) -> ContextAssignment:
    """The assignment with the fastest predicted layers; the first of equals."""
    return min(assignments, key=costs.layer_ms)
