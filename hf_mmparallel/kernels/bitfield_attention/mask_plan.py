"""
A mask compiled for the kernels: the values that they test for each pair, and the blocks of keys of each block of
queries.

Axis letters: B batch, Q queries, K keys, M blocks of queries, N blocks of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_states import EMPTY, PARTIAL, general_states, interval_states, key_rows, query_rows, real_places
from .intervals import row_bounds
from .mask import BitfieldMask
from .work_split import SplitTiles, split_tiles, step_costs


@dataclass(frozen=True)
class BlockLists:
    """The work of one kernel: tiles, longest first, and the blocks that each tile visits."""

    # int32 [num_tiles, 5]: row of the batch, block of this side, `begin`, `middle` and `end` of its list in `blocks`,
    # whose partial blocks are `begin:middle` and full blocks `middle:end`
    tiles: Tensor
    blocks: Tensor  # int32 [size], blocks of the other side; entries outside of all lists are undefined


@dataclass(frozen=True)
class MaskPlan:
    """
    A [`BitfieldMask`] and a window, compiled for one pair of block sizes.

    In the interval form each query sees the keys at positions `first` to `first + length - 1`; in the general form the
    kernels test the words themselves.
    """

    interval: bool
    block_q: int  # queries of a block
    block_k: int  # keys of a block
    # int32 [batch, 2 or 5, query_length]. Interval form: first position and length (0 if it sees no key). General
    # form: low half of the word, kinds that it sees, last position that it sees causally, low half of the words of its
    # span, position before its window.
    query_rows: Tensor
    # int32 [batch, 1 or 3, key_length]: position (-1 for padding); in the general form also the low half of the word,
    # and the kinds
    key_rows: Tensor
    by_query: BlockLists  # for the forward kernel and the gradient of the queries
    by_key: BlockLists  # for the gradients of keys and values
    split: SplitTiles | None = None  # the forward tiles, if the keys of some queries are split over several programs

    @property
    def batch_size(self) -> int:
        """Returns the batch size."""
        return self.query_rows.shape[0]

    @property
    def num_queries(self) -> int:
        """Number of queries per row of the batch."""
        return self.query_rows.shape[2]

    @property
    def num_keys(self) -> int:
        """Number of keys per row of the batch."""
        return self.key_rows.shape[2]


def compile_mask(
    mask: BitfieldMask,
    window: int = 0,  # sliding window in tokens; 0 for none
    block_q: int = 128,
    block_k: int = 128,
    *,
    num_heads: int = 1,  # query heads that run each tile: with few heads, tiles may be split
    # that run at once; by default the multiprocessors of the mask's device, 1 on a CPU
    num_programs: int | None = None,
) -> MaskPlan:
    """Compiles a mask to values per query and key, and block lists, on the mask's device."""
    bounds, has_holes = row_bounds(mask, window)
    places = real_places(mask)
    states = interval_states(bounds, places, block_q, block_k)
    work = _Work.of(states)
    *sizes, general = torch.stack([*work.sizes(), has_holes]).tolist()  # the only synchronization with the device
    if general:  # a second synchronization
        states = general_states(states, mask, window, block_q, block_k)
        work = _Work.of(states)
        sizes = torch.stack(work.sizes()).tolist()
    by_query, by_key = work.lists(states, sizes)
    programs = num_programs or _programs(mask.query_words.device)
    return MaskPlan(
        interval=not general,
        block_q=block_q,
        block_k=block_k,
        query_rows=query_rows(mask, bounds, general, window),
        key_rows=key_rows(mask, places, general),
        by_query=by_query,
        by_key=by_key,
        split=split_tiles(by_query.tiles, sizes[2], sizes[3], num_heads, programs),
    )


@dataclass(frozen=True)
class _Work:
    """Visited blocks of the tiles of the blocks of queries, followed by those of the blocks of keys."""

    visits: Tensor  # int32 [2, num_tiles], number of visited blocks, and of partial blocks among them
    costs: Tensor  # int32 [num_tiles], from `step_costs`
    num_rows: int  # tiles of the blocks of queries

    @classmethod
    def of(cls, states_BMN: Tensor) -> _Work:
        pair = torch.stack([states_BMN != EMPTY, states_BMN == PARTIAL])
        visits = torch.cat([pair.sum(dim=dim, dtype=torch.int32).flatten(1) for dim in (-1, -2)], dim=1)
        return cls(visits, step_costs(visits[1], visits[0]), states_BMN[..., 0].numel())

    def sizes(self) -> list[Tensor]:
        """The longest list of each side, and the largest cost and the total cost of the blocks of queries."""
        by_query, by_key = self.visits[0].tensor_split([self.num_rows])
        costs = self.costs[: self.num_rows]
        return [by_query.amax(), by_key.amax(), costs.amax(), costs.sum()]

    def lists(self, states_BMN: Tensor, widths: Sequence[int]) -> tuple[BlockLists, BlockLists]:
        """Makes the lists of the blocks of queries and of keys; `widths` are the longest lists of each side."""
        visits, costs = (tensor.tensor_split([self.num_rows], dim=-1) for tensor in (self.visits, self.costs))
        return (
            _lists(states_BMN, visits[0], costs[0], widths[0]),
            _lists(states_BMN.transpose(1, 2), visits[1], costs[1], widths[1]),
        )


def _lists(states_BMN: Tensor, visits: Tensor, costs: Tensor, width: int) -> BlockLists:
    """Tiles of one side, longest first, with lists of `width` blocks each: partial blocks, then full blocks."""
    num_blocks = states_BMN.shape[1]
    longest_first = costs.argsort(descending=True, stable=True)
    rows = longest_first.to(torch.int32)
    begin = rows * width
    seen_end, partial_end = (visits[:, longest_first] + begin).unbind()
    columns = [rows // num_blocks, rows % num_blocks, begin, partial_end, seen_end]
    order = states_BMN.sort(dim=-1, descending=True, stable=True).indices
    # Without any pair there is one unused entry, so that kernels have an address to load from.
    blocks = order[..., : max(width, 1)].to(torch.int32).flatten()
    return BlockLists(tiles=torch.stack(columns, dim=1), blocks=blocks)


def _programs(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
