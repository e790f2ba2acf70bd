"""Intervals of rows against the dense mask: exact for any words, and absent only where a row has a hole."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, Kind, dense_mask, encode_words, intervals
from hf_mmparallel.kernels.bitfield_attention.intervals import row_intervals

from .mask_families import FAMILIES, HOLES, masks, permuted

ONES = BitfieldMask.from_words(encode_words(torch.ones(1, 4, dtype=torch.int64)))


def _assert_bounds(mask: BitfieldMask, window: int = 0, kernel: bool = False) -> tuple[bool, bool]:
    """Checks first and last place that each query sees; returns whether a row has holes, found and by the mask."""
    dense = dense_mask(mask, window)
    places = mask.key_positions[:, None].expand_as(dense)
    last = torch.where(dense, places, -1).amax(-1)
    first = torch.where(last < 0, 0, torch.where(dense, places, 2**30).amin(-1))
    inside = (places >= first[..., None]) & (places <= last[..., None]) & (mask.key_words != 0)[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_has_kernel", lambda tensor: kernel)  # as on a GPU
        bounds, found = intervals.row_bounds(mask, window)
        assert (row_intervals(mask, window) is None) == bool(found)
    assert bounds.first.dtype == bounds.last.dtype == torch.int32
    assert torch.equal(bounds.first, first) and torch.equal(bounds.last, last)
    return bool(found), not torch.equal(inside, dense)


@settings(max_examples=150)
@given(drawn=masks(longest=60), kernel=st.booleans())
def test_any_words_in_any_order(drawn, kernel):
    found, holes = _assert_bounds(*drawn, kernel)
    assert found == holes


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, window):
    rng = Random(window)
    any_holes = False
    for kernel in (False, False, False, False, True):
        mask = BitfieldMask.from_words(FAMILIES[family](rng, 131))
        for some in (mask, permuted(mask, rng, 50)):
            found, holes = _assert_bounds(some, window, kernel)
            assert found == holes
            any_holes |= holes
    assert any_holes == (family in HOLES) or (window and not any_holes)


def test_holes_are_never_missed_where_keys_have_several_kinds():
    safe = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        kinds, sees = torch.randint(0, 8, (2, 2, 20), generator=generator)
        words = encode_words(torch.ones_like(kinds), kinds=kinds, sees=sees)
        found, holes = _assert_bounds(BitfieldMask.from_words(words))
        assert found or not holes
        safe += found
    assert safe > 0


def test_padding_between_samples_is_no_hole():
    segment = torch.tensor([[0, 1, 1, 0, 1, 2, 0]])
    found = row_intervals(BitfieldMask.from_words(encode_words(segment, kinds=int(Kind.TEXT))))
    assert found is not None
    assert found.first.tolist() == [[0, 1, 1, 0, 1, 5, 0]]
    assert found.last.tolist() == [[-1, 1, 2, -1, 4, 5, -1]]


@pytest.mark.parametrize("kernel", [False, True])
def test_no_keys_and_no_queries(kernel, monkeypatch):
    monkeypatch.setattr(intervals, "_has_kernel", lambda tensor: kernel)
    none = ONES.query_words[:, :0]
    found = row_intervals(BitfieldMask(ONES.query_words, ONES.query_positions, none, none.int()))
    assert found is not None and (found.last < found.first).all()
    found = row_intervals(BitfieldMask(none, none.int(), ONES.key_words, ONES.key_positions))
    assert found is not None and found.first.shape == found.last.shape == (1, 0)


def test_memory_is_linear_in_tokens():
    words = FAMILIES["image_spans"](Random(0), 200_000)  # a dense mask of it would have 40 billion pairs
    assert row_intervals(BitfieldMask.from_words(words)) is not None
