"""
A mask compiled for the kernels: the values that they test for each pair, and the blocks of keys of each block of
queries.

Axis letters: B batch, Q queries, K keys, M blocks of queries, N blocks of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .intervals import RowIntervals, row_bounds
from .words import KIND_BITS, MAX_SEGMENTS, BitfieldMask, decode_words

# Splits the longest tiles of the forward pass over several programs, where so few run that the longest decides.

# Longest first is nearly the ideal order if every program has several tiles to run (within 3 % on the masks of
# training). With few, as in generation, in short batches or with one very long row, the longest tile's list of blocks
# is split, each share writes its own softmax, and a second kernel combines the shares.
# Costs in tenths of a step over a full block: a partial block also evaluates the mask; every tile loads its queries
# and stores its output; a share of a tile stores float32, which is read again; the second kernel has to be launched.
FULL_COST, PARTIAL_COST = 10, 13
TILE_COST = 20
PART_COST = 30
COMBINE_COST = 30


@dataclass(frozen=True)
class SplitTiles:
    """Forward tiles, some of which are shares of a split tile."""

    # int32 [num_tiles, 6]: the five columns of `BlockLists`, and the index in the workspace to which the share is
    # written; -1 for a tile that is not split
    tiles: Tensor
    # int32 [num_rows, 4], for each block of queries that is split: row of the batch, block, first index in the
    # workspace, number of shares
    rows: Tensor
    num_slots: int  # size of the workspace in shares


def step_costs(partial: Tensor, seen: Tensor) -> Tensor:
    """Costs of the steps of tiles that visit `seen` blocks, `partial` of them partial; integers of the same shape."""
    return torch.add(seen * FULL_COST, partial, alpha=PARTIAL_COST - FULL_COST)


def split_tiles(tiles: Tensor, longest: int, total: int, num_heads: int, num_programs: int) -> SplitTiles | None:
    """
    Splits tiles `[num_tiles, 5]` if the kernel is then certain to end earlier, otherwise returns `None`.

    A tile is split only if the upper bound for any list schedule of the shares (their mean load plus the longest
    share) is below the lower bound without splitting (the mean load, or the longest tile), so that it cannot end
    later. `longest` and `total` are costs of the steps of a tile and of all tiles.
    """
    share = num_heads / num_programs
    mean = (total + tiles.shape[0] * TILE_COST) * share
    if longest + TILE_COST <= mean:
        return None
    on_host = tiles.cpu().to(torch.int64)
    begin, middle, end = on_host[:, 2:].unbind(dim=1)
    seen, steps = end - begin, step_costs(middle - begin, end - begin)
    best_bound, best_parts = float(longest + TILE_COST), None
    for limit in (2**power for power in range(int(seen.max()).bit_length())):
        parts = torch.where(seen > limit, (seen + limit - 1) // limit, 1)
        cost = int((steps + parts * TILE_COST + (parts > 1) * parts * PART_COST).sum())
        longest_part = int(torch.minimum(steps, (seen + parts - 1) // parts * PARTIAL_COST).max())
        bound = cost * share + longest_part + TILE_COST + PART_COST + COMBINE_COST
        if bound < best_bound:
            best_bound, best_parts = bound, parts
    return None if best_parts is None else _cut(on_host, best_parts, tiles.device)


def _cut(tiles: Tensor, parts: Tensor, device: torch.device) -> SplitTiles:
    """Splits each tile of a CPU tensor into `parts` shares, longest first; the result is on `device`."""
    tile = torch.repeat_interleave(parts)
    part = torch.arange(len(tile)) - (parts.cumsum(0) - parts)[tile]
    batch, block, begin, middle, end = tiles[tile].unbind(dim=1)
    seen = end - begin
    start, stop = begin + seen * part // parts[tile], begin + seen * (part + 1) // parts[tile]
    full_from = torch.minimum(torch.maximum(middle, start), stop)
    cut = parts[tile] > 1
    slot = torch.where(cut, cut.cumsum(0) - 1, -1)
    longest_first = step_costs(full_from - start, stop - start).argsort(descending=True, stable=True)
    cut_tiles = torch.stack([batch, block, start, full_from, stop, slot], dim=1)[longest_first]
    first = cut & (part == 0)
    rows = torch.stack([batch, block, slot, parts[tile]], dim=1)[first]
    to_device = {"device": device, "dtype": torch.int32}
    return SplitTiles(cut_tiles.to(**to_device), rows.to(**to_device), num_slots=int(cut.sum()))


# States of pairs of blocks (empty, partial or full), and the values that the kernels test within a block. Axis
# letters: B batch, Q queries, K keys, M blocks of queries, N blocks of keys.

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


@dataclass(frozen=True)
class BlockLists:
    """The work of one kernel: tiles, longest first, and the blocks that each tile visits."""

    # int32 [num_tiles, 5]: row of the batch, block of this side, `begin`, `middle` and `end` of its list in `blocks`,
    # whose partial blocks are `begin:middle` and full blocks `middle:end`
    tiles: Tensor
    blocks: Tensor  # int32 [size], blocks of the other side; entries outside of all lists are undefined


@dataclass(frozen=True)
class MaskPlan:
    """
    A [`BitfieldMask`] and a window, compiled for one pair of block sizes.

    In the interval form each query sees the keys at positions `first` to `first + length - 1`; in the general form the
    kernels test the words themselves.
    """

    interval: bool
    block_q: int  # queries of a block
    block_k: int  # keys of a block
    # int32 [batch, 2 or 5, query_length]. Interval form: first position and length (0 if it sees no key). General
    # form: low half of the word, kinds that it sees, last position that it sees causally, low half of the words of its
    # span, position before its window.
    query_rows: Tensor
    # int32 [batch, 1 or 3, key_length]: position (-1 for padding); in the general form also the low half of the word,
    # and the kinds
    key_rows: Tensor
    by_query: BlockLists  # for the forward kernel and the gradient of the queries
    by_key: BlockLists  # for the gradients of keys and values
    split: SplitTiles | None = None  # the forward tiles, if the keys of some queries are split over several programs

    def to(self, device: torch.device) -> MaskPlan:
        """The plan on a device, which receives it while the host goes on."""

        def send(part: Any) -> Any:
            if isinstance(part, Tensor):
                return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)
            if not is_dataclass(part):
                return part
            return replace(part, **{field.name: send(getattr(part, field.name)) for field in fields(part)})

        return send(self)

    @property
    def batch_size(self) -> int:
        return self.query_rows.shape[0]

    @property
    def num_queries(self) -> int:
        """Number of queries per row of the batch."""
        return self.query_rows.shape[2]

    @property
    def num_keys(self) -> int:
        """Number of keys per row of the batch."""
        return self.key_rows.shape[2]


def compile_mask(
    mask: BitfieldMask,
    window: int = 0,  # sliding window in tokens; 0 for none
    block_q: int = 128,
    block_k: int = 128,
    *,
    num_heads: int = 1,  # query heads that run each tile: with few heads, tiles may be split
    # that run at once; by default the multiprocessors of the mask's device, 1 on a CPU
    num_programs: int | None = None,
) -> MaskPlan:
    """Compiles a mask to values per query and key, and block lists, on the mask's device."""
    bounds, has_holes = row_bounds(mask, window)
    places = real_places(mask)
    states = interval_states(bounds, places, block_q, block_k)
    work = _Work.of(states)
    *sizes, general = torch.stack([*work.sizes(), has_holes]).tolist()  # the only synchronization with the device
    if general:  # a second synchronization
        states = general_states(states, mask, window, block_q, block_k)
        work = _Work.of(states)
        sizes = torch.stack(work.sizes()).tolist()
    by_query, by_key = work.lists(states, sizes)
    programs = num_programs or programs_at_once(mask.query_words.device)
    return MaskPlan(
        interval=not general,
        block_q=block_q,
        block_k=block_k,
        query_rows=query_rows(mask, bounds, general, window),
        key_rows=key_rows(mask, places, general),
        by_query=by_query,
        by_key=by_key,
        split=split_tiles(by_query.tiles, sizes[2], sizes[3], num_heads, programs),
    )


@dataclass(frozen=True)
class _Work:
    """Visited blocks of the tiles of the blocks of queries, followed by those of the blocks of keys."""

    visits: Tensor  # int32 [2, num_tiles], number of visited blocks, and of partial blocks among them
    costs: Tensor  # int32 [num_tiles], from `step_costs`
    num_rows: int  # tiles of the blocks of queries

    @classmethod
    def of(cls, states_BMN: Tensor) -> _Work:
        pair = torch.stack([states_BMN != EMPTY, states_BMN == PARTIAL])
        visits = torch.cat([pair.sum(dim=dim, dtype=torch.int32).flatten(1) for dim in (-1, -2)], dim=1)
        return cls(visits, step_costs(visits[1], visits[0]), states_BMN[..., 0].numel())

    def sizes(self) -> list[Tensor]:
        """The longest list of each side, and the largest cost and the total cost of the blocks of queries."""
        by_query, by_key = self.visits[0].tensor_split([self.num_rows])
        costs = self.costs[: self.num_rows]
        return [by_query.amax(), by_key.amax(), costs.amax(), costs.sum()]

    def lists(self, states_BMN: Tensor, widths: Sequence[int]) -> tuple[BlockLists, BlockLists]:
        """Makes the lists of the blocks of queries and of keys; `widths` are the longest lists of each side."""
        visits, costs = (tensor.tensor_split([self.num_rows], dim=-1) for tensor in (self.visits, self.costs))
        return (
            _lists(states_BMN, visits[0], costs[0], widths[0]),
            _lists(states_BMN.transpose(1, 2), visits[1], costs[1], widths[1]),
        )


def _lists(states_BMN: Tensor, visits: Tensor, costs: Tensor, width: int) -> BlockLists:
    """Tiles of one side, longest first, with lists of `width` blocks each: partial blocks, then full blocks."""
    num_blocks = states_BMN.shape[1]
    longest_first = costs.argsort(descending=True, stable=True)
    rows = longest_first.to(torch.int32)
    begin = rows * width
    seen_end, partial_end = (visits[:, longest_first] + begin).unbind()
    columns = [rows // num_blocks, rows % num_blocks, begin, partial_end, seen_end]
    order = states_BMN.sort(dim=-1, descending=True, stable=True).indices
    # Without any pair there is one unused entry, so that kernels have an address to load from.
    blocks = order[..., : max(width, 1)].to(torch.int32).flatten()
    return BlockLists(tiles=torch.stack(columns, dim=1), blocks=blocks)


def programs_at_once(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
