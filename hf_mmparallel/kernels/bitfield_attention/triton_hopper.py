"""
Forward and backward for Hopper GPUs; the kernels are in [`hopper_kernels`].

[`tuning.hopper_refusal`] lists unsupported calls, for which the portable form is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .hopper_kernels import dkdv_kernel, dq_kernel, forward_kernel
from .mask_plan import BlockLists, MaskPlan
from .triton import row_stats
from .tuning import Tile, Tuning


class _Heads(NamedTuple):
    """A `[1, heads, length, head_dim]` tensor as `_heads` takes it."""

    data: Tensor
    stride: int
    rows: int
    columns: int


def _as_matrix(tensor: Tensor) -> _Heads:
    """A view in which heads are stacked or side by side, if the strides allow it; otherwise a copy."""
    _, num_heads, length, head_dim = tensor.shape
    _, head, row, last = tensor.stride()
    aligned = tensor.data_ptr() % 16 == 0 and row * tensor.element_size() % 16 == 0
    if last == 1 and aligned and row >= head_dim:
        if head % row == 0 and (head >= row * length or num_heads == 1):
            return _Heads(tensor, row, head // row, 0)
        if head >= head_dim and (num_heads - 1) * head + head_dim <= row:
            return _Heads(tensor, row, 0, head)
    return _Heads(tensor.clone(memory_format=torch.contiguous_format), head_dim, length, 0)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: MaskPlan,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    tuning: Tuning,
    num_programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Attention of one row, for inputs that [`tuning.hopper_refusal`] accepts.

    Args:
        query (`torch.Tensor` of shape `[1, heads, query_length, head_dim]`): Queries.
        key (`torch.Tensor` of shape `[1, kv_heads, key_length, head_dim]`): Keys.
        value (`torch.Tensor` of shape `[1, kv_heads, key_length, head_dim]`): Values.
        plan (`MaskPlan`): The compiled mask, in its interval form.
        scale (`float`, *optional*): Factor of the scores, above 0; `head_dim ** -0.5` by default.
        softcap (`float`, *optional*, defaults to 0.0): Must be 0.
        sinks (`torch.Tensor`, *optional*): Must be None.
        tuning (`Tuning`): Tiles of the Hopper form.
        num_programs (`int`, *optional*): Persistent programs; by default one for each multiprocessor.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The output, like `query`, and the log-sum-exp `[1, heads, query_length]`.
    """
    assert not softcap and sinks is None
    out = torch.empty_like(query)
    if _as_matrix(out).data is not out:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    heads = [_as_matrix(tensor) for tensor in (query, key, value)]
    lists, tile = plan.by_query, tuning.forward
    num_tiles = lists.tiles.shape[0] * (plan.block_q // tile.block_q)
    grid = _grid(num_tiles * query.shape[1], query.device, num_programs)
    with _starting_on(query.device):
        forward_kernel[grid](
            *(matrix.data for matrix in heads),
            out,
            lse,
            *_mask_arguments(plan, lists),
            *_sizes(query, key, scale, num_tiles),
            *_layouts(*heads, _as_matrix(out)),
            **_constants(query, key, plan, tile),
        )
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
    *,
    tuning: Tuning,
    num_programs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """
    Gradients of [`forward`], without atomics and therefore bitwise deterministic.

    Args:
        grad_out (`torch.Tensor` of shape `[1, heads, query_length, head_dim]`): Gradient of the output.
        query (`torch.Tensor` of shape `[1, heads, query_length, head_dim]`):
            As in the forward pass, like all arguments below.
        key (`torch.Tensor` of shape `[1, kv_heads, key_length, head_dim]`): Keys.
        value (`torch.Tensor` of shape `[1, kv_heads, key_length, head_dim]`): Values.
        out (`torch.Tensor` of shape `[1, heads, query_length, head_dim]`): The output.
        lse (`torch.Tensor` of shape `[1, heads, query_length]`): The log-sum-exp.
        plan (`MaskPlan`): The compiled mask.
        scale (`float`, *optional*): Factor of the scores, above 0; `head_dim ** -0.5` by default.
        softcap (`float`, *optional*, defaults to 0.0): Must be 0.
        sinks (`torch.Tensor`, *optional*): Must be None.
        tuning (`Tuning`): Tiles of the Hopper form.
        num_programs (`int`, *optional*): Persistent programs; by default one for each multiprocessor.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]`: The gradients of query, key and value.
    """
    assert not softcap and sinks is None
    heads = [_as_matrix(tensor) for tensor in (query, key, value, grad_out)]
    grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
    grad_query, grad_key, grad_value = grads
    stats = row_stats(heads[-1].data, out, lse)
    tensors = [matrix.data for matrix in heads]
    layouts = _layouts(*heads)

    with _starting_on(query.device):
        lists, tile = plan.by_key, tuning.dkdv
        num_tiles = lists.tiles.shape[0] * (plan.block_k // tile.block_k)
        dkdv_kernel[_grid(num_tiles * key.shape[1], query.device, num_programs)](
            *tensors,
            grad_key,
            grad_value,
            stats,
            *_mask_arguments(plan, lists),
            *_sizes(query, key, scale, num_tiles),
            *layouts,
            **_constants(query, key, plan, tile),
        )
        lists, tile = plan.by_query, tuning.dq
        num_tiles = lists.tiles.shape[0] * (plan.block_q // tile.block_q)
        dq_kernel[_grid(num_tiles * query.shape[1], query.device, num_programs)](
            *tensors,
            grad_query,
            stats,
            *_mask_arguments(plan, lists),
            *_sizes(query, key, scale, num_tiles),
            *layouts,
            **_constants(query, key, plan, tile),
        )
    return grad_query, grad_key, grad_value, None


@contextmanager
def _starting_on(device: torch.device) -> Iterator[None]:
    """
    Launches kernels on this device, with their descriptors in its memory.

    The allocator of this memory is a setting of the thread, and backward passes run in another thread.
    """
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def _grid(num_tiles: int, device: torch.device, num_programs: int | None) -> tuple[int]:
    """One program for each multiprocessor, but not more than there are tiles."""
    if num_programs is None:
        on_gpu = device.type == "cuda"
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
    return (min(num_programs, num_tiles),)


def _mask_arguments(plan: MaskPlan, lists: BlockLists) -> tuple[Tensor, ...]:
    """First position and length of each query, tiles, their blocks, and the first position of each block of keys."""
    first, length = plan.query_rows[0].unbind(0)
    return first, length, lists.tiles, lists.blocks, plan.key_block_starts[0]


def _sizes(query: Tensor, key: Tensor, scale: float | None, num_tiles: int) -> tuple[float, int, int, int, int]:
    """Scale and sizes; the running maximum is taken before scores are scaled."""
    if scale is not None and scale <= 0:
        raise ValueError(f"`scale={scale}` is not above 0, which the kernels need. Scale `query` instead.")
    factor = query.shape[3] ** -0.5 if scale is None else scale
    return factor, query.shape[2], key.shape[2], query.shape[1], num_tiles


def _layouts(*matrices: _Heads) -> list[int]:
    return [number for matrix in matrices for number in matrix[1:]]


def _constants(query: Tensor, key: Tensor, plan: MaskPlan, tile: Tile) -> dict[str, int | bool]:
    """Compile-time arguments of a kernel, and how it is compiled."""
    return {
        "GROUPS": query.shape[1] // key.shape[1],
        "HEAD_DIM": query.shape[3],
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "STEPS_Q": plan.block_q // tile.block_q,
        "STEPS_K": plan.block_k // tile.block_k,
        "TILE_WIDTH": plan.by_query.tiles.shape[1],
        "SPECIALIZED": tile.specialized,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
