"""The mask of one attention call: the words and positions of its queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
        """The mask on another device."""
        return BitfieldMask(*(tensor.to(device) for tensor in self.tensors))
