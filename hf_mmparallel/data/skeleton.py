"""A copy of a model without memory for weights, to find the shape of the input of an encoder's first layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.dtensors import whole_shape
from ..modeling.spec import find_stack, layers_of, module_parts
from ..modeling.unowned import hidden_of, identity_layer

_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class _Entered(Exception):
    """Raised to leave an encoder at its first layer, with the shape of the layer's input."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape


def make_skeleton(
    model: PreTrainedModel,
    stacks: Iterable[str],  # names of its lists of layers
) -> Any:
    """Copies a model of any device, or what a rank keeps of it, to the CPU, without hooks, with identity layers."""
    memo: dict[int, Any] = {}
    for stack in stacks:
        memo |= {id(layer): identity_layer(layer) for layer in layers_of(model, stack)}
    for module in model.modules():  # hooks may hold process groups, which can't be copied
        memo |= {id(value): type(value)() for name, value in vars(module).items() if name.endswith(_HOOKS)}
    for parameter in model.parameters():
        # one expanded zero, which uses no memory
        zeros = torch.zeros((), dtype=torch.float32).expand(whole_shape(parameter))
        memo[id(parameter)] = nn.Parameter(zeros, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.detach().cpu()
    return copy.deepcopy(model, memo).eval()


def entered_shape(
    skeleton: Any,  # of `make_skeleton`
    module: str,
    modality: str,
    inputs: Mapping[str, Any],  # the entries of a batch that its features are made of
) -> tuple[int, ...]:
    """The input shape of an encoder's first layer; raises any error of the encoder for unsupported inputs."""
    part = module_parts(skeleton)[module]
    layer = layers_of(skeleton, find_stack(skeleton, part.tower))[0]
    handle = layer.register_forward_pre_hook(_leave, with_kwargs=True)
    try:
        with torch.no_grad():
            part.features[modality](**inputs)
    except _Entered as entered:
        return entered.shape
    finally:
        handle.remove()
    raise RuntimeError("its first layer is never called")


def _leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Entered(tuple(hidden_of(args, kwargs).shape))
