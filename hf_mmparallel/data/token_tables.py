"""Vectorised token counts of many rows of an Arrow table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..plan import LANGUAGE_MODEL
from .size_measures import TokenMeasure
from .size_sources import Ragged


def token_lengths(
    table: Any,  # a `pyarrow.Table` with `input_ids`, and what else the measure reads
    measure: TokenMeasure,
) -> dict[str, Ragged] | None:
    """[`TokenMeasure`] of all rows together: module -> lengths; `None` where ids or mask are no lists of numbers."""
    ids, mask = _lists(table, "input_ids"), None
    if "attention_mask" in table.column_names:
        mask = _lists(table, "attention_mask")
        if mask is None or ids is None or (mask.counts != ids.counts).any():
            return None
    if ids is None:
        return None
    if mask is not None:
        ids = ids.where(mask.values != 0)
    found = {LANGUAGE_MODEL: Ragged(ids.counts, np.ones(len(ids.counts), np.int64))}
    for name, modalities in measure.placeholders.items():
        if name != LANGUAGE_MODEL:
            found[name] = _side_by_side(
                [_items(table, ids, modality, token) for modality, token in modalities], len(ids.counts)
            )
    return found


@dataclass(frozen=True)
class _Lists:
    """The values of all rows, and how many each row has."""

    values: np.ndarray
    counts: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    @property
    def rows(self) -> np.ndarray:
        """The row of each value."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def where(self, kept: np.ndarray) -> _Lists:
        """The values that are kept."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return _Lists(self.values[kept], np.diff(before[np.concatenate([[0], self.ends])]))


def _lists(table: Any, name: str) -> _Lists | None:
    """A column of lists of whole numbers; `None` for any other."""
    import pyarrow as pa

    array = table[name].combine_chunks()
    if not (_is_list(array.type) and pa.types.is_integer(array.type.value_type)) or array.null_count:
        return None
    values = array.flatten()
    return None if values.null_count else _Lists(np.asarray(values), _num_values(array))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _num_values(array: Any) -> np.ndarray:
    return np.asarray(array.value_lengths()).astype(np.int64)


def _items(table: Any, ids: _Lists, modality: str, token: int) -> _Lists:
    """Rows of features of each item of one modality: shared out by the items' extents, else runs of placeholders."""
    positions = np.flatnonzero(ids.values == token)
    num_rows = np.diff(np.searchsorted(positions, ids.ends), prepend=0)
    row_of = np.repeat(np.arange(len(num_rows)), num_rows)
    is_open = num_rows > 0
    parts = []
    for name in table.column_names:
        if name.startswith(f"{modality}_") and is_open.any():
            shares, fits = _shares(table[name].combine_chunks(), num_rows)
            fits &= is_open
            parts.append(shares.where(fits[shares.rows]))
            is_open &= ~fits
    is_new = np.ones(len(positions), dtype=bool)
    is_new[1:] = (np.diff(positions) != 1) | (np.diff(row_of) != 0)
    starts = np.flatnonzero(is_new)
    runs = _Lists(np.diff(np.append(starts, len(positions))), np.bincount(row_of[starts], minlength=len(ids.counts)))
    whole = _side_by_side([*parts, runs.where(is_open[runs.rows])], len(ids.counts))
    return _Lists(whole.lengths, whole.counts)


def _shares(
    array: Any,  # lists of two numbers or of three with the frames first
    num_rows: np.ndarray,
) -> tuple[_Lists, np.ndarray]:
    """Rows by the extents of items, and for which rows of the table they fit, bool `[rows]`."""
    import pyarrow as pa

    nothing = _Lists(np.zeros(0, np.int64), np.zeros(len(num_rows), np.int64)), np.zeros(len(num_rows), dtype=bool)
    if not _is_list(array.type) or not _is_list(array.type.value_type):
        return nothing
    items = array.flatten()
    values = items.flatten()
    if not pa.types.is_integer(values.type) or array.null_count or items.null_count or values.null_count:
        return nothing
    counts, dims, numbers = _num_values(array), _num_values(items), np.asarray(values).astype(np.int64)
    row_of = np.repeat(np.arange(len(counts)), counts)
    bad = (dims < 2) | (dims > 3)
    bad |= np.bincount(np.repeat(np.arange(len(dims)), dims), numbers < 1, len(dims)) > 0
    max_dims, min_dims = np.zeros(len(counts), np.int64), np.full(len(counts), 3)
    np.maximum.at(max_dims, row_of, dims)
    np.minimum.at(min_dims, row_of, dims)
    fits = (counts > 0) & (max_dims == min_dims) & (np.bincount(row_of, bad, len(counts)) == 0)
    ends = np.cumsum(dims)
    some = fits[row_of]
    last, first = ends[some] - 1, (ends - dims)[some]
    area = numbers[last] * numbers[last - 1]
    frames = np.where(dims[some] == 3, numbers[first], 1)
    row_of = row_of[some]
    total = np.zeros(len(counts), np.int64)
    np.add.at(total, row_of, area * frames)
    share, rest = np.divmod(num_rows[row_of] * area, np.maximum(total, 1)[row_of])
    fits &= np.bincount(row_of, rest, len(counts)) == 0
    return _Lists(np.repeat(share, frames), np.bincount(row_of, frames, len(counts)).astype(np.int64)), fits


def _side_by_side(parts: Sequence[_Lists], num_rows: int) -> Ragged:
    """The values of all parts, those of a row in the order of the parts."""
    if len(parts) == 1:
        return Ragged(parts[0].values, parts[0].counts)
    rows = np.concatenate([np.zeros(0, np.int64), *(part.rows for part in parts)])
    values = np.concatenate([np.zeros(0, np.int64), *(part.values for part in parts)])
    return Ragged(values[np.argsort(rows, kind="stable")], np.bincount(rows, minlength=num_rows))
