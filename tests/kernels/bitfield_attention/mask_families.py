"""Words of every mask family, of random rows of odd lengths."""

from collections.abc import Callable, Sequence
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, dense_mask, encode_words
from hf_mmparallel.kernels.bitfield_attention.builders import (
    bidirectional_words,
    causal_words,
    chunked_words,
    embedded_words,
    image_span_words,
    noised_words,
    prefix_words,
    prepended_words,
    segments_of_lengths,
)

ALL = 2**14 - 1


def draw_row(rng: Random, length: int, samples: int = 3, padding: int = 7) -> tuple[Tensor, Tensor]:
    """Segments and images `[1, length]` of samples with up to three images each, some of them side by side."""
    cuts = sorted(rng.sample(range(1, length - padding), samples - 1))
    lengths = [end - begin for begin, end in zip([0, *cuts], [*cuts, length - padding], strict=True)]
    image = torch.zeros(1, length, dtype=torch.int64)
    begin = 0
    for sample in lengths:
        at = begin + rng.randrange(5)
        for number in range(1, rng.randrange(1, 4) + 1):
            size = rng.randrange(3, max(4, sample // 3))
            if at + size > begin + sample:
                break
            image[0, at : at + size] = number
            at += size + rng.choice([0, 4])
        begin += sample
    return segments_of_lengths(lengths, length), image


def _family(build: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Random, int], Tensor]:
    return lambda rng, length: build(*draw_row(rng, length))


FAMILIES: dict[str, Callable[[Random, int], Tensor]] = {
    "causal": lambda rng, length: causal_words(torch.ones(1, length, dtype=torch.int64)),
    "packed": _family(lambda segment, image: causal_words(segment)),
    "image_spans": _family(image_span_words),
    "prefix": _family(lambda segment, image: prefix_words(segment, image == 1)),
    "prepended": lambda rng, length: prepended_words([length // 4, length // 3], length - length // 4 - length // 3),
    "embedded_images": _family(embedded_words),
    "embedded_modality": _family(lambda segment, image: embedded_words(segment, image.clamp(max=1))),
    "encoder": _family(
        lambda segment, image: bidirectional_words(segment[0].bincount()[1:].tolist(), segment.shape[1])
    ),
    "windows": lambda rng, length: bidirectional_words([16] * (length // 16), length),
    "chunked": _family(lambda segment, image: chunked_words(causal_words(segment), 11)),
    "noised": _family(lambda segment, image: noised_words(image_span_words(segment, image), image * (image > 1))),
}
HOLES = ("embedded_modality", "noised")
"""Families whose rows have holes, or may have some."""


def random_words(rng: Random, batch: int, length: int) -> Tensor:
    """Words without any order: fields drawn token by token, or sorted, or left out."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def draw(high: int, ordered: float = 0.0) -> Tensor:
        values = torch.randint(0, high, (batch, length), generator=generator)
        return values.sort(dim=1).values if rng.random() < ordered else values

    return encode_words(
        segment=draw(rng.randrange(2, 5), ordered=0.7),
        span=draw(rng.choice([1, 3, 5]), ordered=0.5),
        kinds=1 << draw(rng.choice([1, 1, 3])),
        sees=rng.choice([torch.tensor(ALL), draw(8)]),
        causal=rng.choice([torch.tensor(True), draw(2)]).bool(),
        sees_all=rng.choice([torch.tensor(False), draw(2)]).bool(),
    )


def permuted(mask: BitfieldMask, rng: Random, num_queries: int, without_keys: Sequence[int] = ()) -> BitfieldMask:
    """Some of the queries of a mask in any order, and the keys in another, without some of them."""
    length = mask.query_words.shape[1]
    queries = rng.sample(range(length), num_queries)
    keys = [index for index in rng.sample(range(length), length) if index not in without_keys]
    of_queries, of_keys = mask.tensors[:2], mask.tensors[2:]
    return BitfieldMask(*(tensor[:, queries] for tensor in of_queries), *(tensor[:, keys] for tensor in of_keys))


@st.composite
def masks(draw: st.DrawFn, longest: int) -> tuple[BitfieldMask, int]:
    """A mask of any words and a window; of some masks some queries, in any order, without keys that nobody sees."""
    rng, length = Random(draw(st.integers(0, 2**32))), draw(st.integers(1, longest))
    window = draw(st.sampled_from([0, 0, 1, 9]))
    mask = BitfieldMask.from_words(random_words(rng, draw(st.integers(1, 3)), length))
    if draw(st.booleans()):
        unseen = (~dense_mask(mask, window).any(1).any(0)).nonzero()[:, 0].tolist()
        mask = permuted(mask, rng, rng.randrange(1, length + 1), without_keys=unseen[: len(unseen) // 2])
    return mask, window
