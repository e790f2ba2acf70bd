"""
Shared code of the forward and backward kernels: loads, the mask, scores, and the tile of a program.

A head dimension is divided into one or two slices of columns whose widths are powers of two (96 = 64 + 32), so that
there is little or no padding: 72 is 64 + 16, of which 8 columns are padding. `PART_1` is 0 if one slice is enough; the
values of the second slice are then dummies that the compiler removes.
Names: `i_` index, `o_` offsets, `m_` mask, `b_` value of a tile. Shapes: Q queries, K keys, D columns of a slice.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def program_tile(num_tiles, num_kv_heads, tile_stride, head_stride, INNER: tl.constexpr):
    """Tile, kv head and inner index of a program; `INNER` consecutive programs share a tile and a kv head."""
    i_program = tl.program_id(0)
    i_outer = i_program // INNER
    return (i_outer // tile_stride) % num_tiles, (i_outer // head_stride) % num_kv_heads, i_program % INNER


@triton.jit
def listed_row(blocks, i_step, num_steps, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """First token of the tile of one step through a list of blocks; 0 past its end."""
    STEPS: tl.constexpr = BLOCK // TILE
    # Kernels load it one step ahead: if the address of a step's tokens depended on a load of the same step, the
    # compiler would spend a pipeline stage on it.
    i_block = tl.load(blocks + i_step // STEPS, mask=i_step < num_steps, other=0)
    return i_block * BLOCK + (i_step % STEPS) * TILE


@triton.jit
def load_part(
    pointer,
    stride,
    o_rows,
    m_rows,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """
    Columns from `COLUMN` on for some tokens, counted from the start of the head, 0 past the ends.

    Offsets from the start of a tile would be constant in a loop, and held in registers that the products need.
    """
    o_columns = COLUMN + tl.arange(0, WIDTH)
    pointers = pointer + (o_rows.to(tl.int64) * stride)[:, None] + o_columns[None, :]
    if COLUMN + WIDTH > D:
        m_columns = (o_columns < D)[None, :]
        if MASK_ROWS:
            return tl.load(pointers, mask=m_rows[:, None] & m_columns, other=0.0)  # [rows, WIDTH]
        else:
            return tl.load(pointers, mask=m_columns, other=0.0)
    else:
        if MASK_ROWS:
            return tl.load(pointers, mask=m_rows[:, None], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_part(pointer, stride, o_rows, m_rows, b_value, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Writes columns from `COLUMN` on for some tokens, in the dtype of the pointer."""
    o_columns = COLUMN + tl.arange(0, WIDTH)
    pointers = pointer + (o_rows.to(tl.int64) * stride)[:, None] + o_columns[None, :]
    mask = m_rows[:, None] & (o_columns < D)[None, :]
    tl.store(pointers, b_value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_query_rows(pointer, o_rows, m_rows, length, GENERAL: tl.constexpr):
    """The two or five numbers of each query; past the end a query sees no key. Unused numbers repeat the first."""
    b_0 = tl.load(pointer + o_rows, mask=m_rows, other=0)
    b_1 = tl.load(pointer + length + o_rows, mask=m_rows, other=0)
    if GENERAL:
        b_2 = tl.load(pointer + 2 * length + o_rows, mask=m_rows, other=0)
        b_3 = tl.load(pointer + 3 * length + o_rows, mask=m_rows, other=0)
        b_4 = tl.load(pointer + 4 * length + o_rows, mask=m_rows, other=0)
        return b_0, b_1, b_2, b_3, b_4
    else:
        return b_0, b_1, b_0, b_0, b_0


@triton.jit
def load_key_rows(pointer, o_rows, m_rows, length, GENERAL: tl.constexpr):
    """The one or three numbers of each key; past the end a key is padding."""
    b_place = tl.load(pointer + o_rows, mask=m_rows, other=-1)
    if GENERAL:
        b_low = tl.load(pointer + length + o_rows, mask=m_rows, other=0)
        b_kinds = tl.load(pointer + 2 * length + o_rows, mask=m_rows, other=0)
        return b_place, b_low, b_kinds
    else:
        return b_place, b_place, b_place


@triton.jit
def visible(b_q0, b_q1, b_q2, b_q3, b_q4, b_place, b_low, b_kinds, GENERAL: tl.constexpr):
    """Whether each pair is visible, for numbers of queries and of keys that broadcast against each other."""
    if GENERAL:
        one_sample = ((b_q0 ^ b_low) & 0xFFFF) == 0
        back_or_span = (b_place <= b_q2) | (b_low == b_q3)
        return one_sample & ((b_q1 & b_kinds) != 0) & back_or_span & (b_place > b_q4)
    else:
        # Before the interval the difference is negative, which is a huge unsigned number: one comparison tests both
        # ends.
        return (b_place - b_q0).to(tl.uint32, bitcast=True) < b_q1.to(tl.uint32, bitcast=True)


@triton.jit
def capped(b_s, score_scale):
    """Hyperbolic tangent of scores, whose scale includes the cap and `2 * log2(e)`; exact at both ends."""
    return 1.0 - 2.0 / (tl.exp2(b_s * score_scale) + 1.0)


@triton.jit
def dot_parts(b_a0, b_a1, b_b0, b_b1, PART_1: tl.constexpr):
    """`a @ b.T` over both slices of the head dimension, float32."""
    b_product = tl.dot(b_a0, tl.trans(b_b0), input_precision="ieee")
    if PART_1 > 0:
        b_product = tl.dot(b_a1, tl.trans(b_b1), b_product, input_precision="ieee")
    return b_product
