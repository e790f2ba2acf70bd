"""A copy of a model without memory for weights, to find the shape of the input of an encoder's first layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ..modeling.features import flat_features
from ..modeling.spec import find_stack, layers_of, module_parts
from ..modeling.unowned import hidden_of, identity_layer, whole_shape

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


_MOST = 1 << 22  # elements of a parameter that gets values of its own


@torch.no_grad()
def frames_are_apart(skeleton: Any, module: str, grid: Tensor, width: int) -> bool:
    """
    Whether an encoder that packs its items computes each frame of a video as if it were alone: two frames of the same
    patches, of extent `grid` `(1, 3)` and `width` values, enter its layers alike, attend to themselves only, and have
    twice the features of one. Small parameters of the skeleton are changed.
    """
    part = module_parts(skeleton)[module]
    modality, num_patches = part.modalities[0], int(grid.prod())
    entered: list[Any] = []  # arguments of each layer
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: entered.append((args, kwargs)), with_kwargs=True)
        for layer in layers_of(skeleton, find_stack(skeleton, part.tower))
    ]
    num_features = []
    try:
        with torch.random.fork_rng(devices=[]):
            for parameter in skeleton.get_submodule(part.tower).parameters():
                if parameter.numel() <= _MOST:
                    parameter.data = torch.rand(parameter.shape, dtype=parameter.dtype)
            frame = torch.rand(num_patches, width)
        for count in (1, 2):
            entered.clear()
            values = frame.repeat(count, 1), grid * torch.tensor([count, 1, 1])
            output = part.features[modality](**dict(zip(part.input_names(modality), values, strict=False)))
            num_features.append(len(flat_features(output.pooler_output)))
    except Exception:  # an encoder may raise anything
        return False
    finally:
        for handle in handles:
            handle.remove()
    return num_features[1] == 2 * num_features[0] and all(_is_apart(tree_leaves(own), num_patches) for own in entered)


def _is_apart(arguments: Iterable[Any], num_patches: int) -> bool:
    """Whether a layer with these arguments computes the same for two frames of so many patches, each by itself."""
    has_ends = False
    for value in arguments:
        if not isinstance(value, Tensor):
            continue
        if value.dim() == 1 and len(value) > 1 and value[0] == 0 and value[-1] == 2 * num_patches:  # `cu_seqlens`
            has_ends = True
            if num_patches not in value.tolist():
                return False
        elif 2 * num_patches in value.shape:
            halves = value.split(num_patches, value.shape.index(2 * num_patches))
            if not torch.equal(*halves):
                return False
    return has_ends
