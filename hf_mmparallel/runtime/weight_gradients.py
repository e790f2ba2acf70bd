"""
Gradients of the weights of linear layers as work of its own, which pipeline schedules put where a rank would be idle.

The backward of a linear layer computes the gradient of its input at once and keeps its input and the gradient of its
output, from which that of the weight is computed later (Qi et al. 2023, zero bubble pipeline parallelism, section 2).
The graph of the backward is gone by then. All else that is trained gets its gradient at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from ..modeling import ModuleStage
from ..modeling.unowned import from_shard, local
from .joint_passes import gradient_dtype


@dataclass(frozen=True)
class PutOffGradient:
    """The gradient of the weight of a linear layer that is still to be computed."""

    layer: nn.Linear
    input: Tensor  # `[tokens, in_features]`
    output_gradient: Tensor  # `[tokens, out_features]`

    def compute(self) -> Tensor:
        """Returns the gradient `[out_features, in_features]`, as the backward of a linear layer computes it."""
        return self.output_gradient.t().mm(self.input)


PutOffGradients = dict[nn.Linear, list[list[PutOffGradient]]]  # by linear layer and chunk


class WeightGradients:
    """The linear layers of a rank whose weight gradients can be put off."""

    def __init__(self, stages: Iterable[ModuleStage]):
        self._collected: list[PutOffGradient] | None = None  # `None` while they are not put off
        self._layer_of: dict[nn.Linear, int | None] = {}  # linear layer -> its layer in the module, if it is in one
        for stage in stages:
            self._cover(stage)

    def _cover(self, stage: ModuleStage) -> None:
        """Lets the trained linear layers of a stage compute with [`~WeightGradients.multiply`]."""
        users: dict[nn.Parameter, list[nn.Module]] = {}
        for module in stage.model.modules():
            for parameter in module.parameters(recurse=False):
                users.setdefault(parameter, []).append(module)
        inside = {part: index for index, layer in stage.own_layers.items() for part in layer.modules()}
        for _, parameter in stage.parameters():
            # a weight with several users has one gradient of all of them
            layer = users[parameter][0] if parameter.requires_grad and len(users[parameter]) == 1 else None
            if isinstance(layer, nn.Linear) and parameter is layer.weight and _computes_plainly(layer):
                layer.multiply = partial(self.multiply, layer)  # type: ignore[assignment]
                if "forward" not in vars(layer):
                    layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
                self._layer_of[layer] = inside.get(layer)

    def multiply(self, layer: nn.Linear, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns what `torch.nn.functional.linear` does for the parameters of a layer on this rank."""
        is_plain = torch.compiler.is_compiling() or isinstance(weight, DTensor)
        if is_plain or not (torch.is_grad_enabled() and weight.requires_grad):
            return functional.linear(input, weight, bias)
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        # rows, since a view that a function of autograd returns can't be changed in place
        rows = input.reshape(-1, input.shape[-1])
        return _Product.apply(rows, weight, bias, layer, self).view(*input.shape[:-1], weight.shape[0])

    @contextmanager
    def put_off(self) -> Iterator[list[PutOffGradient]]:
        """A block whose backwards add the weight gradients that they leave out to a list."""
        self._collected = result = []
        try:
            yield result
        finally:
            self._collected = None

    def collect(self, gradient: PutOffGradient) -> bool:
        """Takes a gradient that is put off; returns whether it is."""
        if self._collected is not None:
            self._collected.append(gradient)
        return self._collected is not None

    @torch.no_grad()
    def add(self, gradients: PutOffGradients, reach: Callable[[int], None]) -> None:
        """
        Adds gradients that were put off to those of the parameters, from the last layer to the first, and frees them.
        `reach` is called with the index of each layer before its first one.
        """
        reached: int | None = None
        while gradients:
            layer = next(iter(gradients))
            index = self._layer_of[layer]
            if index is not None and index != reached:
                reached = index
                reach(index)
            for of_chunk in gradients.pop(layer):
                _add(layer.weight, reduce(torch.add, (one.compute() for one in of_chunk)))

    def by_layer(self, chunks: Iterable[list[PutOffGradient]]) -> PutOffGradients:
        """Linear layer -> what is put off of it in each chunk; first those in no layer, then from the last one on."""
        found: PutOffGradients = {}
        for chunk in chunks:
            own: dict[nn.Linear, list[PutOffGradient]] = {}
            for gradient in chunk:
                own.setdefault(gradient.layer, []).append(gradient)
            for layer, gradients in own.items():
                found.setdefault(layer, []).append(gradients)
        places = {layer: self._layer_of[layer] for layer in found}
        ordered = sorted(found, key=lambda layer: -math.inf if (place := places[layer]) is None else -place)
        return {layer: found[layer] for layer in ordered}


def cut_by_work(gradients: PutOffGradients, count: int) -> list[PutOffGradients]:
    """Consecutive parts of what was put off, of about the same work."""
    sizes = list(accumulate(layer.weight.numel() for layer in gradients))
    result: list[PutOffGradients] = [{} for _ in range(count)]
    for (layer, chunks), size in zip(gradients.items(), sizes, strict=True):
        middle = size - layer.weight.numel() / 2
        result[min(int(count * middle / sizes[-1]), count - 1)][layer] = chunks
    return result


def _computes_plainly(layer: nn.Linear) -> bool:
    """Whether a layer is a product with its weight alone, by the forward of its class or on shards of a tp group."""
    is_own = "forward" not in vars(layer) or hasattr(layer, "multiply") or hasattr(layer, "graph_inputs")
    return type(layer) is nn.Linear and is_own and not is_parametrized(layer)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a linear layer on plain tensors."""
    return layer.multiply(input, layer.weight, layer.bias)  # type: ignore[operator]


def _add(parameter: Any, gradient: Tensor) -> None:
    """Adds to the gradient of a parameter what this rank has computed, as autograd does."""
    gradient = gradient.to(gradient_dtype(parameter))
    if parameter.grad is not None:
        local(parameter.grad).add_(gradient)
        return
    gradient = gradient.contiguous()
    parameter.grad = from_shard(gradient, parameter) if isinstance(parameter, DTensor) else gradient


class _Product(torch.autograd.Function):
    """A linear layer whose weight gradient may be put off."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, owner: WeightGradients
    ) -> Tensor:
        ctx.layer, ctx.owner = layer, owner
        ctx.save_for_backward(input, weight)
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad[:3]
        of_input = gradient.mm(weight) if needs_input else None
        of_bias = gradient.sum(0) if needs_bias else None
        later = PutOffGradient(ctx.layer, input, gradient)
        of_weight = None if ctx.owner.collect(later) else later.compute()
        return of_input, of_weight, of_bias, None, None
