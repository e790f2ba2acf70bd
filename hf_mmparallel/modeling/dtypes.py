"""Dtypes of weights and of the hidden states between layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..adapters.adapter_files import adapter_names
from ..plan import ModelSpec, ParameterSpec
from .unowned import is_unowned


def is_activation_dtype(dtype: torch.dtype) -> bool:
    """Returns whether layers compute in a dtype; weights of 8 bits and less are dequantized for computation."""
    return dtype.is_floating_point and dtype.itemsize > 1


def activation_dtype(spec: ModelSpec, parameters: Iterable[ParameterSpec]) -> torch.dtype:
    """Returns the widest dtype of hidden states that layers with these parameters can output."""
    adapters = adapter_names(spec.parameters)
    # adapters output the dtype of the layer that they wrap
    dtypes = {getattr(torch, p.dtype) for p in parameters if p.name not in adapters}
    candidates = [dtype for dtype in dtypes if is_activation_dtype(dtype)]
    return functools.reduce(torch.promote_types, candidates) if candidates else torch.bfloat16


def hidden_dtype(spec: ModelSpec, module: str) -> torch.dtype:
    """Returns the widest dtype of the hidden states between the layers of a module."""
    layers = spec.modules[module]
    return activation_dtype(spec, [p for p in layers.parameters if p.layer < layers.num_layers])


def cast_values(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters and buffers in place; unowned ones still use no memory."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if is_unowned(tensor):
            return torch.full((), torch.nan, dtype=dtype, device=tensor.device).expand(tensor.shape)
        return tensor.to(dtype)

    model._apply(cast)
