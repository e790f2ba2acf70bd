"""Work of the blocks of a row of tokens, and its balance over ranks."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK = 128
PARTIAL_COST = 0.3
"""What the test of each pair adds to a block of which only a part is seen, as a share of a block."""

Method = Literal["lpt", "zigzag", "contiguous", "random"]

_EXCHANGES = 64  # each costs some 50 microseconds with 1,000 blocks a rank
_CLOSE_ENOUGH = 1e-4  # of the mean; nearer than this the formula itself says nothing


def block_counts(first: ArrayLike, last: ArrayLike, block: int = BLOCK) -> tuple[NDArray, NDArray]:
    """
    Counts the blocks of keys that each block of queries visits, and those of them that it sees in part only.

    Each block of queries visits all blocks of keys from the first to the last token that one of its queries sees.

    Args:
        first (array of shape `[num_tokens]`, integers): The first place that each token sees.
        last (array of shape `[num_tokens]`, integers): The last place that each token sees; less than `first` for a
            token that sees nothing.
        block (`int`, *optional*, defaults to 128): Tokens of a block; the last block may be shorter.

    Returns:
        `tuple[numpy.ndarray, numpy.ndarray]`: Visited blocks and partial blocks, int64 `[num_blocks]`.
    """
    first, last = np.asarray(first), np.asarray(last)
    starts = np.arange(0, len(first), block)
    if not len(starts):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    lowest, highest = _per_block(np.minimum, first, block), _per_block(np.maximum, last, block)
    highest_first, lowest_last = _per_block(np.maximum, first, block), _per_block(np.minimum, last, block)
    # Rows that see nothing are seldom: only their blocks are looked at again. No block is full for them, since the
    # last place they see is before the first.
    for index in np.flatnonzero(_per_block(np.logical_or, last < first, block)):
        rows = slice(starts[index], starts[index] + block)
        sees = last[rows] >= first[rows]
        lowest[index] = first[rows].min(where=sees, initial=np.iinfo(first.dtype).max)
        highest[index] = last[rows].max(where=sees, initial=-1)
    visited = np.where(highest < lowest, 0, highest // block - lowest // block + 1)
    full = (lowest_last + 1) // block + (-highest_first // block)
    return visited, visited - np.maximum(full, 0)


def _per_block(reduce: np.ufunc, values: NDArray, block: int) -> NDArray:
    """One value of each block, int64 or bool, where the last block may be shorter."""
    whole = len(values) // block * block
    found = reduce.reduce(values[:whole].reshape(-1, block), axis=1)
    if whole < len(values):
        found = np.append(found, reduce.reduce(values[whole:]))
    return found if found.dtype == bool else found.astype(np.int64)


def block_workloads(
    first: ArrayLike, last: ArrayLike, block: int = BLOCK, partial_cost: float = PARTIAL_COST
) -> NDArray:
    """
    Estimates the attention work of each block of queries, in blocks of keys, from the rows' intervals alone.

    Args:
        first (array of shape `[num_tokens]`, integers): The first place that each token sees.
        last (array of shape `[num_tokens]`, integers): The last place that each token sees; less than `first` for a
            token that sees nothing.
        block (`int`, *optional*, defaults to 128): Tokens of a block.
        partial_cost (`float`, *optional*, defaults to 0.3): What a block adds of which only a part is seen.

    Returns:
        `numpy.ndarray`: float64 `[num_blocks]`.
    """
    visited, partial = block_counts(first, last, block)
    return visited + partial_cost * partial


def distribute(workloads: ArrayLike, num_ranks: int, method: Method = "lpt", seed: int = 0) -> NDArray:
    """
    Hands blocks to ranks, to each the same number.

    `"lpt"` goes longest first, in rounds: of the blocks sorted by work, each `num_ranks` in a row go to the ranks, the
    heaviest to the rank that has the least work. Two ranks then differ by at most the largest difference inside a
    round. Exchanges of two blocks between the heaviest rank and another follow while they help. The others are what
    it is compared with: `"zigzag"` gives each rank a run from the front and one from the back, `"contiguous"` one run.

    Args:
        workloads (array of shape `[num_blocks]`): Work of each block. Blocks without work are added at the end until
            the number of ranks divides their number.
        num_ranks (`int`): Ranks.
        method (`str`, *optional*, defaults to `"lpt"`): `"lpt"`, `"zigzag"`, `"contiguous"` or `"random"`.
        seed (`int`, *optional*, defaults to 0): Of `"random"`.

    Returns:
        `numpy.ndarray`: The blocks of each rank, ascending, int64 `[num_ranks, blocks_per_rank]`. Indices past the
        end are the blocks that were added.

    Raises:
        `ValueError`: For a method that does not exist or less than one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"`num_ranks={num_ranks}`: blocks need somebody to go to. Use 1 or more.")
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
    raise ValueError(f"`method={method!r}` hands out no blocks. Use one of {', '.join(get_args(Method))}.")


def _longest_first(work: NDArray, num_ranks: int) -> NDArray:
    """The heaviest block of each round to the rank with the least work."""
    rounds = np.argsort(-work, kind="stable").reshape(-1, num_ranks)
    weights = work[rounds]
    taker = np.tile(np.arange(num_ranks), (len(rounds), 1))
    uneven = np.flatnonzero(weights[:, 0] != weights[:, -1])  # the other rounds add the same to all
    loads, ranks, takers = [0.0] * num_ranks, list(range(num_ranks)), []
    for weight in weights[uneven].tolist():
        ranks.sort(key=loads.__getitem__)
        takers.append(ranks.copy())
        for rank, value in zip(ranks, weight, strict=True):
            loads[rank] += value
    if takers:
        taker[uneven] = takers
    blocks = np.empty((num_ranks, len(rounds)), dtype=np.int64)
    blocks[taker, np.arange(len(rounds))[:, None]] = rounds
    return blocks


def _exchange(blocks: NDArray, work: NDArray) -> NDArray:
    """Exchanges a block of the heaviest rank for one of another as long as that lowers the heavier of the two."""
    loads = work[blocks].sum(axis=1)
    mean = loads.mean()
    for _ in range(_EXCHANGES):
        heavy = int(loads.argmax())
        if loads[heavy] - mean <= _CLOSE_ENOUGH * mean:
            break
        for light in np.argsort(loads, kind="stable").tolist():
            gap = loads[heavy] - loads[light]
            if gap <= 2 * _CLOSE_ENOUGH * mean:
                return blocks
            mine, theirs, moved = _best_pair(work[blocks[heavy]], work[blocks[light]], gap)
            if 0 < moved < gap * (1 - 1e-9):
                break
        else:
            return blocks
        blocks[heavy, mine], blocks[light, theirs] = blocks[light, theirs], blocks[heavy, mine]
        loads[heavy] -= moved
        loads[light] += moved
    return blocks


def _best_pair(mine: NDArray, theirs: NDArray, gap: float) -> tuple[int, int, float]:
    """The two whose exchange moves as near to half of `gap` as can be, and what it moves."""
    order = np.argsort(theirs, kind="stable")
    at = np.searchsorted(theirs[order], mine - gap / 2)
    candidates = np.stack([order[np.minimum(at, len(order) - 1)], order[np.maximum(at - 1, 0)]])
    moved = mine - theirs[candidates]
    best = int(np.abs(moved - gap / 2).argmin())
    side, index = divmod(best, len(mine))
    return index, int(candidates[side, index]), float(moved[side, index])
