"""Collectives of a tensor-parallel group, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..world import ACTIVITY


def run(collective: Callable[..., Any], *tensors: Tensor, group: dist.ProcessGroup) -> None:
    """Runs a collective, in which this rank waits for others."""
    ACTIVITY.waits = True
    collective(*tensors, group=group)
    ACTIVITY.waits = False


def gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the values of all ranks, by rank."""
    gathered = values.new_empty((group.size(), *values.shape))
    run(dist.all_gather_single, gathered.view(-1), values.contiguous().view(-1), group=group)
    return gathered


class SumGradients(torch.autograd.Function):
    """Passes on what all ranks have alike; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        summed = gradient.contiguous()  # in place: nobody but the linear layer, which has just made it, knows it
        run(dist.all_reduce, summed, group=ctx.group)
        return summed, None


class Sum(torch.autograd.Function):
    """Sums over the ranks, in place; each has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(values)
        run(dist.all_reduce, values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class GatherFeatures(torch.autograd.Function):
    """Joins the features of all ranks; each has the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.width = group.rank(), values.shape[-1]
        return gather(values, group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.narrow(-1, ctx.rank * ctx.width, ctx.width), None


# A graph of `torch.compile` has the sum as an operator, which names its group and writes to none of its inputs.


@torch.library.custom_op("hf_mmparallel::sum_over_ranks", mutates_args=())
def sum_in_graph(values: Tensor, group_name: str) -> Tensor:
    """Sums over the ranks of a group; each has the gradient of the sum."""
    summed = values.clone(memory_format=torch.contiguous_format)
    group: Any = torch._C._distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    run(dist.all_reduce, summed, group=group)
    return summed


@sum_in_graph.register_fake
def _(values: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


sum_in_graph.register_autograd(lambda ctx, gradient: (gradient, None))


class SumGradientsInGraph(torch.autograd.Function):
    """[`SumGradients`] in a graph."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return sum_in_graph(gradient, ctx.group_name), None
