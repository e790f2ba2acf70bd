"""
States of pairs of blocks (empty, partial or full), and the values that the kernels test within a block.
Axis letters: B batch, Q queries, K keys, M blocks of queries, N blocks of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .intervals import RowIntervals
from .mask import BitfieldMask
from .words import KIND_BITS, MAX_SEGMENTS, decode_words

# An empty pair of blocks has no visible pair of tokens, a full one no hidden pair; if neither is certain it is
# partial.
# In descending order partial blocks come first and empty blocks last.
# All states follow from minima and maxima over the tokens of a block, so that memory grows with the number of tokens
# and of pairs of blocks, not of pairs of tokens.
EMPTY, FULL, PARTIAL = 0, 1, 2
NEVER = 2**31 - 1


def interval_states(bounds: RowIntervals, places: Tensor, block_q: int, block_k: int) -> Tensor:
    """Returns int8 `[batch, blocks of queries, blocks of keys]`, if queries see all keys of their intervals."""
    # A query without visible keys (its last position is -1) neither reaches a block nor lets a block be full.
    first = torch.add(bounds.first, bounds.last < 0, alpha=NEVER)
    low_B2M1, high_B2M1 = _query_bounds(torch.stack([first, bounds.last], dim=1), block_q)
    (first_BM1, earliest_last_BM1), (latest_first_BM1, last_BM1) = low_B2M1.unbind(1), high_B2M1.unbind(1)
    # For padding, whose position is -1, the first of these is NEVER.
    if missing := -places.shape[-1] % block_k:
        places = pad(places, (0, missing), value=-1)
    low_B21N, high_B21N = _key_bounds(torch.stack([places & NEVER, places], dim=1), block_k, -1)
    first_B1N, (last_or_never_B1N, last_B1N) = low_B21N[:, 0], high_B21N.unbind(1)
    some = (last_B1N >= first_BM1) & (first_B1N <= last_BM1)
    full = (first_B1N >= latest_first_BM1) & (last_or_never_B1N <= earliest_last_BM1)
    return _states(some, full)


def general_states(interval_states_BMN: Tensor, mask: BitfieldMask, window: int, block_q: int, block_k: int) -> Tensor:
    """The state of each pair of blocks if queries do not see all keys of their intervals; arguments as above."""
    some, full = _general_states(mask, window, block_q, block_k)
    return _states(some & (interval_states_BMN != EMPTY), full)


def _states(some: Tensor, full: Tensor) -> Tensor:
    """States from whether any pair is visible and whether all pairs are; `full` implies `some`."""
    return some.view(torch.int8) + (some ^ full).view(torch.int8)


def query_rows(mask: BitfieldMask, bounds: RowIntervals, general: bool, window: int) -> Tensor:
    """The values of each query for the kernels: int32 `[batch, 2 or 5, query_length]`, see [`MaskPlan`]."""
    if not general:
        return torch.stack([bounds.first, bounds.last - bounds.first + 1], dim=1)
    fields = decode_words(mask.query_words)
    low = _low_half(mask.query_words)
    # A query without a span gets the low half of another sample, which no key of its sample has.
    span = torch.where(fields.span > 0, low, low ^ 1)
    before_window = mask.query_positions - window if window else torch.full_like(low, -(2**30))
    return torch.stack([low, fields.sees, _horizon(mask), span, before_window], dim=1).to(torch.int32)


def key_rows(mask: BitfieldMask, places: Tensor, general: bool) -> Tensor:
    """The values of each key at positions `places` for the kernels: int32 `[batch, 1 or 3, key_length]`."""
    if not general:
        return places[:, None]
    kinds = decode_words(mask.key_words).kinds.to(torch.int32)
    return torch.stack([places, _low_half(mask.key_words), kinds], dim=1)


def real_places(mask: BitfieldMask) -> Tensor:
    """The positions of the keys, -1 for padding: int32 `[batch, key_length]`."""
    return (mask.key_positions + 1) * ((mask.key_words & MAX_SEGMENTS) != 0) - 1


def _general_states(mask: BitfieldMask, window: int, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
    """[`interval_states`] for the general form, from bounds on every field of the words."""
    q, k = decode_words(mask.query_words), decode_words(mask.key_words)
    looks, shown = (q.segment > 0) & (q.sees != 0), (k.segment > 0) & (k.kinds != 0)
    some, full = _equal_states(torch.where(looks, q.segment, 0), torch.where(shown, k.segment, 0), block_q, block_k)

    kinds_some, kinds_full = _kinds_states(q.sees, k.kinds, block_q, block_k)
    horizon = torch.where(looks, _horizon(mask), -1)
    earliest_BM1, latest_BM1 = _query_bounds(horizon, block_q)
    first_B1N, _ = _key_bounds(torch.where(shown, mask.key_positions, NEVER), block_k, NEVER)
    _, last_B1N = _key_bounds(torch.where(shown, mask.key_positions, -1), block_k, -1)
    group_q = torch.where(looks & (q.span > 0), mask.query_words & 0xFFFFFFFF, 0)
    group_k = torch.where(shown & (k.span > 0), mask.key_words & 0xFFFFFFFF, 0)
    span_some, span_full = _equal_states(group_q, group_k, block_q, block_k)
    some &= kinds_some & ((first_B1N <= latest_BM1) | span_some)
    full &= kinds_full & ((last_B1N <= earliest_BM1) | span_full)
    if window:
        first_place_BM1, last_place_BM1 = _query_bounds(mask.query_positions, block_q)
        some &= last_B1N > first_place_BM1 - window
        full &= first_B1N > last_place_BM1 - window
    return some, full


def _equal_states(at_q: Tensor, at_k: Tensor, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
    """Whether some numbers of queries and keys may be equal, and whether all are; 0 is equal to no number."""
    beyond = 2**33  # no half of a word is as large, so that it is in no range
    low_BM1, high_BM1 = _query_bounds(torch.where(at_q > 0, at_q, beyond), block_q)
    _, real_high_BM1 = _query_bounds(at_q, block_q)
    low_B1N, high_B1N = _key_bounds(torch.where(at_k > 0, at_k, beyond), block_k, beyond)
    _, real_high_B1N = _key_bounds(at_k, block_k, 0)
    some = (low_BM1 <= real_high_B1N) & (low_B1N <= real_high_BM1)
    full = (low_BM1 == high_B1N) & (low_B1N == high_BM1) & (low_BM1 == high_BM1) & (low_BM1 < beyond)
    return some, full


def _kinds_states(sees: Tensor, kinds: Tensor, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
    """Whether some query may see some key by its kinds, and whether all queries see all keys."""
    bit = torch.arange(KIND_BITS, device=sees.device)
    sees_BMI, kinds_BNI = ((field[..., None] >> bit) & 1 for field in (sees, kinds))
    all_see, any_sees = _query_bounds(sees_BMI.transpose(1, 2), block_q)  # [B, bits, M, 1]
    all_are, any_is = _key_bounds(kinds_BNI.transpose(1, 2), block_k, 0)  # [B, bits, 1, N]
    some = ((any_sees & any_is) != 0).any(dim=1)
    # All queries see all keys if every query sees every kind that occurs, or if one kind is common to all.
    full = (any_is <= all_see).all(dim=1) | ((all_see & all_are) != 0).any(dim=1)
    return some, full


def _horizon(mask: BitfieldMask) -> Tensor:
    """The last position that each query sees causally; -1 for none."""
    fields = decode_words(mask.query_words)
    back = torch.where(fields.causal, mask.query_positions, -1)
    return torch.where(fields.sees_all, NEVER, back)


def _low_half(words: Tensor) -> Tensor:
    """The low 32 bits of words, segment and span: int32 of the words' shape."""
    return words.to(torch.int32)


def _query_bounds(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns minima and maxima over blocks of queries, `[..., blocks, 1]`; the last query pads the last block."""
    missing = -values.shape[-1] % block
    if missing:
        values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], missing)], dim=-1)
    low, high = values.unflatten(-1, (-1, block)).aminmax(dim=-1)
    return low[..., None], high[..., None]


def _key_bounds(values: Tensor, block: int, fill: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over each block of keys, `[..., 1, blocks]`; `fill` is the value for keys past the end."""
    missing = -values.shape[-1] % block
    if missing:
        values = pad(values, (0, missing), value=fill)
    low, high = values.unflatten(-1, (-1, block)).aminmax(dim=-1)
    return low[..., None, :], high[..., None, :]
