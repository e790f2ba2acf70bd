"""
The calls that a mask takes on a CPU: the rectangles of the mask that are not empty.

Queries and keys are put in the order of their places, where a query that sees an interval of places sees a slice of
the keys. Rows that see the same slice are one call without a mask, so are the rows of a causal sample; whatever else
there is goes in chunks of few rows over the keys that some of them see, with a mask of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from .intervals import row_bounds
from .mask import BitfieldMask

CHUNK_ROWS = 256
_FEWEST_ROWS = 32  # shorter runs of rows are not worth a call of their own
_CALL_PAIRS = 16384  # a call costs about as much as this many pairs of a query and a key


class Kind(Enum):
    """The kind of mask of a part."""

    FULL = "full"
    CAUSAL = "causal"  # query i sees the keys up to i
    MASKED = "masked"


@dataclass(frozen=True)
class Part:
    """
    Rows of queries against a slice of the keys, both in the order of their places.

    Args:
        rows (`tuple[int, int]`): The first row and the one after the last.
        keys (`tuple[int, int]`): The first key and the one after the last.
        kind (`Kind`): What is seen.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: Kind


@dataclass(frozen=True)
class RowPlan:
    """
    The calls of one row of the batch.

    Args:
        query_index (`slice` or `torch.Tensor`): The queries that see something, by place.
        key_index (`slice` or `torch.Tensor`): The keys that are not padding, by place.
        parts (`tuple[Part, ...]`): The calls, each of other rows.
        bounds (`torch.Tensor` of shape `[2, rows]`): Of each query the first key and the one after the last.
        mask (`BitfieldMask`, *optional*): The words in that order, where bounds do not say everything.
        window (`int`): The window that goes with the words.
    """

    query_index: slice | Tensor
    key_index: slice | Tensor
    parts: tuple[Part, ...]
    bounds: Tensor
    mask: BitfieldMask | None
    window: int


@dataclass(frozen=True)
class CpuPlan:
    """The plan of each row of the batch, and whether each query sees something."""

    rows: tuple[RowPlan, ...]
    complete: bool


def compile_mask(mask: BitfieldMask, window: int = 0) -> CpuPlan:
    """
    Plans the calls of a mask; one plan serves all layers with the same window.

    Args:
        mask (`BitfieldMask`): The words, on the CPU.
        window (`int`, *optional*, defaults to 0): The layers' sliding window in tokens, 0 for none.
    """
    bounds, holes = row_bounds(mask, window)
    has_holes = bool(holes)
    rows: list[RowPlan] = []
    for index in range(mask.query_words.shape[0]):
        one = BitfieldMask(*(tensor[index] for tensor in mask.tensors))
        if index and all(torch.equal(t[index], t[index - 1]) for t in mask.tensors):
            rows.append(rows[-1])
        else:
            rows.append(_plan_row(one, bounds.first[index], bounds.last[index], has_holes, window))
    return CpuPlan(tuple(rows), bool((bounds.last >= bounds.first).all()))


def _plan_row(mask: BitfieldMask, first: Tensor, last: Tensor, has_holes: bool, window: int) -> RowPlan:
    """The plan of one row of the batch; tensors are 1-D."""
    query_index = _in_order(mask.query_positions, last >= first)
    key_index = _in_order(mask.key_positions, (mask.key_words & 0xFFFF) > 0)
    places = mask.key_positions[key_index].contiguous()
    start = torch.searchsorted(places, first[query_index].contiguous())
    stop = torch.searchsorted(places, last[query_index].contiguous(), right=True)
    ordered = None
    if has_holes:
        ordered = BitfieldMask(
            mask.query_words[query_index], mask.query_positions[query_index], mask.key_words[key_index], places
        )
    return RowPlan(
        query_index, key_index, tuple(_parts(start, stop, has_holes)), torch.stack([start, stop]), ordered, window
    )


def _in_order(positions: Tensor, wanted: Tensor) -> slice | Tensor:
    """The wanted rows by position: a slice when they lie like that already, which spares a copy."""
    index = wanted.nonzero()[:, 0]
    at = positions[index]
    if not bool((at[1:] > at[:-1]).all()):
        index = index[at.argsort(stable=True)]
    if not len(index):
        return slice(0, 0)
    begin, end = int(index[0]), int(index[-1]) + 1
    consecutive = end - begin == len(index) and bool((index[1:] > index[:-1]).all())
    return slice(begin, end) if consecutive else index


def _parts(start: Tensor, stop: Tensor, has_holes: bool) -> Iterator[Part]:
    """The calls of rows whose slices of keys are given, in the order of rows."""
    begin = 0  # of the rows that wait for a mask
    for part in () if has_holes else _runs(start, stop):
        yield from _masked_parts(start, stop, begin, part.rows[0])
        yield part
        begin = part.rows[1]
    yield from _masked_parts(start, stop, begin, len(start))


def _runs(start: Tensor, stop: Tensor) -> Iterator[Part]:
    """Runs of rows that need no mask: all of them see the same keys, or the first sees one key and each one more."""
    step = torch.where(start[1:] == start[:-1], stop[1:] - stop[:-1], -1)
    steps, lengths = torch.unique_consecutive(step, return_counts=True)
    row, taken = 0, 0
    for growth, length in zip(steps.tolist(), lengths.tolist(), strict=True):
        first, end = max(row, taken), row + length + 1
        row += length
        if growth not in (0, 1) or end - first < _FEWEST_ROWS:
            continue
        keys = int(start[first]), int(stop[end - 1])
        if growth == 0 or int(stop[first]) == keys[0] + 1:
            yield Part((first, end), keys, Kind.CAUSAL if growth else Kind.FULL)
            taken = end


def _masked_parts(start: Tensor, stop: Tensor, first: int, end: int) -> Iterator[Part]:
    """The rows `first` to `end` in chunks; rows without a common key share one only where that is little work."""
    if first >= end:
        return
    low, high = start[first:end], stop[first:end]
    apart = low[1:] >= high.cummax(0).values[:-1]
    edges = [0, *(apart.nonzero()[:, 0] + 1).tolist(), end - first]
    chunks: list[list[int]] = []  # first row, end, first key, end
    for edge, following in zip(edges, edges[1:], strict=False):
        for row in range(edge, following, CHUNK_ROWS):
            until = min(row + CHUNK_ROWS, following)
            chunk = [row, until, int(low[row:until].min()), int(high[row:until].max())]
            last = chunks[-1] if chunks else chunk
            joined = [last[0], until, min(last[2], chunk[2]), max(last[3], chunk[3])]
            little = _pairs(joined) - _pairs(last) - _pairs(chunk) <= _CALL_PAIRS
            if chunks and little and until - last[0] <= CHUNK_ROWS:
                chunks[-1] = joined
            else:
                chunks.append(chunk)
    for row, until, key, key_end in chunks:
        yield Part((first + row, first + until), (key, key_end), Kind.MASKED)


def _pairs(chunk: list[int]) -> int:
    return (chunk[1] - chunk[0]) * (chunk[3] - chunk[2])
