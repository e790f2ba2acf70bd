"""Intervals of rows against the dense mask: exact for any words, and absent only where a row has a hole."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, Kind, dense_mask, encode_words, row_intervals
from hf_mmparallel.kernels.bitfield_attention.intervals import row_bounds
from tests.kernels.bitfield_attention.mask_families import FAMILIES, HOLES, permuted, random_words


def _bounds_of(mask: BitfieldMask, window: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """First and last place that each query sees, and whether some place between belongs to a key it does not see."""
    dense = dense_mask(mask, window)
    places = mask.key_positions[:, None].expand_as(dense)
    last = torch.where(dense, places, -1).amax(-1)
    first = torch.where(last < 0, 0, torch.where(dense, places, 2**30).amin(-1))
    inside = (places >= first[..., None]) & (places <= last[..., None]) & (mask.key_words != 0)[:, None]
    return first, last, not torch.equal(inside, dense)


def _assert_exact(mask: BitfieldMask, window: int) -> bool:
    first, last, holes = _bounds_of(mask, window)
    bounds, found_holes = row_bounds(mask, window)
    assert torch.equal(bounds.first, first.to(torch.int32)) and torch.equal(bounds.last, last.to(torch.int32))
    assert found_holes == holes
    assert (row_intervals(mask, window) is None) == holes
    return holes


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 3),
    length=st.integers(1, 60),
    window=st.sampled_from([0, 0, 1, 6]),
    cut=st.booleans(),
)
def test_any_words_in_any_order(seed, batch, length, window, cut):
    rng = Random(seed)
    mask = BitfieldMask.from_words(random_words(rng, batch, length))
    if cut:
        unseen = (~dense_mask(mask, window).any(1).any(0)).nonzero()[:, 0].tolist()
        mask = permuted(mask, rng, rng.randrange(1, length + 1), without_keys=unseen[: len(unseen) // 2])
    _assert_exact(mask, window)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, window):
    rng = Random(window)
    holes = False
    for _ in range(5):
        mask = BitfieldMask.from_words(FAMILIES[family](rng, 131))
        holes |= _assert_exact(mask, window)
        _assert_exact(permuted(mask, rng, 50), window)
    assert not holes or family in HOLES
    assert holes or window or family not in HOLES


def test_holes_are_never_missed_where_keys_have_several_kinds():
    rng = Random(0)
    safe = 0
    for _ in range(60):
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        kinds, sees = (torch.randint(0, 8, (2, 20), generator=generator) for _ in range(2))
        mask = BitfieldMask.from_words(encode_words(torch.ones_like(kinds), kinds=kinds, sees=sees))
        first, last, holes = _bounds_of(mask, 0)
        bounds, found_holes = row_bounds(mask)
        assert torch.equal(bounds.first, first.to(torch.int32)) and torch.equal(bounds.last, last.to(torch.int32))
        assert found_holes or not holes
        safe += found_holes
    assert safe > 0


def test_padding_between_samples_is_no_hole():
    segment = torch.tensor([[0, 1, 1, 0, 1, 2, 0]])
    found = row_intervals(BitfieldMask.from_words(encode_words(segment, kinds=int(Kind.TEXT))))
    assert found is not None
    assert found.first.tolist() == [[0, 1, 1, 0, 1, 5, 0]]
    assert found.last.tolist() == [[-1, 1, 2, -1, 4, 5, -1]]


def test_no_keys_and_no_queries():
    words = encode_words(torch.ones(1, 4, dtype=torch.int64))
    whole = BitfieldMask.from_words(words)
    none = torch.zeros(1, 0, dtype=torch.int64)
    found = row_intervals(BitfieldMask(words, whole.query_positions, none, none.int()))
    assert found is not None and (found.last < found.first).all()
    found = row_intervals(BitfieldMask(none, none.int(), words, whole.key_positions))
    assert found is not None and found.first.shape == (1, 0)


def test_memory_is_linear_in_tokens():
    words = FAMILIES["image_spans"](Random(0), 200_000)  # a dense mask of it would have 40 billion pairs
    assert row_intervals(BitfieldMask.from_words(words)) is not None
