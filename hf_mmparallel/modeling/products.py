"""
Products of linear layers whose weights are trained, where their gradients are not autograd's own: they may be put off,
and the rows of a tensor-parallel group that they are computed from may be gathered again.

The backward of such a layer computes the gradient of its input at once. That of its weight needs the input, of which
a rank may have kept its share alone (see `sequence_parallel`), and can be computed later as work of its own, which
pipeline schedules put where a rank would be idle (Qi et al. 2023, zero bubble pipeline parallelism, section 2). The
graph of the backward is gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from .tp_collectives import GatheredRows, KeptShare


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of the weight of a linear layer that is still to be computed."""

    layer: nn.Linear
    input: Tensor  # `[tokens, in_features]`; of gathered rows the share of this rank, `[samples, rows, in_features]`
    output_gradient: Tensor  # `[tokens, out_features]`
    rows: GatheredRows | None = None

    def start(self) -> None:
        if self.rows is not None:
            self.rows.start(self.input)

    def compute(self) -> Tensor:
        """Returns the gradient `[out_features, in_features]`, as the backward of a linear layer computes it."""
        input = self.input
        if self.rows is not None:
            input = self.rows.read(input).flatten(0, 1).to(self.output_gradient.dtype)
        return self.output_gradient.t().mm(input)


class Collector(Protocol):
    """What may take weight gradients to compute them later."""

    @property
    def is_collecting(self) -> bool: ...

    def collect(self, gradient: WeightGradient) -> None: ...


def use_products(layer: nn.Linear, collector: Collector | None = None) -> None:
    """Lets a linear layer compute with [`multiply`]."""
    compute_by(layer, partial(multiply, layer=layer, collector=collector))


def compute_by(layer: nn.Linear, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
    """Lets a linear layer compute with a product, by its own forward or by one that another part has given it."""
    layer.multiply = product  # type: ignore[assignment]
    if "forward" not in vars(layer):
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return layer.multiply(input, layer.weight, layer.bias)  # type: ignore[operator]


def as_multiplied(values: Tensor) -> Tensor:
    """Returns values as autocast gives them to matrices."""
    kind = values.device.type
    if not torch.is_autocast_enabled(kind) or values.dtype == torch.float64:
        return values
    return values.to(torch.get_autocast_dtype(kind))


def multiply(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: nn.Linear,
    collector: Collector | None = None,
) -> Tensor:
    """As `torch.nn.functional.linear`; the gradient of the weight goes to a `collector` that takes it."""
    kept: KeptShare | None = None if torch.compiler.is_compiling() else getattr(input, "kept_share", None)
    kind = input.device.type
    is_cast = torch.is_autocast_enabled(kind) and input.dtype != torch.float64
    if not is_cast:
        input = input.to(weight.dtype)  # of an adapter in a wider dtype
    is_plain = torch.compiler.is_compiling() or isinstance(weight, DTensor) or (kept is None and collector is None)
    if is_plain or not (torch.is_grad_enabled() and weight.requires_grad):
        return functional.linear(input, weight, bias)
    if is_cast:
        dtype = torch.get_autocast_dtype(kind)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if kept is not None:
        kept.rows.add_reader(lambda: collector is None or not collector.is_collecting)
    # rows, since a view that a function of autograd returns can't be changed in place
    rows = input.reshape(-1, input.shape[-1])
    return _Product.apply(rows, weight, bias, kept, layer, collector).view(*input.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: KeptShare | None,
        layer: nn.Linear,
        collector: Collector | None,
    ) -> Tensor:
        ctx.layer, ctx.collector, ctx.rows = layer, collector, None if kept is None else kept.rows
        ctx.save_for_backward(input if kept is None else kept.share, weight)
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad[:3]
        of_input = gradient.mm(weight) if needs_input else None
        of_bias = gradient.sum(0) if needs_bias else None
        own, of_weight = WeightGradient(ctx.layer, input, gradient, ctx.rows), None
        if ctx.collector is not None and ctx.collector.is_collecting:
            ctx.collector.collect(own)
        else:
            of_weight = own.compute()
        return of_input, of_weight, of_bias, None, None, None
