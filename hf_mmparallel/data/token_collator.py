"""Collator of samples that are tokenised already."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..modeling.loss import IGNORE_INDEX

TOKEN_FIELDS = (
    "input_ids",
    "attention_mask",
    "labels",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "shift_labels",
)


class PretokenizedCollator:
    """
    Batches samples of token ids, labels and media tensors.

    Token fields are padded. All other arrays are concatenated along their first dimension, which counts the images,
    patches or clips of a sample; in a sample without images the field is missing, `None` or empty. If other dimensions
    differ, arrays are padded with zeros at the end, as processors do. Strings and single numbers are left out.

    Args:
        pad_token_id (`int`, *optional*, defaults to 0):
            Padding of `input_ids`; labels are padded with -100, other token fields with 0.
        padding_side (`str`, *optional*, defaults to `"right"`): `"right"` or `"left"`.
        pad_to_multiple_of (`int`, *optional*): Pads the length up to a multiple of this.
    """

    def __init__(
        self,
        pad_token_id: int = 0,
        padding_side: Literal["right", "left"] = "right",
        pad_to_multiple_of: int | None = None,
    ):
        if padding_side not in ("right", "left"):
            raise ValueError(f"`padding_side={padding_side!r}` is not known. Use 'right' or 'left'.")
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"`pad_to_multiple_of={pad_to_multiple_of}` is not a length. Use 1 or more.")
        self.pad_token_id = pad_token_id
        self.padding_side = padding_side
        self.pad_to_multiple_of = pad_to_multiple_of
        self.stacked: frozenset[str] = frozenset()  # names of arrays that are not concatenated
        self.decodes: frozenset[str] = frozenset()
        self._left_out: Collection[str] | None = ()

    def without_media(self, entries: Collection[str] | None = None) -> PretokenizedCollator:
        """
        A collator of the same batches without media.

        Args:
            entries (`Collection[str]`, *optional*):
                Floating-point entries to leave out, which samples may lack; by default all except token fields.
        """
        bare = copy.copy(self)
        bare._left_out = entries
        return bare

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """
        Args:
            samples (`Sequence[Mapping[str, Any]]`): Samples, all with `input_ids` and the same token fields.

        Returns:
            `dict[str, Tensor]`: Token fields of shape `(batch, length)`, always with `attention_mask`, and media of
            shape `(entries of all samples, ...)`.

        Raises:
            `ValueError`: If a token field is missing in a sample, or its length differs from that of `input_ids`.
        """
        arrays = [{name: as_array(value) for name, value in sample.items()} for sample in samples]
        arrays = [
            {
                n: array
                for n, array in sample.items()
                if array is not None and not is_left_out(n, array, self._left_out)
            }
            for sample in arrays
        ]
        for sample, given in zip(arrays, samples, strict=True):
            require_column(given, "input_ids", sample)
            sample.setdefault("attention_mask", torch.ones_like(sample["input_ids"]))
        names = dict.fromkeys(name for sample in arrays for name in sample)
        batch = {}
        for name in names:
            if name in TOKEN_FIELDS:
                batch[name] = self._pad(name, arrays)
            else:
                entries = [sample[name] for sample in arrays if name in sample]
                batch[name] = concatenate([e[None] for e in entries] if name in self.stacked else entries)
        return batch

    def _pad(self, name: str, samples: Sequence[Mapping[str, Tensor]]) -> Tensor:
        lengths = [sample["input_ids"].shape[-1] for sample in samples]
        longest = max(lengths)
        if self.pad_to_multiple_of is not None:
            longest = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fill = padding_of(name, self.pad_token_id)
        rows = []
        for index, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            if name not in sample or sample[name].shape[-1] != length:
                actual = f"has {sample[name].shape[-1]}" if name in sample else "is missing"
                raise ValueError(
                    f"Sample {index} of the batch has {length} `input_ids`, but `{name}` {actual}. "
                    "Give one value per token, in all samples or in none."
                )
            padding = (0, longest - length) if self.padding_side == "right" else (longest - length, 0)
            rows.append(functional.pad(sample[name], padding, value=fill))
        return torch.stack(rows, dim=1 if rows[0].dim() == 2 else 0)  # position ids may be (3, length)


def padding_of(field: str, pad_token_id: int) -> int:
    """The value of a field of tokens where there is none."""
    return {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}.get(field, 0)


def require_column(sample: Mapping[str, Any], column: str, present: Mapping[str, Any] | None = None) -> None:
    """Raises `ValueError` unless a column is in `present`, or in the sample if that is left out."""
    if column not in (sample if present is None else present):
        raise ValueError(
            f"The dataset has no column `{column}`; it has {sorted(sample)}. Rename a column, or give a "
            "`data_collator` of your own."
        )


def as_array(value: Any) -> Tensor | None:
    """A tensor from an array or nested lists; `None` for values that are no inputs: empty, strings, single numbers."""
    if value is None or isinstance(value, (str, bytes, bool, int, float, dict)):
        return None
    if isinstance(value, (list, tuple)) and len(value) and isinstance(value[0], Tensor):
        value = torch.stack(list(value))
    if not isinstance(value, Tensor):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            return None
        value = torch.from_numpy(np.array(array, dtype=np.float32 if array.dtype == np.float64 else None))
    return value if value.dim() and value.numel() else None


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors along the first dimension, padded with zeros in the other dimensions."""
    if len({tensor.dim() for tensor in tensors}) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"Media of the samples have the shapes {shapes}. Give all the same number of dimensions, with the images "
            "of a sample along the first."
        )
    sizes = [max(tensor.shape[dim] for tensor in tensors) for dim in range(1, tensors[0].dim())]
    padded = []
    for tensor in tensors:
        missing = [size - actual for size, actual in zip(sizes, tensor.shape[1:], strict=True)]
        padding = [n for count in reversed(missing) for n in (0, count)]
        padded.append(functional.pad(tensor, padding) if any(padding) else tensor)
    return torch.cat(padded)


def is_left_out(name: str, value: Any, entries: Collection[str] | None) -> bool:
    """Whether a floating-point entry is among `entries`, which are all except token fields by default."""
    chosen = name not in TOKEN_FIELDS if entries is None else name in entries
    return chosen and isinstance(value, Tensor) and value.is_floating_point()
