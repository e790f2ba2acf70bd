"""Refuses models that a plan can't describe, before anything is planned or built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ..plan import LANGUAGE_MODEL
from .spec import ENCODER_OF_MODALITY, ModulePart, are_layers, find_stack, inside, module_parts, placeholder_token

_OTHERWISE = "Train it without `parallel`, or compose its encoder with a causal language model by"
_COMPOSE = "`MultimodalModel.from_unimodal`"


def check_supported(model: PreTrainedModel) -> None:
    """
    Refuses models that a plan can't train, see [`check_causal`], and models with layers that are neither in an encoder
    nor in the language model's stack, whose step time can't be predicted.
    """
    check_causal(model)
    text = unknown_layers_text(model)
    if text:
        raise ValueError(
            f"{text} {_how_encoders_are_found(model)} Give the model a method `multimodal_parts` that names its "
            f"encoders, or compose them with a causal language model by {_COMPOSE}."
        )


def unknown_layers_text(model: PreTrainedModel) -> str:
    """Returns the message about the layers of [`unknown_stacks`], empty if there are none."""
    parts = module_parts(model)
    unknown = unknown_stacks(model, parts)
    if not unknown:
        return ""
    stacks = ", ".join(f"`{name}` ({len(layers)} `{type(layers[0]).__name__}`)" for name, layers in unknown.items())
    known = " and ".join(f"`{name}`" for name in parts)
    return (
        f"`{type(model).__name__}` has layers that are in no module of a plan, so their time and activations are "
        f"not predicted and they have no layout of their own: {stacks}; modules: {known}."
    )


def unknown_stacks(model: PreTrainedModel, parts: Mapping[str, ModulePart]) -> dict[str, nn.ModuleList]:
    """Finds the lists of transformer layers outside of the encoders and of the language model's stack, by name."""
    encoders = [part for name, part in parts.items() if name != LANGUAGE_MODEL]
    known = [prefix for part in encoders for prefix in (part.tower, *part.prefixes)]
    known += [find_stack(model, parts[LANGUAGE_MODEL].tower), *parts[LANGUAGE_MODEL].first]
    unknown: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not are_layers(module):
            continue
        if not any(inside(name, prefix) for prefix in (*known, *unknown)):
            unknown[name] = module
    return unknown


def _how_encoders_are_found(model: PreTrainedModel) -> str:
    missing = [
        modality
        for modality in ENCODER_OF_MODALITY
        if any(hasattr(owner, f"get_{modality}_features") for owner in (model.base_model, model))
        and placeholder_token(model.config, modality) is None
    ]
    if missing:
        tokens = ", ".join(f"`{modality}_token_id`" for modality in missing)
        return f"Its configuration has no {tokens}, the placeholder of a feature in `input_ids`; set it if it exists."
    return "Encoders are found by `get_image_features`, `get_video_features` and `get_audio_features`."


def check_causal(model: PreTrainedModel) -> None:
    """Refuses models without a next-token loss, and those whose decoder attends to the states of an encoder."""
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder or config.is_encoder_decoder:
        raise ValueError(
            f"`{type(model).__name__}` is an encoder-decoder model: its decoder has inputs of its own and attends to "
            "the encoder's states, and its labels are not shifted. A plan needs a decoder that reads text and media "
            f"as one sequence. {_OTHERWISE} {_COMPOSE}."
        )
    if type(model).forward is nn.Module.forward:
        names = (f"`{type(part).__name__}.from_pretrained`" for part in model.children() if _takes_labels(part))
        raise ValueError(
            f"`{type(model).__name__}` has no forward and so no loss: each of its parts is a model of its own. Train "
            f"the one that reads text and media: pass {next(names, 'it')} of the same checkpoint."
        )
    if not _has_head(model):
        raise ValueError(
            f"`{type(model).__name__}` has no language-model head, so it has no next-token loss. Set `architectures` "
            f"in its `config.json` to the model class with a head. {_OTHERWISE} {_COMPOSE}."
        )
    part = _part_with_a_loss(model)
    if part:
        raise ValueError(
            f"`{type(model).__name__}` has `{part}` with a loss of its own, but `parallel` supports the next-token "
            "loss only. Train it without `parallel`."
        )
    if type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", False):
        remedy = (
            "Set `is_decoder=True` for a causal one, or train"
            if type(config) in AutoModelForCausalLM._model_mapping
            else "Train"
        )
        raise ValueError(
            f"`{type(model).__name__}` is a masked language model (`is_decoder=False`): each token also attends to "
            f"later ones. A plan needs a causal language model. {remedy} it without `parallel`."
        )
    loss = _own_loss(model)
    if loss:
        raise ValueError(
            f"`{type(model).__name__}` has the loss `{loss}`, but `parallel` supports the next-token loss only. Use "
            "the model's class for causal language modeling, or train it without `parallel`."
        )


def _has_head(model: PreTrainedModel) -> bool:
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return any(part.get_output_embeddings() is not None for part in parts)


def _part_with_a_loss(model: PreTrainedModel) -> str:
    """Names a part with a loss that is not around the decoder, such as a decoder of codebooks; empty without one."""
    decoder = model.get_decoder()
    for name, part in model.named_modules():
        has_loss = isinstance(part, PreTrainedModel) and _takes_labels(part)
        if has_loss and not any(module is decoder for module in part.modules()):
            return name
    return ""


def _takes_labels(model: nn.Module) -> bool:
    return "labels" in inspect.signature(model.forward).parameters


def _own_loss(model: PreTrainedModel) -> str:
    """Names the loss that transformers assigns to the model's class; empty if it is the next-token loss."""
    name: Any = getattr(model, "loss_type", None)
    if hasattr(model, "_loss_function") or LOSS_MAPPING.get(name, ForCausalLMLoss) is ForCausalLMLoss:
        return ""  # a loss function set by the user is checked in the first step
    return name
