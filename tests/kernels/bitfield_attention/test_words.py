"""The word and its definition, spelled out again with plain integers."""

from random import Random

import pytest
import torch

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, decode_words, dense_mask, encode_words

from .mask_families import permuted, random_words


def _sees(query: int, at_query: int, key: int, at_key: int, window: int) -> bool:
    """The rule of a word, bit by bit."""
    if query & 0xFFFF == 0 or query & 0xFFFF != key & 0xFFFF:
        return False
    if (query >> 46 & 0x3FFF) & (key >> 32 & 0x3FFF) == 0 or (window and at_key <= at_query - window):
        return False
    back = query >> 60 & 1 and at_key <= at_query
    together = query >> 16 & 0xFFFF and query >> 16 & 0xFFFF == key >> 16 & 0xFFFF
    return bool(back or together or query >> 61 & 1)


@pytest.mark.parametrize("window", [0, 4])
def test_the_dense_mask_is_the_rule(window):
    rng = Random(window)
    for _ in range(5):
        mask = permuted(BitfieldMask.from_words(random_words(rng, 2, 19)), rng, 11)
        dense = dense_mask(mask, window).tolist()
        for row in range(2):
            query_words, query_places, key_words, key_places = (tensor[row].tolist() for tensor in mask.tensors)
            keys = list(zip(key_words, key_places, strict=True))
            for found, *query in zip(dense[row], query_words, query_places, strict=True):
                assert found == [_sees(*query, *key, window) for key in keys]


def test_fields_come_back():
    shape = (3, 40)
    fields = {
        "segment": torch.randint(1, 2**16, shape),
        "span": torch.randint(0, 2**16, shape),
        "kinds": torch.randint(0, 2**14, shape),
        "sees": torch.randint(0, 2**14, shape),
        "causal": torch.rand(shape) < 0.5,
        "sees_all": torch.rand(shape) < 0.5,
    }
    words = encode_words(**fields)
    assert words.min() > 0
    for name, value in fields.items():
        assert torch.equal(getattr(decode_words(words), name), value), name


def test_padding_is_zero():
    assert encode_words(torch.tensor([0, 1, 0]), span=torch.tensor([5, 5, 5])).count_nonzero() == 1


@pytest.mark.parametrize(
    ("name", "value"), [("segment", 2**16), ("span", 2**16), ("kinds", 2**14), ("sees", -1), ("span", -1)]
)
def test_what_does_not_fit_its_bits_is_refused(name, value):
    fields = {"segment": torch.ones(3, dtype=torch.int64), name: torch.full((3,), value)}
    with pytest.raises(ValueError, match=f"`{name}` has values from {value} to {value}"):
        encode_words(**fields)
