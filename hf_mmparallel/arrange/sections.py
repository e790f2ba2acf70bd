"""Segments to the sections of ranks: all tokens have room and no rank has much more work than another."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

_BALANCED = 0.002  # excess of the heaviest over the mean at which the division ends
GOOD = 0.01  # and at which the exchanges after it end, which are dearer
_ROUNDS = 300
_TRIALS = 200  # of which each counts the work of two ranks anew
_CANDIDATES = 6
_FEW = 24  # segments of a rank of which pairs are looked at
_OVERFLOW_PRICE = 10.0  # of a whole rank's tokens, where a rank's work twice the mean costs 1


@dataclass(frozen=True)
class Sections:
    """
    Segments that each go whole to one rank, and what the ranks have room for.

    Args:
        length (`numpy.ndarray` of shape `[num_segments]`): Tokens of each segment.
        work (`numpy.ndarray` of shape `[3, num_segments]`):
            Work of each when it starts with a block, inside a block, and so late in one that it touches one more.
        room (`numpy.ndarray` of shape `[num_ranks]`): Tokens that each rank's section holds.
        loads (`numpy.ndarray` of shape `[num_ranks]`): Work that each rank has already.
        offset (`numpy.ndarray` of shape `[num_ranks]`): Tokens of its first block that are before the section.
        block (`int`): Tokens of a block.
        shared (`float`): Work that two neighbours save since they share a block.
    """

    length: NDArray
    work: NDArray
    room: NDArray
    loads: NDArray
    offset: NDArray
    block: int
    shared: float

    @property
    def num_ranks(self) -> int:
        """Ranks, those without room included."""
        return len(self.room)

    @cached_property
    def mean_work(self) -> NDArray:
        """Work of each segment when it is not known where in a block it starts."""
        return self.work[1:].mean(axis=0)

    def tokens(self, owner: NDArray) -> NDArray:
        """Tokens of each rank's section, float64."""
        return np.bincount(owner, weights=self.length, minlength=self.num_ranks)

    def estimate(self, owner: NDArray) -> NDArray:
        """Work of each rank, in whatever order its segments will be."""
        return self.loads + np.bincount(owner, weights=self.mean_work, minlength=self.num_ranks)

    def fit(self, owner: NDArray) -> bool:
        """Whether all tokens have room."""
        return bool((self.tokens(owner) <= self.room).all())

    def order(self, mine: NDArray, offset: int) -> NDArray:
        """
        An order of the segments `mine` that visits few blocks.

        A segment that starts in the middle of a block may touch one block more than it needs, and the longer it is,
        the more work that adds: the longest that doesn't comes next, or else the shortest.
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
        """Work of a rank whose section begins at its place and lies in the order of [`order`]."""
        offset = int(self.offset[rank])
        mine = self.order(np.flatnonzero(owner == rank), offset)
        begin = (offset + np.cumsum(self.length[mine]) - self.length[mine]) % self.block
        late = begin + (self.length[mine] - 1) % self.block >= self.block
        work = self.work[np.where(late, 2, np.minimum(begin, 1)), mine]
        return float(self.loads[rank] + work.sum() - self.shared * np.count_nonzero(begin))

    def divide(self) -> NDArray:
        """
        The rank of each segment.

        Longest first to where most room is, then exchanges of a segment for another one or for nothing between the
        rank that costs most and any other, the best each time. A rank costs the square of its deviation from the mean
        work and, dearer, the tokens that have no room.
        """
        num_ranks = self.num_ranks
        owner = self._most_room()
        share = self.estimate(owner)
        if num_ranks == 1 or not len(owner) or not share.any():
            return owner
        # A segment of no length on each rank makes a move a kind of exchange.
        length = np.append(self.length, np.zeros(num_ranks, np.int64))
        weight = np.append(self.mean_work, np.zeros(num_ranks)) / share.mean()
        tokens, share = self.tokens(owner), share / share.mean()
        owner = np.append(owner, np.arange(num_ranks))
        price = _OVERFLOW_PRICE / self.room.max()
        for _ in range(_ROUNDS):
            if (tokens <= self.room).all() and share.max() <= 1 + _BALANCED:
                break
            costs = (share - 1) ** 2 + price * np.maximum(tokens - self.room, 0)
            for rank in np.argsort(-costs, kind="stable").tolist():
                mine = np.flatnonzero(owner == rank)
                moved, shifted = length[mine, None] - length, weight[mine, None] - weight
                after = (share[rank] - shifted - 1) ** 2 + (share[owner] + shifted - 1) ** 2
                after += price * np.maximum(tokens[rank] - moved - self.room[rank], 0)
                after += price * np.maximum(tokens[owner] + moved - self.room[owner], 0)
                change = np.where(owner == rank, 0.0, after - costs[rank] - costs[owner])
                at = np.unravel_index(int(change.argmin()), change.shape)
                if change[at] < -1e-12:
                    break
            else:
                break
            here, there = mine[at[0]], at[1]
            for sums, part in ((tokens, moved[at]), (share, shifted[at])):
                sums[rank] -= part
                sums[owner[there]] += part
            owner[here], owner[there] = owner[there], rank
        return owner[:-num_ranks]

    def _most_room(self) -> NDArray:
        """Longest first to the rank with most room left."""
        owner = np.empty(len(self.length), dtype=np.int64)
        heap = [(-room, rank) for rank, room in enumerate(self.room.tolist())]
        heapq.heapify(heap)
        sizes = self.length.tolist()
        for index in np.argsort(-self.length, kind="stable").tolist():
            room, rank = heap[0]
            owner[index] = rank
            heapq.heapreplace(heap, (room + sizes[index], rank))
        return owner

    def exchange(self, owner: NDArray) -> NDArray:
        """
        Exchanges segments of the heaviest rank while its work, in its order, falls and all tokens have room.

        Up to two are exchanged for up to two others: long and short ones for two of medium length changes the work
        and not the tokens. Where a rank has many segments, pairs of some of them do.
        """
        owner, trials = owner.copy(), 0
        tokens = self.tokens(owner)
        work = np.array([self.rank_work(owner, rank) for rank in range(self.num_ranks)])
        while trials < _TRIALS and work.max() > (1 + GOOD) * work.mean():
            heavy = int(work.argmax())
            for light in np.argsort(work, kind="stable")[:-1].tolist():
                given, taken = self._groups(owner, heavy), self._groups(owner, light)
                moved, shifted = (
                    np.append(values, 0)[given].sum(axis=1)[:, None] - np.append(values, 0)[taken].sum(axis=1)
                    for values in (self.length, self.mean_work)
                )
                expected = np.maximum(work[heavy] - shifted, work[light] + shifted)
                fits = (tokens[heavy] - moved <= self.room[heavy]) & (tokens[light] + moved <= self.room[light])
                expected[~fits] = np.inf
                best = np.argpartition(expected, min(_CANDIDATES, expected.size - 1), axis=None)[:_CANDIDATES]
                best = best[expected.flat[best] < work[heavy]]
                after = None
                for at in best[np.argsort(expected.flat[best], kind="stable")].tolist():
                    trial, trials = np.append(owner, heavy), trials + 1
                    trial[given[at // len(taken)]], trial[taken[at % len(taken)]] = light, heavy
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
        """Pairs of segments of a rank `[num_groups, 2]`; one past the last segment stands for none."""
        mine, none = np.flatnonzero(owner == rank), len(owner)
        some = mine[:: -(-len(mine) // _FEW) or 1]
        left, right = np.triu_indices(len(some), 1)
        alone = np.stack([np.append(mine, none), np.full(len(mine) + 1, none)], axis=1)
        return np.concatenate([np.stack([some[left], some[right]], axis=1), alone])
