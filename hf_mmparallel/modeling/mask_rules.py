"""
The words of a batch: what each token may look at, as the model's own mask code says it.

A model's `create_masks_for_generate` is asked which tokens see the one after them; tokens that do are spans, such as
an image of Gemma3 or the prefix of PaliGemma. No model has code of its own here; what can't be read is refused.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.models.auto import modeling_auto

from ..kernels.bitfield_attention import encode_words

PROBE = "hf_mmparallel_probe"
PLAIN_LAYERS = ("full_attention", "sliding_attention")
ITEM_LENGTHS = {"image": "mm_tokens_per_image"}
"""Modality -> setting of a config that holds the tokens of every item; a grid in the batch comes first."""


@dataclass(frozen=True)
class _Drawn:
    """What a mask function was asked to draw: (batch, head, query, key) indices -> whether the query sees the key."""

    sees: Callable[[Tensor, int, Tensor, Tensor], Tensor]


def _probe(*, mask_function: Callable[..., Tensor], **_: Any) -> _Drawn:
    """A mask function that hands back what it was asked to draw."""
    return _Drawn(mask_function)


AttentionMaskInterface.register(PROBE, _probe)


def config_and_class(config_or_model: Any) -> tuple[Any, type | None]:
    """
    A model's config and class.

    Args:
        config_or_model ([`~transformers.PreTrainedModel`] or [`~transformers.PreTrainedConfig`]):
            A model, with or without adapters, or the config of one; a config that names no class is looked up in the
            classes of transformers with a language-model head.

    Returns:
        The config, and the class (`None` when transformers has none for the config).
    """
    if isinstance(config_or_model, torch.nn.Module):
        model: Any = config_or_model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        return model.config, type(model)
    config = config_or_model
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if inspect.isclass(found) and isinstance(config, getattr(found, "config_class", None) or ()):
            return config, found
    for mapping in (
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        found = mapping.get(type(config), None)
        if found is not None:
            return config, found[0] if isinstance(found, tuple) else found
    return config, None


class MaskRule:
    """
    Makes the words of the batches of one model.

    Padding gets the word 0. Every other token looks back in its sample, and sees its span both ways. Spans are read
    off the model's own masks, with one difference: neighbouring images of which transformers would make one span are
    a span each where the batch's grids or the config say how many tokens an image has.

    Can be pickled: it holds a config and a class, no weights.

    Args:
        config_or_model ([`~transformers.PreTrainedModel`] or [`~transformers.PreTrainedConfig`]): The model.

    Raises:
        `ValueError`: For a model whose samples would see each other in one row, or whose masks words can't say.

    Example:

    ```python
    >>> words = MaskRule(model)(batch)  # int64 of shape (batch, length)
    ```
    """

    def __init__(self, config_or_model: Any):
        config, model_class = config_and_class(config_or_model)
        _check_rows_hold_samples(config, model_class)
        self.name = getattr(model_class, "__name__", type(config).__name__)
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = PROBE
        self.create_masks: Callable[..., Any] = getattr(model_class, "create_masks_for_generate", None) or (
            create_masks_for_generate
        )

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """
        Args:
            batch (`Mapping[str, Any]`):
                A padded batch with `input_ids` and `attention_mask` of shape `(batch, length)`, with what the
                processor says of its tokens and media (`token_type_ids`, `mm_token_type_ids`, `image_grid_thw`).

        Returns:
            `torch.Tensor` of shape `(batch, length)`: int64 words, in which each row is one sample.
        """
        real = real_tokens(batch)
        masks = self._masks(batch)
        items = None
        spans = torch.zeros_like(real, dtype=torch.int64)
        for row, mask in enumerate(real):
            places = mask.nonzero()[:, 0]
            runs = self._runs(masks, row, places)
            if int(runs[-1] if len(runs) else 0) + 1 < len(runs):
                if items is None:
                    items = self._items(batch, real)
                groups = self._groups(masks, row, places, runs)
                spans[row, places] = _span_ids(groups, runs, items[row, places])
        return encode_words(real.to(torch.int64), spans)

    def _masks(self, batch: Mapping[str, Any]) -> list[_Drawn]:
        """The masks that the model draws for a batch, one for each type of layer."""
        rows, length = batch["input_ids"].shape
        known = {
            "config": self.config,
            "inputs_embeds": torch.empty(rows, length, 0),
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": None,
        }
        extra = {
            name: batch[name]
            for name in inspect.signature(self.create_masks).parameters
            if name not in known and name in batch
        }
        own = "self" in inspect.signature(self.create_masks).parameters  # it depends on more than the config
        drawn = None if own else self.create_masks(**known, **extra)
        masks: list[Any] = list(drawn.values()) if isinstance(drawn, Mapping) else [drawn]
        if not all(isinstance(mask, _Drawn) for mask in masks):
            raise ValueError(
                f"`{self.name}.create_masks_for_generate` draws its masks without the mask functions of transformers, "
                "so no words can be read off them. Train it on padded batches, without packing."
            )
        return masks

    def _sees(self, masks: list[_Drawn], row: int, query: Tensor, key: Tensor) -> Tensor:
        """Whether queries see keys, at or after them, which must be the same in all layers."""
        rows = torch.full_like(query, row)
        answers = torch.stack([mask.sees(rows, 0, query, key).expand(query.shape) for mask in masks])
        self._require(bool((answers == answers[0]).all()), "differ between its layers in more than a window")
        return answers[0]

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(
                f"The masks of `{self.name}` {what}, which a mask word can't say. Train it on padded batches, without "
                "packing."
            )

    def _runs(self, masks: list[_Drawn], row: int, places: Tensor) -> Tensor:
        """The number, from 0, of each real token's run: tokens that each see the next."""
        self._require(bool(self._sees(masks, row, places[1:], places[:-1]).all()), "are not causal")
        starts = ~self._sees(masks, row, places[:-1], places[1:])
        return torch.cat([starts.new_zeros(len(places[:1])), starts]).cumsum(0)

    def _groups(self, masks: list[_Drawn], row: int, places: Tensor, runs: Tensor) -> Tensor:
        """For each run, the first run of its group; runs of a group see each other both ways."""
        lengths = runs.bincount()
        firsts = places[lengths.cumsum(0) - lengths]
        lasts = places[lengths.cumsum(0) - 1]
        self._require(bool(self._sees(masks, row, firsts, lasts).all()), "have windows that look ahead")
        groups = torch.arange(len(lengths))
        for run in (lengths > 1).nonzero()[:, 0].tolist():
            own = firsts[run].expand_as(firsts)
            members = self._sees(masks, row, torch.minimum(own, firsts), torch.maximum(own, firsts))
            groups[members] = members.nonzero()[0]
        return groups

    def _items(self, batch: Mapping[str, Any], real: Tensor) -> Tensor:
        """The number, from 0 over the whole batch, of each placeholder token's item; -1 for text and where unknown."""
        ids = batch["input_ids"]
        items = torch.full_like(ids, -1, dtype=torch.int64)
        first = 0
        for modality, sizes in _item_sizes(self.config, batch):
            token = getattr(self.config, f"{modality}_token_id", None)
            placeholders = real & (ids == token)
            count = int(placeholders.sum())
            if token is None or not count:
                continue
            ends = sizes.cumsum(0) if sizes.dim() else torch.arange(1, count + 1) * sizes
            items[placeholders] = first + torch.searchsorted(ends, torch.arange(count), right=True)
            first += len(ends) + 1
        return items


def words_of_batch(config_or_model: Any, batch: Mapping[str, Any]) -> Tensor:
    """
    The mask words of a padded batch of a model; see [`MaskRule`], which serves many batches.

    Args:
        config_or_model ([`~transformers.PreTrainedModel`] or [`~transformers.PreTrainedConfig`]): The model.
        batch (`Mapping[str, Any]`): With `input_ids` and `attention_mask` of shape `(batch, length)`.

    Returns:
        `torch.Tensor` of shape `(batch, length)`: int64 words, in which each row is one sample.
    """
    return MaskRule(config_or_model)(batch)


def real_tokens(batch: Mapping[str, Any]) -> Tensor:
    """
    Which tokens of a batch are no padding: bool `(batch, length)`.

    Raises:
        `ValueError`: Without an `attention_mask` of that shape.
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != batch["input_ids"].shape:
        found = "no `attention_mask`" if mask is None else f"an `attention_mask` of shape {tuple(mask.shape)}"
        raise ValueError(
            f"The batch has {found}, so padding can't be told from tokens. Use a collator that makes one of the shape "
            f"{tuple(batch['input_ids'].shape)} of `input_ids`."
        )
    return mask != 0


def _span_ids(groups: Tensor, runs: Tensor, items: Tensor) -> Tensor:
    """
    Spans, from 1, of the tokens of one row; 0 for tokens that are alone.

    Args:
        groups (`torch.Tensor` of shape `[runs]`): The first run of each run's group.
        runs (`torch.Tensor` of shape `[tokens]`): The run of each token.
        items (`torch.Tensor` of shape `[tokens]`): The item of each token, -1 for text.
    """
    ids = torch.zeros_like(runs)
    number = 0
    of_token = groups[runs]
    for group in (of_token.bincount() > 1).nonzero()[:, 0].tolist():
        members = of_token == group
        inside = items[members]
        if int((groups == group).sum()) == 1 and bool((inside >= 0).all()):  # a run of nothing but items
            _, parts = inside.unique_consecutive(return_inverse=True)
        else:
            parts = torch.zeros_like(inside)
        ids[members] = number + 1 + parts
        number += int(parts.max()) + 1
    return ids


def _item_sizes(config: Any, batch: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Modality, and the tokens of each of its items in the batch, or one number for all."""
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    for modality in ("image", "video"):
        grids = batch.get(f"{modality}_grid_thw")
        fixed = getattr(config, ITEM_LENGTHS.get(modality, ""), None)
        if isinstance(grids, Tensor):
            yield modality, grids.prod(-1) // merge**2
        elif fixed:
            yield modality, torch.tensor(fixed)


def _check_rows_hold_samples(config: Any, model_class: type | None) -> None:
    """Raises `ValueError` for models in which more than a mask keeps the samples of a row apart."""
    text = config.get_text_config()
    name = getattr(model_class, "__name__", type(config).__name__)
    layers = {str(kind) for kind in getattr(text, "layer_types", None) or ()} - set(PLAIN_LAYERS)
    if getattr(text, "attention_chunk_size", None) and not hasattr(text, "layer_types"):
        layers.add("chunked_attention")
    reason = None
    if layers or getattr(model_class, "_is_stateful", False):
        kinds = ", ".join(f"`{kind}`" for kind in sorted(layers)) or "recurrent layers"
        reason = f"has {kinds}: one word a token serves only {' and '.join(f'`{kind}`' for kind in PLAIN_LAYERS)}"
    elif getattr(text, "is_encoder_decoder", False):
        reason = "is an encoder and a decoder: its samples have two lengths"
    elif getattr(text, "cross_attention_layers", None):
        reason = "has layers that look at images outside the row, which hold those of all samples"
    elif text is config and getattr(text, "use_bidirectional_attention", None) is True:
        reason = "looks ahead everywhere, with a window to both sides (`use_bidirectional_attention=True`)"
    elif model_class is not None and _draws_unasked(model_class):
        reason = "draws a mask in its forward that its `create_masks_for_generate` knows nothing of"
    if reason is not None:
        raise ValueError(f"`{name}` {reason}. Train it on padded batches, without packing.")


def _draws_unasked(model_class: type) -> bool:
    """Whether a forward gives blocks to the mask functions, but `create_masks_for_generate` is the common one."""
    if hasattr(model_class, "create_masks_for_generate"):
        return False
    family = sys.modules.get(model_class.__module__)
    return any(
        "block_sequence_ids" in _source(vars(cls)["forward"])
        for cls in vars(family).values()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and "forward" in vars(cls)
        if cls.config_class is model_class.config_class  # type: ignore[attr-defined]
    )


def _source(function: Callable[..., Any]) -> str:
    """The source of a function, nothing where Python has none."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
