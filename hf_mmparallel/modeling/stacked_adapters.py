"""
LoRA of stacked weights, such as those of the experts of a layer (`target_parameters`).

`peft` wraps a module once for each such parameter, one adapter around the other, and adds `scale * B_e A_e` to the
weight of each expert before a forward. It does so in the module, which must have all of the weight. Ranks that share
the weight have the same part of the adapter, and add that to theirs.

Axes: E experts, R rank of the adapter, I inputs and O outputs of an expert. `A` is `[E * R, I]` and has the rows of
one expert after those of the other; `B` is `[O, R * E]`, with the columns of an expert E apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .unowned import local

_WRAPPED = re.compile(r"(\.base_layer)+$")


def caller_name(name: str) -> str:
    """Returns the name by which a model calls a module that adapters of its weights may wrap."""
    return _WRAPPED.sub("", name)


def stacked_adapters(module: Any) -> list[Any]:
    """Lists the adapters of weights around a module, the outermost first, which is the given one."""
    adapters = []
    while hasattr(module, "parameter_name"):
        adapters.append(module)
        module = module.base_layer
    return adapters


@contextmanager
def own_weights(module: nn.Module, adapters: Sequence[Any] = ()) -> Iterator[None]:
    """Lets a module's code see what this rank has of its weights, as plain tensors, with what adapters add to them."""
    factors = [matrix for adapter in adapters for part in (adapter.lora_A, adapter.lora_B) for matrix in part.values()]
    hidden = [(part, dict(part.named_parameters(recurse=False))) for part in (module, *factors)]
    for part, parameters in hidden:
        part.__dict__.update({name: local(parameter) for name, parameter in parameters.items()})
    try:
        for adapter in adapters:
            _add_adapter(module, adapter)
        yield
    finally:
        for part, parameters in hidden:
            for name in parameters:
                del part.__dict__[name]


def _add_adapter(module: nn.Module, adapter: Any) -> None:
    """Adds the product of an adapter's factors to the weight that a module sees, in the dtype of that."""
    active = [] if adapter.disable_adapters else [name for name in adapter.active_adapters if name in adapter.lora_A]
    for name in active:
        left, right, scale = adapter.get_delta_factors(name)
        weight = module.__dict__[adapter.parameter_name]
        with torch.autocast(weight.device.type, enabled=False):
            module.__dict__[adapter.parameter_name] = torch.baddbmm(weight, left, right, alpha=scale)


def add_own_parts(caller: Any) -> None:
    """Lets a module and the adapters of its weights, which tensor parallelism cuts, compute with this rank's parts."""
    adapters = stacked_adapters(caller)
    module = adapters[-1].base_layer

    def forward(*args: Any, **kwargs: Any) -> Any:
        with own_weights(module, adapters):
            return module.forward(*args, **kwargs)

    caller.forward = forward
