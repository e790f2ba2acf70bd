"""Features between an encoder and the language model: what they are, their number of rows, how they are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..kernels.bitfield_attention import decode_words
from ..plan import FeatureSpec, ModelSpec


def feature_specs(modalities: Sequence[str], config: Any) -> tuple[FeatureSpec, ...]:
    """The features of an encoder with this config: one per modality, and one per DeepStack level."""
    levels = len(getattr(config, "deepstack_visual_indexes", None) or ()) if modalities else 0
    result = []
    for modality in modalities:
        result.append(FeatureSpec(modality))
        result += [FeatureSpec(modality, "deepstack_features", level, level) for level in range(levels)]
    return tuple(result)


def count_rows(inputs: Mapping[str, Any], spec: ModelSpec) -> dict[str, list[int]]:
    """
    Rows of features of each modality and sample: the number of its placeholder tokens.

    Args:
        inputs (`Mapping[str, Any]`):
            A batch with `input_ids` of shape `[batch, sequence]`. A sample is a row, or each segment of a row when
            there are `attention_words` of that shape.
        spec ([`ModelSpec`]): The model.
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


def flat_rows(value: Any) -> Tensor:
    """One `[rows, hidden]` tensor from what an encoder returns: a tensor, or one per image."""
    if isinstance(value, Tensor):
        return value.reshape(-1, value.shape[-1])
    return torch.cat([flat_rows(item) for item in value])


class Rows(list):
    """
    Flat features in the form that any model's merge takes.

    Some models concatenate a list with one tensor per image, others use one tensor; a list of the flat tensor whose
    other attributes are the tensor's serves both.
    """

    def __init__(self, rows: Tensor):
        super().__init__([rows])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[0], name)


def merge_output(features: Sequence[tuple[FeatureSpec, Tensor]]) -> BaseModelOutputWithPooling:
    """The encoder output that a model's merge reads, from one modality's flat features."""
    output = BaseModelOutputWithPooling()
    for feature, rows in features:
        if feature.index is None:
            for name in ("last_hidden_state", feature.field):  # some models merge the former
                setattr(output, name, Rows(rows))
        else:
            levels = getattr(output, feature.field, None) or []
            setattr(output, feature.field, [*levels, Rows(rows)])
    return output
