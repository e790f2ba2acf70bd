"""Forward of the language model with features that were computed elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .spec import ModulePart


def _merges_outputs(model: PreTrainedModel, modality: str) -> bool:
    """
    Returns whether the model's forward merges the entry of `mm_encoder_outputs` for a modality.

    The argument does not say for which modalities it is read: Qwen2.5-Omni reads images and videos from it, and calls
    `get_audio_features` nevertheless. A forward that reads an entry has the modality as a string constant.
    `tests/modeling/test_stages.py` compares every family.
    """
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        return False
    forward = inspect.unwrap(type(model.base_model).forward)
    return hasattr(model, "multimodal_parts") or modality in forward.__code__.co_consts


@contextmanager
def inject_features(
    model: PreTrainedModel, parts: Mapping[str, ModulePart], outputs: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields keyword arguments with which the model's forward merges these encoder outputs."""
    direct = {modality: output for modality, output in outputs.items() if _merges_outputs(model, modality)}
    kwargs: dict[str, Any] = {"mm_encoder_outputs": direct} if direct else {}
    with ExitStack() as stack:
        # A forward that does not read a modality from `mm_encoder_outputs` (Voxtral, audio of Qwen2.5-Omni) calls the
        # model's feature method. That returns the output here, and an empty input tensor makes the forward call it.
        for part in parts.values():
            for modality in (outputs.keys() - direct.keys()) & part.features.keys():
                method = part.features[modality]
                stack.enter_context(_returning(method.__self__, method.__name__, outputs[modality]))
                kwargs[part.input_names(modality)[0]] = torch.empty(0, device=model.device)
        yield kwargs


@contextmanager
def _returning(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a method of one object by one that returns `value`."""
    # hides the method in this object only, so that other models of the class keep theirs
    owner.__dict__[name] = lambda *args, **kwargs: value
    try:
        yield
    finally:
        del owner.__dict__[name]
