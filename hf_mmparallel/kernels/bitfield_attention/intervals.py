"""
What each query sees as one interval of places, where that is all there is to say.

The keys that a query sees are those of its segment up to its own place (all of them for a global query) and those of
its span after that, less what the window cuts off. Sorted by segment, or by segment and span, and then by place, each
of the two parts is a slice, so two binary searches give its ends and its size. Together they are one interval exactly
when no other key stands between the first and the last of them. Memory is linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .mask import BitfieldMask
from .words import ALL_KINDS, KIND_BITS, WordFields, decode_words

_PLACE_BITS = 31
_NOWHERE = 2**_PLACE_BITS - 1
_ABSENT = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class RowIntervals:
    """
    Bounds of what each query sees, in places of the whole row. Keys that are padding have no place: whatever the
    bounds, they are not seen.

    Args:
        first (`torch.Tensor` of shape `[batch, query_length]`): int32, 0 for a query that sees nothing.
        last (`torch.Tensor` of shape `[batch, query_length]`): int32, -1 for a query that sees nothing.
    """

    first: Tensor
    last: Tensor


@dataclass(frozen=True)
class _Seen:
    """How many keys each query sees (int64), and the first and last of their places (0 and -1 for none)."""

    count: Tensor
    first: Tensor
    last: Tensor


def row_intervals(mask: BitfieldMask, window: int = 0) -> RowIntervals | None:
    """
    The intervals of `mask`, or `None` when a query sees keys on both sides of a key that it does not see.

    Args:
        mask (`BitfieldMask`): The words.
        window (`int`, *optional*, defaults to 0): The layer's sliding window in tokens, 0 for none.

    Returns:
        `RowIntervals` or `None`: `None` only if some query really has such a hole, with one exception: where a key has
        several kinds and a query does not look at all kinds, keys may be counted twice and `None` is the safe answer.
    """
    bounds, has_holes = row_bounds(mask, window)
    return None if has_holes else bounds


def row_bounds(mask: BitfieldMask, window: int = 0) -> tuple[RowIntervals, bool]:
    """The first and the last key that each query sees, exact for every mask, and whether some query has a hole."""
    queries, keys = decode_words(mask.query_words), decode_words(mask.key_words)
    if not mask.key_words.numel():
        nothing = torch.zeros_like(mask.query_positions)
        return RowIntervals(nothing, nothing - 1), False
    parts = [_seen(mask, q, k, window) for q, k in _by_kind(queries, keys)]
    some = torch.stack([part.count > 0 for part in parts])
    first = torch.where(some, torch.stack([part.first for part in parts]), _NOWHERE).amin(0)
    last = torch.where(some, torch.stack([part.last for part in parts]), -1).amax(0)
    count = torch.stack([part.count for part in parts]).sum(0)

    places = _sorted(torch.where(keys.segment > 0, mask.key_positions, _NOWHERE))
    spanned = torch.searchsorted(places, last, right=True) - torch.searchsorted(places, first)
    has_holes = bool(((count > 0) & (spanned != count)).any())
    first = torch.where(count > 0, first, 0)
    return RowIntervals(first.to(torch.int32), last.to(torch.int32)), has_holes


def _by_kind(queries: WordFields, keys: WordFields) -> Iterator[tuple[WordFields, WordFields]]:
    """Queries and keys among which kinds do not matter: all of them, or those of one kind after the other."""
    blind = (queries.segment > 0) & (queries.sees != ALL_KINDS)
    hidden = (keys.segment > 0) & (keys.kinds == 0)
    if not bool(blind.any() | hidden.any()):
        yield queries, keys
        return
    bits = torch.stack([((keys.kinds >> bit) & 1).any() for bit in range(KIND_BITS)]).tolist()
    for bit in [bit for bit in range(KIND_BITS) if bits[bit]] or [0]:
        looking, looked_at = ((field >> bit) & 1 for field in (queries.sees, keys.kinds))
        yield replace(queries, segment=queries.segment * looking), replace(keys, segment=keys.segment * looked_at)


def _seen(mask: BitfieldMask, queries: WordFields, keys: WordFields, window: int) -> _Seen:
    """What each query sees, kinds aside."""
    at = mask.query_positions.long()
    lowest = (at - window + 1).clamp(min=0) if window else torch.zeros_like(at)
    horizon = torch.where(queries.sees_all, _NOWHERE - 1, torch.where(queries.causal, at, -1))

    segment_key = _sorted(_keyed(keys.segment, mask.key_positions, keys.segment > 0))
    back = _slice(segment_key, queries.segment, lowest, horizon)
    in_span = (keys.segment > 0) & (keys.span > 0)
    if not bool(in_span.any()):
        return back

    # a span counts from behind the horizon on: what lies before it is of the same segment and counted already
    span_key = _sorted(_keyed((keys.segment << 16) | keys.span, mask.key_positions, in_span))
    together = _slice(
        span_key, (queries.segment << 16) | queries.span, torch.maximum(lowest, horizon + 1), _NOWHERE - 1
    )
    count = torch.where((queries.segment > 0) & (queries.span > 0), together.count, 0)
    return _Seen(
        back.count + count,
        torch.where(back.count > 0, back.first, together.first),
        torch.where(count > 0, together.last, back.last),
    )


def _keyed(group: Tensor, place: Tensor, present: Tensor) -> Tensor:
    """Numbers that sort by group and then by place, those of absent tokens last."""
    return torch.where(present, (group << _PLACE_BITS) | place, _ABSENT)


def _slice(sorted_key: Tensor, group: Tensor, lowest: Tensor, highest: Tensor | int) -> _Seen:
    """The keys of `group` at the places `lowest` to `highest`."""
    base = group << _PLACE_BITS
    start = torch.searchsorted(sorted_key, base + lowest)
    stop = torch.searchsorted(sorted_key, base + highest, right=True)
    end = sorted_key.shape[-1] - 1
    first, last = (sorted_key.gather(-1, index.clamp(0, end)) & _NOWHERE for index in (start, stop - 1))
    return _Seen((stop - start).clamp(min=0), first, last)


def _sorted(values: Tensor) -> Tensor:
    """`values` in ascending order; on a CPU, where looking costs less than sorting, rows in order are left alone."""
    if values.device.type == "cpu" and bool((values[..., 1:] >= values[..., :-1]).all()):
        return values.contiguous()
    return values.sort(dim=-1).values
