"""A whole model made of gathered tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ..adapters.adapter import Adapter
from ..adapters.adapter_files import adapter_names
from ..adapters.peft_models import wrap_as_peft_model
from ..plan import ModelSpec
from .loading import initialize_rest
from .tensor_parallel import base_name


def check_gatherable(part: Any) -> None:
    """Raises `ValueError` for a model whose weights say nothing without what their quantizer keeps beside them."""
    if getattr(part, "is_quantized", False):
        raise ValueError(
            f"The weights of this `{type(part).__name__}` are quantized, so that they can't be put together again. "
            "Save the adapter with `trainer.save_model(folder)`, and load it with `PeftModel.from_pretrained(base, "
            "folder)`."
        )


def whole_model(part: Any, spec: ModelSpec, state: Mapping[str, torch.Tensor], adapter: Adapter | None = None) -> Any:
    """
    The whole model that a rank has a part of. No weight is initialised and none is copied.

    Args:
        part (`PreTrainedModel`): A pruned model.
        spec (`ModelSpec`): The whole model.
        state (`Mapping[str, torch.Tensor]`): Its parameters, with tied names, and its buffers.
        adapter ([`Adapter`], *optional*): The adapter that the parameters are of.

    Returns:
        `PreTrainedModel` or `PeftModel`: In evaluation mode, where the tensors are; a `PeftModel` with `adapter`.
    """
    with torch.device("meta"):
        whole = part.without_weights() if hasattr(part, "without_weights") else type(part)(copy.deepcopy(part.config))
    added = adapter_names(spec)
    plain = {base_name(name): tensor for name, tensor in state.items() if name not in added}
    persistent = whole.state_dict()
    whole.load_state_dict({name: plain[name] for name in persistent if name in plain}, strict=False, assign=True)
    whole.tie_weights()
    for name in plain.keys() - persistent.keys():
        owner, _, attribute = name.rpartition(".")
        whole.get_submodule(owner)._buffers[attribute] = plain[name]
    initialize_rest(whole, {name for name, p in whole.named_parameters() if p.is_meta}, "cpu", "The ranks' parts")
    if part.can_generate():
        whole.generation_config = part.generation_config
    if adapter is not None:
        whole = wrap_as_peft_model(whole, spec, adapter, state)
    return whole.eval()
