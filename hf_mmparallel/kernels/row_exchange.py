"""Rows of tensors that travel to ranks of a group, several tensors as the bytes of one, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..world import run_collective

Layout = Sequence[tuple[int, torch.dtype]]  # width and dtype of tensors whose rows are sent together


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """Width and dtype of tensors `[rows, width]`."""
    return [(tensor.shape[1], tensor.dtype) for tensor in tensors]


def _transfer(
    tensors: Sequence[Tensor], sent: list[int], received: list[int], layout: Layout, group: Any
) -> list[Tensor]:
    """Sends rows to the ranks of a group, and returns those that they have sent."""
    packed = torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors], dim=1)
    widths = [width * dtype.itemsize for width, dtype in layout]
    arrived = packed.new_empty(sum(received), sum(widths))
    _all_to_all(arrived, packed, received, sent, group)
    result = [arrived.new_empty(len(arrived), width, dtype=dtype) for width, dtype in layout]
    for tensor, piece in zip(result, arrived.split(widths, dim=1), strict=True):
        tensor.view(torch.uint8).copy_(piece)  # which need not have strides of the wider dtype
    return result


def _all_to_all(output: Tensor, rows: Tensor, received: list[int], sent: list[int], group: Any) -> None:
    """Sends so many rows to each rank of a group, and receives so many of each."""

    def exchange(output: Tensor, rows: Tensor, group: Any) -> None:
        dist.all_to_all_single(output, rows, received, sent, group=group)

    run_collective(exchange, output, rows, group=group)


class RowExchange(torch.autograd.Function):
    """Sends rows of tensors to ranks of a group; their gradients take the way back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: Tensor | None,  # one that needs a gradient lets this rank take part in the backward in any case
        group: Any,
        sent: list[int],  # rows, in the order of the ranks
        received: list[int],
        layout: Layout,  # of what arrives
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.back = group, received, sent
        ctx.is_float = [tensor.is_floating_point() for tensor in tensors]
        ctx.layout = [own for own, is_float in zip(layout_of(tensors), ctx.is_float, strict=True) if is_float]
        # A recomputed forward goes on as long as something is saved in it: all ranks send, or none.
        ctx.save_for_backward(tensors[0].new_empty(0))
        arrived = _transfer(tensors, sent, received, layout, group)
        ctx.mark_non_differentiable(*(tensor for tensor in arrived if not tensor.is_floating_point()))
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors  # recomputes the forward first
        group, sent, received = ctx.back
        of_floats = [gradient for gradient, is_float in zip(gradients, ctx.is_float, strict=True) if is_float]
        returned = iter(_transfer(of_floats, sent, received, ctx.layout, group))
        return (None,) * 5 + tuple(next(returned) if is_float else None for is_float in ctx.is_float)
