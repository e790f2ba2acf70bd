"""Rows cut over ranks: the mask stays what it was, ranks get what they need, and whole segments stay whole."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange.token_assignment import ContextAssignment, padded_length
from hf_mmparallel.arrange.token_segments import (
    ContextCosts,
    SegmentBins,
    assign_context,
    assign_segments,
    choose_faster,
    independent_segments,
)
from hf_mmparallel.kernels.bitfield_attention.reference import dense_mask
from hf_mmparallel.kernels.bitfield_attention.words import BitfieldMask, decode_words, encode_words
from tests.arrange.token_rows import causal_row, packed_row


def random_words(rng: np.random.Generator) -> torch.Tensor:
    """Words of a packed row: causal tokens, tokens that look at their span only or at everything, padding anywhere."""
    lengths = rng.integers(1, 40, rng.integers(1, 9))
    ids = np.repeat(np.arange(len(lengths)) + 1, lengths)
    ids = np.concatenate([np.zeros(rng.integers(0, 5), int), ids, np.zeros(rng.integers(0, 30), int)])
    span = (np.arange(len(ids)) // 7 + 1) * (rng.random(len(ids)) < 0.5)
    kinds, sees = 2 ** rng.integers(0, 2, len(ids)), rng.integers(1, 4, len(ids))
    fields = (torch.from_numpy(field) for field in (span, kinds, sees, rng.random(len(ids)) < 0.7))
    return encode_words(torch.from_numpy(ids), *fields, sees_all=torch.from_numpy(rng.random(len(ids)) < 0.1))


def index_in_order(found: ContextAssignment) -> np.ndarray:
    """Index of each token of the row in `order`, its inverse."""
    used = np.flatnonzero(found.order >= 0)
    result = np.empty(found.num_tokens, np.int64)
    result[found.order[used]] = used
    return result


def cut(words: torch.Tensor, **options) -> ContextAssignment:
    """The assignment of a row of words, from the dense mask."""
    seen = dense_mask(BitfieldMask.from_words(words[None]))[0].numpy()
    first, last = seen.argmax(axis=1), seen.shape[1] - 1 - seen[:, ::-1].argmax(axis=1)
    blind = ~seen.any(axis=1)
    ids = decode_words(words).segment.numpy()
    return assign_context(np.where(blind, 1, first), np.where(blind, 0, last), segment_ids=ids, **options)


@settings(max_examples=150)
@given(st.sampled_from(["row", "segments"]), st.integers(1, 5), st.sampled_from([4, 16]), st.integers(0, 2**32))
def test_ranks_have_all_tokens_once_and_the_mask_stays_the_same(mode, num_ranks, block, seed):
    words = random_words(np.random.default_rng(seed))
    found = cut(words, num_ranks=num_ranks, block=block, mode=mode)
    assert found.order.shape == found.positions.shape == (num_ranks * found.tokens_per_rank,)
    assert found.tokens_per_rank % block == 0 and len(found.order) == found.padded_length
    assert sorted(found.order[found.order >= 0]) == list(range(len(words)))
    assert (found.order[index_in_order(found)] == np.arange(len(words))).all()
    starts = found.positions.reshape(-1, block)[:, :1]
    assert (found.positions.reshape(-1, block) == starts + np.arange(block)).all() and not (starts % block).any()
    assert sorted(starts.reshape(-1)) == list(range(0, found.padded_length, block))
    assert (np.diff(found.blocks, axis=1) > 0).all()

    order, places = torch.from_numpy(found.order), torch.from_numpy(found.positions)[None]
    moved = torch.where(order >= 0, words[order.clamp_min(0)], 0)[None]
    for window in (0, 9):
        before = dense_mask(BitfieldMask.from_words(words[None]), window)[0]
        after = dense_mask(BitfieldMask(moved, places, moved, places), window)[0]
        held = torch.from_numpy(index_in_order(found))
        assert (after[held][:, held] == before).all() and after.sum() == before.sum()

    # What a rank sees of another rank, that one gives.
    owner = np.arange(found.padded_length) // found.tokens_per_rank
    given_ = np.zeros((num_ranks, found.blocks.shape[1]), dtype=bool)
    given_[np.arange(num_ranks)[:, None], found.gathered] = True
    seen = dense_mask(BitfieldMask(moved, places, moved, places))[0].numpy()
    foreign = (seen & (owner[:, None] != owner)).any(axis=0)
    assert given_.reshape(-1).repeat(block)[foreign].all()
    assert (np.diff(found.gathered, axis=1) > 0).all()

    same = cut(words, num_ranks=num_ranks, block=block, mode=mode)
    assert (same.order == found.order).all() and (same.gathered == found.gathered).all()


def split_segments(found: ContextAssignment, ids: np.ndarray) -> list[int]:
    """Segments with tokens on several ranks."""
    owner = index_in_order(found) // found.tokens_per_rank
    return [int(i) for i in np.unique(ids[ids > 0]) if len(np.unique(owner[ids == i])) > 1]


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_segments_stay_whole_where_any_order_of_them_fits(num_ranks, seed):
    """With capacity for the longest segment to spare on each rank, the longest first always finds a place."""
    rng = np.random.default_rng(seed)
    samples = rng.integers(1, 60, 12 * num_ranks).tolist()
    first, last, ids = causal_row(samples, sum(samples) + num_ranks * max(samples))
    found = assign_segments(first, last, ids, num_ranks, block=8)
    assert found.mode == "segments" and split_segments(found, ids) == [] and found.gathered.shape == (num_ranks, 0)


@given(st.integers(2, 6), st.integers(0, 40), st.integers(0, 2**32))
def test_a_segment_is_split_at_a_border_or_for_its_size(num_ranks, padding, seed):
    rng = np.random.default_rng(seed)
    samples = np.append(rng.integers(1, 60, 8 * num_ranks), rng.integers(1, 400, 1)).tolist()
    first, last, ids = causal_row(samples, sum(samples) + padding)
    found = assign_segments(first, last, ids, num_ranks, block=8)
    if found.mode == "segments":
        share = 1.05 * found.work.mean()
        fitting = [i for i in split_segments(found, ids) if samples[i - 1] <= found.tokens_per_rank]
        light = [i for i in fitting if (samples[i - 1] / 8 + 1) * (samples[i - 1] / 8 + 2) / 2 * 1.3 < share]
        assert len(light) <= num_ranks - 1
    assert found.padded_length <= 1.02 * padded_length(len(ids), num_ranks, 8)


@pytest.mark.parametrize(("num_ranks", "images", "imbalance"), [(4, False, 1.02), (8, False, 1.02), (8, True, 1.015)])
def test_packed_rows_need_no_gather_and_are_balanced(num_ranks, images, imbalance):
    """Tokens that look ahead to the end of their image cost more or less by where its blocks begin."""
    for seed in range(20, 26) if images else range(6):
        first, last, ids = packed_row(65536, seed)
        inside = np.arange(65536) - first
        image = images & (inside >= 32) & (inside < 608)
        seen = np.where(image & (np.append(ids[576:], np.zeros(576)) == ids), first + 607, last)
        found = assign_segments(first, seen.astype(np.int32), ids, num_ranks)
        assert split_segments(found, ids) == [] and found.gathered.size == 0
        assert found.imbalance <= imbalance and found.padded_length <= 1.02 * 65536


SHORT = np.random.default_rng(0).integers(512, 1537, 40).tolist()
LENGTHS = {
    "one of many ranks": ([1000, 20000, *SHORT], 8, [2], 1.02),
    "more work than the mean rank": ([7000] + [500] * 116, 8, [1], 1.02),  # whose tokens would fit
    "many tiny ones, in bundles": ([3] * 5000, 4, [], 1.05),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_a_long_segment_is_cut_first_and_the_rest_is_balanced_around_it(case):
    samples, num_ranks, cut_first, imbalance = LENGTHS[case]
    first, last, ids = causal_row(samples)
    found = assign_segments(first, last, ids, num_ranks)
    assert split_segments(found, ids)[:1] == cut_first and found.imbalance <= imbalance
    longest = max(samples) if cut_first else 0
    if longest <= found.tokens_per_rank:
        assert longest or not found.gathered.size
    else:
        assert longest <= found.gathered.size * 128 <= longest + 8 * 128 * 14


def test_only_the_long_segment_is_cut_where_there_is_room():
    """Its last block is shared with the first whole segment, whose rank has that block."""
    for size in (300, 305, 308):
        samples = [size] + [20] * 40
        first, last, ids = causal_row(samples, sum(samples) + 4 * 20)
        found = assign_segments(first, last, ids, 4, block=8)
        assert split_segments(found, ids) == [1]
        assert found.gathered.size * 8 <= size + 8 * 5


def test_without_padding_to_spend_the_borders_are_gathered():
    first, last, ids = packed_row(65536, 3)
    found = assign_segments(first, last, ids, 8, max_padding=0.0)
    assert found.padded_length == 65536
    assert 1 <= len(split_segments(found, ids)) <= 7
    assert found.gathered.size < found.blocks.size / 3
    assert found.imbalance <= 1.05


def test_one_long_segment_is_cut_as_a_row():
    first, last, ids = causal_row([4096])
    found = assign_segments(first, last, ids, 4)
    assert found.mode == "row"
    assert (found.order == assign_context(first, last, 4).order).all()


def test_whole_segments_are_near_the_optimum_of_small_cases():
    """Against all ways to give eight segments to two ranks."""
    ratios = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        length = rng.integers(8, 64, 8)
        size = -(-length // 8)
        work = np.stack([size * (size + 1) / 2, size * (size + 3) / 2, (size + 1) * (size + 2) / 2])
        capacity = np.full(2, length.sum() // 2 + 24)
        bins = SegmentBins(length, work, capacity, np.zeros(2), np.zeros(2, np.int64), 8, 1.0)
        owner = bins.exchange(bins.divide())
        assert bins.fits(owner)
        owners = (np.array(owners) for owners in product(range(2), repeat=8))
        best = min(max(bins.rank_work(o, r) for r in range(2)) for o in owners if bins.fits(o))
        ratios.append(max(bins.rank_work(owner, rank) for rank in range(2)) / best)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.15 and np.mean(ratios) <= 1.03


def test_segments_may_not_be_parted_although_their_tokens_do_not_see_each_other():
    # Text that sees text only, then an image that sees itself only: laid out the other way round, text would see it.
    start, length = independent_segments([0, 1, 1, 1, 2, 0, 3, 0, 3, 0])
    assert start.tolist() == [0, 1, 4, 5, 6, 9] and length.tolist() == [1, 3, 1, 1, 3, 1]
    assert independent_segments([])[0].tolist() == []


def test_an_empty_row_has_blocks_of_padding():
    empty = np.zeros(0, np.int64)
    for mode in ("row", "segments"):
        found = assign_context(empty, empty, 2, 4, mode=mode, segment_ids=empty)
        assert found.order.tolist() == [-1] * 8 and found.imbalance == 1.0


def costs(bytes_per_ms: float) -> ContextCosts:
    return ContextCosts.of_layer(32, 8, 128, 200_000_000, flops_per_ms=4e11, bytes_per_ms=bytes_per_ms)


def test_time_is_the_longer_of_computation_and_gather():
    first, last, _ = causal_row([1024])
    found = assign_context(first, last, 2)
    pairs, layer = found.work.max() * 128**2, 2 * 512 * 200_000_000 / 4e11
    compute = pairs * 4 * 32 * 128 / 4e11
    assert costs(1e12).layer_ms(found) == pytest.approx(3.5 * compute + 3 * layer)
    gather = 512 * 2 * 8 * 128 * 2 / 1e6
    assert costs(1e6).layer_ms(found) == pytest.approx(3 * gather + 3 * layer)
    moving = replace(costs(1e6), moved_bytes_per_token=100.0)
    assert moving.layer_ms(found) - costs(1e6).layer_ms(found) == pytest.approx(2 * 512 / 2 * 100 / 1e6)


def test_a_slow_network_keeps_segments_whole_and_a_fast_one_gathers():
    first, last, ids = packed_row(65536, 0)
    row = assign_context(first, last, 8)
    slow = assign_context(first, last, 8, mode="auto", segment_ids=ids, costs=costs(2.5e7))
    assert slow.mode == "segments" and costs(2.5e7).layer_ms(slow) < costs(2.5e7).layer_ms(row)
    fast = assign_context(first, last, 8, mode="auto", segment_ids=ids, costs=costs(1e12))
    assert fast.mode == "row" and choose_faster(costs(1e12), row, slow) is row


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"mode": "ring"}, r"`mode='ring'`.*Use 'row'"),
        ({"mode": "segments"}, "`segment_ids`"),
        ({"mode": "auto", "segment_ids": np.ones(64)}, "`costs`"),
        ({"method": "zigzag", "mode": "segments", "segment_ids": np.ones(64)}, r"`method='zigzag'`.*`mode='row'`"),
    ],
)
def test_wrong_arguments_are_refused(wrong, match):
    first, last, _ = causal_row([64])
    with pytest.raises(ValueError, match=match):
        assign_context(first, last, 2, **wrong)
