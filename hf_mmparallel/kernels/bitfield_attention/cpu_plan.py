"""
The calls for a mask on a CPU: the non-empty rectangles of the mask.
Queries and keys are sorted by position, so that a query that sees an interval of positions sees a slice of the keys.
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
_FEWEST_ROWS = 32  # shorter runs of queries are not worth a separate call
_CALL_PAIRS = 16384  # a call costs about as much as this many pairs of a query and a key


class Kind(Enum):
    """The kind of mask of a rectangle."""

    FULL = "full"
    CAUSAL = "causal"  # query i sees the keys up to i
    MASKED = "masked"


@dataclass(frozen=True)
class Part:
    """A rectangle of the mask, in queries and keys that are both sorted by position."""

    rows: tuple[int, int]  # the first query and one past the last
    keys: tuple[int, int]  # the first key and one past the last
    kind: Kind


@dataclass(frozen=True)
class RowPlan:
    """The calls of one row of the batch."""

    query_index: slice | Tensor  # the queries with visible keys, sorted by position
    key_index: slice | Tensor  # the keys that are not padding, sorted by position
    parts: tuple[Part, ...]  # each for different queries
    bounds: Tensor  # [2, rows], the first key and one past the last key of each query
    mask: BitfieldMask | None  # in that order, if bounds do not determine the mask
    window: int  # in tokens, used with the words


@dataclass(frozen=True)
class CpuPlan:
    """The plan of each row of the batch, and whether every query has a visible key."""

    rows: tuple[RowPlan, ...]
    complete: bool


def compile_mask(mask: BitfieldMask, window: int = 0) -> CpuPlan:
    """Plans the calls of a mask on the CPU; one plan serves all layers with the same window (tokens, 0 for none)."""
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
    """Returns the indices of the wanted tokens, sorted by position; a slice where possible, which saves a copy."""
    index = wanted.nonzero()[:, 0]
    at = positions[index]
    if not bool((at[1:] > at[:-1]).all()):
        index = index[at.argsort(stable=True)]
    if not len(index):
        return slice(0, 0)
    begin, end = int(index[0]), int(index[-1]) + 1
    consecutive = end - begin == len(index) and bool((index[1:] > index[:-1]).all())
    return slice(begin, end) if consecutive else index


# Queries that see the same slice are one call without a mask, and so are the queries of a causal sample. All others
# are computed in chunks of few queries over the keys that some of them see, with a mask for the chunk.
def _parts(start: Tensor, stop: Tensor, has_holes: bool) -> Iterator[Part]:
    """The calls for queries with given slices of keys, in the order of the queries."""
    begin = 0  # of the queries that need a mask and are not covered yet
    for part in () if has_holes else _runs(start, stop):
        yield from _masked_parts(start, stop, begin, part.rows[0])
        yield part
        begin = part.rows[1]
    yield from _masked_parts(start, stop, begin, len(start))


def _runs(start: Tensor, stop: Tensor) -> Iterator[Part]:
    """Yields runs of queries that need no mask: all see the same keys, or each one more than the one before."""
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
    """Yields chunks of queries; those without a common key share one only if that adds little work."""
    if first >= end:
        return
    low, high = start[first:end], stop[first:end]
    apart = low[1:] >= high.cummax(0).values[:-1]
    edges = [0, *(apart.nonzero()[:, 0] + 1).tolist(), end - first]
    chunks: list[list[int]] = []  # first query, end, first key, end
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
