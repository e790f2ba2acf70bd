"""Features that an encoder passes to the language model: their description, token counts and merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..kernels.bitfield_attention import decode_words
from ..plan import FeatureSpec, ModelSpec


def feature_specs(modalities: Sequence[str], config: Any) -> tuple[FeatureSpec, ...]:
    """The feature tensors of an encoder with this config: one per modality, and one per DeepStack level."""
    levels = len(getattr(config, "deepstack_visual_indexes", None) or ()) if modalities else 0
    result = []
    for modality in modalities:
        result.append(FeatureSpec(modality))
        result += [FeatureSpec(modality, "deepstack_features", level, level) for level in range(levels)]
    return tuple(result)


def count_feature_tokens(inputs: Mapping[str, Any], spec: ModelSpec) -> dict[str, list[int]]:
    """
    Number of feature tokens, which is the number of placeholder tokens, of each modality and sample.

    Args:
        inputs (`Mapping[str, Any]`):
            A batch with `input_ids` of shape `[batch, sequence]`. A sample is a row or, if the batch has
            `attention_words` of the same shape, a segment of a row.
        spec ([`ModelSpec`]): The model.

    Returns:
        `dict[str, list[int]]`: Modality -> counts in the order of the samples.
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
    """
    Flat features in a form that any model can merge.

    Some models concatenate a list with one tensor per image, others expect one tensor. This is a list of the flat
    tensor whose other attributes are those of the tensor, which works for both.
    """

    def __init__(self, features: Tensor):
        super().__init__([features])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[0], name)


def merge_output(features: Sequence[tuple[FeatureSpec, Tensor]]) -> BaseModelOutputWithPooling:
    """Flat features of one modality as the encoder output that a model's forward merges."""
    output = BaseModelOutputWithPooling()
    for feature, tensor in features:
        if feature.index is None:
            for name in ("last_hidden_state", feature.field):  # some models merge the former
                setattr(output, name, FeatureList(tensor))
        else:
            levels = getattr(output, feature.field, None) or []
            setattr(output, feature.field, [*levels, FeatureList(tensor)])
    return output
