"""
The kernels of the backward pass, without atomics, so that gradients are bitwise deterministic.
One is for tiles of keys, over all queries and heads of the group, one for tiles of queries, over all keys; both
recompute the weights from the log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import (
    LOG2E,
    capped,
    dot_parts,
    listed_row,
    load_key_rows,
    load_part,
    load_query_rows,
    program_tile,
    store_part,
    visible,
)


@triton.jit
def row_stats_kernel(
    out, grad_out, lse, stats, o_stride_b, o_stride_h, o_stride_t, g_stride_b, g_stride_h, g_stride_t,
    num_queries, num_heads, num_rows,
    D: tl.constexpr, PART_0: tl.constexpr, PART_1: tl.constexpr, TILE_Q: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of each query in powers of two, followed by `delta`, the sum of output times gradient."""
    num_tiles = tl.cdiv(num_queries, TILE_Q)
    i_row = tl.program_id(0) // num_tiles
    i_head = i_row % num_heads
    i_batch = (i_row // num_heads).to(tl.int64)
    o_q = tl.program_id(0) % num_tiles * TILE_Q + tl.arange(0, TILE_Q)
    m_q = o_q < num_queries
    out += i_batch * o_stride_b + i_head.to(tl.int64) * o_stride_h
    grad_out += i_batch * g_stride_b + i_head.to(tl.int64) * g_stride_h
    b_o = load_part(out, o_stride_t, o_q, m_q, 0, PART_0, D, True).to(tl.float32)  # [Q, D]
    b_g = load_part(grad_out, g_stride_t, o_q, m_q, 0, PART_0, D, True).to(tl.float32)
    b_delta = tl.sum(b_o * b_g, 1)  # [Q]
    if PART_1 > 0:
        b_o1 = load_part(out, o_stride_t, o_q, m_q, PART_0, PART_1, D, True).to(tl.float32)
        b_g1 = load_part(grad_out, g_stride_t, o_q, m_q, PART_0, PART_1, D, True).to(tl.float32)
        b_delta += tl.sum(b_o1 * b_g1, 1)
    o_rows = (i_batch * num_heads + i_head) * num_queries + o_q
    b_lse = tl.load(lse + o_rows, mask=m_q, other=0.0)
    tl.store(stats + o_rows, b_lse * LOG2E, mask=m_q)
    tl.store(stats + num_rows + o_rows, b_delta, mask=m_q)


@triton.jit
def weights_and_slope(b_s, b_lse, m_visible, score_scale, cap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """Weights of the softmax, and the slope of the soft cap at the scores (1 without a cap)."""
    if SOFTCAP:
        b_capped = capped(b_s, score_scale)
        b_p = tl.exp2(b_capped * cap - b_lse)
        b_slope = 1.0 - b_capped * b_capped
    else:
        b_p = tl.exp2(b_s * score_scale - b_lse)
        b_slope = 1.0
    if MASKED:
        # A query without visible keys is in partial blocks only, where this clears its infinite weights; past the end
        # the log-sum-exp is `inf`, which gives weights of 0 in full blocks as well.
        b_p = tl.where(m_visible, b_p, 0.0)
    return b_p, b_slope


@triton.jit(do_not_specialize=["num_tiles", "tile_stride", "head_stride"])
def dkdv_kernel(
    query, key, value, grad_out, grad_key, grad_value, stats, tiles, blocks, query_rows, key_rows,
    scale, score_scale, cap,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    g_stride_b, g_stride_h, g_stride_t, dk_stride_b, dk_stride_h, dk_stride_t, dv_stride_b, dv_stride_h, dv_stride_t,
    num_queries, num_keys, num_rows, num_kv_heads, num_tiles, tile_stride, head_stride,
    GROUP: tl.constexpr, D: tl.constexpr, PART_0: tl.constexpr, PART_1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    GENERAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradients of `TILE_K` keys and values of one head, from all query heads of its group, one after another."""
    i_tile, i_kv, i_inner = program_tile(num_tiles, num_kv_heads, tile_stride, head_stride, BLOCK_K // TILE_K)
    tiles += i_tile * 5
    i_batch = tl.load(tiles).to(tl.int64)
    o_k = tl.load(tiles + 1) * BLOCK_K + i_inner * TILE_K + tl.arange(0, TILE_K)
    o_q = tl.arange(0, TILE_Q)
    m_k = o_k < num_keys
    i_first = i_kv.to(tl.int64) * GROUP  # first query head of the group
    query += i_batch * q_stride_b
    grad_out += i_batch * g_stride_b
    stats += i_batch * num_kv_heads * GROUP * num_queries
    key += i_batch * k_stride_b + i_kv.to(tl.int64) * k_stride_h
    value += i_batch * v_stride_b + i_kv.to(tl.int64) * v_stride_h
    query_rows += i_batch * (5 if GENERAL else 2) * num_queries
    key_rows += i_batch * (3 if GENERAL else 1) * num_keys
    b_k0 = load_part(key, k_stride_t, o_k, m_k, 0, PART_0, D, True)  # [K, D]
    b_k1 = load_part(key, k_stride_t, o_k, m_k, PART_0, PART_1, D, True) if PART_1 > 0 else b_k0
    b_v0 = load_part(value, v_stride_t, o_k, m_k, 0, PART_0, D, True)
    b_v1 = load_part(value, v_stride_t, o_k, m_k, PART_0, PART_1, D, True) if PART_1 > 0 else b_v0
    b_place, b_low, b_kinds = load_key_rows(key_rows, o_k, m_k, num_keys, GENERAL)

    b_dk0 = tl.zeros([TILE_K, PART_0], tl.float32)
    b_dv0 = tl.zeros([TILE_K, PART_0], tl.float32)
    if PART_1 > 0:
        b_dk1 = tl.zeros([TILE_K, PART_1], tl.float32)
        b_dv1 = tl.zeros([TILE_K, PART_1], tl.float32)
    STEPS: tl.constexpr = BLOCK_Q // TILE_Q
    for STAGE in tl.static_range(2):  # partial blocks with the mask, then full blocks without
        i_from = tl.load(tiles + 2 + STAGE)
        num_steps = (tl.load(tiles + 3 + STAGE) - i_from) * STEPS
        i_query = listed_row(blocks + i_from, 0, num_steps, BLOCK_Q, TILE_Q)
        for i_step in tl.range(0, num_steps * GROUP):  # heads innermost: one loop, which can be pipelined
            o_query = i_query + o_q
            i_query = listed_row(blocks + i_from, (i_step + 1) // GROUP, num_steps, BLOCK_Q, TILE_Q)
            m_q = o_query < num_queries
            i_head = i_first + i_step % GROUP
            queries = query + i_head * q_stride_h
            grads = grad_out + i_head * g_stride_h
            b_q0 = load_part(queries, q_stride_t, o_query, m_q, 0, PART_0, D, True)  # [Q, D]
            b_q1 = load_part(queries, q_stride_t, o_query, m_q, PART_0, PART_1, D, True) if PART_1 > 0 else b_q0
            b_g0 = load_part(grads, g_stride_t, o_query, m_q, 0, PART_0, D, True)
            b_g1 = load_part(grads, g_stride_t, o_query, m_q, PART_0, PART_1, D, True) if PART_1 > 0 else b_g0
            o_stats = i_head * num_queries + o_query
            b_lse = tl.load(stats + o_stats, mask=m_q, other=float("inf"))  # [Q]
            b_delta = tl.load(stats + num_rows + o_stats, mask=m_q, other=0.0)
            if STAGE == 0:
                b_r0, b_r1, b_r2, b_r3, b_r4 = load_query_rows(query_rows, o_query, m_q, num_queries, GENERAL)
                m_visible = visible(
                    b_r0[None, :], b_r1[None, :], b_r2[None, :], b_r3[None, :], b_r4[None, :],
                    b_place[:, None], b_low[:, None], b_kinds[:, None], GENERAL,
                )  # fmt: skip
            else:
                m_visible = m_q
            b_s = dot_parts(b_k0, b_k1, b_q0, b_q1, PART_1)  # [K, Q]
            b_p, b_slope = weights_and_slope(b_s, b_lse[None, :], m_visible, score_scale, cap, SOFTCAP, STAGE == 0)
            b_weight = b_p.to(b_g0.dtype)
            b_dv0 = tl.dot(b_weight, b_g0, b_dv0, input_precision="ieee")
            b_dp = dot_parts(b_v0, b_v1, b_g0, b_g1, PART_1)  # [K, Q]
            b_ds = (b_p * (b_dp - b_delta[None, :]) * b_slope).to(b_q0.dtype)
            b_dk0 = tl.dot(b_ds, b_q0, b_dk0, input_precision="ieee")
            if PART_1 > 0:
                b_dv1 = tl.dot(b_weight, b_g1, b_dv1, input_precision="ieee")
                b_dk1 = tl.dot(b_ds, b_q1, b_dk1, input_precision="ieee")

    grad_key += i_batch * dk_stride_b + i_kv.to(tl.int64) * dk_stride_h
    grad_value += i_batch * dv_stride_b + i_kv.to(tl.int64) * dv_stride_h
    store_part(grad_key, dk_stride_t, o_k, m_k, b_dk0 * scale, 0, PART_0, D)
    store_part(grad_value, dv_stride_t, o_k, m_k, b_dv0, 0, PART_0, D)
    if PART_1 > 0:
        store_part(grad_key, dk_stride_t, o_k, m_k, b_dk1 * scale, PART_0, PART_1, D)
        store_part(grad_value, dv_stride_t, o_k, m_k, b_dv1, PART_0, PART_1, D)


@triton.jit(do_not_specialize=["num_tiles", "tile_stride", "head_stride"])
def dq_kernel(
    query, key, value, grad_out, grad_query, stats, tiles, blocks, query_rows, key_rows, scale, score_scale, cap,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    g_stride_b, g_stride_h, g_stride_t, dq_stride_b, dq_stride_h, dq_stride_t,
    num_queries, num_keys, num_rows, num_kv_heads, num_tiles, tile_stride, head_stride,
    GROUP: tl.constexpr, D: tl.constexpr, PART_0: tl.constexpr, PART_1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    GENERAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradient of `TILE_Q` queries of one head; the programs of the heads of a group are consecutive."""
    INNER: tl.constexpr = GROUP * (BLOCK_Q // TILE_Q)
    i_tile, i_kv, i_inner = program_tile(num_tiles, num_kv_heads, tile_stride, head_stride, INNER)
    i_head = (i_kv * GROUP + i_inner % GROUP).to(tl.int64)
    tiles += i_tile * 5
    i_batch = tl.load(tiles).to(tl.int64)
    o_q = tl.load(tiles + 1) * BLOCK_Q + (i_inner // GROUP) * TILE_Q + tl.arange(0, TILE_Q)
    o_k = tl.arange(0, TILE_K)
    m_q = o_q < num_queries
    query += i_batch * q_stride_b + i_head * q_stride_h
    grad_out += i_batch * g_stride_b + i_head * g_stride_h
    stats += (i_batch * num_kv_heads * GROUP + i_head) * num_queries
    key += i_batch * k_stride_b + i_kv.to(tl.int64) * k_stride_h
    value += i_batch * v_stride_b + i_kv.to(tl.int64) * v_stride_h
    query_rows += i_batch * (5 if GENERAL else 2) * num_queries
    key_rows += i_batch * (3 if GENERAL else 1) * num_keys
    b_q0 = load_part(query, q_stride_t, o_q, m_q, 0, PART_0, D, True)  # [Q, D]
    b_q1 = load_part(query, q_stride_t, o_q, m_q, PART_0, PART_1, D, True) if PART_1 > 0 else b_q0
    b_g0 = load_part(grad_out, g_stride_t, o_q, m_q, 0, PART_0, D, True)
    b_g1 = load_part(grad_out, g_stride_t, o_q, m_q, PART_0, PART_1, D, True) if PART_1 > 0 else b_g0
    b_lse = tl.load(stats + o_q, mask=m_q, other=float("inf"))  # [Q]
    b_delta = tl.load(stats + num_rows + o_q, mask=m_q, other=0.0)
    b_r0, b_r1, b_r2, b_r3, b_r4 = load_query_rows(query_rows, o_q, m_q, num_queries, GENERAL)

    b_dq0 = tl.zeros([TILE_Q, PART_0], tl.float32)
    if PART_1 > 0:
        b_dq1 = tl.zeros([TILE_Q, PART_1], tl.float32)
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
            b_s = dot_parts(b_q0, b_q1, b_k0, b_k1, PART_1)  # [Q, K]
            b_p, b_slope = weights_and_slope(b_s, b_lse[:, None], m_visible, score_scale, cap, SOFTCAP, STAGE == 0)
            b_dp = dot_parts(b_g0, b_g1, b_v0, b_v1, PART_1)  # [Q, K]
            b_ds = (b_p * (b_dp - b_delta[:, None]) * b_slope).to(b_k0.dtype)
            b_dq0 = tl.dot(b_ds, b_k0, b_dq0, input_precision="ieee")
            if PART_1 > 0:
                b_dq1 = tl.dot(b_ds, b_k1, b_dq1, input_precision="ieee")

    grad_query += i_batch * dq_stride_b + i_head * dq_stride_h
    store_part(grad_query, dq_stride_t, o_q, m_q, b_dq0 * scale, 0, PART_0, D)
    if PART_1 > 0:
        store_part(grad_query, dq_stride_t, o_q, m_q, b_dq1 * scale, PART_0, PART_1, D)
