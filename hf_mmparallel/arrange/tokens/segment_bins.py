"""Assignment of segments to the bins of ranks, with capacities in tokens and balanced work."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..._portable import smallest

_BALANCED = 0.002  # relative excess of the maximum over the mean at which the first phase ends
GOOD = 0.01  # and at which the more expensive exchanges end
_ROUNDS = 300
_TRIALS = 200  # exchanges that recompute the work of two ranks
_CANDIDATES = 6
_FEW = 24  # segments per rank of which pairs are considered
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

    def fit(self, owner: NDArray) -> bool:
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
            if (tokens <= self.capacity).all() and share.max() <= 1 + _BALANCED:
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
        while trials < _TRIALS and work.max() > (1 + GOOD) * work.mean():
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
        some = mine[:: -(-len(mine) // _FEW) or 1]
        left, right = np.triu_indices(len(some), 1)
        alone = np.stack([np.append(mine, none), np.full(len(mine) + 1, none)], axis=1)
        return np.concatenate([np.stack([some[left], some[right]], axis=1), alone])
