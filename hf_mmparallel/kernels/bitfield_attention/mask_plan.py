"""
A mask compiled for the kernels: what they test for each pair, and which blocks of keys each block of queries visits.

Axis letters: B batch, Q queries, K keys, M blocks of queries, N blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .block_states import EMPTY, block_states, key_rows, query_rows
from .intervals import row_bounds
from .mask import BitfieldMask
from .work_split import SplitTiles, split_tiles, step_costs

_NEVER = 2**31 - 1
_NO_START = -(2**31)


@dataclass(frozen=True)
class BlockLists:
    """
    The work of one kernel: tiles, longest first, and the blocks that each of them visits.

    Args:
        tiles (`torch.Tensor` of shape `[num_tiles, 5]`):
            int32: row of the batch, block of this side, `begin`, `middle` and `end` of its list in `blocks`. The
            partial blocks stand at `begin:middle`, the full ones at `middle:end`.
        blocks (`torch.Tensor` of shape `[size]`): int32 blocks of the other side; what no tile points at is undefined.
    """

    tiles: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class MaskPlan:
    """
    A [`BitfieldMask`] and a window, compiled for one pair of block sizes.

    In the interval form each query sees the keys at places `first` to `first + length - 1`; in the general form the
    kernels test the words themselves.

    Args:
        interval (`bool`): Whether this is the interval form.
        block_q (`int`): Queries of a block.
        block_k (`int`): Keys of a block.
        query_rows (`torch.Tensor` of shape `[batch, 2 or 5, query_length]`):
            int32. Interval form: first place and length (0 sees nothing). General form: low half of the word, kinds it
            sees, last place it may look back to, low half that a key of its span has, place before its window.
        key_rows (`torch.Tensor` of shape `[batch, 1 or 3, key_length]`):
            int32: place (-1 for padding); in the general form also the low half of the word, and the kinds.
        by_query (`BlockLists`): Of the forward kernel and the gradient of the queries.
        by_key (`BlockLists`): Of the gradients of keys and values.
        split (`SplitTiles`, *optional*): The forward tiles when some queries' keys are cut over several programs.
    """

    interval: bool
    block_q: int
    block_k: int
    query_rows: Tensor
    key_rows: Tensor
    by_query: BlockLists
    by_key: BlockLists
    split: SplitTiles | None = None

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.query_rows.shape[0]

    @property
    def num_queries(self) -> int:
        """Queries of each row of the batch."""
        return self.query_rows.shape[2]

    @property
    def num_keys(self) -> int:
        """Keys of each row of the batch."""
        return self.key_rows.shape[2]

    @cached_property
    def key_block_starts(self) -> Tensor:
        """The place of the first key of each block, counted back from its last real key: int32 `[batch, blocks]`."""
        return self._key_starts().amax(dim=-1)

    @cached_property
    def consecutive_keys(self) -> bool:
        """
        Whether place `start + i` may stand for the place of key `i` of every block.

        So it is when the real keys of a block stand at consecutive places, and no query of the interval form looks
        at a place that only padding would then take.
        """
        starts = self._key_starts()
        latest = self.key_block_starts[..., None]
        first, length = self.query_rows[:, 0], self.query_rows[:, 1]
        lowest = torch.where(length > 0, first, _NEVER).amin(dim=-1)[:, None, None]
        highest = torch.where(length > 0, first + length, 0).amax(dim=-1)[:, None, None]
        places = latest + torch.arange(self.block_k, device=starts.device)
        outside = (places < lowest) | (places >= highest) | (latest == _NO_START)
        return self.interval and bool(torch.where(starts == _NO_START, outside, starts == latest).all())

    def _key_starts(self) -> Tensor:
        """The place that each key gives to the first of its block: int32 `[batch, blocks, block_k]`."""
        places = self.key_rows[:, 0]
        padded = torch.nn.functional.pad(places, (0, -places.shape[-1] % self.block_k), value=-1)
        blocks = padded.unflatten(-1, (-1, self.block_k))
        starts = blocks - torch.arange(self.block_k, dtype=torch.int32, device=blocks.device)
        return torch.where(blocks < 0, _NO_START, starts)


def compile_mask(
    mask: BitfieldMask,
    window: int = 0,
    block_q: int = 128,
    block_k: int = 128,
    *,
    num_heads: int = 1,
    num_programs: int | None = None,
) -> MaskPlan:
    """
    Compiles a mask to row metadata and block lists.

    Args:
        mask (`BitfieldMask`): The words, on the device of the kernels.
        window (`int`, *optional*, defaults to 0): The layer's sliding window in tokens; 0 for none.
        block_q (`int`, *optional*, defaults to 128): Queries of a block.
        block_k (`int`, *optional*, defaults to 128): Keys of a block.
        num_heads (`int`, *optional*, defaults to 1): Query heads that run each tile: few heads may need split tiles.
        num_programs (`int`, *optional*):
            Programs that run at once; the multiprocessors of the mask's device when left out, 1 on a CPU.

    Returns:
        `MaskPlan`: Tensors on the device of the mask.
    """
    bounds, general = row_bounds(mask, window)
    states = block_states(mask, bounds, general, window, block_q, block_k)
    sides = (states, states.transpose(1, 2))
    orders = [side.sort(dim=-1, descending=True, stable=True).indices for side in sides]
    counts = [_counts(side) for side in sides]
    steps = step_costs(*counts[0])
    sizes = torch.stack([*(seen.amax() for _, seen in counts), steps.amax(), steps.sum()])
    *widths, longest, total = sizes.tolist()  # the only wait for the device in this function
    by_query, by_key = (_lists(*side) for side in zip(orders, counts, widths, strict=True))
    programs = num_programs or _programs(mask.query_words.device)
    return MaskPlan(
        interval=not general,
        block_q=block_q,
        block_k=block_k,
        query_rows=query_rows(mask, bounds, general, window),
        key_rows=key_rows(mask, general),
        by_query=by_query,
        by_key=by_key,
        split=split_tiles(by_query.tiles, longest, total, num_heads, programs),
    )


def _counts(states_BMN: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of the other side each block sees in part, and how many it sees at all: int32 `[batch * M]`."""
    seen = (states_BMN != EMPTY).sum(dim=-1, dtype=torch.int32).flatten()
    return states_BMN.sum(dim=-1, dtype=torch.int32).flatten() - seen, seen  # the state of a partial block counts 2


def _lists(order_BMN: Tensor, counts: tuple[Tensor, Tensor], width: int) -> BlockLists:
    """Tiles of one side, longest first, over lists of `width` blocks each: partial ones, then full ones."""
    batch, num_blocks, _ = order_BMN.shape
    partial, seen = counts
    rows = torch.arange(batch * num_blocks, dtype=torch.int32, device=order_BMN.device)
    begin = rows * width
    columns = [rows // num_blocks, rows % num_blocks, begin, begin + partial, begin + seen]
    longest_first = step_costs(partial, seen).argsort(descending=True, stable=True)
    # Without any pair, a list of one block stands for nothing, so that kernels have an address to load from.
    blocks = order_BMN[..., : max(width, 1)].to(torch.int32).flatten()
    return BlockLists(tiles=torch.stack(columns, dim=1)[longest_first], blocks=blocks)


def _programs(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
