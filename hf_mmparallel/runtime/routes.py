"""
The ranks between which each token of a message is sent: the change of layout between two meshes, as pure functions.

A stage runs on a mesh of cp x tp ranks: each cp rank has tokens of its own, which all ranks of its tp group hold. A
message is a set of routes, one for each pair of a cp rank of the producer and a cp rank of the consumer. Hidden states
stay on their cp rank; features go where the placeholders are that they replace.

On a route each token crosses once: the tokens are cut into as many equal slices as the consumer's tp group has ranks,
slice `i` goes from producer rank `i mod a` to consumer rank `i`, and the consumer ranks gather the slices. The
gradient takes the same way back: consumer rank `i` returns slice `i` (its gradient is replicated too), and the
producer ranks sum what they received. That is the adjoint, never an average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Mesh = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Slice:
    """Consecutive tokens of a route, between one global rank and another."""

    producer: int  # computes them
    consumer: int  # receives them in the forward
    start: int
    stop: int  # one past the last token

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def slice_size(num_tokens: int, num_slices: int) -> int:
    """Tokens of each slice; the last ones may be shorter."""
    return -(-num_tokens // num_slices)


def slices(num_tokens: int, producers: Sequence[int], consumers: Sequence[int]) -> list[Slice]:
    """Cuts `num_tokens` tokens between two tp groups into slices, without the empty ones."""
    size = slice_size(num_tokens, len(consumers))
    result = []
    for index, consumer in enumerate(consumers):
        start, stop = min(index * size, num_tokens), min((index + 1) * size, num_tokens)
        if stop > start:
            result.append(Slice(producers[index % len(producers)], consumer, start, stop))
    return result


@dataclass(frozen=True)
class Route:
    """The tokens of a message between a cp rank of the producer and a cp rank of the consumer."""

    producers: tuple[int, ...]  # global ranks of the tp group
    consumers: tuple[int, ...]
    num_tokens: int
    # int64 `[num_tokens]`, ascending: their indices in the message; `None` for all of them
    tokens: Tensor | None = None

    @cached_property
    def slices(self) -> list[Slice]:
        return slices(self.num_tokens, self.producers, self.consumers)


def hidden_state_routes(num_tokens: int, producer: Mesh, consumer: Mesh) -> list[Route]:
    """Routes hidden states, of which each cp rank has `num_tokens`, from each cp rank to the same one."""
    return [Route(sources, targets, num_tokens) for sources, targets in zip(producer, consumer, strict=True)]


def feature_routes(
    num_tokens: int, producer: Mesh, consumer: Mesh, computed_on: Tensor | None, needed_on: Tensor | None
) -> list[Route]:
    """
    Routes features, in the order of the producer's cp ranks and then the consumer's. `computed_on` and `needed_on` are
    int64 `[num_tokens]`: the cp rank of the producer and the consumer for each token, `None` for a single cp rank.
    """
    if len(producer) == len(consumer) == 1:
        return [Route(producer[0], consumer[0], num_tokens)]
    pair = torch.zeros(num_tokens, dtype=torch.int64)
    if computed_on is not None:
        pair += computed_on * len(consumer)
    if needed_on is not None:
        pair += needed_on
    counts = pair.bincount(minlength=len(producer) * len(consumer)).tolist()
    groups = pair.argsort(stable=True).split(counts)
    ends = [(sources, targets) for sources in producer for targets in consumer]
    return [Route(*end, count, tokens) for end, count, tokens in zip(ends, counts, groups, strict=True)]


def select(tokens: Tensor, index: Tensor | None) -> Tensor:
    """Returns `tokens[index]`, without a copy for all tokens in order: for no index, or one that counts up."""
    if index is None or (len(index) == len(tokens) and torch.equal(index, torch.arange(len(tokens)))):
        return tokens
    return tokens[index.to(tokens.device)]


def compose(outer: Tensor | None, inner: Tensor | None) -> Tensor | None:
    """Returns `outer[inner]`, where `None` means all tokens in order."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer[inner]


def num_tokens_of(shape: Sequence[int]) -> int:
    """Counts tokens of a hidden state or a feature, whose last dimension is its width."""
    return math.prod(shape[:-1])
