"""
The kernels in the form that suits Hopper GPUs: tensor descriptors, persistent programs, one loop.

The inner loop reads only through descriptors (TMA), programs stay on their multiprocessor and take tiles in snake
order, and the mask is applied to every block: with intervals it is a subtraction and a comparison, which overlap with
the matrix products. A single loop with descriptors is the only form that the compiler splits into loading and
computing warps (`SPECIALIZED`); without that split the kernel is the same.

Letters of shapes: H query heads, K kv heads, T queries, S keys, D head dimension, Q and N queries and keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Finite, so that infinities are never subtracted for queries without visible keys so far.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _snake(i_round, num_programs):
    """
    The tile of this program in a round; odd rounds run backwards, so that programs get long and short tiles alike.
    """
    i_program = tl.program_id(0)
    return i_round * num_programs + tl.where(i_round % 2 == 0, i_program, num_programs - 1 - i_program)


@triton.jit
def _num_rounds(num_tiles, num_programs):
    """
    The number of tiles of this program; stores through descriptors have no mask, so that no tile may be computed
    twice.
    """
    full = num_tiles // num_programs
    return full + (_snake(full, num_programs) < num_tiles).to(tl.int32)


@triton.jit
def _heads(data, num_heads, length, stride, rows, columns, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """A descriptor of all heads as one matrix: head `h` starts at row `h * rows`, column `h * columns`."""
    return tl.make_tensor_descriptor(
        data,
        shape=[(num_heads - 1) * rows + length, (num_heads - 1) * columns + HEAD_DIM],
        strides=[stride, 1],
        block_shape=[BLOCK, HEAD_DIM],
    )


@triton.jit
def _vector(data, length, BLOCK: tl.constexpr):
    return tl.make_tensor_descriptor(data, shape=[length], strides=[1], block_shape=[BLOCK])


@triton.jit
def _seen(b_position, b_first, b_count):
    """Whether `first <= position < first + count`, with one comparison."""
    return (b_position - b_first).to(tl.uint32, bitcast=True) < b_count.to(tl.uint32, bitcast=True)


@triton.jit
def _query_tile(
    tiles,
    i_tile,
    num_tiles,
    GROUPS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    STEPS_Q: tl.constexpr,
    STEPS_K: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    """
    Kv head, head, first query and range of steps of a tile: heads of one group are consecutive, kv heads outermost.
    """
    i_kv = i_tile // (GROUPS * num_tiles)
    i_head = i_kv * GROUPS + i_tile % GROUPS
    i_part = (i_tile // GROUPS) % num_tiles
    tile = tiles + i_part // STEPS_Q * TILE_WIDTH
    i_row = tl.load(tile + 1) * (BLOCK_Q * STEPS_Q) + i_part % STEPS_Q * BLOCK_Q
    return i_kv, i_head, i_row, tl.load(tile + 2) * STEPS_K, tl.load(tile + 4) * STEPS_K


@triton.jit
def _key_block(columns, key_first, i_step, BLOCK_K: tl.constexpr, STEPS_K: tl.constexpr):
    """Index and position of the first key of a step."""
    i_block = tl.load(columns + i_step // STEPS_K)
    o_part = i_step % STEPS_K * BLOCK_K
    return i_block * (BLOCK_K * STEPS_K) + o_part, tl.load(key_first + i_block) + o_part


@triton.jit
def forward_kernel(
    query,  # [H, T, D] in any of the layouts of `_heads`, like all arguments below
    key,  # [K, S, D]
    value,  # [K, S, D]
    out,  # [H, T, D]
    lse,  # [H, T]
    row_first,  # [T]
    row_count,  # [T]
    tiles,  # [num_tiles / STEPS_Q, TILE_WIDTH]
    columns,  # blocks of keys, tile by tile
    key_first,  # [blocks of keys]
    scale,
    num_queries,
    num_keys,
    num_heads,
    num_tiles,
    q_stride,
    q_rows,
    q_columns,
    k_stride,
    k_rows,
    k_columns,
    v_stride,
    v_rows,
    v_columns,
    o_stride,
    o_rows,
    o_columns,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS_Q: tl.constexpr,
    STEPS_K: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    queries = _heads(query, num_heads, num_queries, q_stride, q_rows, q_columns, HEAD_DIM, BLOCK_Q)
    keys = _heads(key, num_heads // GROUPS, num_keys, k_stride, k_rows, k_columns, HEAD_DIM, BLOCK_K)
    values = _heads(value, num_heads // GROUPS, num_keys, v_stride, v_rows, v_columns, HEAD_DIM, BLOCK_K)
    outs = _heads(out, num_heads, num_queries, o_stride, o_rows, o_columns, HEAD_DIM, BLOCK_Q)
    firsts = _vector(row_first, num_queries, BLOCK_Q)
    counts = _vector(row_count, num_queries, BLOCK_Q)
    qk_scale = scale * LOG2_E
    num_programs = tl.num_programs(0)
    rounds = _num_rounds(num_tiles * num_heads, num_programs)
    for i_round in tl.range(0, rounds, warp_specialize=SPECIALIZED):
        i_kv, i_head, i_row, begin, end = _query_tile(
            tiles, _snake(i_round, num_programs), num_tiles, GROUPS, BLOCK_Q, STEPS_Q, STEPS_K, TILE_WIDTH
        )
        b_q = queries.load([i_head * q_rows + i_row, i_head * q_columns])  # [Q, D]
        b_first = firsts.load([i_row])  # [Q]
        b_count = counts.load([i_row])  # [Q]
        b_max = tl.full([BLOCK_Q], LOWEST, tl.float32)
        b_sum = tl.zeros([BLOCK_Q], tl.float32)
        b_out = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)
        for i_step in tl.range(begin, end):
            i_key, position = _key_block(columns, key_first, i_step, BLOCK_K, STEPS_K)
            b_k = keys.load([i_kv * k_rows + i_key, i_kv * k_columns])  # [N, D]
            b_scores = tl.dot(b_q, b_k.T)  # [Q, N]
            m_seen = _seen((position + tl.arange(0, BLOCK_K))[None, :], b_first[:, None], b_count[:, None])
            b_scores = tl.where(m_seen, b_scores, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_scores, 1) * qk_scale)
            b_p = tl.exp2(b_scores * qk_scale - b_new[:, None])
            b_decay = tl.exp2(b_max - b_new)
            b_sum = b_sum * b_decay + tl.sum(b_p, 1)
            b_out = b_out * b_decay[:, None]
            b_v = values.load([i_kv * v_rows + i_key, i_kv * v_columns])  # [N, D]
            b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out)
            b_max = b_new
        m_blind = b_sum == 0.0
        o_lse = i_head.to(tl.int64) * num_queries + i_row + tl.arange(0, BLOCK_Q)
        tl.store(lse + o_lse, tl.where(m_blind, float("-inf"), (b_max + tl.log2(b_sum)) * LN_2))
        b_out = b_out / tl.where(m_blind, 1.0, b_sum)[:, None]
        outs.store([i_head * o_rows + i_row, i_head * o_columns], b_out.to(out.dtype.element_ty))


@triton.jit
def dkdv_kernel(
    query,  # [H, T, D]
    key,  # [K, S, D]
    value,  # [K, S, D]
    grad_out,  # [H, T, D]
    grad_key,  # [K, S, D], contiguous
    grad_value,  # [K, S, D], contiguous
    stats,  # [2, H, T]: lse in base 2, then the sums over D of out * grad_out
    row_first,  # [T]
    row_count,  # [T]
    tiles,  # [num_tiles / STEPS_K, TILE_WIDTH]
    columns,  # blocks of queries, tile by tile
    key_first,  # [blocks of keys]
    scale,
    num_queries,
    num_keys,
    num_heads,
    num_tiles,
    q_stride,
    q_rows,
    q_columns,
    k_stride,
    k_rows,
    k_columns,
    v_stride,
    v_rows,
    v_columns,
    g_stride,
    g_rows,
    g_columns,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS_Q: tl.constexpr,
    STEPS_K: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    num_kv_heads = num_heads // GROUPS
    queries = _heads(query, num_heads, num_queries, q_stride, q_rows, q_columns, HEAD_DIM, BLOCK_Q)
    grads = _heads(grad_out, num_heads, num_queries, g_stride, g_rows, g_columns, HEAD_DIM, BLOCK_Q)
    keys = _heads(key, num_kv_heads, num_keys, k_stride, k_rows, k_columns, HEAD_DIM, BLOCK_K)
    values = _heads(value, num_kv_heads, num_keys, v_stride, v_rows, v_columns, HEAD_DIM, BLOCK_K)
    grad_keys = _heads(grad_key, num_kv_heads, num_keys, HEAD_DIM, num_keys, 0, HEAD_DIM, BLOCK_K)
    grad_values = _heads(grad_value, num_kv_heads, num_keys, HEAD_DIM, num_keys, 0, HEAD_DIM, BLOCK_K)
    firsts = _vector(row_first, num_queries, BLOCK_Q)
    counts = _vector(row_count, num_queries, BLOCK_Q)
    all_stats = _vector(stats, 2 * num_heads * num_queries, BLOCK_Q)
    qk_scale = scale * LOG2_E
    num_programs = tl.num_programs(0)
    rounds = _num_rounds(num_tiles * num_kv_heads, num_programs)
    for i_round in tl.range(0, rounds, warp_specialize=SPECIALIZED):
        i_tile = _snake(i_round, num_programs)
        i_kv = i_tile // num_tiles
        i_part = i_tile % num_tiles
        tile = tiles + i_part // STEPS_K * TILE_WIDTH
        i_block = tl.load(tile + 1)
        begin = tl.load(tile + 2) * (STEPS_Q * GROUPS)
        end = tl.load(tile + 4) * (STEPS_Q * GROUPS)
        o_part = i_part % STEPS_K * BLOCK_K
        i_key = i_block * (BLOCK_K * STEPS_K) + o_part
        b_position = tl.load(key_first + i_block) + o_part + tl.arange(0, BLOCK_K)  # [N]
        b_k = keys.load([i_kv * k_rows + i_key, i_kv * k_columns])  # [N, D]
        b_v = values.load([i_kv * v_rows + i_key, i_kv * v_columns])  # [N, D]
        b_dk = tl.zeros([BLOCK_K, HEAD_DIM], tl.float32)
        b_dv = tl.zeros([BLOCK_K, HEAD_DIM], tl.float32)
        # Blocks, the tiles of a block and the heads of the group in one loop: the gradients need no sum over programs.
        for i_step in tl.range(begin, end):
            i_head = i_kv * GROUPS + i_step % GROUPS
            i_sub = i_step // GROUPS
            i_row = tl.load(columns + i_sub // STEPS_Q) * (BLOCK_Q * STEPS_Q) + i_sub % STEPS_Q * BLOCK_Q
            b_q = queries.load([i_head * q_rows + i_row, i_head * q_columns])  # [Q, D]
            b_scores = tl.dot(b_k, b_q.T)  # [N, Q]
            b_lse = all_stats.load([i_head * num_queries + i_row])  # [Q]
            b_p = tl.exp2(b_scores * qk_scale - b_lse[None, :])
            b_first = firsts.load([i_row])  # [Q]
            b_count = counts.load([i_row])  # [Q]
            b_p = tl.where(_seen(b_position[:, None], b_first[None, :], b_count[None, :]), b_p, 0.0)
            b_g = grads.load([i_head * g_rows + i_row, i_head * g_columns])  # [Q, D]
            b_dv = tl.dot(b_p.to(b_g.dtype), b_g, b_dv)
            b_dp = tl.dot(b_v, b_g.T)  # [N, Q]
            b_delta = all_stats.load([(num_heads + i_head) * num_queries + i_row])  # [Q]
            b_ds = b_p * (b_dp - b_delta[None, :])
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk)
        grad_values.store([i_kv * num_keys + i_key, 0], b_dv.to(grad_value.dtype.element_ty))
        grad_keys.store([i_kv * num_keys + i_key, 0], (b_dk * scale).to(grad_key.dtype.element_ty))


@triton.jit
def dq_kernel(
    query,  # [H, T, D]
    key,  # [K, S, D]
    value,  # [K, S, D]
    grad_out,  # [H, T, D]
    grad_query,  # [H, T, D], contiguous
    stats,  # [2, H, T]: lse in base 2, then the sums over D of out * grad_out
    row_first,  # [T]
    row_count,  # [T]
    tiles,  # [num_tiles / STEPS_Q, TILE_WIDTH]
    columns,  # blocks of keys, tile by tile
    key_first,  # [blocks of keys]
    scale,
    num_queries,
    num_keys,
    num_heads,
    num_tiles,
    q_stride,
    q_rows,
    q_columns,
    k_stride,
    k_rows,
    k_columns,
    v_stride,
    v_rows,
    v_columns,
    g_stride,
    g_rows,
    g_columns,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS_Q: tl.constexpr,
    STEPS_K: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    queries = _heads(query, num_heads, num_queries, q_stride, q_rows, q_columns, HEAD_DIM, BLOCK_Q)
    grads = _heads(grad_out, num_heads, num_queries, g_stride, g_rows, g_columns, HEAD_DIM, BLOCK_Q)
    keys = _heads(key, num_heads // GROUPS, num_keys, k_stride, k_rows, k_columns, HEAD_DIM, BLOCK_K)
    values = _heads(value, num_heads // GROUPS, num_keys, v_stride, v_rows, v_columns, HEAD_DIM, BLOCK_K)
    grad_queries = _heads(grad_query, num_heads, num_queries, HEAD_DIM, num_queries, 0, HEAD_DIM, BLOCK_Q)
    firsts = _vector(row_first, num_queries, BLOCK_Q)
    counts = _vector(row_count, num_queries, BLOCK_Q)
    all_stats = _vector(stats, 2 * num_heads * num_queries, BLOCK_Q)
    qk_scale = scale * LOG2_E
    num_programs = tl.num_programs(0)
    rounds = _num_rounds(num_tiles * num_heads, num_programs)
    for i_round in tl.range(0, rounds, warp_specialize=SPECIALIZED):
        i_kv, i_head, i_row, begin, end = _query_tile(
            tiles, _snake(i_round, num_programs), num_tiles, GROUPS, BLOCK_Q, STEPS_Q, STEPS_K, TILE_WIDTH
        )
        b_q = queries.load([i_head * q_rows + i_row, i_head * q_columns])  # [Q, D]
        b_g = grads.load([i_head * g_rows + i_row, i_head * g_columns])  # [Q, D]
        b_lse = all_stats.load([i_head * num_queries + i_row])  # [Q]
        b_delta = all_stats.load([(num_heads + i_head) * num_queries + i_row])  # [Q]
        b_first = firsts.load([i_row])  # [Q]
        b_count = counts.load([i_row])  # [Q]
        b_dq = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)
        for i_step in tl.range(begin, end):
            i_key, position = _key_block(columns, key_first, i_step, BLOCK_K, STEPS_K)
            b_k = keys.load([i_kv * k_rows + i_key, i_kv * k_columns])  # [N, D]
            b_p = tl.exp2(tl.dot(b_q, b_k.T) * qk_scale - b_lse[:, None])  # [Q, N]
            m_seen = _seen((position + tl.arange(0, BLOCK_K))[None, :], b_first[:, None], b_count[:, None])
            b_p = tl.where(m_seen, b_p, 0.0)
            b_v = values.load([i_kv * v_rows + i_key, i_kv * v_columns])  # [N, D]
            b_dp = tl.dot(b_g, b_v.T)  # [Q, N]
            b_ds = b_p * (b_dp - b_delta[:, None])
            b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq)
        grad_queries.store([i_head * num_queries + i_row, 0], (b_dq * scale).to(grad_query.dtype.element_ty))
