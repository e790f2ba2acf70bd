"""Assignment of the tokens of a packed row to context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Attention work of the blocks of a row of tokens, and its balance over ranks.

BLOCK = 128
# additional cost of a partially visible block for the test of each pair, relative to a full block; a multiple of a
# power of two, so that all sums of work are exact
PARTIAL_COST = round(0.3 * 2**20) / 2**20

Method = Literal["lpt", "zigzag", "contiguous", "random"]

_EXCHANGES = 64  # each takes about 50 microseconds with 1,000 blocks per rank
_BALANCE_TOLERANCE = 1e-4  # relative to the mean; smaller differences are below the accuracy of the estimate


def block_counts(
    first: ArrayLike,  # [num_tokens] the first position that each token sees
    last: ArrayLike,  # [num_tokens] the last one; less than `first` for a token that sees nothing
    block: int = BLOCK,  # tokens of a block; the last block may be shorter
) -> tuple[NDArray, NDArray]:
    """
    Counts the key blocks that each query block visits, and those that are only partially visible, `[num_blocks]` each.

    Each query block visits all key blocks from the first to the last token that any of its queries sees.
    """
    first, last = np.asarray(first), np.asarray(last)
    starts = np.arange(0, len(first), block)
    if not len(starts):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    lowest, highest = _per_block(np.minimum, first, block), _per_block(np.maximum, last, block)
    highest_first, lowest_last = _per_block(np.maximum, first, block), _per_block(np.minimum, last, block)
    # Tokens that see nothing are rare: only their blocks are recomputed. No block is full for them, since the last
    # position they see is before the first.
    for index in np.flatnonzero(_per_block(np.logical_or, last < first, block)):
        rows = slice(starts[index], starts[index] + block)
        sees = last[rows] >= first[rows]
        lowest[index] = first[rows].min(where=sees, initial=np.iinfo(first.dtype).max)
        highest[index] = last[rows].max(where=sees, initial=-1)
    visited = np.where(highest < lowest, 0, highest // block - lowest // block + 1)
    full = (lowest_last + 1) // block + (-highest_first // block)
    return visited, visited - np.maximum(full, 0)


def _per_block(reduce: np.ufunc, values: NDArray, block: int) -> NDArray:
    """One value per block, int64 or bool; the last block may be shorter."""
    whole = len(values) // block * block
    result = reduce.reduce(values[:whole].reshape(-1, block), axis=1)
    if whole < len(values):
        result = np.append(result, reduce.reduce(values[whole:]))
    return result if result.dtype == bool else result.astype(np.int64)


def block_workloads(
    first: ArrayLike, last: ArrayLike, block: int = BLOCK, partial_cost: float = PARTIAL_COST
) -> NDArray:
    """Estimates the attention work `[num_blocks]` of each query block in key blocks, see [`block_counts`]."""
    visited, partial = block_counts(first, last, block)
    return visited + partial_cost * partial


def distribute(
    workloads: ArrayLike,  # [num_blocks]; blocks without work are appended up to a multiple of `num_ranks`
    num_ranks: int,
    method: Method = "lpt",
    seed: int = 0,  # of "random"
) -> NDArray:
    """
    Distributes blocks over ranks, the same number to each: ascending indices `[num_ranks, blocks_per_rank]`.

    `"lpt"` (longest processing time first) works in rounds: of the blocks sorted by work, each `num_ranks` consecutive
    ones go to the ranks, the heaviest to the rank with the least work. Two ranks then differ by at most the largest
    difference within a round. Exchanges of two blocks between the heaviest rank and another one follow while they
    help. The other methods are for comparison: `"zigzag"` gives each rank a run from the front and one from the back,
    `"contiguous"` one run. Raises `ValueError` for an unknown method or less than one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"`num_ranks={num_ranks}`: blocks need at least one rank. Use 1 or more.")
    work = np.asarray(workloads, dtype=np.float64)
    work = np.append(work, np.zeros(-len(work) % num_ranks))
    share = len(work) // num_ranks
    if method == "lpt":
        return np.sort(_exchange(_longest_first(work, num_ranks), work), axis=1)
    if method == "zigzag":
        indices = np.arange(len(work))
        middle = num_ranks * (share - share // 2)
        front, back = indices[:middle].reshape(num_ranks, -1), indices[middle:].reshape(num_ranks, -1)
        return np.concatenate([front, back[::-1]], axis=1)
    if method == "contiguous":
        return np.arange(len(work)).reshape(num_ranks, -1)
    if method == "random":
        return np.sort(np.random.default_rng(seed).permutation(len(work)).reshape(num_ranks, -1), axis=1)
    raise ValueError(f"`method={method!r}` is unknown. Use one of {', '.join(get_args(Method))}.")


def _longest_first(work: NDArray, num_ranks: int) -> NDArray:
    """Assigns the heaviest block of each round to the rank with the least work."""
    rounds = np.argsort(-work, kind="stable").reshape(-1, num_ranks)
    weights = work[rounds]
    owner = np.tile(np.arange(num_ranks), (len(rounds), 1))
    uneven = np.flatnonzero(weights[:, 0] != weights[:, -1])  # the other rounds add the same to all ranks
    loads, ranks, owners = [0.0] * num_ranks, list(range(num_ranks)), []
    for weight in weights[uneven].tolist():
        ranks.sort(key=loads.__getitem__)
        owners.append(ranks.copy())
        for rank, value in zip(ranks, weight, strict=True):
            loads[rank] += value
    if owners:
        owner[uneven] = owners
    blocks = np.empty((num_ranks, len(rounds)), dtype=np.int64)
    blocks[owner, np.arange(len(rounds))[:, None]] = rounds
    return blocks


def _exchange(blocks: NDArray, work: NDArray) -> NDArray:
    """Exchanges blocks of the heaviest rank and another one as long as that lowers the maximum of the two."""
    loads = work[blocks].sum(axis=1)
    mean = loads.mean()
    for _ in range(_EXCHANGES):
        heavy = int(loads.argmax())
        if loads[heavy] - mean <= _BALANCE_TOLERANCE * mean:
            break
        for light in np.argsort(loads, kind="stable").tolist():
            gap = loads[heavy] - loads[light]
            if gap <= 2 * _BALANCE_TOLERANCE * mean:
                return blocks
            heavy_index, light_index, moved = _best_pair(work[blocks[heavy]], work[blocks[light]], gap)
            if 0 < moved < gap * (1 - 1e-9):
                break
        else:
            return blocks
        heavy_block, light_block = blocks[heavy, heavy_index], blocks[light, light_index]
        blocks[heavy, heavy_index], blocks[light, light_index] = light_block, heavy_block
        loads[heavy] -= moved
        loads[light] += moved
    return blocks


def _best_pair(heavy: NDArray, light: NDArray, gap: float) -> tuple[int, int, float]:
    """Indices of the two blocks whose exchange moves closest to half of `gap`, and the moved work."""
    order = np.argsort(light, kind="stable")
    at = np.searchsorted(light[order], heavy - gap / 2)
    candidates = np.stack([order[np.minimum(at, len(order) - 1)], order[np.maximum(at - 1, 0)]])
    moved = heavy - light[candidates]
    best = int(np.abs(moved - gap / 2).argmin())
    side, index = divmod(best, len(heavy))
    return index, int(candidates[side, index]), float(moved[side, index])


Mode = Literal["row", "segments"]  # which keys are gathered: of all blocks, or only of segments that span ranks


@dataclass(frozen=True, eq=False)
class ContextAssignment:
    """
    Assignment of a row of tokens to ranks, the same number of tokens to each.

    The tokens are reordered (`layout`; the row itself in mode `"row"`), split into blocks of `block` tokens, and each
    rank gets some of the blocks. The tokens of a segment stay consecutive and in order.
    """

    layout: NDArray  # [padded_length] int64 index into the row for each position, -1 for added padding
    blocks: NDArray  # [num_ranks, blocks_per_rank] int64 blocks of the layout on each rank, ascending
    # [num_ranks, num_gathered] int64 indices into the rank's blocks, ascending: blocks whose keys and values other
    # ranks need, plus others such that all ranks send equally many
    gathered: NDArray
    work: NDArray  # [num_ranks] attention work, see `block_workloads`
    num_tokens: int  # of the row
    block: int = BLOCK  # tokens of a block
    mode: Mode = "row"

    @property
    def num_ranks(self) -> int:
        return self.blocks.shape[0]

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each rank, including padding."""
        return self.blocks.shape[1] * self.block

    @property
    def padded_length(self) -> int:
        """Tokens of all ranks, including padding."""
        return self.blocks.size * self.block

    @property
    def imbalance(self) -> float:
        """Work of the heaviest rank over the mean."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    @cached_property
    def order(self) -> NDArray:
        """int64 `[padded_length]` index into the row, -1 for padding: rank `r` has `order[r * n : (r + 1) * n]`."""
        return self.layout.reshape(-1, self.block)[self.blocks.reshape(-1)].reshape(-1)

    @cached_property
    def positions(self) -> NDArray:
        """
        int32 `[padded_length]` positions in the layout, in the order of `order`, which serve as positions for the
        mask.

        Within a segment their differences equal those in the row, all are distinct, and those of a block are
        consecutive.
        """
        starts = (self.blocks.reshape(-1, 1) * self.block).astype(np.int32)
        return (starts + np.arange(self.block, dtype=np.int32)).reshape(-1)


def padded_length(num_tokens: int, num_ranks: int, block: int = BLOCK) -> int:
    """Minimum length for the tokens in whole blocks, equally many and at least one per rank."""
    return max(1, -(-num_tokens // (block * num_ranks))) * block * num_ranks


def assign_rows(
    first: ArrayLike,  # [num_tokens] the first position that each token sees
    last: ArrayLike,  # [num_tokens] the last one; less than `first` for a token that sees nothing
    num_ranks: int,
    block: int = BLOCK,  # tokens of a block
    method: Method = "lpt",  # see `distribute`
    seed: int = 0,  # of the method "random"
) -> ContextAssignment:
    """Assigns the blocks of a row to ranks; all keys are gathered."""
    num_tokens = len(np.asarray(first))
    length = padded_length(num_tokens, num_ranks, block)
    work = block_workloads(first, last, block)
    work = np.append(work, np.zeros(length // block - len(work)))
    blocks = distribute(work, num_ranks, method, seed)
    layout = np.arange(length)
    layout[num_tokens:] = -1
    gathered = np.tile(np.arange(blocks.shape[1]), (num_ranks, 1))
    return ContextAssignment(layout, blocks, gathered, work[blocks].sum(axis=1), num_tokens, block, "row")
