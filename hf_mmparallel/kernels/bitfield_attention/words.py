"""
The mask word: one int64 per token that encodes what the token is and which tokens it sees.

Bits of a word, from the lowest:

| bits | field | meaning |
|---|---|---|
| 0..15 | segment | the sample within the row, from 1; 0 is padding |
| 16..31 | span | a group of tokens of the sample that see each other in both directions; 0 is none |
| 32..45 | kinds | the kinds of the token as a key, one bit for each kind |
| 46..59 | sees | the kinds that it sees as a query |
| 60 | causal | it sees itself and earlier tokens |
| 61 | global | it sees its whole sample |

A query sees a key if both are in one segment, `sees` of the query and `kinds` of the key share a bit, and the key is
not later (causal), is in the same span, or the query is global. A layer's sliding window is not in the word: with a
window `w`, a key must also be less than `w` positions before the query. The word of padding is 0; padding sees no key
and no query sees it. [`dense_mask`] is this definition as code.

"Later" refers to the position in the row, not to the position ids of rotary embeddings, which may repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor

SEGMENT_BITS = 16
SPAN_BITS = 16
KIND_BITS = 14
SPAN_SHIFT = SEGMENT_BITS
KIND_SHIFT = SPAN_SHIFT + SPAN_BITS
SEES_SHIFT = KIND_SHIFT + KIND_BITS
CAUSAL_SHIFT = SEES_SHIFT + KIND_BITS
GLOBAL_SHIFT = CAUSAL_SHIFT + 1

MAX_SEGMENTS = 2**SEGMENT_BITS - 1
MAX_SPANS = 2**SPAN_BITS - 1
ALL_KINDS = 2**KIND_BITS - 1


class Kind(IntFlag):
    """The named kinds of tokens; the higher bits are free."""

    TEXT = 1
    IMAGE = 2
    AUDIO = 4
    VIDEO = 8


@dataclass(frozen=True)
class WordFields:
    """The fields of words, each a tensor of the words' shape."""

    segment: Tensor  # int64, 0 for padding
    span: Tensor  # int64, 0 for none
    kinds: Tensor  # int64, a bit for each kind
    sees: Tensor  # int64, a bit for each kind
    causal: Tensor  # bool
    sees_all: Tensor  # bool, the bit `global`


def encode_words(
    segment: Tensor,
    span: Tensor | int = 0,
    kinds: Tensor | int = int(Kind.TEXT),
    sees: Tensor | int = ALL_KINDS,
    causal: Tensor | bool = True,
    sees_all: Tensor | bool = False,
) -> Tensor:
    """
    Packs fields into int64 words of the shape of `segment`, 0 where the segment is 0.

    Args:
        segment (`torch.Tensor` of any shape, integers): The sample of each token, from 1; 0 is padding.
        span (`torch.Tensor` or `int`, *optional*, defaults to 0): The bidirectional group of each token, 0 for none.
        kinds (`torch.Tensor` or `int`, *optional*, defaults to text): The kinds of each token.
        sees (`torch.Tensor` or `int`, *optional*, defaults to all kinds): The kinds that each token sees.
        causal (`torch.Tensor` or `bool`, *optional*, defaults to `True`):
            Whether each token sees itself and earlier tokens.
        sees_all (`torch.Tensor` or `bool`, *optional*, defaults to `False`): Whether each token sees its whole sample.

    Raises:
        `ValueError`: If a field does not fit its bits.
    """
    fields = (
        ("segment", segment, SEGMENT_BITS, 0),
        ("span", span, SPAN_BITS, SPAN_SHIFT),
        ("kinds", kinds, KIND_BITS, KIND_SHIFT),
        ("sees", sees, KIND_BITS, SEES_SHIFT),
        ("causal", causal, 1, CAUSAL_SHIFT),
        ("sees_all", sees_all, 1, GLOBAL_SHIFT),
    )
    words = torch.zeros_like(segment, dtype=torch.int64)
    for name, value, bits, shift in fields:
        value = torch.as_tensor(value, device=segment.device).to(torch.int64)
        if value.numel() and (value.min() < 0 or value.max() >= 2**bits):
            raise ValueError(
                f"`{name}` has values from {int(value.min())} to {int(value.max())}; a mask word holds 0 to "
                f"{2**bits - 1}. Use fewer of them in one row."
            )
        words |= value << shift
    return torch.where(segment > 0, words, torch.zeros_like(words))


def decode_words(words: Tensor) -> WordFields:
    """The fields of int64 words of any shape."""
    return WordFields(
        segment=words & MAX_SEGMENTS,
        span=(words >> SPAN_SHIFT) & MAX_SPANS,
        kinds=(words >> KIND_SHIFT) & ALL_KINDS,
        sees=(words >> SEES_SHIFT) & ALL_KINDS,
        causal=((words >> CAUSAL_SHIFT) & 1).bool(),
        sees_all=((words >> GLOBAL_SHIFT) & 1).bool(),
    )


# The mask of one attention call: the words and positions of its queries and keys.


@dataclass(frozen=True)
class BitfieldMask:
    """
    Words and positions of the queries and of the keys.

    A position is the index of a token in its row before the row was permuted or sharded; no two keys of a row that are
    not padding have the same position. Tokens may be in any order, and keys that no query sees may be missing.

    Args:
        query_words (`torch.Tensor` of shape `[batch, query_length]`): int64.
        query_positions (`torch.Tensor` of shape `[batch, query_length]`): int32.
        key_words (`torch.Tensor` of shape `[batch, key_length]`): int64.
        key_positions (`torch.Tensor` of shape `[batch, key_length]`): int32.
    """

    query_words: Tensor
    query_positions: Tensor
    key_words: Tensor
    key_positions: Tensor

    @classmethod
    def from_words(cls, words: Tensor) -> BitfieldMask:
        """The mask of whole rows in their original order; `words` is int64 `[batch, length]`."""
        positions = torch.arange(words.shape[-1], dtype=torch.int32, device=words.device).expand_as(words)
        return cls(words, positions, words, positions)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors, in the order of the arguments."""
        return self.query_words, self.query_positions, self.key_words, self.key_positions

    def to(self, device: torch.device | str) -> BitfieldMask:
        return BitfieldMask(*(tensor.to(device) for tensor in self.tensors))
