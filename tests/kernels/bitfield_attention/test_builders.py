"""The words of each family against the mask that the family is defined by, pair by pair."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, builders, dense_mask, encode_words
from tests.kernels.bitfield_attention.mask_families import draw_row, lengths_of

LENGTH = 97


def _dense(words: Tensor) -> Tensor:
    return dense_mask(BitfieldMask.from_words(words))[0]


def _pairs(rule: Callable[[int, int], bool], segment: Tensor) -> Tensor:
    """The mask of a rule over pairs of tokens of one sample."""
    samples = segment[0].tolist()
    index = range(len(samples))
    return torch.tensor([[samples[q] == samples[k] > 0 and rule(q, k) for k in index] for q in index])


@pytest.fixture(params=range(3))
def row(request) -> tuple[Tensor, Tensor, list[int]]:
    segment, image = draw_row(Random(request.param), LENGTH)
    return segment, image, image[0].tolist()


def test_causal(row):
    segment, _, _ = row
    assert torch.equal(_dense(builders.causal_words(segment)), _pairs(lambda q, k: k <= q, segment))


def test_image_spans(row):
    segment, image, of = row
    expected = _pairs(lambda q, k: k <= q or of[q] == of[k] > 0, segment)
    assert torch.equal(_dense(builders.image_span_words(segment, image)), expected)


def test_prefix(row):
    segment, image, of = row
    expected = _pairs(lambda q, k: k <= q or of[q] == of[k] == 1, segment)
    assert torch.equal(_dense(builders.prefix_words(segment, image == 1)), expected)


def test_embedded(row):
    segment, image, of = row
    expected = _pairs(lambda q, k: of[q] == of[k] if of[q] else k <= q, segment)
    assert torch.equal(_dense(builders.embedded_words(segment, image)), expected)


def test_prepended():
    found = _dense(builders.prepended_words([3, 5], 4))
    owner = [1] * 3 + [2] * 5 + [0] * 4
    one_sample = torch.ones(1, 12, dtype=torch.int64)
    assert torch.equal(found, _pairs(lambda q, k: owner[q] == owner[k] if owner[q] else k <= q, one_sample))


def test_bidirectional(row):
    segment, _, _ = row
    assert torch.equal(
        _dense(builders.bidirectional_words(lengths_of(segment), LENGTH)), _pairs(lambda *_: True, segment)
    )


def test_chunked(row):
    segment, _, _ = row
    place, counts = [], {}
    for sample in segment[0].tolist():
        place.append(counts.get(sample, 0))
        counts[sample] = place[-1] + 1
    words = builders.chunked_words(builders.causal_words(segment), 7)
    assert torch.equal(_dense(words), _pairs(lambda q, k: k <= q and place[q] // 7 == place[k] // 7, segment))


def test_noised(row):
    segment, image, of = row
    words = builders.noised_words(builders.image_span_words(segment, image), image * (image == 2))
    expected = _pairs(
        lambda q, k: of[q] == 2 if of[k] == 2 else k <= q or of[q] == of[k] > 0,
        segment,
    )
    assert torch.equal(_dense(words), expected)
    assert words[segment == 0].count_nonzero() == 0


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


def test_what_a_word_cannot_say_is_refused():
    one = torch.ones(1, 70_000, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"do not fit a row of 4"):
        builders.segments_of_lengths([3, 2], 4)
    with pytest.raises(ValueError, match="4 image tokens; its images have 5"):
        builders.image_index(torch.ones(1, 4, dtype=torch.bool), [2, 3])
    with pytest.raises(ValueError, match="`segment` has values from 1 to 70000"):
        builders.bidirectional_words([1] * 70_000)
    with pytest.raises(ValueError, match="`span` has values"):
        builders.image_span_words(one, one.cumsum(1))
    with pytest.raises(ValueError, match="70000 chunks of 1 tokens"):
        builders.chunked_words(builders.causal_words(one), 1)
    with pytest.raises(ValueError, match="in several pieces"):
        builders.chunked_words(encode_words(torch.tensor([[1, 2, 1]])), 2)
    with pytest.raises(ValueError, match="`chunk=0`"):
        builders.chunked_words(one, 0)
    with pytest.raises(ValueError, match="11 noised images"):
        builders.noised_words(one[:, :11], torch.arange(1, 12)[None])
