"""Selection of the features in an encoder's output, and detection of their kind and width."""

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
    """Returns an encoder's output as a `ModelOutput`; a bare tensor becomes its `last_hidden_state`."""
    return BaseModelOutput(last_hidden_state=output) if isinstance(output, torch.Tensor) else output


def select_features(name: str, output: Any, settings: EncoderSettings) -> torch.Tensor:
    """Selects features from an encoder's output by its settings: `(items, tokens, width)` or `(tokens, width)`."""
    if settings.feature_select == "pooled":
        features = getattr(output, "pooler_output", None)
        if features is None:
            raise ValueError(
                f"Encoder `{name}` has no pooled output. Use `feature_select='full'`, with `pooling='mean'` for one "
                "token per item."
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
    """Completes settings by a meta-device forward, which shows the output that has the features, and their width."""
    inputs = meta_inputs(encoder)
    # the signature and the config say too little
    if inputs is None:
        return settings
    states = {} if settings.feature_layer is None else {"output_hidden_states": True}
    output = named_output(meta_forward(encoder, **inputs, **states, return_dict=True))
    if output is None:
        return settings
    # what the user gave is not changed
    if not {"feature_select", "feature_layer", "pooling"} & set(given) and _merges(output):
        settings = replace(settings, feature_select="pooled")
    width = select_features(name, output, settings).shape[-1]
    if settings.feature_size is None and width != configured_width(encoder.config):
        settings = replace(settings, feature_size=width)
    return settings


def configured_width(config: Any) -> int | None:
    """Returns the width of features in a config, which may be the width of the encoder's layers instead."""
    return number_in_config(config, "out_hidden_size", "hidden_size", "d_model", "embed_dim")


def _merges(output: Any) -> bool:
    """Returns whether `pooler_output` has one token for several patches, rather than one per item."""
    hidden, pooled = getattr(output, "last_hidden_state", None), getattr(output, "pooler_output", None)
    if not isinstance(hidden, torch.Tensor) or not isinstance(pooled, torch.Tensor):
        return False
    # only encoders that pack their items have outputs without an item dimension
    return hidden.dim() == pooled.dim() == 2 and pooled.shape[0] < hidden.shape[0]
