"""The kernels of the forward pass: attention of a tile of queries, and the combination of split tiles."""

from __future__ import annotations

import triton
import triton.language as tl

# Shared code of the forward and backward kernels: loads, the mask, scores, and the tile of a program.
#
# A head dimension is divided into one or two slices of columns whose widths are powers of two (96 = 64 + 32), so that
# there is little or no padding: 72 is 64 + 16, of which 8 columns are padding. `PART_1` is 0 if one slice is enough;
# the values of the second slice are then dummies that the compiler removes. Names: `i_` index, `o_` offsets, `m_`
# mask, `b_` value of a tile. Shapes: Q queries, K keys, D columns of a slice.

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


@triton.jit
def softmax_step(
    b_q0, b_q1, b_k0, b_k1, b_v0, b_v1, b_o0, b_o1, b_max, b_sum, m_visible, score_scale, cap,
    PART_1: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the running softmax, in powers of two."""
    b_s = dot_parts(b_q0, b_q1, b_k0, b_k1, PART_1)  # [Q, K]
    if SOFTCAP:
        b_s = capped(b_s, score_scale)
        factor = cap
    else:
        factor = score_scale
    if MASKED:
        b_s = tl.where(m_visible, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * factor)  # [Q]
    # Avoids -inf minus -inf for a query without visible keys so far.
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max) if MASKED else b_new_max
    b_p = tl.exp2(b_s * factor - b_base[:, None])  # [Q, K]
    b_fade = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_fade + tl.sum(b_p, 1)
    b_o0 = tl.dot(b_p.to(b_v0.dtype), b_v0, b_o0 * b_fade[:, None], input_precision="ieee")  # [Q, D]
    if PART_1 > 0:
        b_o1 = tl.dot(b_p.to(b_v1.dtype), b_v1, b_o1 * b_fade[:, None], input_precision="ieee")
    return b_o0, b_o1, b_new_max, b_sum


@triton.jit
def store_result(
    out, lse, sink, stride, o_q, m_q, b_o0, b_o1, b_max, b_sum,
    D: tl.constexpr, PART_0: tl.constexpr, PART_1: tl.constexpr, SINK: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
    """Divides by the sum and writes the output and the log-sum-exp, 0 and `-inf` for a query without visible keys."""
    if SINK:  # a logit without a value
        b_sink = tl.load(sink).to(tl.float32) * LOG2E
        b_new_max = tl.maximum(b_max, b_sink)
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)  # no visible key, and a sink of -inf
        b_fade = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_fade + tl.exp2(b_sink - b_base)
        b_max = b_new_max
    b_blind = b_sum == 0.0
    b_sum = tl.where(b_blind, 1.0, b_sum)
    b_weight = 1.0 / b_sum
    if SINK:
        b_weight *= b_fade
    store_part(out, stride, o_q, m_q, b_o0 * b_weight[:, None], 0, PART_0, D)
    if PART_1 > 0:
        store_part(out, stride, o_q, m_q, b_o1 * b_weight[:, None], PART_0, PART_1, D)
    b_lse = tl.where(b_blind, float("-inf"), b_max + tl.log2(b_sum))
    # the log-sum-exp of a share of a split tile is in powers of two
    if not IS_PART:
        b_lse *= LN2
    tl.store(lse + o_q, b_lse, mask=m_q)


@triton.jit(do_not_specialize=["num_tiles", "tile_stride", "head_stride"])
def forward_kernel(
    query, key, value, out, lse, part_out, part_lse, sinks, tiles, blocks, query_rows, key_rows, score_scale, cap,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    o_stride_b, o_stride_h, o_stride_t, num_queries, num_keys, num_kv_heads, num_tiles, tile_stride, head_stride,
    GROUP: tl.constexpr, D: tl.constexpr, PART_0: tl.constexpr, PART_1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    GENERAL: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of `TILE_Q` queries of one head; a share of a split tile goes to the workspace."""
    INNER: tl.constexpr = GROUP * (BLOCK_Q // TILE_Q)
    i_tile, i_kv, i_inner = program_tile(num_tiles, num_kv_heads, tile_stride, head_stride, INNER)
    # The programs of the heads of a group are consecutive, so that their keys are in the cache.
    i_head = i_kv * GROUP + i_inner % GROUP
    num_heads = num_kv_heads * GROUP
    COLUMNS: tl.constexpr = 6 if SPLIT else 5
    tiles += i_tile * COLUMNS
    i_batch = tl.load(tiles).to(tl.int64)
    o_inside = (i_inner // GROUP) * TILE_Q + tl.arange(0, TILE_Q)  # queries of the block
    o_q = tl.load(tiles + 1) * BLOCK_Q + o_inside
    o_k = tl.arange(0, TILE_K)
    m_q = o_q < num_queries
    query += i_batch * q_stride_b + i_head.to(tl.int64) * q_stride_h
    key += i_batch * k_stride_b + i_kv.to(tl.int64) * k_stride_h
    value += i_batch * v_stride_b + i_kv.to(tl.int64) * v_stride_h
    query_rows += i_batch * (5 if GENERAL else 2) * num_queries
    key_rows += i_batch * (3 if GENERAL else 1) * num_keys
    b_q0 = load_part(query, q_stride_t, o_q, m_q, 0, PART_0, D, True)  # [Q, D]
    b_q1 = load_part(query, q_stride_t, o_q, m_q, PART_0, PART_1, D, True) if PART_1 > 0 else b_q0
    b_r0, b_r1, b_r2, b_r3, b_r4 = load_query_rows(query_rows, o_q, m_q, num_queries, GENERAL)

    b_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_Q], tl.float32)
    b_o0 = tl.zeros([TILE_Q, PART_0], tl.float32)
    b_o1 = tl.zeros([TILE_Q, PART_1], tl.float32) if PART_1 > 0 else b_sum
    STEPS: tl.constexpr = BLOCK_K // TILE_K
    for STAGE in tl.static_range(2):  # partial blocks with the mask, then full blocks without
        i_from = tl.load(tiles + 2 + STAGE)
        num_steps = (tl.load(tiles + 3 + STAGE) - i_from) * STEPS
        i_key = listed_row(blocks + i_from, 0, num_steps, BLOCK_K, TILE_K)
        for i_step in tl.range(0, num_steps):
            o_key = i_key + o_k
            i_key = listed_row(blocks + i_from, i_step + 1, num_steps, BLOCK_K, TILE_K)
            m_k = o_key < num_keys
            b_k0 = load_part(key, k_stride_t, o_key, m_k, 0, PART_0, D, STAGE == 0)  # [K, D]
            b_k1 = load_part(key, k_stride_t, o_key, m_k, PART_0, PART_1, D, STAGE == 0) if PART_1 > 0 else b_k0
            b_v0 = load_part(value, v_stride_t, o_key, m_k, 0, PART_0, D, STAGE == 0)
            b_v1 = load_part(value, v_stride_t, o_key, m_k, PART_0, PART_1, D, STAGE == 0) if PART_1 > 0 else b_v0
            if STAGE == 0:
                b_place, b_low, b_kinds = load_key_rows(key_rows, o_key, m_k, num_keys, GENERAL)
                m_visible = visible(
                    b_r0[:, None], b_r1[:, None], b_r2[:, None], b_r3[:, None], b_r4[:, None],
                    b_place[None, :], b_low[None, :], b_kinds[None, :], GENERAL,
                )  # fmt: skip
            else:
                m_visible = m_k
            b_o0, b_o1, b_max, b_sum = softmax_step(
                b_q0, b_q1, b_k0, b_k1, b_v0, b_v1, b_o0, b_o1, b_max, b_sum, m_visible, score_scale, cap,
                PART_1, SOFTCAP, STAGE == 0,
            )  # fmt: skip

    out += i_batch * o_stride_b + i_head.to(tl.int64) * o_stride_h
    lse += (i_batch * num_heads + i_head) * num_queries
    if SPLIT:
        i_slot = tl.load(tiles + 5)
        if i_slot >= 0:  # one share; the sink is added when the shares are combined
            i_row = (i_slot.to(tl.int64) * num_heads + i_head) * BLOCK_Q
            part_out += i_row * D
            part_lse += i_row
            store_result(
                part_out, part_lse, sinks, D, o_inside, m_q, b_o0, b_o1, b_max, b_sum, D, PART_0, PART_1, False, True
            )
        else:
            sinks += i_head
            store_result(
                out, lse, sinks, o_stride_t, o_q, m_q, b_o0, b_o1, b_max, b_sum, D, PART_0, PART_1, SINKS, False
            )
    else:
        sinks += i_head
        store_result(out, lse, sinks, o_stride_t, o_q, m_q, b_o0, b_o1, b_max, b_sum, D, PART_0, PART_1, SINKS, False)


@triton.jit
def combine_kernel(
    part_out, part_lse, out, lse, sinks, rows, o_stride_b, o_stride_h, o_stride_t, num_queries, num_heads,
    D: tl.constexpr, PART_0: tl.constexpr, PART_1: tl.constexpr, BLOCK_Q: tl.constexpr, TILE_Q: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of `TILE_Q` queries of one head whose keys were split over several programs."""
    i_row = tl.program_id(0) // (BLOCK_Q // TILE_Q)
    o_inside = (tl.program_id(0) % (BLOCK_Q // TILE_Q)) * TILE_Q + tl.arange(0, TILE_Q)  # queries of the block
    i_head = tl.program_id(1)
    i_batch = tl.load(rows + i_row * 4).to(tl.int64)
    o_q = tl.load(rows + i_row * 4 + 1) * BLOCK_Q + o_inside
    i_first = tl.load(rows + i_row * 4 + 2).to(tl.int64)
    num_parts = tl.load(rows + i_row * 4 + 3)
    m_q = o_q < num_queries

    b_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_Q], tl.float32)
    b_o0 = tl.zeros([TILE_Q, PART_0], tl.float32)
    b_o1 = tl.zeros([TILE_Q, PART_1], tl.float32) if PART_1 > 0 else b_sum
    for i_part in range(0, num_parts):
        i_slot = ((i_first + i_part) * num_heads + i_head) * BLOCK_Q
        b_lse = tl.load(part_lse + i_slot + o_inside, mask=m_q, other=float("-inf"))  # [Q]
        b_new_max = tl.maximum(b_max, b_lse)
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_fade = tl.exp2(b_max - b_base)
        b_weight = tl.exp2(b_lse - b_base)
        b_p0 = load_part(part_out + i_slot * D, D, o_inside, m_q, 0, PART_0, D, True)  # [Q, D]
        b_o0 = b_o0 * b_fade[:, None] + b_p0 * b_weight[:, None]
        if PART_1 > 0:
            b_p1 = load_part(part_out + i_slot * D, D, o_inside, m_q, PART_0, PART_1, D, True)
            b_o1 = b_o1 * b_fade[:, None] + b_p1 * b_weight[:, None]
        b_sum = b_sum * b_fade + b_weight
        b_max = b_new_max

    out += i_batch * o_stride_b + i_head.to(tl.int64) * o_stride_h
    lse += (i_batch * num_heads + i_head) * num_queries
    sinks += i_head
    store_result(out, lse, sinks, o_stride_t, o_q, m_q, b_o0, b_o1, b_max, b_sum, D, PART_0, PART_1, SINKS, False)
