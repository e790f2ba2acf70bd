"""The words of each family against the mask that the family is defined by, pair by pair."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, builders, decode_words, dense_mask, encode_words

from .mask_families import FAMILIES, draw_row, permuted, random_words

LENGTH = 97
ONE = torch.ones(1, 70_000, dtype=torch.int64)


class Row(NamedTuple):
    """What a rule reads of the tokens of a row: their image, and their place in their sample."""

    image: list[int]
    place: list[int]


Rule = Callable[[Row, int, int], bool]
RULES: dict[str, Rule] = {
    "packed": lambda of, q, k: k <= q,
    "image_spans": lambda of, q, k: k <= q or of.image[q] == of.image[k] > 0,
    "prefix": lambda of, q, k: k <= q or of.image[q] == of.image[k] == 1,
    "embedded_images": lambda of, q, k: of.image[q] == of.image[k] if of.image[q] else k <= q,
    "embedded_modality": lambda of, q, k: of.image[k] > 0 if of.image[q] else k <= q,
    "encoder": lambda of, q, k: True,
    "chunked": lambda of, q, k: k <= q and of.place[q] // 11 == of.place[k] // 11,
    "noised": lambda of, q, k: (
        of.image[q] == of.image[k] if of.image[k] > 1 else k <= q or of.image[q] == of.image[k] > 0
    ),
}


def _dense(words: Tensor) -> Tensor:
    return dense_mask(BitfieldMask.from_words(words))[0]


def _assert_rule(words: Tensor, segment: Tensor, image: Tensor, rule: Rule) -> None:
    """The rule holds for all pairs of tokens of one sample, and no other pair is visible."""
    samples = segment[0].tolist()
    of = Row(image[0].tolist(), [samples[:index].count(sample) for index, sample in enumerate(samples)])
    index = range(len(samples))
    pairs = [[samples[q] == samples[k] > 0 and rule(of, q, k) for k in index] for q in index]
    assert torch.equal(_dense(words), torch.tensor(pairs))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", RULES)
def test_families(family, seed):
    segment, image = draw_row(Random(seed), LENGTH)
    words = FAMILIES[family](Random(seed), LENGTH)
    assert words[segment == 0].count_nonzero() == 0
    _assert_rule(words, segment, image, RULES[family])


def test_prepended():
    owner = torch.tensor([[1] * 3 + [2] * 5 + [0] * 4])
    _assert_rule(builders.prepended_words([3, 5], 4), torch.ones_like(owner), owner, RULES["embedded_images"])


def test_images_side_by_side_stay_two():
    is_image = torch.tensor([[False, True, True, True, True, True, False]])
    index = builders.image_index(is_image, [2, 3])
    assert index.tolist() == [[0, 1, 1, 2, 2, 2, 0]]
    dense = _dense(builders.image_span_words(torch.ones_like(index), index))
    assert not dense[2, 3] and dense[1, 2] and dense[3, 5]
    assert builders.image_index(is_image[0], [5]).tolist() == [0, 1, 1, 1, 1, 1, 0]


def test_lengths_and_padding():
    assert builders.segments_of_lengths([2, 0, 3], 7).tolist() == [[1, 1, 3, 3, 3, 0, 0]]
    assert builders.segments_of_lengths([]).shape == (1, 0)


@pytest.mark.parametrize(
    ("build", "arguments", "salient"),
    [
        (builders.segments_of_lengths, ([3, 2], 4), "a row of 4"),
        (builders.image_index, (torch.ones(1, 4, dtype=torch.bool), [2, 3]), "4 image tokens; its images have 5"),
        (builders.bidirectional_words, ([1] * 70_000,), "`segment` has values from 1 to 70000"),
        (builders.image_span_words, (ONE, ONE.cumsum(1)), "`span` has values"),
        (builders.chunked_words, (builders.causal_words(ONE), 1), "70000 chunks of 1 tokens"),
        (builders.chunked_words, (encode_words(torch.tensor([[1, 2, 1]])), 2), "several pieces"),
        (builders.chunked_words, (ONE, 0), "`chunk=0`"),
        (builders.noised_words, (ONE[:, :11], torch.arange(1, 12)[None]), "11 noised images"),
    ],
)
def test_what_a_word_cannot_say_is_refused(build: Callable[..., Any], arguments: tuple, salient: str):
    with pytest.raises(ValueError, match=salient):
        build(*arguments)


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
