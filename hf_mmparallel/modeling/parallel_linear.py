"""
Linear layers that the ranks of a tensor-parallel group share, on plain tensors: column- and row-parallel products
(Shoeybi et al., Megatron-LM, 2019, section 3).

transformers computes these layers on `DTensor`s, which derive the layout of each operation anew for rows of another
length. That takes longer than the products, and batches of multimodal samples have another length in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ..world import ACTIVITY
from .dtensors import local

# The columns of a matrix are the features that it returns; its rows are those that it takes.
_COLUMN_STYLES = ("colwise", "colwise_gather_output", "colwise_rep")
_ROW_STYLES = ("rowwise",)


def _run(collective: Callable[..., Any], *tensors: Tensor, group: dist.ProcessGroup) -> None:
    """Runs a collective, in which this rank waits for others."""
    ACTIVITY.waits = True
    collective(*tensors, group=group)
    ACTIVITY.waits = False


# A graph of `torch.compile` has the sum as an operator, which names its group and writes to none of its inputs.


@torch.library.custom_op("hf_mmparallel::sum_over_ranks", mutates_args=())
def _sum_in_graph(values: Tensor, group_name: str) -> Tensor:
    summed = values.clone(memory_format=torch.contiguous_format)
    group: Any = torch._C._distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    _run(dist.all_reduce, summed, group=group)
    return summed


@_sum_in_graph.register_fake
def _(values: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


_sum_in_graph.register_autograd(lambda ctx, gradient: (gradient, None))


class _SumGradientsInGraph(torch.autograd.Function):
    """[`_SumGradients`] in a graph."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum_in_graph(gradient, ctx.group_name), None


class _SumGradients(torch.autograd.Function):
    """Passes on what all ranks have alike; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        summed = gradient.contiguous()  # in place: nobody but the linear layer, which has just made it, knows it
        _run(dist.all_reduce, summed, group=ctx.group)
        return summed, None


class _Sum(torch.autograd.Function):
    """Sums over the ranks, in place; each has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(values)
        _run(dist.all_reduce, values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _GatherFeatures(torch.autograd.Function):
    """Joins the features of all ranks; each has the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.width = group.rank(), values.shape[-1]
        gathered = values.new_empty((group.size(), *values.shape))
        _run(dist.all_gather_single, gathered.view(-1), values.contiguous().view(-1), group=group)
        return gathered.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.narrow(-1, ctx.rank * ctx.width, ctx.width), None


def shares_linear(layer: nn.Module, style: str, tp_size: int) -> TypeGuard[nn.Linear]:
    """Returns whether `use_plain_tensors` computes a layer of this style: a linear one that all ranks cut alike."""
    if type(layer) is not nn.Linear:  # one that is quantized computes its product in another way
        return False
    if style in _COLUMN_STYLES:
        return layer.out_features % tp_size == 0
    return style in _ROW_STYLES and layer.in_features % tp_size == 0


def use_plain_tensors(layer: nn.Linear, style: str, mesh: DeviceMesh) -> None:
    """
    Lets a linear layer whose parameters are cut compute on plain tensors, in place. A column-parallel one takes all
    features and returns those of this rank, or all for the styles that gather; a row-parallel one takes those of this
    rank and returns all.
    """
    group = mesh.get_group()
    if style in _ROW_STYLES:
        forward = _row_parallel(layer, group)
    else:
        forward = _column_parallel(layer, group, gathers=style != "colwise")
    layer.graph_inputs = None  # type: ignore[assignment]
    layer.forward = forward  # type: ignore[method-assign]


@contextmanager
def shards_as_inputs(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Takes the shards of linear layers out of their `DTensor`s for the graphs that run in this context."""
    for layer in layers:
        layer.graph_inputs = None  # type: ignore[assignment]
        layer.graph_inputs = _shards(layer)  # type: ignore[assignment, arg-type]
    try:
        yield
    finally:
        for layer in layers:
            layer.graph_inputs = None  # type: ignore[assignment]


def _shards(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Returns this rank's weight and bias; the inputs of a graph are plain tensors."""
    given: Any = layer.graph_inputs
    if given is not None:
        return given
    return local(layer.weight), None if layer.bias is None else local(layer.bias)


def _column_parallel(layer: nn.Linear, group: dist.ProcessGroup, gathers: bool) -> Callable[[Tensor], Tensor]:
    name = group.group_name

    def forward(input: Tensor) -> Tensor:
        features = input
        if input.requires_grad and torch.compiler.is_compiling():
            features = _SumGradientsInGraph.apply(input, name)
        elif input.requires_grad:
            features = _SumGradients.apply(input, group)
        output = functional.linear(features, *_shards(layer))
        return _GatherFeatures.apply(output, group) if gathers else output

    return forward


def _row_parallel(layer: nn.Linear, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    name = group.group_name

    def forward(input: Tensor) -> Tensor:
        weight, bias = _shards(layer)
        product = functional.linear(input, weight)
        output = _sum_in_graph(product, name) if torch.compiler.is_compiling() else _Sum.apply(product, group)
        return output if bias is None else output + bias  # which each rank has whole

    return forward
