"""Collectives of a tensor-parallel group, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..world import run_collective


def _gather(values: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> tuple[Tensor, Any]:
    """Returns the values of all ranks, by rank, and with `async_op` the work at whose end they are there."""
    gathered = values.new_empty((group.size(), *values.shape))
    flat = values.contiguous().view(-1)
    return gathered, dist.all_gather_single(gathered.view(-1), flat, group=group, async_op=async_op)


def gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    return run_collective(_gather, values, group)[0]


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


def _in_order(gathered: Tensor, num_rows: int | None) -> Tensor:
    rows = gathered.movedim(0, 1).flatten(1, 2)
    return rows if num_rows is None else rows.narrow(1, 0, num_rows).contiguous()


def _all_rows(values: Tensor, group: dist.ProcessGroup, num_rows: int | None) -> Tensor:
    return _in_order(gather(values, group), num_rows)


def _sum_of_own_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    of_ranks = _by_rank(values, group.size())
    own = torch.empty_like(of_ranks[0])
    run_collective(dist.reduce_scatter_single, own.view(-1), of_ranks.view(-1), group=group)
    return own


class GatheredRows:
    """
    The rows of all ranks that the matrices of a block read in a forward, which are gathered again for the gradients of
    their weights: once in a backward, for all that read them there.
    """

    def __init__(self, group: dist.ProcessGroup, num_rows: int | None):
        self.group, self.num_rows = group, num_rows
        self._readers: list[Callable[[], bool]] = []
        self._gathered: Tensor | None = None
        self._work: Any = None
        self._num_left = 0  # readers that have not read what is gathered

    def add_reader(self, reads_now: Callable[[], bool]) -> None:
        """Notes one more reader; `reads_now` says whether it reads in the backward that is running."""
        self._readers.append(reads_now)

    @property
    def is_read(self) -> bool:
        return bool(self._readers)

    @property
    def is_read_now(self) -> bool:
        """Whether one of them reads in the backward that is running."""
        return any(reads_now() for reads_now in self._readers)

    def start(self, share: Tensor) -> None:
        """Starts to gather the shares of all ranks, unless they are there or on their way."""
        if self._gathered is None:
            self._gathered, self._work = _gather(share, self.group, async_op=True)
            self._num_left = len(self._readers)

    def read(self, share: Tensor) -> Tensor:
        """Returns the rows, which are forgotten when all readers have had them."""
        self.start(share)
        assert self._gathered is not None
        if self._work is not None:
            run_collective(self._work.wait)
            self._gathered, self._work = _in_order(self._gathered, self.num_rows), None
        rows = self._gathered
        self._num_left -= 1
        if not self._num_left:
            self._gathered = None
        return rows


class KeptShare(NamedTuple):
    rows: GatheredRows
    share: Tensor  # of this rank


class _OnRows(torch.autograd.Function):
    """A function of rows, and that of the gradients, behind which rows that are read next are on their way."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        values: Tensor,
        function: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        kept: KeptShare | None = None,
    ) -> Tensor:
        ctx.adjoint, ctx.rows = adjoint, None
        if kept is not None and kept.rows.is_read:
            ctx.rows = kept.rows
            ctx.save_for_backward(kept.share)
        return function(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        result = ctx.adjoint(gradient)
        if ctx.rows is not None and ctx.rows.is_read_now:
            ctx.rows.start(*ctx.saved_tensors)
        return result, None, None, None


def split_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the rows of this rank, of those that all ranks have alike."""
    back = partial(_all_rows, group=group, num_rows=values.shape[1])
    return _OnRows.apply(values, partial(_own_rows, group=group), back)


def join_rows(values: Tensor, group: dist.ProcessGroup, num_rows: int) -> Tensor:
    """Returns the rows of all ranks, with which each goes on alike."""
    forth = partial(_all_rows, group=group, num_rows=num_rows)
    return _OnRows.apply(values, forth, partial(_own_rows, group=group))


def gather_rows(values: Tensor, group: dist.ProcessGroup, num_rows: int | None, keeps_share: bool = False) -> Tensor:
    """
    Returns the rows of all ranks, with padding by default; their gradients are summed over the ranks. With
    `keeps_share` the backward of what reads them gathers them again: they are noted as `kept_share` of the result.
    """
    if torch.compiler.is_compiling():
        gather_in_graph = partial(functional_collectives.all_gather_tensor_autograd, gather_dim=1, group=group)
        # a graph gathers again what is marked so
        rows = checkpoint(gather_in_graph, values, use_reentrant=False) if keeps_share else gather_in_graph(values)
        return rows if num_rows is None else rows.narrow(1, 0, num_rows)
    forth = partial(_all_rows, group=group, num_rows=num_rows)
    rows = _OnRows.apply(values, forth, partial(_sum_of_own_rows, group=group))
    if keeps_share:
        rows.kept_share = KeptShare(GatheredRows(group, num_rows), values.detach())
    return rows


def sum_rows(values: Tensor, group: dist.ProcessGroup, kept: KeptShare | None = None) -> Tensor:
    """
    Sums over the ranks; each gets its own rows of the sum. While the backward goes on from the gradients of all rows,
    those that were `kept` are gathered again.
    """
    if torch.compiler.is_compiling():
        padded = functional.pad(values, (0, 0, 0, -values.shape[1] % group.size()))
        return functional_collectives.reduce_scatter_tensor_autograd(padded, "sum", 1, group)
    back = partial(_all_rows, group=group, num_rows=values.shape[1])
    return _OnRows.apply(values, partial(_sum_of_own_rows, group=group), back, kept)


class GatherFeatures(torch.autograd.Function):
    """Joins the features of all ranks; each has the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.width = group.rank(), values.shape[-1]
        return gather(values, group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.narrow(-1, ctx.rank * ctx.width, ctx.width), None


def _group(name: str) -> Any:
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


# A graph of `torch.compile` has the sum as an operator, which names its group and writes to none of its inputs.


@torch.library.custom_op("hf_mmparallel::sum_over_ranks", mutates_args=())
def sum_in_graph(values: Tensor, group_name: str) -> Tensor:
    """Sums over the ranks of a group; each has the gradient of the sum."""
    summed = values.clone(memory_format=torch.contiguous_format)
    run_collective(dist.all_reduce, summed, group=_group(group_name))
    return summed


@sum_in_graph.register_fake
def _(values: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


sum_in_graph.register_autograd(lambda ctx, gradient: (gradient, None))


# Where layers are recomputed, all but the outputs of some operators, a product and its sum are one.


@torch.library.custom_op("hf_mmparallel::summed_product", mutates_args=())
def summed_product(input: Tensor, weight: Tensor, group_name: str, splits_rows: bool) -> Tensor:
    """A product `[samples, rows, features]` that the ranks of a group sum; each gets all rows or its own."""
    product, group = functional.linear(input, weight), _group(group_name)
    if splits_rows:
        return _sum_of_own_rows(product, group)
    run_collective(dist.all_reduce, product, group=group)
    return product


def _keep_operands(ctx: Any, inputs: tuple[Tensor, Tensor, str, bool], output: Tensor) -> None:
    input, weight, ctx.group_name, ctx.splits_rows = inputs
    ctx.save_for_backward(input, weight)


def _gradients_of_operands(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    input, weight = ctx.saved_tensors
    if ctx.splits_rows:
        gradient = _all_rows(gradient, _group(ctx.group_name), input.shape[1])
    of_input = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
    of_weight = gradient.flatten(0, -2).t().mm(input.flatten(0, -2)) if ctx.needs_input_grad[1] else None
    return of_input, of_weight, None, None


summed_product.register_autograd(_gradients_of_operands, setup_context=_keep_operands)


class SumGradientsInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return sum_in_graph(gradient, ctx.group_name), None
