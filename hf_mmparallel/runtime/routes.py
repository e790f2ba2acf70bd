"""
The ranks between which each token of a message is sent: the change of layout between two meshes, as pure functions.

A stage runs on a mesh of cp x tp ranks: each cp rank has tokens of its own, which all ranks of its tp group hold. A
message is a set of routes, one for each pair of a cp rank of the producer and a cp rank of the consumer. Hidden states
stay on their cp rank; features go where the placeholders are that they replace.

On a route each token crosses once: the tokens are cut into as many equal slices as the consumer's tp group has ranks,
slice `i` goes from producer rank `i mod a` to consumer rank `i`, and the consumer ranks gather the slices among
themselves. The gradient takes the same way back: consumer rank `i` returns slice `i` (its gradient is replicated too),
and the producer ranks sum what they received. That is the adjoint, never an average.
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
    """
    Consecutive tokens of a route, between one rank and another.

    Args:
        producer (`int`): Global rank that computes them.
        consumer (`int`): Global rank that receives them in the forward.
        start (`int`): The first token.
        stop (`int`): One past the last token.
    """

    producer: int
    consumer: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def slice_size(num_tokens: int, num_slices: int) -> int:
    """Tokens of each slice; the last ones may be shorter."""
    return -(-num_tokens // num_slices)


def slices(num_tokens: int, producers: Sequence[int], consumers: Sequence[int]) -> list[Slice]:
    """The slices of `num_tokens` tokens between two tp groups, without the empty ones."""
    size = slice_size(num_tokens, len(consumers))
    result = []
    for index, consumer in enumerate(consumers):
        start, stop = min(index * size, num_tokens), min((index + 1) * size, num_tokens)
        if stop > start:
            result.append(Slice(producers[index % len(producers)], consumer, start, stop))
    return result


@dataclass(frozen=True)
class Route:
    """
    The tokens of a message between a cp rank of the producer and a cp rank of the consumer.

    Args:
        producers (`tuple[int, ...]`): Global ranks of the producer's tp group.
        consumers (`tuple[int, ...]`): Global ranks of the consumer's tp group.
        num_tokens (`int`): Number of tokens.
        tokens (`torch.Tensor` of shape `[num_tokens]`, *optional*):
            int64, ascending: indices of its tokens in the message; `None` for all of them.
    """

    producers: tuple[int, ...]
    consumers: tuple[int, ...]
    num_tokens: int
    tokens: Tensor | None = None

    @cached_property
    def slices(self) -> list[Slice]:
        return slices(self.num_tokens, self.producers, self.consumers)


def hidden_state_routes(num_tokens: int, producer: Mesh, consumer: Mesh) -> list[Route]:
    """The routes of hidden states, of which each cp rank has `num_tokens`: from each cp rank to the same one."""
    return [Route(sources, targets, num_tokens) for sources, targets in zip(producer, consumer, strict=True)]


def feature_routes(
    num_tokens: int, producer: Mesh, consumer: Mesh, computed_on: Tensor | None, needed_on: Tensor | None
) -> list[Route]:
    """
    The routes of features, in the order of the producer's cp ranks and then the consumer's.

    Args:
        num_tokens (`int`): Tokens of the message.
        producer (`Mesh`): Ranks of the stage that computes them.
        consumer (`Mesh`): Ranks of the stage that they enter.
        computed_on (`torch.Tensor` of shape `[num_tokens]`, *optional*):
            int64: the producer's cp rank that computes each token; `None` for a single cp rank.
        needed_on (`torch.Tensor` of shape `[num_tokens]`, *optional*):
            int64: the consumer's cp rank that needs each token; `None` for a single cp rank.
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
    """`tokens[index]`, without a copy for all tokens in order: for no index, or one that counts up."""
    if index is None or (len(index) == len(tokens) and torch.equal(index, torch.arange(len(tokens)))):
        return tokens
    return tokens[index.to(tokens.device)]


def compose(outer: Tensor | None, inner: Tensor | None) -> Tensor | None:
    """`outer[inner]`, where `None` means all tokens in order."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer[inner]


def num_tokens_of(shape: Sequence[int]) -> int:
    """Tokens of a hidden state or a feature, whose last dimension is its width."""
    return math.prod(shape[:-1])
