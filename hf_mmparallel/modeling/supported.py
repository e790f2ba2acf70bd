"""Models that a plan can't describe are refused with a reason, before anything is planned or built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ..plan import LANGUAGE_MODEL
from .spec import ENCODER_OF_MODALITY, ModulePart, find_stack, inside, module_parts, placeholder_token

_LAYER_MATRICES = 4  # at least, in an attention or in a transformer layer
_OTHERWISE = "Train it without `parallel`, or compose its encoder with a causal language model by"
_COMPOSE = "`MultimodalModel.from_unimodal`"


def check_supported(model: PreTrainedModel) -> None:
    """
    Refuses models that a plan can't train, and those whose step can't be predicted.

    Args:
        model ([`~transformers.PreTrainedModel`]): The whole model, on any device.

    Raises:
        `ValueError`: For an encoder-decoder model or one whose language model is one; for a model that is trained on
            masked tokens; for one with layers that are neither in an encoder nor in the language model's stack.
    """
    check_causal(model)
    text = unknown_layers_text(model)
    if text:
        raise ValueError(
            f"{text} {_how_encoders_are_found(model)} Give the model a method `multimodal_parts` that names its "
            f"encoders, or compose them with a causal language model by {_COMPOSE}."
        )


def unknown_layers_text(model: PreTrainedModel) -> str:
    """A sentence about the layers of [`unknown_stacks`]; empty without any."""
    parts = module_parts(model)
    unknown = unknown_stacks(model, parts)
    if not unknown:
        return ""
    stacks = ", ".join(f"`{name}` ({len(layers)} `{type(layers[0]).__name__}`)" for name, layers in unknown.items())
    known = " and ".join(f"`{name}`" for name in parts)
    return (
        f"`{type(model).__name__}` has layers that are in no module of a plan, so that their time and activations are "
        f"not predicted and they have no layout of their own: {stacks}; modules: {known}."
    )


def unknown_stacks(model: PreTrainedModel, parts: Mapping[str, ModulePart]) -> dict[str, nn.ModuleList]:
    """Name -> list of transformer layers that neither an encoder has nor the language model's stack is or holds."""
    encoders = [part for name, part in parts.items() if name != LANGUAGE_MODEL]
    known = [prefix for part in encoders for prefix in (part.tower, *part.prefixes)]
    known.append(find_stack(model, parts[LANGUAGE_MODEL].tower))
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not _are_layers(module):
            continue
        if not any(inside(name, prefix) for prefix in (*known, *found)):
            found[name] = module
    return found


def _are_layers(modules: nn.ModuleList) -> bool:
    """Whether these are two or more layers of one kind, each with the matrices of an attention at least."""
    kinds = {type(module) for module in modules}
    if len(modules) < 2 or len(kinds) > 1 or nn.Module in kinds:
        return False
    return min(sum(p.dim() == 2 for p in module.parameters()) for module in modules) >= _LAYER_MATRICES


def _how_encoders_are_found(model: PreTrainedModel) -> str:
    """What the model lacks for its encoders to be found."""
    untold = [
        modality
        for modality in ENCODER_OF_MODALITY
        if any(hasattr(owner, f"get_{modality}_features") for owner in (model.base_model, model))
        and placeholder_token(model.config, modality) is None
    ]
    if untold:
        tokens = ", ".join(f"`{modality}_token_id`" for modality in untold)
        return (
            f"Its configuration says no {tokens}, the placeholder of a feature in `input_ids`; set it if it has one."
        )
    return "Encoders are found by `get_image_features`, `get_video_features` and `get_audio_features`."


def check_causal(model: PreTrainedModel) -> None:
    """
    Refuses models whose loss is not that of the next token, or whose decoder attends to the states of an encoder.

    Args:
        model ([`~transformers.PreTrainedModel`]): The whole model, on any device.

    Raises:
        `ValueError`: For an encoder-decoder model, or one whose language model is one; for a model without a
            language-model head; for one that is trained on masked tokens or on another loss.
    """
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder or config.is_encoder_decoder:
        raise ValueError(
            f"`{type(model).__name__}` is an encoder-decoder model: its decoder has inputs of its own and attends to "
            "the encoder's states, and its labels are not shifted. A plan needs a decoder that reads text and media "
            f"as one sequence. {_OTHERWISE} {_COMPOSE}."
        )
    if not _has_head(model):
        raise ValueError(
            f"`{type(model).__name__}` has no language-model head, so that it has no loss of the next token. Name the "
            f"model's class that has one as `architectures` in its `config.json`. {_OTHERWISE} {_COMPOSE}."
        )
    if type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", False):
        remedy = (
            "Set `is_decoder=True` for a causal one, or train"
            if type(config) in AutoModelForCausalLM._model_mapping
            else "Train"
        )
        raise ValueError(
            f"`{type(model).__name__}` is a model of masked tokens (`is_decoder=False`): each token attends to those "
            f"behind it too. A plan needs a causal language model. {remedy} it without `parallel`."
        )
    loss = _own_loss(model)
    if loss:
        raise ValueError(
            f"`{type(model).__name__}` is trained on the loss `{loss}`, and `parallel` trains on that of the next "
            "token. Use the model's class for causal language modeling, or train it without `parallel`."
        )


def _has_head(model: PreTrainedModel) -> bool:
    """Whether a model or a part of it has output embeddings."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return any(part.get_output_embeddings() is not None for part in parts)


def _own_loss(model: PreTrainedModel) -> str:
    """The name of the loss that transformers gives a class of models, unless it is that of the next token."""
    name: Any = getattr(model, "loss_type", None)
    if hasattr(model, "_loss_function") or LOSS_MAPPING.get(name, ForCausalLMLoss) is ForCausalLMLoss:
        return ""  # of a loss that the user gives, the first step says whether it is
    return name
