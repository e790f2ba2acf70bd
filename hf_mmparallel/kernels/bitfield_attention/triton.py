"""The portable Triton form (sm_80 and later): launches of the forward and the backward kernels."""

from __future__ import annotations

import contextlib
import math
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from .mask_plan import MaskPlan
from .reference import last_dim_dense, sink_gradient
from .triton_backward import dkdv_kernel, dq_kernel, row_stats_kernel
from .triton_forward import combine_kernel, forward_kernel
from .tuning import Tile, Tuning, choose_tuning

# Keys and values up to this size stay in the L2 cache; tiles then run longest first over all heads at once. For larger
# keys and values, one head runs after another.
L2_BYTES = 16 * 2**20
ROWS_TILE = 64  # of the kernels without matrix products


def forward(
    query: Tensor,  # in 32 or 16 bits, like keys and values
    key: Tensor,
    value: Tensor,
    plan: MaskPlan,
    scale: float | None = None,  # above 0; `head_dim ** -0.5` when left out
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tuning: Tuning | None = None,  # tiles of the table when left out
) -> tuple[Tensor, Tensor]:
    """Returns output, strided like `query`, and natural log-sum-exp in float32, as in `bitfield_attention`."""
    query, key, value = (last_dim_dense(tensor) for tensor in (query, key, value))
    batch, num_heads, num_queries, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[2], key.shape[1]
    out = torch.empty_like(query)
    lse = torch.empty(batch, num_heads, num_queries, dtype=torch.float32, device=query.device)
    logits = lse if sinks is None else sinks.contiguous()  # a stand-in when there are none
    split, tile = plan.split, _tile("forward", query, plan, tuning)
    part_out, part_lse, tiles = lse, lse, plan.by_query.tiles
    if split is not None:
        shape = (split.num_slots, num_heads, plan.block_q)
        part_out = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        tiles = split.tiles
    with _device_of(query):
        forward_kernel[(len(tiles) * num_heads * (plan.block_q // tile.block_q),)](
            query, key, value, out, lse, part_out, part_lse, logits,
            tiles, plan.by_query.blocks, plan.query_rows, plan.key_rows, *_score_scales(scale, head_dim, softcap)[1:],
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            num_queries, num_keys, num_kv_heads, len(tiles), *_order(len(tiles), key),
            SINKS=sinks is not None, SPLIT=split is not None, **_constants(query, key, plan, tile, softcap),
        )  # fmt: skip
        if split is not None:
            rows = min(ROWS_TILE, plan.block_q)
            combine_kernel[(len(split.rows) * (plan.block_q // rows), num_heads)](
                part_out, part_lse, out, lse, logits, split.rows, *out.stride()[:3], num_queries, num_heads,
                **head_parts(head_dim), BLOCK_Q=plan.block_q, TILE_Q=rows, SINKS=sinks is not None,
            )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: MaskPlan,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of [`forward`] in the shape and dtype of its inputs (`None` without sinks), bitwise deterministic."""
    grad_out, query, key, value = (last_dim_dense(tensor) for tensor in (grad_out, query, key, value))
    group, head_dim = query.shape[1] // key.shape[1], query.shape[3]
    num_queries, num_keys, num_kv_heads = query.shape[2], key.shape[2], key.shape[1]
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    stats = row_stats(grad_out, out, lse)
    inputs = (query, key, value, grad_out)
    rows = (plan.query_rows, plan.key_rows, *_score_scales(scale, head_dim, softcap))
    strides = [stride for tensor in inputs for stride in tensor.stride()[:3]]
    sizes = (num_queries, num_keys, lse.numel(), num_kv_heads)
    with _device_of(query):
        tile, lists = _tile("dkdv", query, plan, tuning), plan.by_key
        dkdv_kernel[(len(lists.tiles) * num_kv_heads * (plan.block_k // tile.block_k),)](
            *inputs, grad_key, grad_value, stats, lists.tiles, lists.blocks, *rows,
            *strides, *grad_key.stride()[:3], *grad_value.stride()[:3],
            *sizes, len(lists.tiles), *_order(len(lists.tiles), key), **_constants(query, key, plan, tile, softcap),
        )  # fmt: skip
        tile, lists = _tile("dq", query, plan, tuning), plan.by_query
        dq_kernel[(len(lists.tiles) * num_kv_heads * group * (plan.block_q // tile.block_q),)](
            *inputs, grad_query, stats, lists.tiles, lists.blocks, *rows, *strides, *grad_query.stride()[:3],
            *sizes, len(lists.tiles), *_order(len(lists.tiles), key), **_constants(query, key, plan, tile, softcap),
        )  # fmt: skip
    return grad_query, grad_key, grad_value, None if sinks is None else sink_gradient(stats[1], lse, sinks)


def row_stats(grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Float32 `[2, batch, heads, query_length]`: log-sum-exp in powers of two, and sum of output times gradient."""
    batch, num_heads, num_queries, head_dim = out.shape
    out, grad_out, lse = last_dim_dense(out), last_dim_dense(grad_out), lse.contiguous()
    stats = torch.empty(2, *lse.shape, dtype=torch.float32, device=out.device)
    with _device_of(out):
        # One dimension, because the second dimension of a grid is limited to 65535, which many short rows of a tower
        # exceed.
        row_stats_kernel[(triton.cdiv(num_queries, ROWS_TILE) * batch * num_heads,)](
            out, grad_out, lse, stats, *out.stride()[:3], *grad_out.stride()[:3],
            num_queries, num_heads, lse.numel(), **head_parts(head_dim), TILE_Q=ROWS_TILE,
        )  # fmt: skip
    return stats


@cache
def head_parts(head_dim: int) -> dict[str, int]:
    """Divides the head dimension into a slice whose width is a power of two, and one of 16 or more columns or none."""
    first = max(16, 2 ** (head_dim.bit_length() - 1))
    rest = max(0, head_dim - first)
    return {"D": head_dim, "PART_0": first, "PART_1": max(16, triton.next_power_of_2(rest)) if rest else 0}


def _constants(query: Tensor, key: Tensor, plan: MaskPlan, tile: Tile, softcap: float) -> dict[str, Any]:
    """Compile-time constants of the attention kernels."""
    return {
        **head_parts(query.shape[3]),
        "GROUP": query.shape[1] // key.shape[1],
        "BLOCK_Q": plan.block_q,
        "BLOCK_K": plan.block_k,
        "TILE_Q": tile.block_q,
        "TILE_K": tile.block_k,
        "GENERAL": not plan.interval,
        "SOFTCAP": softcap > 0,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _order(num_tiles: int, key: Tensor) -> tuple[int, int]:
    """Strides of tiles and of kv heads in the order of the programs."""
    fits_cache = 2 * key.numel() * key.element_size() <= L2_BYTES
    return (key.shape[1], 1) if fits_cache else (1, num_tiles)


def _tile(kernel: str, query: Tensor, plan: MaskPlan, tuning: Tuning | None) -> Tile:
    """The tile of a kernel; on a CPU a tile is a whole block of the plan."""
    if tuning is not None:
        return getattr(tuning, kernel)
    if query.device.type != "cuda":
        return Tile(plan.block_q, plan.block_k, num_warps=4, num_stages=1)
    capability = torch.cuda.get_device_capability(query.device)
    return getattr(choose_tuning(capability, query.shape[3], plan.interval, wide=query.element_size() > 2), kernel)


def _score_scales(scale: float | None, head_dim: int, softcap: float) -> tuple[float, float, float]:
    """The scale, and factors from scores to powers of two: one, or one inside and one outside of the soft cap."""
    scale = head_dim**-0.5 if scale is None else scale
    if scale <= 0:  # the running maximum is taken before scores are scaled
        raise ValueError(f"`scale={scale}` is not above 0, which the kernels need. Scale `query` instead.")
    log2e = math.log2(math.e)
    return (scale, 2 * log2e * scale / softcap, softcap * log2e) if softcap else (scale, scale * log2e, 0.0)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of a tensor the current one, on which kernels are launched."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()
