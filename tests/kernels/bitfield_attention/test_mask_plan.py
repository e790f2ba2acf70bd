"""
Compiled masks against the dense mask: intervals are exact and absent only where a row has a hole, no visible pair is
lost, full blocks are full, splits never end later.
"""

import heapq
from dataclasses import asdict
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_mmparallel._device import keep_values
from hf_mmparallel.kernels.bitfield_attention import (
    BitfieldMask,
    dense_mask,
    dispatch,
    encode_words,
    intervals,
    mask_plan,
)
from hf_mmparallel.kernels.bitfield_attention.mask_plan import (
    COMBINE_COST,
    EMPTY,
    FULL,
    PART_COST,
    PARTIAL,
    TILE_COST,
    BlockLists,
    MaskPlan,
    compile_mask,
    step_costs,
)
from tests.deep_cases import third

from .mask_families import FAMILIES, HOLES, masks, permuted


def _states_of_lists(lists: BlockLists, batch: int, num_blocks: int, num_others: int) -> Tensor:
    """The state of each pair of blocks that the lists say, `[batch, num_blocks, num_others]`; every tile once."""
    states = torch.full((batch, num_blocks, num_others), EMPTY)
    assert sorted(lists.tiles[:, :2].tolist()) == [[row, block] for row in range(batch) for block in range(num_blocks)]
    for row, block, begin, middle, end in lists.tiles.tolist():
        partial, full = lists.blocks[begin:middle].tolist(), lists.blocks[middle:end].tolist()
        assert begin <= middle <= end and len(set(partial + full)) == end - begin
        states[row, block, partial] = PARTIAL
        states[row, block, full] = FULL
    seen, partial = lists.tiles[:, 4] - lists.tiles[:, 2], lists.tiles[:, 3] - lists.tiles[:, 2]
    costs = step_costs(partial, seen)
    assert torch.equal(costs, costs.sort(descending=True).values)
    return states


def _exact_states(dense: Tensor, block_q: int, block_k: int) -> Tensor:
    """The state of each pair of blocks; keys past the end are hidden, queries past it do not count."""
    batch, num_queries, num_keys = dense.shape
    sizes = (-(-num_queries // block_q), block_q, -(-num_keys // block_k), block_k)
    padded = torch.zeros(batch, sizes[0] * block_q, sizes[2] * block_k, dtype=torch.bool)
    padded[:, :num_queries, :num_keys] = dense
    some = padded.view(batch, *sizes).any(4).any(2)
    padded[:, num_queries:] = True
    full = padded.view(batch, *sizes).all(4).all(2)
    return torch.where(full, FULL, torch.where(some, PARTIAL, EMPTY))


def _dense_of_rows(plan: MaskPlan) -> Tensor:
    """What the numbers of the rows say, as the kernels read them: bool `[batch, num_queries, num_keys]`."""
    queries, keys = plan.query_rows[..., :, None], plan.key_rows[..., None, :]
    places = keys[:, 0]
    if plan.interval:
        return (places >= queries[:, 0]) & (places < queries[:, 0] + queries[:, 1])
    same = ((queries[:, 0] ^ keys[:, 1]) & 0xFFFF) == 0
    reached = (places <= queries[:, 2]) | (queries[:, 3] == keys[:, 1])
    return same & ((queries[:, 1] & keys[:, 2]) != 0) & reached & (places > queries[:, 4])


def _check_bounds(mask: BitfieldMask, window: int = 0) -> tuple[bool, bool]:
    """Checks first and last place that each query sees; returns whether a row has holes, found and by the mask."""
    dense = dense_mask(mask, window)
    places = mask.key_positions[:, None].expand_as(dense)
    last = torch.where(dense, places, -1).amax(-1)
    first = torch.where(last < 0, 0, torch.where(dense, places, 2**30).amin(-1))
    inside = (places >= first[..., None]) & (places <= last[..., None]) & (mask.key_words != 0)[:, None]
    bounds, found = intervals.row_bounds(mask, window)
    assert bounds.first.dtype == bounds.last.dtype == torch.int32
    assert torch.equal(bounds.first, first) and torch.equal(bounds.last, last)
    return bool(found), not torch.equal(inside, dense)


def _check(
    mask: BitfieldMask, window: int, block_q: int, block_k: int, kernel: bool = False
) -> tuple[MaskPlan, Tensor, Tensor]:
    """Checks a plan against the dense mask; returns it with its states and the exact ones."""
    dense = dense_mask(mask, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_has_kernel", lambda tensor: kernel)  # as on a GPU
        found, holes = _check_bounds(mask, window)
        plan = compile_mask(mask, window, block_q, block_k)
    assert plan.interval == (not found) and found == holes
    exact = _exact_states(dense, block_q, block_k)
    states = _states_of_lists(plan.by_query, *exact.shape)
    batch, num_query_blocks, num_key_blocks = exact.shape
    by_key = _states_of_lists(plan.by_key, batch, num_key_blocks, num_query_blocks)
    assert torch.equal(by_key, states.transpose(1, 2))
    assert not ((states == EMPTY) & (exact != EMPTY)).any(), "a visible pair is lost"
    assert not ((states == FULL) & (exact != FULL)).any(), "a hidden pair is not masked"
    assert torch.equal(_dense_of_rows(plan), dense)
    lists = (plan.by_query.tiles, plan.by_query.blocks, plan.by_key.tiles, plan.by_key.blocks)
    assert {tensor.dtype for tensor in (plan.query_rows, plan.key_rows, *lists)} == {torch.int32}
    return plan, states, exact


@settings(max_examples=120)
@given(drawn=masks(longest=70), block_q=st.sampled_from([4, 8]), block_k=st.sampled_from([2, 8]), kernel=st.booleans())
def test_any_words_in_any_order(drawn, block_q, block_k, kernel):
    _check(*drawn, block_q, block_k, kernel)


@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("family", third(FAMILIES))
def test_families_visit_what_they_must(family, window):
    rng = Random(f"{family} {window}")
    needless = missed_full = visited = num_with_holes = 0
    for index in range(6):
        mask = BitfieldMask.from_words(FAMILIES[family](rng, 331))
        plan, states, exact = _check(mask, window, 32, 16, kernel=index == 5)
        num_with_holes += not plan.interval
        needless += int(((states != EMPTY) & (exact == EMPTY)).sum())
        missed_full += int(((states != FULL) & (exact == FULL)).sum())
        visited += int((exact != EMPTY).sum())
    assert bool(num_with_holes) == (family in HOLES) or (window and not num_with_holes)
    # From minima and maxima alone, intervals give the exact blocks and the words nearly so.
    assert needless <= (0.05 * visited if family in HOLES else 0.0)
    assert missed_full <= (0.1 * visited if family in HOLES else 0.0)


def test_holes_are_never_missed_where_keys_have_several_kinds():
    safe = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        kinds, sees = torch.randint(0, 8, (2, 2, 20), generator=generator)
        words = encode_words(torch.ones_like(kinds), kinds=kinds, sees=sees)
        found, holes = _check_bounds(BitfieldMask.from_words(words))
        assert found or not holes
        safe += found
    assert safe > 0


@pytest.mark.parametrize("kernel", [False, True])
def test_intervals_without_keys_or_queries(kernel, monkeypatch):
    monkeypatch.setattr(intervals, "_has_kernel", lambda tensor: kernel)
    ones = BitfieldMask.from_words(encode_words(torch.ones(1, 4, dtype=torch.int64)))
    none = ones.query_words[:, :0]
    found = intervals.row_intervals(BitfieldMask(ones.query_words, ones.query_positions, none, none.int()))
    assert found is not None and (found.last < found.first).all()
    found = intervals.row_intervals(BitfieldMask(none, none.int(), ones.key_words, ones.key_positions))
    assert found is not None and found.first.shape == found.last.shape == (1, 0)


def test_memory_of_intervals_is_linear_in_tokens():
    words = FAMILIES["image_spans"](Random(0), 200_000)  # a dense mask of it would have 40 billion pairs
    assert intervals.row_intervals(BitfieldMask.from_words(words)) is not None


def test_whole_blocks_in_another_order_stay_exact():
    rng = Random(3)
    words = FAMILIES["image_spans"](rng, 256)
    blocks = torch.arange(256).view(16, 16)
    order_q, order_k = (blocks[rng.sample(range(16), 16)].flatten() for _ in range(2))
    whole = BitfieldMask.from_words(words)
    mask = BitfieldMask(words[:, order_q], whole.query_positions[:, order_q], words[:, order_k], order_k[None].int())
    plan, states, exact = _check(mask, 0, 16, 16)
    assert torch.equal(states, exact)


def test_a_copy_of_a_key_without_its_word_is_padding():
    words = encode_words(torch.ones(1, 32, dtype=torch.int64))
    keys = torch.cat([words, torch.zeros_like(words)], dim=1)
    places = torch.arange(32, dtype=torch.int32)[None]
    mask = BitfieldMask(words, places, keys, torch.cat([places, places], dim=1))
    plan, states, exact = _check(mask, 0, 8, 16)
    assert torch.equal(states, exact) and not states[:, :, 2:].any()


def _end_of(costs: list[int], num_heads: int, num_programs: int) -> int:
    """When the last program ends that takes the next tile whenever it is free; the heads of a tile side by side."""
    free = [0] * num_programs
    for cost in costs:
        for _ in range(num_heads):
            heapq.heappush(free, heapq.heappop(free) + cost)
    return max(free)


def _ends(plan: MaskPlan, num_heads: int, num_programs: int) -> tuple[int, int]:
    """When the forward pass ends without cut tiles and as planned."""
    _, _, begin, middle, end = plan.by_query.tiles.unbind(1)
    whole = _end_of((step_costs(middle - begin, end - begin) + TILE_COST).tolist(), num_heads, num_programs)
    if plan.split is None:
        return whole, whole
    _, _, begin, middle, end, slot = plan.split.tiles.unbind(1)
    costs = step_costs(middle - begin, end - begin) + TILE_COST + (slot >= 0) * PART_COST
    return whole, _end_of(costs.tolist(), num_heads, num_programs) + COMBINE_COST


def _check_split(plan: MaskPlan) -> None:
    """Checks that parts cover each list once, and that rows name the slots of their parts in order."""
    split = plan.split
    assert split is not None
    parts: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for row, block, *part in split.tiles.tolist():
        parts.setdefault((row, block), []).append(tuple(part))
    rows = {(row, block): (first, count) for row, block, first, count in split.rows.tolist()}
    assert sum(count for _, count in rows.values()) == split.num_slots
    for row, block, begin, middle, end in plan.by_query.tiles.tolist():
        found = sorted(parts.pop((row, block)))
        slots = [slot for *_, slot in found]
        first, count = rows.get((row, block), (-1, 1))
        assert slots == [-1] if count == 1 else slots == list(range(first, first + count))
        starts, middles, stops, _ = zip(*found, strict=True)
        assert (starts[0], stops[-1]) == (begin, end) and starts[1:] == stops[:-1]
        assert middles == tuple(min(max(middle, start), stop) for start, stop in zip(starts, stops, strict=True))
    assert not parts


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(1, 900),
    queries=st.floats(0.01, 1.0),
    num_heads=st.integers(1, 32),
    num_programs=st.sampled_from([4, 40, 132]),
)
def test_a_split_never_ends_later(seed, length, queries, num_heads, num_programs):
    rng = Random(seed)
    family = rng.choice(["causal", "encoder", "prefix"])
    words = FAMILIES[family](rng, length + 40)
    mask = permuted(BitfieldMask.from_words(words), rng, max(1, int(length * queries)))
    plan = compile_mask(mask, 0, 16, 8, num_heads=num_heads, num_programs=num_programs)
    whole, planned = _ends(plan, num_heads, num_programs)
    assert planned <= whole
    if plan.split is not None:
        _check_split(plan)


def test_one_query_over_many_keys_is_split():
    words = encode_words(torch.ones(1, 32768, dtype=torch.int64))
    whole = BitfieldMask.from_words(words)
    last = BitfieldMask(words[:, -1:], whole.query_positions[:, -1:], words, whole.key_positions)
    plan = compile_mask(last, num_heads=32, num_programs=132)
    before, after = _ends(plan, 32, 132)
    assert after < before / 2
    _check_split(plan)


@pytest.mark.parametrize("length, num_heads", [(8192, 32), (65536, 4)])
def test_tiles_of_training_are_not_split(length, num_heads):
    for segment in (torch.arange(length)[None] // 2048 + 1, torch.ones(1, length, dtype=torch.int64)):
        mask = BitfieldMask.from_words(encode_words(segment))
        assert compile_mask(mask, num_heads=num_heads, num_programs=132).split is None


def test_the_host_compiles_a_mask_whose_words_it_knows(monkeypatch):
    words = encode_words(torch.arange(300)[None] // 70 + 1)
    query = torch.zeros(1, 2, 300, 64)
    want = dispatch._plan("triton", query, dispatch.whole_rows(words), 0)
    known, given = words.clone(), []
    keep_values(known, words)
    monkeypatch.setattr(
        mask_plan, "compile_mask", lambda mask, *a, **k: given.append(mask) or compile_mask(mask, *a, **k)
    )
    found = dispatch._plan("triton", query, dispatch.whole_rows(known), 0)
    assert given[0].query_words is words
    assert str(asdict(found)) == str(asdict(want))
