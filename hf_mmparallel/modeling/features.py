"""Features that an encoder passes to the language model: their description, token counts and merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..kernels.bitfield_attention import decode_words
from ..plan import FeatureSpec
from .unowned import Elsewhere


def feature_specs(modalities: Sequence[str], config: Any) -> tuple[FeatureSpec, ...]:
    """Lists the feature tensors of an encoder with this config: one per modality, and one per DeepStack level."""
    levels = len(getattr(config, "deepstack_visual_indexes", None) or ()) if modalities else 0
    result = []
    for modality in modalities:
        result.append(FeatureSpec(modality))
        result += [FeatureSpec(modality, "deepstack_features", level, level) for level in range(levels)]
    return tuple(result)


def _sample_numbers(inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    """
    The sample of each token `[rows, length]`, -1 for padding between packed ones, and the number of samples. A sample
    is a row of `input_ids` `[batch, sequence]` or, if the batch has `attention_words` of the same shape, a segment.
    """
    ids, words = inputs["input_ids"], inputs.get("attention_words")
    if not isinstance(words, Tensor):
        rows = ids.reshape(-1, ids.shape[-1])
        return torch.arange(len(rows), device=ids.device)[:, None].expand_as(rows), len(rows)
    segments = decode_words(words).segment
    counts = segments.amax(dim=-1)
    numbers = segments - 1 + (counts.cumsum(0) - counts)[:, None]
    return numbers.masked_fill(segments == 0, -1), int(counts.sum())


def count_feature_tokens(inputs: Mapping[str, Any], placeholders: Mapping[str, int]) -> dict[str, list[int]]:
    """
    Counts feature tokens, which are as many as placeholder tokens: modality -> count of each sample, in order.
    """
    samples, num_samples = _sample_numbers(inputs)
    ids = inputs["input_ids"].reshape(samples.shape)
    return {
        modality: samples[(ids == token) & (samples >= 0)].bincount(minlength=num_samples).tolist()
        for modality, token in placeholders.items()
    }


def feature_runs(inputs: Mapping[str, Any], token: int) -> list[int]:
    """The lengths of the runs of a placeholder token in the samples of a batch, in order."""
    samples, _ = _sample_numbers(inputs)
    wanted = (inputs["input_ids"].reshape(samples.shape) == token) & (samples >= 0)
    places, owners = wanted.flatten().nonzero()[:, 0], samples[wanted]
    starts = torch.ones_like(places, dtype=torch.bool)
    starts[1:] = (places.diff() != 1) | (owners.diff() != 0)
    return starts.cumsum(0).bincount()[1:].tolist()


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
