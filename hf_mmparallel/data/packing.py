"""Packing: concatenates the samples of a microbatch in one row, without padding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.bitfield_attention import decode_words
from ..kernels.recurrent_layers import recurrent_kinds, start_anew_at_samples
from ..modeling.loss import IGNORE_INDEX
from ..plan import LANGUAGE_MODEL, ModelSpec
from .mask_rules import MaskRule, PositionRule, config_and_class, real_tokens
from .token_collator import TOKEN_FIELDS, padding_of

ATTENTION = "bitfield"


class PackingCollator:
    """
    Packs the samples that a collator batches into one row, for models with `attn_implementation="bitfield"`.

    The collator it wraps pads as always; of its batch this class makes the mask words and the position ids, drops the
    padding, and puts the samples one after the other. No token sees another sample, and the first token of a sample is
    no target. Losses and gradients are those of the padded batch. Media (pixels, grids) stay as they are.

    Can be pickled, for the workers of a data loader: it holds the model's config, no weights.

    Args:
        collator (`Callable[[Sequence], Mapping[str, Any]]`):
            Any collator whose batches have `input_ids` and `attention_mask` of shape `(batch, length)`.
        config_or_model ([`~transformers.PreTrainedModel`] or [`~transformers.PreTrainedConfig`]):
            The model that is trained, or its config.
        max_length (`int`, *optional*): Longest row in tokens; a longer one is refused.
        pad_to_multiple_of (`int`, *optional*): Pads the row at its end up to a multiple of this.
        token_fields (`Sequence[str]`, *optional*):
            Names of more entries of a batch with one value a token, of shape `(batch, length, ...)`.

    Raises:
        `ValueError`:
            For a model with another attention function, under which the samples of a row would see each other, or
            whose samples can't share a row.

    Example:

    ```python
    >>> model.set_attn_implementation({"text_config": "bitfield"})
    >>> packed = PackingCollator(collator, model)(dataset[:2])
    >>> packed["input_ids"].shape == (1, sum(len(sample["input_ids"]) for sample in dataset[:2]))
    True
    ```
    """

    def __init__(
        self,
        collator: Callable[[Sequence[Any]], Mapping[str, Any]],
        config_or_model: Any,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        token_fields: Sequence[str] = (),
    ):
        for name, value in (("max_length", max_length), ("pad_to_multiple_of", pad_to_multiple_of)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` is no length. Use 1 or more.")
        self.collator = collator
        self.max_length = max_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self.token_fields = (*TOKEN_FIELDS, *token_fields)
        self.config, _ = config_and_class(config_or_model)
        self._check_attention()
        self.mask_rule = MaskRule(config_or_model)
        self.position_rule = PositionRule(config_or_model)
        text: Any = self.config.get_text_config()
        # Llama 4 scales queries by their place in the row, whatever their position ids, from this place on
        self.scaled_from = text.floor_scale if getattr(text, "attn_temperature_tuning", False) else None
        self._let_samples_start_anew(config_or_model)
        if hasattr(collator, "tokenizer"):
            self.tokenizer: Any = collator.tokenizer  # the Trainer saves it beside a model

    def _let_samples_start_anew(self, config_or_model: Any) -> None:
        """Prepares the recurrent layers of a model; raises `ValueError` for a config that has such layers."""
        kinds = recurrent_kinds(self.config.get_text_config())
        if isinstance(config_or_model, torch.nn.Module):
            start_anew_at_samples(config_or_model)
        elif kinds:
            raise ValueError(
                f"`{type(config_or_model).__name__}` describes layers of type {', '.join(map(repr, sorted(kinds)))}, "
                "which have to start anew at each sample of a row. Give the model itself."
            )

    def without_media(self, entries: Collection[str] | None = None) -> PackingCollator:
        """
        A collator of the same rows without media; `self` if the wrapped one leaves nothing out.

        Args:
            entries (`Collection[str]`, *optional*): As the wrapped collator's `without_media` takes them.
        """
        without_media: Any = getattr(self.collator, "without_media", None)
        collator = self.collator if without_media is None else without_media(entries)
        if collator is self.collator:
            return self
        bare = copy.copy(self)
        bare.collator = collator
        return bare

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """
        Args:
            samples (`Sequence`): Samples for the wrapped collator.

        Returns:
            `dict[str, Any]`: Fields of tokens of shape `(1, length)` (position ids `(axes, 1, length)` of models with
            multimodal rotary embeddings), `attention_words` among them, in which the segment `i + 1` is the `i`-th
            sample; the rest of the wrapped collator's batch without `attention_mask`.

        Raises:
            `ValueError`: For a row longer than `max_length`, and a batch without `attention_mask`.
        """
        self._check_attention()
        return self.pack(self.collator(samples))

    def pack(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        real = real_tokens(batch)
        self._check_lengths(real.sum(-1).tolist())
        fields = {name: value for name, value in batch.items() if name != "attention_mask"}
        if fields.get("position_ids") is None:
            fields["position_ids"] = self.position_rule(batch)
        fields["attention_words"] = _words_by_sample(self.mask_rule(batch))
        positions = real.flatten().nonzero()[:, 0]
        names = {*self.token_fields, "attention_words"}
        packed = {
            name: self._one_row(name, value, real, positions) if name in names and isinstance(value, Tensor) else value
            for name, value in fields.items()
        }
        if isinstance(packed.get("labels"), Tensor):
            lengths = real.sum(-1)
            # no other sample's last token predicts the first of a sample
            packed["labels"][:, lengths.cumsum(0) - lengths] = IGNORE_INDEX
        return packed

    def _one_row(self, name: str, value: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        """A field of tokens `(batch, length, ...)`, or `(axes, batch, length)`, as one row."""
        first = 1 if name == "position_ids" and value.dim() == 3 else 0
        if value.shape[first : first + 2] != real.shape:
            if name != "position_ids" or value.shape[-1] != real.shape[-1]:
                raise ValueError(
                    f"`{name}` has the shape {tuple(value.shape)}, but `input_ids` are {tuple(real.shape)}. Give one "
                    "value a token."
                )
            value = value.expand(*value.shape[:first], *real.shape)  # one row of ids for all samples
        row = value.flatten(first, first + 1).index_select(first, positions).unsqueeze(first)
        missing = self._padded(len(positions)) - len(positions)
        if not missing:
            return row
        fill = padding_of(name, self._pad_token())
        after = row.dim() - first - 2
        return functional.pad(row, (0, 0) * after + (0, missing), value=fill)

    def _padded(self, length: int) -> int:
        step = self.pad_to_multiple_of or 1
        return -(-length // step) * step

    def _pad_token(self) -> int:
        for config in (self.config.get_text_config(), self.config):
            if isinstance(getattr(config, "pad_token_id", None), int) and config.pad_token_id >= 0:
                return config.pad_token_id
        return 0

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        if not all(lengths):
            raise ValueError(
                f"Sample {lengths.index(0)} of the batch has no tokens that its `attention_mask` counts. Filter the "
                "dataset."
            )
        length = self._padded(sum(lengths))
        if self.max_length is not None and length > self.max_length:
            padded = f", padded to {length}," if length != sum(lengths) else ""
            raise ValueError(
                f"{len(lengths)} samples of {list(lengths)} tokens make a row of {sum(lengths)}{padded} tokens, more "
                f"than `max_length={self.max_length}`. Use a smaller `per_device_train_batch_size` or a larger "
                "`max_length`."
            )
        if self.scaled_from is not None and length >= self.scaled_from:
            raise ValueError(
                f"Samples of {list(lengths)} tokens make a row of {length} tokens, but from `floor_scale="
                f"{self.scaled_from}` tokens on `{type(self.config).__name__}` scales queries by their place in the "
                "row instead of their sample. Use a lower `max_tokens_per_microbatch`, or padded batches."
            )

    def _check_attention(self) -> None:
        text = self.config.get_text_config()
        chosen = getattr(text, "_attn_implementation", None)
        if chosen == ATTENTION:
            return
        keys = [key for key in self.config.sub_configs if getattr(self.config, key, None) is text]
        wanted = f"{{'{keys[0]}': '{ATTENTION}'}}" if keys else f"'{ATTENTION}'"
        raise ValueError(
            f"The language model has `attn_implementation={chosen!r}`, which reads no `attention_words`: the samples "
            f"of a packed row would see each other. Call `model.set_attn_implementation({wanted})` before you make "
            "the collator. A model that warns then, and keeps what it has, calls an attention of its own: train it on "
            "padded batches."
        )


def unpack(row: Tensor, words: Tensor) -> Tensor:
    """
    The samples of packed rows `(rows, length, ...)`, such as logits or labels, by the rows' `attention_words`, as a
    batch `(samples, longest sample, ...)` in order, padded with -100 on the right.
    """
    segments = decode_words(words).segment
    pieces = [
        values[own == number]
        for values, own in zip(row, segments, strict=True)
        for number in range(1, int(own.max()) + 1)
    ]
    return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=IGNORE_INDEX)


def _words_by_sample(words: Tensor) -> Tensor:
    """Renumbers the segments of words: row `i`, with segment 1, gets segment `i + 1`."""
    rows = torch.arange(len(words), device=words.device)[:, None]
    return torch.where(words != 0, words + rows, words)  # the segment is the lowest field


# The choice between packed and padded rows, with its reason.


@dataclass(frozen=True)
class RowChoice:
    """The form of rows of the language model."""

    packed: bool  # whether a microbatch is one row without padding
    reason: str  # why, in words

    def __str__(self) -> str:
        form = "packed into one row" if self.packed else "padded to the longest of their microbatch"
        return f"Samples are {form}: {self.reason}."


def row_choice(packing: bool | None, model: Any, spec: ModelSpec, collator: Any) -> RowChoice:
    """Decides how rows are made under a plan: packed by default wherever the model allows it."""
    if isinstance(collator, PackingCollator):
        return RowChoice(True, "the data collator does")
    if packing is not None:
        return RowChoice(packing, f"`packing={packing}`")
    attention = spec.language_model.attention
    if attention != ATTENTION:
        return RowChoice(
            False,
            f"`{attention}` attention can't pack them; `packing=True` does, with `{ATTENTION}`",
        )
    try:
        _ = MaskRule(model), PositionRule(model)  # their checks
        start_anew_at_samples(model)
    except ValueError as error:
        return RowChoice(False, str(error).rstrip("."))
    return RowChoice(True, f"`{LANGUAGE_MODEL}` has `{ATTENTION}` attention, which keeps them apart")
