"""Assembles a whole model from gathered tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..adapters.adapter import Adapter
from ..adapters.adapter_files import adapter_names
from ..adapters.peft_models import as_peft_model, wrap_as_peft_model
from ..plan import ModelSpec
from .loading import initialize_rest
from .tensor_parallel import base_name


def check_gatherable(part: Any) -> None:
    """Refuses a quantized model, whose weights can't be used without the state of its quantizer."""
    if getattr(part, "is_quantized", False):
        raise ValueError(
            f"The weights of this `{type(part).__name__}` are quantized, so the whole model can't be assembled. "
            "Save the adapter with `trainer.save_model(folder)`, and load it with `PeftModel.from_pretrained(base, "
            "folder)`."
        )


def whole_model(part: Any, spec: ModelSpec, state: Mapping[str, torch.Tensor], adapter: Adapter | None = None) -> Any:
    """
    Assembles the whole model, in evaluation mode, from its parameters, including tied names, and buffers, which are
    not copied; a `PeftModel` if there is an adapter.
    """
    base = {base_name(name): state[name] for name in state.keys() - adapter_names(state)}
    whole = fill(blank_model(part), part, base)
    if adapter is not None:
        whole = wrap_as_peft_model(whole, spec, adapter, state)
    return whole.eval()


def blank_peft_model(part: Any, spec: ModelSpec, adapter: Adapter) -> Any:
    """Makes the `PeftModel` of an adapter on the meta device, which knows its model card."""
    with torch.device("meta"):
        return as_peft_model(blank_model(part), spec, adapter)


def blank_model(part: Any) -> Any:
    """Makes a model on the meta device like the one that this rank holds a part of, without adapters."""
    with torch.device("meta"):
        # a model with more than a configuration, such as functions of the user, says how another one is made
        return part.without_weights() if hasattr(part, "without_weights") else type(part)(copy.deepcopy(part.config))


def fill(whole: Any, part: Any, state: Mapping[str, torch.Tensor]) -> Any:
    """Gives a model on the meta device its parameters and buffers, and the generation config of a rank's part."""
    persistent = whole.state_dict()
    whole.load_state_dict({name: state[name] for name in persistent if name in state}, strict=False, assign=True)
    whole.tie_weights()
    for name in state.keys() - persistent.keys():
        owner, _, attribute = name.rpartition(".")
        whole.get_submodule(owner)._buffers[attribute] = state[name]
    initialize_rest(whole, {name for name, p in whole.named_parameters() if p.is_meta}, "cpu", "The ranks' parts")
    if part.can_generate():
        whole.generation_config = part.generation_config
    return whole


def without_weights(model: Any) -> Any:
    """Copies a model, with whatever is attached to its modules; the copy's parameters are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        blank: Any = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        blank.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = blank
    return copy.deepcopy(model, memo)


def put_parts_of(source: Any, model: Any) -> None:
    """Replaces the submodules, parameters and buffers of a model by those of another one of the same class."""
    for attribute in ("_modules", "_parameters", "_buffers"):
        setattr(model, attribute, getattr(source, attribute))
