"""Synthetic inputs of a given size for the modules of a model, without a processor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..kernels.bitfield_attention import encode_words
from ..modeling.spec import ModulePart
from ..plan import LANGUAGE_MODEL, ModelSpec

MAX_TILES = 12
_SIZES = ("image_size", "input_size")
_PATCHES = ("patch_size", "spatial_patch_size")
_MERGES = ("spatial_merge_size",)
_CHANNELS = ("num_channels", "in_channels", "in_chans")
_BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel")
_FRAMES = ("max_source_positions", "max_position_embeddings")
_FRAMES_PER_POSITION = 2


def text_inputs(
    spec: ModelSpec, num_sequences: int, length: int, device: torch.device, packed: bool
) -> dict[str, Tensor]:
    """
    Makes random tokens without media: `input_ids` and `labels`, each `[num_sequences, length]`.

    All are `[1, num_sequences * length]` if packed, `attention_words` with a segment for each sequence and
    `position_ids` too.
    """
    uses = spec.uses[LANGUAGE_MODEL, -1]
    vocabulary = max((use.parameter.shape[0] for use in uses if len(use.parameter.shape) == 2), default=2)
    input_ids = torch.randint(vocabulary, (num_sequences, length), device=device)
    for token in spec.placeholders.values():
        input_ids[input_ids == token] = (token + 1) % vocabulary
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    if packed:
        sequence = torch.arange(1, num_sequences + 1, device=device)[:, None].expand_as(input_ids)
        positions = torch.arange(length, device=device).expand_as(input_ids)
        batch |= {"attention_words": encode_words(sequence), "position_ids": positions}
        batch = {name: value.reshape(1, -1) for name, value in batch.items()}
    return batch


def encoder_inputs(
    part: ModulePart, spec: ModelSpec, module: str, config: Any, num_items: int, length: int
) -> Iterator[dict[str, Tensor]]:
    """
    Yields candidates for an encoder's inputs, best first: `num_items` equal images or clips of about `length` tokens.

    Which of them the encoder accepts, and the exact number of tokens, is only known from its forward. They are batch
    entries on the CPU: blank float32 media, with grids, sizes or masks. `config` is the encoder's own.
    """
    for modality in part.modalities:
        names = part.input_names(modality)
        if names[0].endswith("input_features") or names[0].endswith("input_values"):
            yield from _audio(names, config, num_items)
        elif any(name.endswith("grid_thw") for name in names):
            yield from _patches(names, spec, module, config, num_items, length)
        elif names[0].endswith("pixel_values"):
            yield from _images(names, config, num_items, length)


def _images(names: tuple[str, ...], config: Any, num_items: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Square images `[items, channels, side, side]` of the wanted size and of the config's size, and tiled images."""
    channels, patch = _number(config, _CHANNELS, 3), _number(config, _PATCHES, 16)
    merge = _number(config, _MERGES, 1)
    wanted_side = patch * merge * max(1, round(math.sqrt(length) / merge))
    config_side = _number(config, _SIZES, wanted_side)
    for side in dict.fromkeys((wanted_side, config_side)):
        pixels = torch.zeros(num_items, channels, side, side)
        yield {names[0]: pixels}
        yield {names[0]: pixels, **_sizes(names, num_items, side)}
    for tiles in range(1, MAX_TILES + 1):
        pixels = torch.zeros(num_items, tiles, channels, config_side, config_side)
        masks = [name for name in names if name.endswith("pixel_attention_mask")]
        mask = torch.ones(num_items, tiles, config_side, config_side, dtype=torch.bool)
        yield {names[0]: pixels, **_sizes(names, num_items, config_side), **dict.fromkeys(masks, mask)}


def _sizes(names: tuple[str, ...], num_items: int, side: int) -> dict[str, Tensor]:
    """Heights and widths of images, if the encoder has such an input."""
    return {name: torch.full((num_items, 2), side) for name in names if name.endswith("image_sizes")}


def _patches(
    names: tuple[str, ...], spec: ModelSpec, module: str, config: Any, num_items: int, length: int
) -> Iterator[dict[str, Tensor]]:
    """Flat patches `[patches, values per patch]`, with the grid of each item."""
    merge = _number(config, _MERGES, 1)
    side = merge * max(1, round(math.sqrt(length) / merge))
    grid = torch.tensor([[1, side, side]] * num_items)
    matrices = [use.parameter for use in spec.uses[module, -1] if len(use.parameter.shape) > 1]
    for matrix in matrices:
        patches = torch.zeros(num_items * side * side, math.prod(matrix.shape[1:]))
        yield {names[0]: patches, **{name: grid for name in names if name.endswith("grid_thw")}}


def _audio(names: tuple[str, ...], config: Any, num_items: int) -> Iterator[dict[str, Tensor]]:
    """Clips `[items, mel bins, frames]` of the config's length."""
    bins = _number(config, _BINS, 80)
    frames = _FRAMES_PER_POSITION * _number(config, _FRAMES, 1500)
    for shape, axis in (((num_items, bins, frames), 2), ((num_items, frames, bins), 1)):
        masks = {name: torch.ones(num_items, shape[axis], dtype=torch.long) for name in names if name.endswith("mask")}
        yield {names[0]: torch.zeros(*shape), **masks}


def _number(config: Any, names: tuple[str, ...], default: int) -> int:
    """The first of some settings that a config has; the first element of a list."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    return default
