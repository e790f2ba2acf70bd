"""Mask words of a batch, derived from the masks of the model's `create_masks_for_generate`; no code for models."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import unwrap_model
from transformers.models.auto import modeling_auto

from .._versions import CACHE
from ..kernels.bitfield_attention import encode_words
from ..kernels.recurrent_layers import LONE_LAYERS, recurrent_kinds

PROBE = "hf_mmparallel_probe"
PLAIN_LAYERS = ("full_attention", "sliding_attention")
_KNOWN_LAYERS = {*PLAIN_LAYERS, "chunked_attention", *LONE_LAYERS}  # those with chunks divide samples by themselves
# arguments of transformers' mask functions that change the visible pairs
ADDED_TO_MASKS = ("block_sequence_ids", "or_mask_function", "and_mask_function")
PAIRS_AT_A_TIME = 2**20
# modality -> setting of a config that holds the tokens of every item; a grid in the batch comes first
ITEM_LENGTHS = {"image": "mm_tokens_per_image"}


@dataclass(frozen=True)
class _ProbedMask:
    """A mask as a function: (batch, head, query, key) indices -> whether the query sees the key."""

    sees: Callable[[Tensor, int, Tensor, Tensor], Tensor]


def _probe(*, mask_function: Callable[..., Tensor], **_: Any) -> _ProbedMask:
    """A mask function that returns its arguments instead of a mask."""
    return _ProbedMask(mask_function)


AttentionMaskInterface.register(PROBE, _probe)


def config_and_class(config_or_model: Any) -> tuple[Any, type | None]:
    """
    Returns the config and the class (`None` if transformers has none) of a model, with adapters or compiled, or of a
    config; one that names no class is looked up in the classes of transformers with a language-model head.
    """
    if isinstance(config_or_model, torch.nn.Module):
        model: Any = getattr(config_or_model, "_orig_mod", config_or_model)
        model = model if isinstance(model, PreTrainedModel) else unwrap_model(model)  # which imports DeepSpeed
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        return model.config, type(model)
    config = config_or_model
    for name in getattr(config, "architectures", None) or ():
        listed = getattr(transformers, name, None)
        if inspect.isclass(listed) and isinstance(config, getattr(listed, "config_class", None) or ()):
            return config, listed
    for mapping in (
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        listed = mapping.get(type(config), None)
        if listed is not None:
            return config, listed[0] if isinstance(listed, tuple) else listed
    return config, None


class MaskRule:
    """
    Computes the mask words of batches of one model; can be pickled, since it holds a config and a class, no weights.

    Padding has the word 0. Every other token sees earlier tokens of its sample, and all tokens of its span, such as
    an image of Gemma3 or the prefix of PaliGemma. Spans come from the model's own masks, but neighbouring images,
    which transformers would merge, are apart if grids or the config give the number of tokens per image.

    Raises `ValueError` for a model whose samples would see each other in one row, or whose masks can't be expressed by
    words.
    """

    def __init__(self, config_or_model: Any):
        config, model_class = config_and_class(config_or_model)
        _check_rows_hold_samples(config, model_class)
        self.name = getattr(model_class, "__name__", type(config).__name__)
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = PROBE
        text = self.config.get_text_config()
        if getattr(text, "attention_chunk_size", None):
            text.attention_chunk_size = 2**31  # the layers divide samples by themselves
        self.create_masks: Callable[..., Any] = getattr(model_class, "create_masks_for_generate", None) or (
            create_masks_for_generate
        )
        if self.create_masks is create_masks_for_generate:  # a model's own may need more of a batch
            self._masks({"input_ids": torch.zeros(1, 2, dtype=torch.int64)})

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """
        The int64 words `(batch, length)` of a padded batch, with `input_ids` and `attention_mask` of that shape and
        what the processor says of its tokens and media (`token_type_ids`, `mm_token_type_ids`, `image_grid_thw`); a
        row is one sample.
        """
        real = real_tokens(batch)
        masks = self._masks(batch)
        rows, positions = real.nonzero().unbind(-1)
        runs = self._runs(masks, rows, positions)
        spans = torch.zeros_like(real, dtype=torch.int64)
        if len(runs) and int(runs[-1]) + 1 < len(runs):
            groups = self._groups(masks, rows, positions, runs)
            spans[real] = _span_ids(groups, runs, rows, self._items(batch, real)[real])
        return encode_words(real.to(torch.int64), spans)

    def _masks(self, batch: Mapping[str, Any]) -> list[_ProbedMask]:
        """The masks that the model draws for a batch, one for each type of layer."""
        rows, length = batch["input_ids"].shape
        known = {
            "config": self.config,
            "inputs_embeds": torch.empty(rows, length, 0, device=batch["input_ids"].device),
            "attention_mask": None,
            CACHE: None,
            "position_ids": None,
        }
        extra = {
            name: batch[name]
            for name in inspect.signature(self.create_masks).parameters
            if name not in known and name in batch
        }
        own = "self" in inspect.signature(self.create_masks).parameters  # it depends on more than the config
        drawn = None if own else self.create_masks(**known, **extra)
        # recurrent layers have none without padding
        masks = [mask for mask in tree_leaves(drawn) if mask is not None] or [None]
        if not all(isinstance(mask, _ProbedMask) for mask in masks):
            raise ValueError(
                f"`{self.name}.create_masks_for_generate` does not use the mask functions of transformers, so mask "
                "words can't be derived from it. Train it on padded batches, without packing."
            )
        return masks

    def _sees(self, masks: list[_ProbedMask], rows: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether the queries of these rows see keys, at or after them, which must be the same in all layers."""
        answers = torch.stack([mask.sees(rows, 0, query, key).expand(query.shape) for mask in masks])
        self._require(bool((answers == answers[0]).all()), "differ between its layers in more than a window")
        return answers[0]

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(
                f"The masks of `{self.name}` {what}, which mask words can't express. Train it on padded batches, "
                "without packing."
            )

    def _runs(self, masks: list[_ProbedMask], rows: Tensor, positions: Tensor) -> Tensor:
        """The number, from 0 over the whole batch, of each real token's run: tokens that each see the next."""
        follows = rows[1:] == rows[:-1]
        row, before, after = rows[1:][follows], positions[:-1][follows], positions[1:][follows]
        self._require(bool(self._sees(masks, row, after, before).all()), "are not causal")
        starts = torch.ones_like(rows, dtype=torch.bool)
        starts[1:][follows] = ~self._sees(masks, row, before, after)
        return starts.cumsum(0) - 1

    def _groups(self, masks: list[_ProbedMask], rows: Tensor, positions: Tensor, runs: Tensor) -> Tensor:
        """For each run, the first run of its group; runs of a group see each other both ways."""
        lengths = runs.bincount()
        ends = lengths.cumsum(0)
        row, firsts, lasts = rows[ends - 1], positions[ends - lengths], positions[ends - 1]
        self._require(bool(self._sees(masks, row, firsts, lasts).all()), "have windows that look ahead")
        num_runs = row.bincount()
        begins = num_runs.cumsum(0) - num_runs
        groups = torch.arange(len(lengths), device=rows.device)
        # Each run of several tokens is compared with all runs of its row, in batches of limited memory.
        for some in (lengths > 1).nonzero()[:, 0].split(max(1, PAIRS_AT_A_TIME // int(num_runs.max()))):
            counts = num_runs[row[some]]
            own, first, sample = (run.repeat_interleave(counts) for run in (some, firsts[some], row[some]))
            skipped = (begins[row[some]] - counts.cumsum(0) + counts).repeat_interleave(counts)
            other = torch.arange(len(own), device=rows.device) + skipped
            theirs = firsts[other]
            sees = self._sees(masks, sample, torch.minimum(first, theirs), torch.maximum(first, theirs))
            own, other = torch.stack([own, other])[:, sees]
            leaders = groups.scatter_reduce(0, own, other, "amin")
            groups.scatter_reduce_(0, other, leaders[own], "amin")
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
            numbers = torch.arange(count, device=ids.device)
            ends = sizes.to(ids.device).cumsum(0) if isinstance(sizes, Tensor) else (numbers + 1) * sizes
            items[placeholders] = first + torch.searchsorted(ends, numbers, right=True)
            first += len(ends) + 1
        return items


def words_of_batch(config_or_model: Any, batch: Mapping[str, Any]) -> Tensor:
    """
    The mask words of a padded batch of a model. For many batches of one model use [`MaskRule`].

    Args:
        config_or_model ([`~transformers.PreTrainedModel`] or [`~transformers.PreTrainedConfig`]): The model.
        batch (`Mapping[str, Any]`): With `input_ids` and `attention_mask` of shape `(batch, length)`.

    Returns:
        `torch.Tensor` of shape `(batch, length)`: int64 words, in which each row is one sample.
    """
    return MaskRule(config_or_model)(batch)


def real_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Mask `(batch, length)` of tokens that are not padding; `ValueError` without an `attention_mask` of the shape."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != batch["input_ids"].shape:
        found = "no `attention_mask`" if mask is None else f"an `attention_mask` of shape {tuple(mask.shape)}"
        raise ValueError(
            f"The batch has {found}, so padding can't be told from tokens. Use a collator that makes one of the shape "
            f"{tuple(batch['input_ids'].shape)} of `input_ids`."
        )
    return mask != 0


def _span_ids(
    groups: Tensor,  # [runs] the first run of each run's group
    runs: Tensor,  # [tokens] the run of each token
    rows: Tensor,  # [tokens] ascending
    items: Tensor,  # [tokens] the item of each token, -1 for text
) -> Tensor:
    """Spans, from 1 in each row, of the tokens of a batch; 0 for tokens that are alone."""
    of_token = groups[runs]
    inside = of_token.bincount()[of_token] > 1
    # A group that is one run of nothing but items has a span for each; any other is one span.
    has_text = torch.zeros_like(groups, dtype=torch.bool)
    has_text[of_token[items < 0]] = True
    divided = ((groups.bincount(minlength=len(groups)) == 1) & ~has_text)[of_token]
    number = of_token * (int(items.max()) + 2) + torch.where(divided, items, 0)
    _, number = number[inside].unique(return_inverse=True)  # ascending from row to row, as groups are
    row = rows[inside]
    lowest = row.new_full((int(row[-1]) + 1,), len(rows)).scatter_reduce(0, row, number, "amin")
    ids = torch.zeros_like(runs)
    ids[inside] = number - lowest[row] + 1
    return ids


def _item_sizes(config: Any, batch: Mapping[str, Any]) -> Iterator[tuple[str, Tensor | int]]:
    """Modality, and the tokens of each of its items in the batch, or one number for all."""
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    for modality in ("image", "video"):
        grids = batch.get(f"{modality}_grid_thw")
        fixed = getattr(config, ITEM_LENGTHS.get(modality, ""), None)
        if isinstance(grids, Tensor):
            yield modality, grids.prod(-1) // merge**2
        elif fixed:
            yield modality, fixed


def _check_rows_hold_samples(config: Any, model_class: type | None) -> None:
    text = config.get_text_config()
    name = getattr(model_class, "__name__", type(config).__name__)
    recurrent = recurrent_kinds(text)
    layers = {str(kind) for kind in getattr(text, "layer_types", None) or ()} - _KNOWN_LAYERS - recurrent
    reason = None
    if layers or (getattr(model_class, "_is_stateful", False) and not recurrent):
        kinds = ", ".join(f"`{kind}`" for kind in sorted(layers)) or "recurrent layers"
        reason = f"has {kinds}: one word a token serves only {' and '.join(f'`{kind}`' for kind in PLAIN_LAYERS)}"
    elif getattr(text, "is_encoder_decoder", False):
        reason = "is an encoder and a decoder: its samples have two lengths"
    elif getattr(text, "cross_attention_layers", None):
        reason = "has layers that look at images outside the row, which hold those of all samples"
    elif text is config and getattr(text, "use_bidirectional_attention", None) is True:
        reason = "looks ahead everywhere, with a window to both sides (`use_bidirectional_attention=True`)"
    elif model_class is None:
        reason = "is the config of no class that transformers knows, whose masks could be read. Give the model itself"
    elif getattr(text, "is_decoder", None) is False and _has(model_class, "create_bidirectional_mask"):
        reason = "looks ahead everywhere (`is_decoder=False`)"
    elif _has(model_class, "create_position_ids_from_input_ids"):
        reason = "counts its positions from the id of its padding token"
    elif _draws_unasked(model_class, text):
        reason = "draws a mask in its forward that its `create_masks_for_generate` knows nothing of"
    if reason is not None:
        raise ValueError(f"`{name}` {reason}. Train it on padded batches, without packing.")


def _families(model_class: type) -> Iterator[tuple[bool, dict[str, Any]]]:
    """The modules of a model's class and of those that it is made of: whether it is of transformers, what is in it."""
    for name in dict.fromkeys(cls.__module__ for cls in model_class.__mro__ if issubclass(cls, PreTrainedModel)):
        if name != PreTrainedModel.__module__ and name in sys.modules:
            yield name.startswith("transformers."), vars(sys.modules[name])


def _has(model_class: type, name: str) -> bool:
    """Whether the modules of a model's class know a function by this name, or a class of theirs has it as a method."""
    return any(
        name in family or any(name in vars(cls) for cls in family.values() if inspect.isclass(cls))
        for _, family in _families(model_class)
    )


def _draws_unasked(model_class: type, text: Any) -> bool:
    """Whether a forward adds to the masks, but `create_masks_for_generate` is the common one."""
    if hasattr(model_class, "create_masks_for_generate"):
        return False
    configs = (model_class.config_class, type(text))  # type: ignore[attr-defined]
    for is_known, family in _families(model_class):
        # Those of transformers that use the other arguments do so by a setting that is looked at elsewhere.
        added = ADDED_TO_MASKS[:1] if is_known else ADDED_TO_MASKS
        for cls in family.values():
            if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.config_class in configs:
                source = _source(vars(cls).get("forward"))
                if any(argument in source for argument in added):
                    return True
    return False


def _source(function: Callable[..., Any] | None) -> str:
    try:
        return "" if function is None else inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


# Position ids of a padded batch as the model itself computes them.

# argument of `get_rope_index` that no batch has by that name -> how the model makes it of the batch
DERIVED_INPUTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    # The omni models compute these from other entries of the batch before they call `get_rope_index`.
    "audio_seqlens": lambda batch: batch["feature_attention_mask"].sum(-1),
    "second_per_grids": lambda batch: batch["video_second_per_grid"],
}


class PositionRule:
    """
    Makes the position ids of the batches of one model.

    A model with a `get_rope_index` (multimodal rotary embeddings) makes its own, on a copy of it without weights;
    every other model counts the tokens of a sample from 0. Can be pickled: it holds a config and a class.
    """

    def __init__(self, config_or_model: Any):
        config, model_class = config_and_class(config_or_model)
        base = modeling_auto.MODEL_MAPPING.get(type(config), None)
        bases = base if isinstance(base, tuple) else (base,)
        self.owner = next((cls for cls in (model_class, *bases) if hasattr(cls, "get_rope_index")), None)
        self.config = None
        if self.owner is not None:
            self.config = copy.deepcopy(config)
            self.config._attn_implementation = "eager"
        self._skeleton: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_skeleton": None}

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """
        int64 position ids `(batch, length)` of a padded batch, or `(axes, batch, length)` of a model with multimodal
        rotary embeddings; 0 or more for padding. Raises `ValueError` if the batch lacks what they depend on, such as
        grids.
        """
        real = real_tokens(batch)
        if self.owner is None:
            return (real.to(torch.int64).cumsum(-1) - 1).clamp(min=0)
        if self._skeleton is None:
            with torch.device("meta"):
                self._skeleton = self.owner(self.config)
        index = self._skeleton.get_rope_index
        has_media = any(name.endswith("_grid_thw") for name in batch)
        arguments = {}
        for name, parameter in inspect.signature(index).parameters.items():
            if name in batch:
                arguments[name] = batch[name]
            elif name in DERIVED_INPUTS:
                with contextlib.suppress(KeyError):
                    arguments[name] = DERIVED_INPUTS[name](batch)
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                if has_media:
                    raise ValueError(
                        f"The batch has images but no `{name}`, on which the position ids of `{self.owner.__name__}` "
                        "depend. Keep what the processor returns beside `input_ids`."
                    )
                arguments[name] = torch.zeros_like(batch["input_ids"])  # text everywhere
        return index(**arguments)[0]
