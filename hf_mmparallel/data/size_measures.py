"""Measures of undecoded samples: the lengths of their sequences in each module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from transformers.utils import logging

from ..cost.image_tokens import ImageRule
from ..plan import LANGUAGE_MODEL, ModelSpec
from ..plan.plugin import reject_unknown_keys
from .chat_collator import ChatCollator, encode_together
from .image_sizes import UnknownSizeError
from .randomness import seeded

logger = logging.get_logger(__name__)

# module -> the lengths of a sample's sequences: one in the language model, one for each image of an encoder
Lengths = dict[str, list[int]]

_TOGETHER = 32  # samples that are measured at once


@dataclass(frozen=True, eq=False)
class Ragged:
    """A list of whole numbers for each sample, such as the lengths of its sequences in one module."""

    values: np.ndarray  # of all samples, in their order
    counts: np.ndarray  # (samples,) numbers of each sample

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        flat = [value for row in rows for value in row]
        return cls(np.array(flat, dtype=np.int64), np.array([len(row) for row in rows], dtype=np.int64))

    @classmethod
    def of_arrow(cls, array: Any) -> Ragged:
        if not _is_list(array.type):
            return cls(np.asarray(array.drop_null()), np.asarray(array.is_valid()).astype(np.int64))
        return cls(np.asarray(array.flatten()), _list_lengths(array))

    def to_arrow(self) -> Any:
        import pyarrow as pa

        offsets = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(self.values, pa.int64()))

    @property
    def rows(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def where(self, kept: np.ndarray) -> Ragged:
        """The values that are kept, bool `[values]`."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return Ragged(self.values[kept], np.diff(before[np.concatenate([[0], np.cumsum(self.counts)])]))

    def lists(self) -> list[list[int]]:
        values, ends = self.values.tolist(), np.cumsum(self.counts).tolist()
        return [values[end - count : end] for end, count in zip(ends, self.counts.tolist(), strict=True)]


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _list_lengths(array: Any) -> np.ndarray:
    return np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)


class SampleMeasure:
    """Measures samples without decoding their media."""

    counts_rows: ClassVar[bool] = False  # lengths in encoders are rows of features, not tokens of the layers

    def reads(self, present: Sequence[str]) -> list[str]:
        return list(present)

    def __call__(self, sample: Any) -> Lengths:
        raise NotImplementedError

    def together(self, read: Callable[[int], Any], indices: Sequence[int]) -> list[Lengths | Exception]:
        """Lengths of the samples that `read` gives for dataset indices, or why one can't be measured."""
        return [_attempt(self, read, index) for index in indices]


def _attempt(function: Callable[[Any], Any], read: Callable[[int], Any], index: int) -> Any:
    """What a function makes of a sample, or the error of reading or measuring it."""
    try:
        with seeded(index):  # reading and measuring may draw, and must not change what the training draws
            return function(read(index))
    except MemoryError:
        raise
    except Exception as error:  # a dataset or a user's function may raise anything
        return error


class ColumnMeasure(SampleMeasure):
    """Lengths from columns of numbers or sides of images; a module without one counts one token for each sample."""

    def __init__(
        self,
        # the language model's column, or module -> column; `WIDTH*HEIGHT` are columns with the sides of images in
        # pixels, and `LENGTH+MODULE` adds the tokens of a module's images to the lengths of texts
        columns: str | Mapping[str, str],
        modules: Sequence[str],  # all modules of the model
        rules: Mapping[str, ImageRule] | None = None,  # of the modules with columns of sides
    ):
        names = {LANGUAGE_MODEL: columns} if isinstance(columns, str) else dict(columns)
        self.modules = tuple(modules)
        self.rules = rules or {}
        reject_unknown_keys("The model", list(names), list(modules))
        if LANGUAGE_MODEL not in names:
            raise ValueError(
                f"No column of {names} has the lengths of `{LANGUAGE_MODEL}`. Add `{{'{LANGUAGE_MODEL}': ...}}`."
            )
        names[LANGUAGE_MODEL], *self.added = (
            names[LANGUAGE_MODEL].split("+") if self.rules else [names[LANGUAGE_MODEL]]
        )
        reject_unknown_keys(f"A column for `{LANGUAGE_MODEL}` plus the images of a module", self.added, [*self.rules])
        self.names = {name: text.split("*") if name in self.rules else [text] for name, text in names.items()}

    def reads(self, present: Sequence[str]) -> list[str]:
        for module, columns in self.names.items():
            for column in columns:
                if column not in present:
                    raise ValueError(
                        f"The dataset has no column `{column}` with the lengths of `{module}`; it has "
                        f"{sorted(present)}. Name one of these, or give a function of a sample."
                    )
        return list(dict.fromkeys(column for columns in self.names.values() for column in columns))

    def __call__(self, sample: Mapping[str, Any]) -> Lengths:
        columns = {name: as_lengths(sample[name], f"Column `{name}`") for name in self.reads(list(sample))}
        found = self._lengths({name: Ragged(values, np.array([len(values)])) for name, values in columns.items()})
        return {name: lengths.values.tolist() for name, lengths in found.items()}

    def of_table(self, table: Any) -> dict[str, Ragged]:
        columns = {name: Ragged.of_arrow(table[name].combine_chunks()) for name in self.reads(table.column_names)}
        return self._lengths(
            {
                name: Ragged(as_lengths(own.values, f"Column `{name}`", own.counts), own.counts)
                for name, own in columns.items()
            }
        )

    def _lengths(self, columns: Mapping[str, Ragged]) -> dict[str, Ragged]:
        """Lengths in all modules of the samples of some columns."""
        ones = np.ones(len(next(iter(columns.values())).counts), dtype=np.int64)
        lengths = {name: Ragged(ones, ones) for name in self.modules}
        lengths |= {name: columns[own[0]] for name, own in self.names.items()}
        total = lengths[LANGUAGE_MODEL]
        for module, rule in self.rules.items():
            widths, heights = (columns[name] for name in self.names[module])
            if (unlike := np.flatnonzero(widths.counts != heights.counts)).size:
                raise ValueError(
                    f"{self.names[module]} give {widths.counts[unlike[0]]} and {heights.counts[unlike[0]]} sides of "
                    "the images of a sample. Give both sides of each."
                )
            images = rule(heights.values, widths.values)
            lengths[module] = Ragged(images.tokens, widths.counts)
            features = np.bincount(widths.rows, images.feature_tokens, len(ones)).astype(np.int64)
            texts = np.bincount(total.rows, total.values, len(ones)).astype(np.int64)
            if module in self.added:
                total = lengths[LANGUAGE_MODEL] = Ragged(texts + features, ones)
            elif (short := np.flatnonzero(texts < features)).size:
                column = self.names[LANGUAGE_MODEL][0]
                raise ValueError(
                    f"Column `{column}` gave the length {texts[short[0]]} of a sample whose images have "
                    f"{features[short[0]]} tokens. If it counts text alone, name `{column}+{module}`."
                )
        return lengths


@dataclass(frozen=True)
class FunctionMeasure(SampleMeasure):
    # sample -> module -> its tokens, or one number for each of its sequences; encoders left out have nothing to do
    function: Callable[[Any], Mapping[str, Any]]
    modules: tuple[str, ...]  # all modules of the model

    def __call__(self, sample: Any) -> Lengths:
        tokens = self.function(sample)
        name = getattr(self.function, "__name__", repr(self.function))
        if not isinstance(tokens, Mapping) or LANGUAGE_MODEL not in tokens:
            raise ValueError(
                f"`{name}` gave {tokens!r} for the sizes of a sample. Return a dict with the tokens of each module, "
                f"such as `{{'{LANGUAGE_MODEL}': 120}}`."
            )
        reject_unknown_keys("The model", list(tokens), self.modules)
        return {module: as_lengths(tokens.get(module), f"`{name}`").tolist() for module in self.modules}


def as_lengths(value: Any, source: str, counts: np.ndarray | None = None) -> np.ndarray:
    """
    int64 lengths from a number, a list of them, or nothing; `ValueError` for what is none, with the `source` and, by
    the `counts` of lengths of each row, the row.
    """
    array = np.asarray([] if value is None else value)
    where = ""
    is_number = array.ndim <= 1 and array.dtype.kind in "biuf"
    wrong = np.flatnonzero((array < 0) | (array != np.floor(array))) if is_number else np.arange(min(1, array.size))
    if len(wrong) and counts is not None:
        row = int(np.searchsorted(np.cumsum(counts), wrong[0], side="right"))
        value, where = array.reshape(-1).tolist()[wrong[0]], f" in row {row} of {len(counts)}"
    if len(wrong):
        raise ValueError(
            f"{source} gave the length {value!r}{where}. Give a number from 0, or a list with one an image."
        )
    return array.reshape(-1).astype(np.int64)


@dataclass(frozen=True)
class TokenMeasure(SampleMeasure):
    """
    Lengths from token ids: as many rows of an encoder's features, or of a generator, as there are placeholders.

    A sequence of an encoder is an item of the sample's metadata (a row of an integer array such as `image_grid_thw`,
    of which the frames of a video attend apart), where these share out its rows evenly; otherwise a run of
    placeholders.
    """

    # module -> (modality, id of its placeholder) of each of its modalities
    placeholders: Mapping[str, tuple[tuple[str, int], ...]]
    counts_rows: ClassVar[bool] = True

    @classmethod
    def of(cls, spec: ModelSpec) -> TokenMeasure:
        return cls(
            {
                name: tuple(
                    (modality, spec.placeholders[modality])
                    for modality in spec.modalities(name)
                    if modality in spec.placeholders
                )
                for name in spec.modules
            }
        )

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(f"{modality}_" for own in self.placeholders.values() for modality, _ in own)

    def reads(self, present: Sequence[str]) -> list[str]:
        return [name for name in present if name in ("input_ids", "attention_mask") or name.startswith(self._prefixes)]

    def __call__(self, sample: Mapping[str, Any]) -> Lengths:
        """Lengths of a sample with `input_ids` of shape `(length,)`, and what else goes with them."""
        return self.count([sample])[0]

    def count(self, samples: Sequence[Mapping[str, Any]]) -> list[Lengths]:
        return self._of_rows([self._row(sample) for sample in samples])

    def together(self, read: Callable[[int], Any], indices: Sequence[int]) -> list[Lengths | Exception]:
        result: list[Lengths | Exception] = []
        for start in range(0, len(indices), _TOGETHER):
            found = [_attempt(self._row, read, index) for index in indices[start : start + _TOGETHER]]
            result += self._of_rows(found)
        return result

    def _row(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """What counts of a sample, as lists of numbers."""
        ids, mask = np.asarray(sample["input_ids"]).reshape(-1), sample.get("attention_mask")
        if mask is not None:
            ids = ids[np.asarray(mask).reshape(-1) != 0]
        if ids.dtype.kind not in "iu":
            ids = np.full(len(ids), -1)  # no placeholders
        extents = {name: _extents(value) for name, value in sample.items() if name.startswith(self._prefixes)}
        return {"input_ids": ids, **{name: value for name, value in extents.items() if value is not None}}

    def _of_rows(self, rows: Sequence[Any]) -> list[Any]:
        """Lengths of what [`_row`] made of samples; errors among them stay."""
        import pyarrow as pa

        good = [row for row in rows if not isinstance(row, Exception)]
        ids, extents = pa.list_(pa.int64()), pa.list_(pa.list_(pa.int64()))
        names = dict.fromkeys(name for row in good for name in row)
        columns = {
            name: pa.array([row.get(name) for row in good], ids if name == "input_ids" else extents) for name in names
        }
        found = self.of_table(pa.table(columns)) if good else {}
        assert found is not None
        lists = {name: iter(found[name].lists()) for name in found}
        return [
            row if isinstance(row, Exception) else {name: next(lists[name]) for name in self.placeholders}
            for row in rows
        ]

    def of_table(self, table: Any) -> dict[str, Ragged] | None:
        """Lengths of all rows of an Arrow table; `None` where ids or mask are no lists of numbers."""
        ids = _numbers(table, "input_ids")
        mask = _numbers(table, "attention_mask") if "attention_mask" in table.column_names else ids
        if ids is None or mask is None or (mask.counts != ids.counts).any():
            return None
        if mask is not ids:
            ids = ids.where(mask.values != 0)
        found = {
            name: _side_by_side([_items(table, ids, modality, token) for modality, token in own], len(ids.counts))
            for name, own in self.placeholders.items()
        }
        return {**found, LANGUAGE_MODEL: Ragged(ids.counts, np.ones(len(ids.counts), np.int64))}


def _extents(value: Any) -> list[list[int]] | None:
    """A table of whole numbers as lists, `None` for any other value."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array.tolist() if array.ndim == 2 and array.dtype.kind in "iu" else None


def _numbers(table: Any, name: str) -> Ragged | None:
    """A column of lists of whole numbers; `None` for any other."""
    import pyarrow as pa

    array = table[name].combine_chunks()
    if not (_is_list(array.type) and pa.types.is_integer(array.type.value_type)) or array.null_count:
        return None
    return None if array.flatten().null_count else Ragged.of_arrow(array)


def _items(table: Any, ids: Ragged, modality: str, token: int) -> Ragged:
    """Rows of features of each item of one modality: shared out by the items' extents, else runs of placeholders."""
    positions = np.flatnonzero(ids.values == token)
    num_rows = np.diff(np.searchsorted(positions, np.cumsum(ids.counts)), prepend=0)
    left, parts = num_rows.copy(), []  # rows of features that no column has shared out
    for name in table.column_names:
        if name.startswith(f"{modality}_") and left.any():
            parts.append(_shares(table[name].combine_chunks(), left))
            left[parts[-1].counts > 0] = 0
    row_of = np.repeat(np.arange(len(num_rows)), num_rows)
    is_new = np.ones(len(positions), dtype=bool)
    is_new[1:] = (np.diff(positions) != 1) | (np.diff(row_of) != 0)
    starts = np.flatnonzero(is_new)
    runs = Ragged(np.diff(np.append(starts, len(positions))), np.bincount(row_of[starts], minlength=len(num_rows)))
    return _side_by_side([*parts, runs.where(left[runs.rows] > 0)], len(num_rows))


def _shares(
    array: Any,  # extents of items: lists of two numbers, or of three with the frames first
    num_rows: np.ndarray,  # rows of features of each sample
) -> Ragged:
    """Rows of features of each item, of those samples whose extents share them out evenly; none of the others."""
    import pyarrow as pa

    num_samples = len(num_rows)
    nothing = Ragged(np.zeros(0, np.int64), np.zeros(num_samples, np.int64))
    if not _is_list(array.type) or not _is_list(array.type.value_type):
        return nothing
    items = array.flatten()
    numbers = items.flatten()
    if not pa.types.is_integer(numbers.type) or items.null_count or numbers.null_count:
        return nothing
    counts, dims, numbers = _list_lengths(array), _list_lengths(items), np.asarray(numbers).astype(np.int64)
    row_of = np.repeat(np.arange(num_samples), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)  # the first item of each item's sample
    is_bad = (dims < 2) | (dims > 3) | (dims != dims[firsts])
    is_bad |= np.bincount(np.repeat(np.arange(len(dims)), dims), numbers < 1, len(dims)) > 0
    fits = (counts > 0) & (num_rows > 0) & (np.bincount(row_of, is_bad, num_samples) == 0)
    some = fits[row_of]
    ends, dims, row_of = np.cumsum(dims)[some], dims[some], row_of[some]
    area = numbers[ends - 1] * numbers[ends - 2]
    frames = np.where(dims == 3, numbers[ends - 3], 1)
    total = np.bincount(row_of, area * frames, num_samples).astype(np.int64)
    share, rest = np.divmod(num_rows[row_of] * area, total[row_of])
    fits &= np.bincount(row_of, rest, num_samples) == 0
    some = fits[row_of]
    share, frames, row_of = share[some], frames[some], row_of[some]
    return Ragged(np.repeat(share, frames), np.bincount(row_of, frames, num_samples).astype(np.int64))


def _side_by_side(parts: Sequence[Ragged], num_samples: int) -> Ragged:
    """The values of all parts, those of a sample in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([np.zeros(0, np.int64), *(part.rows for part in parts)])
    values = np.concatenate([np.zeros(0, np.int64), *(part.values for part in parts)])
    return Ragged(values[np.argsort(rows, kind="stable")], np.bincount(rows, minlength=num_samples))


@dataclass(frozen=True)
class ChatMeasure(SampleMeasure):
    """Lengths of a conversation, with placeholders expanded without decoding media."""

    collator: ChatCollator  # places the images
    tokens: TokenMeasure  # counts the tokens of its batches
    counts_rows: ClassVar[bool] = True

    @cached_property
    def _bare(self) -> ChatCollator:
        return self.collator.without_media()

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

    def together(self, read: Callable[[int], Any], indices: Sequence[int]) -> list[Lengths | Exception]:
        def sample(index: int) -> Any:
            with seeded(index):
                return read(index)

        result: list[Lengths | Exception] = []
        for start in range(0, len(indices), _TOGETHER):
            few = indices[start : start + _TOGETHER]
            encoded = encode_together(self._bare, sample, few)
            lengths = iter(self.tokens.count([fields for fields in encoded if fields is not None]))
            result += [
                _attempt(self, read, index) if fields is None else next(lengths)
                for index, fields in zip(few, encoded, strict=True)
            ]
        return result


def ones_for_unknown(found: Iterable[Lengths | Exception], modules: Sequence[str]) -> list[Lengths | Exception]:
    """The lengths of samples, with one token in each module for those of unknown size."""
    result = list(found)
    for place, error in enumerate(result):
        if isinstance(error, UnknownSizeError):
            reason = type(error.__cause__ or error).__name__
            logger.warning_once("Samples of which nothing says the size count one token a module: %s", reason)
            logger.debug("Nothing says the size of a sample: %s", error)
            result[place] = {module: [1] for module in modules}
    return result
