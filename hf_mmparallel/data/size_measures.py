"""Measures of one undecoded sample: the lengths of its sequences in each module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from transformers.utils import logging

from ..plan import LANGUAGE_MODEL, ModelSpec
from ..plan.plugin import reject_unknown_keys
from .chat_collator import ChatCollator, encode_together
from .image_sizes import UnknownSizeError
from .randomness import seeded

logger = logging.get_logger(__name__)

# module -> the lengths of a sample's sequences: one in the language model, one for each image of an encoder
Lengths = dict[str, list[int]]

_TOGETHER = 32  # conversations that are measured at once


class SampleMeasure(Protocol):
    """Measures a sample without decoding its media."""

    @property
    def counts_rows(self) -> bool: ...  # lengths in encoders are rows of features, not tokens of the layers

    def reads(self, present: Sequence[str]) -> list[str]:
        """The columns that it reads."""
        ...

    def __call__(self, sample: Any) -> Lengths: ...

    def together(self, read: Callable[[int], Any], indices: Sequence[int]) -> Iterator[Lengths | Exception]:
        """Lengths of the samples that `read` gives for dataset indices, or why one can't be measured."""
        ...


class _OneByOne(ABC):
    """Measures samples one by one."""

    @abstractmethod
    def __call__(self, sample: Any) -> Lengths: ...

    def together(self, read: Callable[[int], Any], indices: Sequence[int]) -> Iterator[Lengths | Exception]:
        return (_attempt(self, read, index) for index in indices)


def _attempt(measure: Callable[[Any], Lengths], read: Callable[[int], Any], index: int) -> Lengths | Exception:
    """The lengths of a single sample, or the error of measuring it."""
    try:
        with seeded(index):  # reading and measuring may draw, and must not change what the training draws
            return measure(read(index))
    except MemoryError:
        raise
    except Exception as error:  # a dataset or a user's function may raise anything
        return error


@dataclass(frozen=True)
class ColumnMeasure(_OneByOne):
    """Lengths from columns; modules without one count one token for each sample."""

    names: Mapping[str, str]  # module -> its column, which holds a number or a list of numbers
    modules: tuple[str, ...]  # all modules of the model
    counts_rows: bool = field(default=False, init=False)

    @classmethod
    def of(cls, columns: str | Mapping[str, str], modules: Sequence[str]) -> ColumnMeasure:
        """The measure of what a user gives: the language model's column, or that of each module."""
        names = {LANGUAGE_MODEL: columns} if isinstance(columns, str) else dict(columns)
        reject_unknown_keys("The model", list(names), list(modules))
        if LANGUAGE_MODEL not in names:
            raise ValueError(
                f"No column of {names} has the lengths of `{LANGUAGE_MODEL}`. Add `{{'{LANGUAGE_MODEL}': ...}}`."
            )
        return cls(names, tuple(modules))

    def reads(self, present: Sequence[str]) -> list[str]:
        self.check(present)
        return list(dict.fromkeys(self.names.values()))

    def check(self, present: Sequence[str]) -> None:
        """Raises `ValueError` for a column that is not among those `present`."""
        for module, column in self.names.items():
            if column not in present:
                raise ValueError(
                    f"The dataset has no column `{column}` with the lengths of `{module}`; it has {sorted(present)}. "
                    "Name one of these, or give a function of a sample."
                )

    def __call__(self, sample: Mapping[str, Any]) -> Lengths:
        self.check(list(sample))
        return {
            module: as_lengths(sample[self.names[module]], f"Column `{self.names[module]}`")
            if module in self.names
            else [1]
            for module in self.modules
        }


@dataclass(frozen=True)
class FunctionMeasure(_OneByOne):
    """Lengths from a user's function."""

    # sample -> module -> its tokens, or one number for each of its sequences; encoders left out have nothing to do
    function: Callable[[Any], Mapping[str, Any]]
    modules: tuple[str, ...]  # all modules of the model
    counts_rows: bool = field(default=False, init=False)

    def reads(self, present: Sequence[str]) -> list[str]:
        return list(present)

    def __call__(self, sample: Any) -> Lengths:
        tokens = self.function(sample)
        name = getattr(self.function, "__name__", repr(self.function))
        if not isinstance(tokens, Mapping) or LANGUAGE_MODEL not in tokens:
            raise ValueError(
                f"`{name}` gave {tokens!r} for the sizes of a sample. Return a dict with the tokens of each module, "
                f"such as `{{'{LANGUAGE_MODEL}': 120}}`."
            )
        reject_unknown_keys("The model", list(tokens), self.modules)
        return {module: as_lengths(tokens.get(module), f"`{name}`") for module in self.modules}


@dataclass(frozen=True)
class TokenMeasure(_OneByOne):
    """
    Lengths from token ids: as many rows of an encoder's features as there are placeholders.

    A sequence of an encoder is an item of the sample's metadata (a row of an integer array such as `image_grid_thw`,
    of which the frames of a video attend apart), where these share out its rows evenly; otherwise a run of
    placeholders.
    """

    # module -> (modality, id of its placeholder) of each of its modalities
    placeholders: Mapping[str, tuple[tuple[str, int], ...]]
    counts_rows: bool = field(default=True, init=False)

    def reads(self, present: Sequence[str]) -> list[str]:
        prefixes = tuple(f"{modality}_" for own in self.placeholders.values() for modality, _ in own)
        return [name for name in present if name in ("input_ids", "attention_mask") or name.startswith(prefixes)]

    @classmethod
    def of(cls, spec: ModelSpec) -> TokenMeasure:
        """The measure of a model."""
        return cls(
            {
                name: tuple(
                    (modality, spec.placeholders[modality])
                    for modality in dict.fromkeys(feature.modality for feature in module.features)
                    if modality in spec.placeholders
                )
                for name, module in spec.modules.items()
            }
        )

    def __call__(self, sample: Mapping[str, Any]) -> Lengths:
        """Lengths of a sample with `input_ids` of shape `(length,)`, and what else goes with them."""
        ids, mask = np.asarray(sample["input_ids"]).reshape(-1), sample.get("attention_mask")
        if mask is not None:
            ids = ids[np.asarray(mask).reshape(-1) != 0]
        lengths = {
            module: [length for modality, token in own for length in _rows_of_items(ids == token, modality, sample)]
            for module, own in self.placeholders.items()
        }
        return {**lengths, LANGUAGE_MODEL: [len(ids)]}


@dataclass(frozen=True)
class ChatMeasure:
    """Lengths of a conversation, with placeholders expanded without decoding media."""

    collator: ChatCollator  # places the images
    tokens: TokenMeasure  # counts the tokens of its batches
    counts_rows: bool = field(default=True, init=False)

    @cached_property
    def _bare(self) -> ChatCollator:
        return self.collator.without_media()

    def reads(self, present: Sequence[str]) -> list[str]:
        return list(present)

    def __call__(self, sample: Mapping[str, Any]) -> Lengths:
        """
        Measures a conversation; raises `OSError` for a file that can't be read, maybe by this rank only, and
        `UnknownSizeError`, equal on all ranks that have the sample, for one that can't be collated or with images that
        have to be fetched or decoded to know their size.
        """
        try:
            return self.tokens(self._bare.encode_by_size(sample))
        except OSError:
            raise
        except Exception as error:  # templates and processors raise errors of any type
            raise UnknownSizeError(f"A conversation can't be measured: {error}") from error

    def together(self, read: Callable[[int], Any], indices: Sequence[int]) -> Iterator[Lengths | Exception]:
        for start in range(0, len(indices), _TOGETHER):
            few = indices[start : start + _TOGETHER]
            for index, fields in zip(few, encode_together(self._bare, read, few), strict=True):
                yield _attempt(self, read, index) if fields is None else self.tokens(fields)


@dataclass(frozen=True)
class OrOne:
    """Wraps a measure; samples of unknown size count as one token in each of the model's modules."""

    measure: SampleMeasure
    modules: tuple[str, ...]

    @property
    def counts_rows(self) -> bool:
        return self.measure.counts_rows

    def reads(self, present: Sequence[str]) -> list[str]:
        return self.measure.reads(present)

    def __call__(self, sample: Any) -> Lengths:
        try:
            return self.measure(sample)
        except UnknownSizeError as error:
            return self._ones(error)

    def together(self, read: Callable[[int], Any], indices: Sequence[int]) -> Iterator[Lengths | Exception]:
        for found in self.measure.together(read, indices):
            yield self._ones(found) if isinstance(found, UnknownSizeError) else found

    def _ones(self, error: UnknownSizeError) -> Lengths:
        """One token in each module."""
        reason = type(error.__cause__ or error).__name__
        logger.warning_once("Samples of which nothing says the size count one token a module: %s", reason)
        logger.debug("Nothing says the size of a sample: %s", error)
        return {module: [1] for module in self.modules}


def as_lengths(value: Any, source: str) -> list[int]:
    """Lengths from a number, a list of them, or nothing; `ValueError` with the `source` for what is no length."""
    array = np.asarray([] if value is None else value)
    whole = array.dtype.kind in "biu" or (array.dtype.kind == "f" and bool((array == np.floor(array)).all()))
    if array.size and (array.ndim > 1 or not whole or (array < 0).any()):
        raise ValueError(f"{source} gave the length {value!r}. Give a number from 0, or a list with one an image.")
    return array.reshape(-1).astype(np.int64).tolist()


def _rows_of_items(is_placeholder: np.ndarray, modality: str, sample: Mapping[str, Any]) -> list[int]:
    """Rows of each item of one modality."""
    num_rows = int(is_placeholder.sum())
    if not num_rows:
        return []
    for name, value in sample.items():
        if name.startswith(f"{modality}_") and (shares := _shares(num_rows, value)) is not None:
            return shares
    edges = np.flatnonzero(np.diff(is_placeholder.astype(np.int8), prepend=0, append=0))
    return (edges[1::2] - edges[::2]).tolist()


def _shares(num_rows: int, extents: Any) -> list[int] | None:
    """Rows by the extents of items, `(items, 2)` or `(items, 3)` with the frames first; None if they don't fit."""
    try:
        array = np.asarray(extents)
    except ValueError:
        return None
    if array.ndim != 2 or array.dtype.kind not in "iu" or array.shape[1] not in (2, 3) or (array < 1).any():
        return None
    frames = array[:, 0] if array.shape[1] == 3 else np.ones(len(array), dtype=np.int64)
    rows, rest = np.divmod(num_rows * np.repeat(array[:, -2:].prod(-1), frames), array.prod(-1).sum())
    return None if rest.any() else rows.tolist()
