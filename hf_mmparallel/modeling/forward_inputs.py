"""Arguments of an encoder's forward, derived from its signature and its config."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel


def meta_inputs(encoder: PreTrainedModel) -> dict[str, Any] | None:
    """Makes inputs of one sample on the meta device; `None` if signature and config do not determine them."""
    arguments = forward_arguments(encoder)
    config, main = encoder.config, arguments[0]
    number = partial(number_in_config, config)
    channels = number("num_channels", "in_channels", "in_chans") or 3
    if "input_ids" in arguments:
        return {"input_ids": torch.zeros(1, 4, dtype=torch.int64, device="meta"), "use_cache": False}
    shape: tuple[int, ...] | None = None
    rest: dict[str, Any] = {}
    if "grid_thw" in arguments:
        side, patch = (
            2 * (number("spatial_merge_size") or 1),
            number("patch_size") or 0,
        )
        shape = (side * side, channels * (number("temporal_patch_size") or 1) * patch**2)
        rest["grid_thw"] = torch.tensor([[1, side, side]], device="cpu")  # a forward reads its values
    elif main == "pixel_values" and "spatial_shapes" not in arguments:
        size = getattr(config, "image_size", None) or 224
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shape = (1, channels, *sides)
        if "image_sizes" in arguments:
            rest["image_sizes"] = torch.tensor([sides], device="cpu")
    elif main == "input_features" and number("num_mel_bins") and number("max_source_positions"):
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "hidden_states" and number("input_size"):
        shape = (1, 64, config.input_size)
    if shape is None:
        return None
    required = dict.fromkeys(name for name in required_arguments(encoder) if name != main)
    return {**required, main: torch.empty(shape, dtype=encoder.dtype, device="meta"), **rest}


def number_in_config(config: Any, *names: str) -> int | None:
    """Returns the first integer among some entries of a config."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def required_arguments(encoder: nn.Module) -> list[str]:
    """Lists the arguments of a forward that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(encoder.forward).parameters.items()
    return [name for name, p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def forward_arguments(encoder: nn.Module) -> list[str]:
    """Lists the arguments of an encoder's forward, its main input first."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    skipped = ("output_attentions", "output_hidden_states", "return_dict")
    parameters = inspect.signature(encoder.forward).parameters
    arguments = [name for name, p in parameters.items() if p.kind in kinds and name not in skipped]
    main = getattr(encoder, "main_input_name", None)
    return sorted(arguments, key=lambda argument: argument != main)


# Forward on the meta device, which computes shapes only, of a module on any device.


class _PromoteToMeta(TorchFunctionMode):
    """Moves all tensor arguments of an operation to the meta device if one of them is there."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        arguments = (args, kwargs or {})
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(arguments)):
            # such as position ids that a forward creates on the CPU
            arguments = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), arguments)
        return func(*arguments[0], **arguments[1])


@contextmanager
def _restore_hooks(module: nn.Module) -> Iterator[None]:
    """Removes hooks that a forward adds."""
    # With `output_hidden_states` transformers hooks the layers in the first forward only, so that identity layers
    # which replace them later would not be recorded.
    flag = "_output_capturing_hooks_installed"
    before = [(part, set(part._forward_hooks), flag in part.__dict__) for part in module.modules()]
    try:
        yield
    finally:
        for part, hooks, was_hooked in before:
            for added in part._forward_hooks.keys() - hooks:
                del part._forward_hooks[added]
            if not was_hooked:
                part.__dict__.pop(flag, None)


@torch.no_grad()
def meta_forward(module: nn.Module, **inputs: Any) -> Any:
    """
    Returns the output of a module, which is not changed, with its weights on the meta device; `None` if its forward
    needs values of tensors there. Inputs are on the meta device, or on the CPU if the forward reads their values.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    with _restore_hooks(module), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _PromoteToMeta():
        warnings.simplefilter("ignore")
        try:
            return functional_call(module, tensors, kwargs=inputs)
        except Exception:  # any error is possible with tensors without values
            return None
