"""
Visible keys of each query as one interval of positions, for the masks for which that is exact; memory is linear.
Axis letters: B batch, G groupings (by segment, by span, and all real tokens together), Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from .words import (
    ALL_KINDS,
    CAUSAL_SHIFT,
    KIND_BITS,
    KIND_SHIFT,
    MAX_SEGMENTS,
    MAX_SPANS,
    SEES_SHIFT,
    SPAN_SHIFT,
    BitfieldMask,
)

_PLACE_BITS = 31
_ABSENT = 2**_PLACE_BITS - 1
_NON_NEGATIVE = 2**63 - 1


@dataclass(frozen=True)
class RowIntervals:
    """The first and last position in the row that each query sees; padding is not seen, whatever the bounds are."""

    first: Tensor  # int32 [batch, query_length], 0 for a query that sees no key
    last: Tensor  # int32 [batch, query_length], -1 for a query that sees no key


def row_intervals(mask: BitfieldMask, window: int = 0) -> RowIntervals | None:
    """
    Returns the intervals of `mask`, or `None` if a query sees keys on both sides of a key that it does not see.

    Args:
        mask (`BitfieldMask`): The words.
        window (`int`, *optional*, defaults to 0): The layer's sliding window in tokens, 0 for none.

    Returns:
        `RowIntervals` or `None`: `None` only if some query has such a hole, with one exception: if a key has several
        kinds and a query does not see all kinds, keys may be counted twice, and `None` is the safe answer.
    """
    bounds, has_holes = row_bounds(mask, window)
    return None if bool(has_holes) else bounds


def row_bounds(mask: BitfieldMask, window: int = 0) -> tuple[RowIntervals, Tensor]:
    """Returns the first and last key of each query, exact for every mask, and a bool without dimensions: some hole."""
    if not mask.key_words.numel():
        nothing = torch.zeros_like(mask.query_positions)
        return RowIntervals(nothing, nothing - 1), nothing.new_zeros((), dtype=torch.bool)
    keys_BGK = _groups(mask.key_words)
    sort_keys_BGK = _sort_keys(keys_BGK, mask.key_positions)
    facts = torch.cat([_kinds_matter(mask)[None], (keys_BGK[:, 1] >= 0).any()[None], _in_order(sort_keys_BGK)])
    kinds_matter, has_spans, *in_order = facts.tolist()  # the only synchronization unless kinds matter
    num_groupings = 2 if has_spans else 1
    places_BK = _ordered(sort_keys_BGK[:, 2:], in_order[2:])[:, 0]
    if kinds_matter:
        queries_BGQ = _groups(mask.query_words)
        seen = []
        for of_queries, of_keys in _by_kind(mask, queries_BGQ, keys_BGK):
            sort_keys_BGK = _sort_keys(of_keys[:, :num_groupings], mask.key_positions)
            ordered_BGK = _ordered(sort_keys_BGK, _in_order(sort_keys_BGK).tolist())
            seen.append(_search(mask, of_queries, ordered_BGK, window))
        count, first, end = (torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))
    else:
        ordered_BGK = _ordered(sort_keys_BGK[:, :num_groupings], in_order)
        if _has_kernel(mask.key_words):
            from .interval_kernels import search_bounds

            first, last, holes = search_bounds(mask, ordered_BGK, places_BK, window).unbind()
            return RowIntervals(first, last), holes.any()
        queries_BGQ = keys_BGK if mask.key_words is mask.query_words else _groups(mask.query_words)
        count, first, end = _search(mask, queries_BGQ, ordered_BGK, window)

    joins = ((torch.add, count), (torch.minimum, first), (torch.maximum, end))
    count, first, end = (reduce(join, of_groupings.unbind(dim=1)) for join, of_groupings in joins)
    bounds = torch.stack([first * (count > 0), end], dim=1)  # [B, 2, Q]
    begin, stop = torch.searchsorted(places_BK, bounds.flatten(1)).unflatten(1, (2, -1)).unbind(dim=1)
    # One interval if and only if no other key is between the first and the last. On the device, so that the caller can
    # read it with other numbers.
    has_holes = (stop - begin != count).any()
    first, end = bounds.to(torch.int32).unbind(dim=1)
    return RowIntervals(first, end - 1), has_holes


def _has_kernel(tensor: Tensor) -> bool:
    """Whether a single Triton kernel does the search; torch is used otherwise."""
    return tensor.is_cuda


def _groups(words: Tensor) -> Tensor:
    """The group of each token in each grouping, -1 for none: int64 `[batch, 3, length]`."""
    segment, span = words & MAX_SEGMENTS, (words >> SPAN_SHIFT) & MAX_SPANS
    real = segment > 0
    in_span = (span > 0) & real
    return torch.stack([segment, torch.add(span, segment, alpha=MAX_SPANS + 1) * in_span, real], dim=1) - 1


def _sort_keys(groups_BGK: Tensor, places_BK: Tensor) -> Tensor:
    """Numbers that sort by group and then by position; tokens without a group are last."""
    return ((groups_BGK << _PLACE_BITS) & _NON_NEGATIVE) | places_BK[:, None]


def _in_order(values_BGK: Tensor) -> Tensor:
    """Whether all rows are in ascending order already, for each grouping: bool `[groupings]`."""
    return (values_BGK[..., 1:] >= values_BGK[..., :-1]).transpose(0, 1).flatten(1).all(dim=1)


def _ordered(values_BGK: Tensor, in_order: Sequence[bool]) -> Tensor:
    """The numbers of each grouping in ascending order; groupings that are in order are not sorted."""
    rows = [
        values if fine else values.sort().values for values, fine in zip(values_BGK.unbind(1), in_order, strict=False)
    ]
    return torch.stack(rows, dim=1) if len(rows) > 1 else rows[0][:, None].contiguous()


def _kinds_matter(mask: BitfieldMask) -> Tensor:
    """Whether some query does not see all kinds, or some key has no kind: bool without dimensions."""
    all_seen, all_kinds = ALL_KINDS << SEES_SHIFT, ALL_KINDS << KIND_SHIFT
    blind = ((mask.query_words & all_seen) != all_seen) & ((mask.query_words & MAX_SEGMENTS) != 0)
    hidden = ((mask.key_words & all_kinds) == 0) & ((mask.key_words & MAX_SEGMENTS) != 0)
    return blind.any() | hidden.any()


def _by_kind(mask: BitfieldMask, queries_BGQ: Tensor, keys_BGK: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The groups of queries and keys, one kind after another: within a kind, kinds do not matter."""
    bits = torch.stack([((mask.key_words >> bit) & 1).any() for bit in range(KIND_SHIFT, KIND_SHIFT + KIND_BITS)])
    for bit in bits.nonzero()[:, 0].tolist() or [0]:
        looking = (mask.query_words >> (SEES_SHIFT + bit)) & 1
        looked_at = (mask.key_words >> (KIND_SHIFT + bit)) & 1
        yield (queries_BGQ + 1) * looking[:, None] - 1, (keys_BGK + 1) * looked_at[:, None] - 1


def _search(
    mask: BitfieldMask, queries_BGQ: Tensor, ordered_BGK: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Finds each query's keys in its segment up to itself (all if global) and, with two groupings, then in its span.
    """
    batch, num_groupings, num_keys = ordered_BGK.shape
    at = mask.query_positions
    lowest = (at - (window - 1)).clamp(min=0) if window else torch.zeros_like(at)
    # The highest bits of a word, causal and global, are 0 for a query that sees its span only, 1 for a causal query,
    # and more for a global one. Such a query sees the keys before 0, up to its own position, or everywhere.
    reach = mask.query_words >> CAUSAL_SHIFT
    end = (torch.add(at, reach, alpha=_ABSENT) + (1 - _ABSENT)).clamp(0, _ABSENT)
    # With keys sorted by segment, or by segment and span, and then by position, each of the two sets is a slice, so
    # that two binary searches give its ends and its size. On a GPU launches take the time: one call does both.
    edges = [lowest, end]
    if num_groupings > 1:
        edges += [torch.maximum(lowest, end), torch.full_like(end, _ABSENT)]
    edges = torch.stack(edges, dim=1).unflatten(1, (num_groupings, 2))  # [B, G, 2, Q]
    values = edges + (queries_BGQ[:, :num_groupings, None] << _PLACE_BITS)
    index = torch.searchsorted(ordered_BGK, values.flatten(2))
    start, stop = index.unflatten(2, (2, -1)).unbind(dim=2)
    count = (stop - start).clamp_(min=0)
    stop.sub_(1)  # the last visible key
    ends = ordered_BGK.gather(-1, index.clamp_(0, num_keys - 1)) & _ABSENT
    first, last = ends.unflatten(2, (2, -1)).unbind(dim=2)
    none = count == 0
    # int64 [batch, groupings, query_length]: number, position of the first, and one past that of the last; if there
    # are none, a position beyond all others, and 0
    return count, torch.add(first, none, alpha=_ABSENT), torch.add(last + 1, none, alpha=-_ABSENT - 1).clamp_(min=0)
