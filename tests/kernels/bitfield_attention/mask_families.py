"""Words of every mask family, of random rows of odd lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, encode_words
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


def lengths_of(segment: Tensor) -> list[int]:
    return torch.bincount(segment[segment > 0])[1:].tolist()


def _windows(rng: Random, length: int) -> Tensor:
    return bidirectional_words([16] * (length // 16), length)


def _prepended(rng: Random, length: int) -> Tensor:
    return prepended_words([length // 4, length // 3], length - length // 4 - length // 3)


def _family(build: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Random, int], Tensor]:
    return lambda rng, length: build(*draw_row(rng, length))


FAMILIES: dict[str, Callable[[Random, int], Tensor]] = {
    "causal": lambda rng, length: causal_words(torch.ones(1, length, dtype=torch.int64)),
    "packed": _family(lambda segment, image: causal_words(segment)),
    "image_spans": _family(image_span_words),
    "prefix": _family(lambda segment, image: prefix_words(segment, image == 1)),
    "prepended": _prepended,
    "embedded_images": _family(embedded_words),
    "embedded_modality": _family(lambda segment, image: embedded_words(segment, image.clamp(max=1))),
    "encoder": _family(lambda segment, image: bidirectional_words(lengths_of(segment), segment.shape[1])),
    "windows": _windows,
    "chunked": _family(lambda segment, image: chunked_words(causal_words(segment), 11)),
    "noised": _family(lambda segment, image: noised_words(image_span_words(segment, image), image)),
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
    return BitfieldMask(
        mask.query_words[:, queries],
        mask.query_positions[:, queries],
        mask.key_words[:, keys],
        mask.key_positions[:, keys],
    )
