"""Features that an encoder passes to the language model: their description, token counts and merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..kernels.bitfield_attention import decode_words
from ..plan import FeatureSpec, ModelSpec
from .unowned import Elsewhere


def feature_specs(modalities: Sequence[str], config: Any) -> tuple[FeatureSpec, ...]:
    """Lists the feature tensors of an encoder with this config: one per modality, and one per DeepStack level."""
    levels = len(getattr(config, "deepstack_visual_indexes", None) or ()) if modalities else 0
    result = []
    for modality in modalities:
        result.append(FeatureSpec(modality))
        result += [FeatureSpec(modality, "deepstack_features", level, level) for level in range(levels)]
    return tuple(result)


def count_feature_tokens(inputs: Mapping[str, Any], spec: ModelSpec) -> dict[str, list[int]]:
    """
    Counts feature tokens, which are as many as placeholder tokens: modality -> count of each sample, in order. A
    sample is a row of `input_ids` `[batch, sequence]` or, if the batch has `attention_words` of the same shape, a
    segment.
    """
    input_ids, words = inputs["input_ids"], inputs.get("attention_words")
    if not isinstance(words, Tensor):
        return {
            modality: (input_ids == token).sum(dim=-1).reshape(-1).tolist()
            for modality, token in spec.placeholders.items()
        }
    segments = decode_words(words).segment
    num_samples = segments.amax(dim=-1)
    sample = segments + (num_samples.cumsum(0) - num_samples)[:, None]  # from 1 over all rows
    total = int(num_samples.sum())
    return {
        modality: sample[(input_ids == token) & (segments > 0)].bincount(minlength=total + 1)[1:].tolist()
        for modality, token in spec.placeholders.items()
    }


def flat_features(value: Any) -> Tensor:
    """Concatenates an encoder's features, a tensor or a sequence of them, to `[feature tokens, hidden]`."""
    if isinstance(value, Tensor):
        return value.reshape(-1, value.shape[-1])
    return torch.cat([flat_features(item) for item in value])


class FeatureList(list):
    """A list of a flat tensor of features that has the tensor's attributes, which any model can merge."""

    def __init__(self, features: Tensor):
        # some models concatenate a list with one tensor per image, others expect one tensor
        super().__init__([features])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[0], name)


class MergedOutput(BaseModelOutputWithPooling):
    """An encoder's output with the features that a plan sends to the language model."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # models hand on what they do not use
        return Elsewhere(
            f"The model reads `{name}` of an encoder's output, but a plan sends only the features of placeholders to "
            "the language model. Train it without `parallel`."
        )


def merge_output(features: Sequence[tuple[FeatureSpec, Tensor]]) -> BaseModelOutputWithPooling:
    """Makes the encoder output that a model's forward merges of the flat features of one modality."""
    output = MergedOutput()
    for feature, tensor in features:
        if feature.index is None:
            for name in ("last_hidden_state", feature.field):  # some models merge the former
                setattr(output, name, FeatureList(tensor))
        else:
            levels = vars(output).get(feature.field) or []
            setattr(output, feature.field, [*levels, FeatureList(tensor)])
    return output
