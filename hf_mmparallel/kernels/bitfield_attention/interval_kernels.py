"""The search of [`intervals`] as one kernel instead of dozens; names as in [`triton_common`], all tiles of queries."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .words import BitfieldMask

_BLOCK = 128


@triton.jit
def lower_bound(pointer, b_value, length, num_steps):
    """Counts the `length` ascending numbers below each value; `num_steps` halvings must suffice for `length`."""
    b_low = tl.zeros_like(b_value)
    b_high = b_low + length
    for _ in range(num_steps):
        m_open = b_low < b_high
        b_middle = (b_low + b_high) // 2
        b_found = tl.load(pointer + b_middle, mask=m_open, other=0)
        m_below = m_open & (b_found < b_value)
        b_high = tl.where(m_open & (b_found >= b_value), b_middle, b_high)
        b_low = tl.where(m_below, b_middle + 1, b_low)
    return b_low


@triton.jit
def seen_of_group(pointer, b_group, b_lowest, b_end, num_keys, num_steps):
    """Number of keys of a group at positions `b_lowest` to `b_end - 1`, the first position, and one past the last."""
    b_base = b_group << 31
    b_start = lower_bound(pointer, b_base + b_lowest, num_keys, num_steps)
    b_stop = lower_bound(pointer, b_base + b_end, num_keys, num_steps)
    m_some = b_stop > b_start
    b_first = tl.load(pointer + b_start, mask=m_some, other=0x7FFFFFFF) & 0x7FFFFFFF
    b_last = tl.load(pointer + b_stop - 1, mask=m_some, other=0) & 0x7FFFFFFF
    return tl.where(m_some, b_stop - b_start, 0), b_first, tl.where(m_some, b_last + 1, 0)


@triton.jit
def bounds_kernel(
    words, positions, ordered, places, out, batch, length, num_keys, window, num_steps,
    SPANS: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """First and last key of each query, and whether it has a hole; one program per tile of queries."""
    num_tiles = (length + Q - 1) // Q
    i_batch = (tl.program_id(0) // num_tiles).to(tl.int64)
    o_rows = (tl.program_id(0) % num_tiles) * Q + tl.arange(0, Q)
    m_rows = o_rows < length
    b_word = tl.load(words + i_batch * length + o_rows, mask=m_rows, other=0)
    b_at = tl.load(positions + i_batch * length + o_rows, mask=m_rows, other=0).to(tl.int64)
    keys = ordered + i_batch * num_keys * (2 if SPANS else 1)
    b_segment, b_span, b_reach = b_word & 0xFFFF, (b_word >> 16) & 0xFFFF, b_word >> 60

    b_lowest = tl.where(window > 0, tl.maximum(b_at - window + 1, 0), 0)
    b_end = tl.where(b_reach == 0, 0, tl.where(b_reach == 1, b_at + 1, 0x7FFFFFFF))
    b_count, b_first, b_stop = seen_of_group(keys, b_segment - 1, b_lowest, b_end, num_keys, num_steps)
    if SPANS:
        # Only keys with a span are listed: the number of a query without a span or a segment equals that of no key.
        b_group = ((b_segment << 16) | b_span) - 1
        b_after = tl.maximum(b_lowest, b_end)
        b_more, b_span_first, b_span_stop = seen_of_group(
            keys + num_keys, b_group, b_after, tl.zeros_like(b_at) + 0x7FFFFFFF, num_keys, num_steps
        )
        b_count += b_more
        b_first = tl.minimum(b_first, b_span_first)
        b_stop = tl.maximum(b_stop, b_span_stop)
    b_first = tl.where(b_count > 0, b_first, 0)

    places += i_batch * num_keys
    b_between = lower_bound(places, b_stop, num_keys, num_steps) - lower_bound(places, b_first, num_keys, num_steps)
    out += i_batch * length + o_rows
    tl.store(out, b_first.to(tl.int32), mask=m_rows)
    tl.store(out + batch * length, (b_stop - 1).to(tl.int32), mask=m_rows)
    tl.store(out + 2 * batch * length, (b_between != b_count).to(tl.int32), mask=m_rows)


def search_bounds(mask: BitfieldMask, ordered: Tensor, places: Tensor, window: int) -> Tensor:
    """
    Finds bounds if kinds do not matter: int32 `[3, batch, query_length]` of first, last (0 and -1 for none), 1 for a
    hole.

    `ordered` int64 `[batch, 1 or 2, key_length]` sorts the keys by segment and position and, if there are spans, by
    span and position; `places`, int64 `[batch, key_length]`, are the positions of the real keys in order.
    """
    batch, length = mask.query_words.shape
    num_keys = places.shape[1]
    out = torch.empty(3, batch, length, dtype=torch.int32, device=places.device)
    if not out.numel():
        return out
    # Kernels are launched on the current device, which may differ from the device of the mask.
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        bounds_kernel[(triton.cdiv(length, _BLOCK) * batch,)](
            mask.query_words.contiguous(), mask.query_positions.contiguous(), ordered, places, out,
            batch, length, num_keys, window, num_keys.bit_length(), SPANS=ordered.shape[1] > 1, Q=_BLOCK,
        )  # fmt: skip
    return out
