"""What an encoder returns: which part of it are its features, and how wide they are, asked of the encoder itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..modeling.forward_inputs import meta_inputs, number_in_config
from ..modeling.meta_forward import meta_forward
from .multimodal_config import EncoderSettings


def named_output(output: Any) -> Any:
    """An encoder's output with fields; a bare tensor is the last hidden state."""
    return BaseModelOutput(last_hidden_state=output) if isinstance(output, torch.Tensor) else output


def select_features(name: str, output: Any, settings: EncoderSettings) -> torch.Tensor:
    """The features of an encoder's output that its settings ask for, `(items, tokens, width)` or `(rows, width)`."""
    if settings.feature_select == "pooled":
        features = getattr(output, "pooler_output", None)
        if features is None:
            raise ValueError(
                f"Encoder `{name}` has no pooled output. Use `feature_select='full'`, with `pooling='mean'` for one "
                "token an item."
            )
        return features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
    if settings.feature_layer is None:
        features = getattr(output, "last_hidden_state", None)
        if not isinstance(features, torch.Tensor):
            raise ValueError(
                f"Encoder `{name}` returns a `{type(output).__name__}` without `last_hidden_state`. Use "
                "`feature_select='pooled'`, or a callback `after_encoder` that returns an output with it."
            )
    else:
        num_states = len(output.hidden_states)
        if not -num_states <= settings.feature_layer < num_states:
            raise ValueError(
                f"`feature_layer={settings.feature_layer}` of encoder `{name}` is out of range: it has {num_states} "
                f"hidden states. Use {-num_states} to {num_states - 1}."
            )
        features = output.hidden_states[settings.feature_layer]
    if features.dim() != 3 and (settings.feature_select == "default" or settings.pooling):
        raise ValueError(
            f"Features of encoder `{name}` have the shape {tuple(features.shape)}, not (items, tokens, width), so no "
            "token can be dropped or averaged. Use `feature_select='full'` without `pooling`."
        )
    if settings.feature_select == "default":
        features = features[:, 1:]
    return features.mean(dim=1, keepdim=True) if settings.pooling == "mean" else features


def fitted_settings(
    name: str, encoder: PreTrainedModel, settings: EncoderSettings, given: Mapping[str, Any]
) -> EncoderSettings:
    """
    Settings with what the encoder itself says where the user says nothing: which output its features are, and their
    width. An encoder whose items are packed in rows and whose `pooler_output` has fewer rows merges patches: these are
    its features. Settings of encoders that can't be asked are returned as they are.

    Args:
        name (`str`): The encoder's name.
        encoder (`PreTrainedModel`): The encoder, on any device.
        settings (`EncoderSettings`): What is known.
        given (`Mapping[str, Any]`): The settings that the user gave.
    """
    inputs = meta_inputs(encoder)
    if inputs is None:
        return settings
    states = {} if settings.feature_layer is None else {"output_hidden_states": True}
    output = named_output(meta_forward(encoder, **inputs, **states, return_dict=True))
    if output is None:
        return settings
    if not {"feature_select", "feature_layer", "pooling"} & set(given) and _merges(output):
        settings = replace(settings, feature_select="pooled")
    width = select_features(name, output, settings).shape[-1]
    if settings.feature_size is None and width != configured_width(encoder.config):
        settings = replace(settings, feature_size=width)
    return settings


def configured_width(config: Any) -> int | None:
    """The width of an encoder's features that its config says, which may be that inside the encoder."""
    return number_in_config(config, "out_hidden_size", "hidden_size", "d_model", "embed_dim")


def _merges(output: Any) -> bool:
    """Whether the pooled rows are the hidden rows of several patches each, not one for each item."""
    hidden, pooled = getattr(output, "last_hidden_state", None), getattr(output, "pooler_output", None)
    if not isinstance(hidden, torch.Tensor) or not isinstance(pooled, torch.Tensor):
        return False
    return hidden.dim() == pooled.dim() == 2 and pooled.shape[0] < hidden.shape[0]
