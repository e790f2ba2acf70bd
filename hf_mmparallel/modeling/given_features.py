"""A forward of the language model with features that were computed elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .spec import ModulePart


def _takes_outputs(model: PreTrainedModel, modality: str) -> bool:
    """Whether the model's forward merges what `mm_encoder_outputs` holds for a modality."""
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        return False
    forward = inspect.unwrap(type(model.base_model).forward)
    return hasattr(model, "multimodal_parts") or modality in forward.__code__.co_consts


@contextmanager
def features_given(
    model: PreTrainedModel, parts: Mapping[str, ModulePart], outputs: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """
    Keyword arguments that make the model merge these encoder outputs.

    A forward that does not look for a modality in `mm_encoder_outputs` calls its feature method, which then returns
    the output; an empty tensor as input makes it do so.
    """
    direct = {modality: output for modality, output in outputs.items() if _takes_outputs(model, modality)}
    given: dict[str, Any] = {"mm_encoder_outputs": direct} if direct else {}
    with ExitStack() as stack:
        for part in parts.values():
            for modality in (outputs.keys() - direct.keys()) & part.features.keys():
                method = part.features[modality]
                stack.enter_context(_returning(method.__self__, method.__name__, outputs[modality]))
                given[part.input_names(modality)[0]] = torch.empty(0, device=model.device)
        yield given


@contextmanager
def _returning(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Makes a method of one object return `value`."""
    owner.__dict__[name] = lambda *args, **kwargs: value
    try:
        yield
    finally:
        del owner.__dict__[name]
