"""Assignment of the tokens of a packed row to context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .blocks import BLOCK, Method, block_workloads, distribute

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
        """Number of ranks."""
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
