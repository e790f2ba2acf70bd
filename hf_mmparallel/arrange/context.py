"""Which rank of context parallelism holds which tokens of a packed row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .blocks import BLOCK, Method, block_workloads, distribute

Mode = Literal["row", "segments"]
"""What is gathered: the keys of all blocks, or of those only whose segments span ranks."""


@dataclass(frozen=True, eq=False)
class ContextAssignment:
    """
    A row of tokens cut over ranks, the same number of tokens for each.

    The row is laid out anew (`layout`; the same row in mode `"row"`), then cut in blocks of `block` tokens, and each
    rank holds some of them. A segment keeps its tokens side by side and in their order.

    Args:
        layout (`numpy.ndarray` of shape `[padded_length]`):
            int64 index into the row for each place, -1 for padding that was added.
        blocks (`numpy.ndarray` of shape `[num_ranks, blocks_per_rank]`): int64 blocks of the layout that each rank
            holds, ascending.
        gathered (`numpy.ndarray` of shape `[num_ranks, num_gathered]`): int64 indices into the rank's own blocks,
            ascending: those whose keys and values other ranks need, and enough others that all ranks give as many.
        work (`numpy.ndarray` of shape `[num_ranks]`): Attention work of each rank, as [`block_workloads`] counts it.
        num_tokens (`int`): Tokens of the row.
        block (`int`): Tokens of a block.
        mode (`str`): `"row"` when all blocks are gathered, `"segments"` when only those of segments that span ranks.
    """

    layout: NDArray
    blocks: NDArray
    gathered: NDArray
    work: NDArray
    num_tokens: int
    block: int = BLOCK
    mode: Mode = "row"

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return self.blocks.shape[0]

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each rank, padding included."""
        return self.blocks.shape[1] * self.block

    @property
    def padded_length(self) -> int:
        """Tokens of all ranks, padding included."""
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
        int32 `[padded_length]` places in the layout, in the order of `order`.

        They serve as the places of the mask: inside a segment they differ as those of the row do, no two are equal,
        and those of a block follow each other.
        """
        starts = (self.blocks.reshape(-1, 1) * self.block).astype(np.int32)
        return (starts + np.arange(self.block, dtype=np.int32)).reshape(-1)

    @cached_property
    def places(self) -> NDArray:
        """int64 `[num_tokens]`: where `order` has each token of the row, its inverse."""
        held = np.flatnonzero(self.order >= 0)
        places = np.empty(self.num_tokens, dtype=np.int64)
        places[self.order[held]] = held
        return places


def padded_length(num_tokens: int, num_ranks: int, block: int = BLOCK) -> int:
    """The least length of at least one block a rank that holds the tokens in blocks, as many for each rank."""
    return max(1, -(-num_tokens // (block * num_ranks))) * block * num_ranks


def assign_rows(
    first: ArrayLike,
    last: ArrayLike,
    num_ranks: int,
    block: int = BLOCK,
    method: Method = "lpt",
    seed: int = 0,
) -> ContextAssignment:
    """
    Hands the blocks of a row to ranks; the keys of all of them are gathered.

    Args:
        first (array of shape `[num_tokens]`, integers): The first place that each token sees.
        last (array of shape `[num_tokens]`, integers): The last place that each token sees; less than `first` for a
            token that sees nothing.
        num_ranks (`int`): Ranks.
        block (`int`, *optional*, defaults to 128): Tokens of a block.
        method (`str`, *optional*, defaults to `"lpt"`): See [`distribute`].
        seed (`int`, *optional*, defaults to 0): Of the method `"random"`.
    """
    num_tokens = len(np.asarray(first))
    length = padded_length(num_tokens, num_ranks, block)
    work = block_workloads(first, last, block)
    work = np.append(work, np.zeros(length // block - len(work)))
    blocks = distribute(work, num_ranks, method, seed)
    layout = np.arange(length)
    layout[num_tokens:] = -1
    gathered = np.tile(np.arange(blocks.shape[1]), (num_ranks, 1))
    return ContextAssignment(layout, blocks, gathered, work[blocks].sum(axis=1), num_tokens, block, "row")
