"""Collectives of a tensor-parallel group, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

from ..world import run_collective


def gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the values of all ranks, by rank."""
    gathered = values.new_empty((group.size(), *values.shape))
    run_collective(dist.all_gather_single, gathered.view(-1), values.contiguous().view(-1), group=group)
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
        run_collective(dist.all_reduce, summed, group=ctx.group)
        return summed, None


class Sum(torch.autograd.Function):
    """Sums over the ranks, in place; each has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(values)
        run_collective(dist.all_reduce, values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


# Rows `[samples, rows, features]`, of which each rank has a share; the last ones are padded with zeros.


def _by_rank(values: Tensor, size: int) -> Tensor:
    """Returns the rows of each rank, `[ranks, samples, rows, features]`."""
    padded = functional.pad(values, (0, 0, 0, -values.shape[1] % size))
    return padded.unflatten(1, (size, -1)).movedim(1, 0).contiguous()


def _own_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _by_rank(values, group.size())[group.rank()].clone()  # so that the rows of others are free


def _all_rows(values: Tensor, group: dist.ProcessGroup, num_rows: int | None) -> Tensor:
    rows = gather(values, group).movedim(0, 1).flatten(1, 2)
    return rows if num_rows is None else rows.narrow(1, 0, num_rows)


def _sum_of_own_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    of_ranks = _by_rank(values, group.size())
    own = torch.empty_like(of_ranks[0])
    run_collective(dist.reduce_scatter_single, own.view(-1), of_ranks.view(-1), group=group)
    return own


class _OnRows(torch.autograd.Function):
    """A function of rows, and that of the gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: Tensor, function: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.adjoint = adjoint
        return function(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.adjoint(gradient), None, None


def split_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the rows of this rank, of those that all ranks have alike."""
    back = partial(_all_rows, group=group, num_rows=values.shape[1])
    return _OnRows.apply(values, partial(_own_rows, group=group), back)


def join_rows(values: Tensor, group: dist.ProcessGroup, num_rows: int) -> Tensor:
    """Returns the rows of all ranks, with which each goes on alike."""
    forth = partial(_all_rows, group=group, num_rows=num_rows)
    return _OnRows.apply(values, forth, partial(_own_rows, group=group))


def gather_rows(values: Tensor, group: dist.ProcessGroup, num_rows: int | None) -> Tensor:
    """Returns the rows of all ranks, with padding by default; their gradients are summed over the ranks."""
    if torch.compiler.is_compiling():
        rows = functional_collectives.all_gather_tensor_autograd(values, 1, group)
        return rows if num_rows is None else rows.narrow(1, 0, num_rows)
    forth = partial(_all_rows, group=group, num_rows=num_rows)
    return _OnRows.apply(values, forth, partial(_sum_of_own_rows, group=group))


def sum_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums over the ranks; each gets its own rows of the sum."""
    if torch.compiler.is_compiling():
        padded = functional.pad(values, (0, 0, 0, -values.shape[1] % group.size()))
        return functional_collectives.reduce_scatter_tensor_autograd(padded, "sum", 1, group)
    back = partial(_all_rows, group=group, num_rows=values.shape[1])
    return _OnRows.apply(values, partial(_sum_of_own_rows, group=group), back)


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
    run_collective(dist.all_reduce, summed, group=group)
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
