"""What an encoder returns: which part of it are its features, and how wide they are, asked of the encoder itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .configuration_composed import EncoderSettings
from .meta_forward import meta_forward


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
    return _setting(config, "out_hidden_size", "hidden_size", "d_model", "embed_dim")


def _merges(output: Any) -> bool:
    """Whether the pooled rows are the hidden rows of several patches each, not one for each item."""
    hidden, pooled = getattr(output, "last_hidden_state", None), getattr(output, "pooler_output", None)
    if not isinstance(hidden, torch.Tensor) or not isinstance(pooled, torch.Tensor):
        return False
    return hidden.dim() == pooled.dim() == 2 and pooled.shape[0] < hidden.shape[0]


def meta_inputs(encoder: PreTrainedModel) -> dict[str, Any] | None:
    """Inputs of one sample on the meta device, by the names of arguments; `None` where these say too little."""
    arguments = forward_arguments(encoder)
    config, main = encoder.config, arguments[0]
    channels = _setting(config, "num_channels", "in_channels", "in_chans") or 3
    if "input_ids" in arguments:
        return {"input_ids": torch.zeros(1, 4, dtype=torch.int64, device="meta"), "use_cache": False}
    shape: tuple[int, ...] | None = None
    rest: dict[str, Any] = {}
    if "grid_thw" in arguments:
        side, patch = 2 * (_setting(config, "spatial_merge_size") or 1), _setting(config, "patch_size") or 0
        shape = (side * side, channels * (_setting(config, "temporal_patch_size") or 1) * patch**2)
        rest["grid_thw"] = torch.tensor([[1, side, side]], device="cpu")  # a forward reads its values
    elif main == "pixel_values" and "spatial_shapes" not in arguments:
        size = getattr(config, "image_size", None) or 224
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shape = (1, channels, *sides)
        if "image_sizes" in arguments:
            rest["image_sizes"] = torch.tensor([sides], device="cpu")
    elif main == "input_features" and _setting(config, "num_mel_bins") and _setting(config, "max_source_positions"):
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "hidden_states" and _setting(config, "input_size"):
        shape = (1, 64, config.input_size)
    if shape is None:
        return None
    required = dict.fromkeys(name for name in required_arguments(encoder) if name != main)
    return {**required, main: torch.empty(shape, dtype=encoder.dtype, device="meta"), **rest}


def _setting(config: Any, *names: str) -> int | None:
    """The first of these that a config says as a number."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def required_arguments(encoder: nn.Module) -> list[str]:
    """Arguments of a forward without a default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(encoder.forward).parameters.items()
    return [name for name, p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def forward_arguments(encoder: nn.Module) -> list[str]:
    """Names of what an encoder's forward takes, its main input first."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    skipped = ("output_attentions", "output_hidden_states", "return_dict")
    parameters = inspect.signature(encoder.forward).parameters
    arguments = [name for name, p in parameters.items() if p.kind in kinds and name not in skipped]
    main = getattr(encoder, "main_input_name", None)
    return sorted(arguments, key=lambda argument: argument != main)
