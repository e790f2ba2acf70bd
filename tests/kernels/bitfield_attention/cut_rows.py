"""Packed rows, ways to cut them over ranks, and what attention of the whole row gives on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_mmparallel.arrange.token_segments import assign_context
from hf_mmparallel.kernels.bitfield_attention import (
    BitfieldMask,
    Kind,
    decode_words,
    encode_words,
    reference_attention,
)
from hf_mmparallel.kernels.bitfield_attention.builders import segments_of_lengths
from hf_mmparallel.kernels.bitfield_attention.intervals import row_bounds

BLOCK = 8
FAMILIES = ("causal", "images", "prefix", "isolated", "kinds", "encoder")


def packed_words(lengths: list[int], family: str = "causal", padding: int = 0) -> Tensor:
    """Words `[1, T]` of samples of these lengths, the second quarter of each being an image, then padding."""
    parts = [*lengths, padding]
    segment = segments_of_lengths(lengths, sum(parts))
    place = torch.cat([torch.arange(length) for length in parts])[None]
    length = torch.tensor(parts).repeat_interleave(torch.tensor(parts))
    image = (place >= length // 4) & (place < length // 2)
    kinds = torch.where(image, int(Kind.IMAGE), int(Kind.TEXT))
    fields: dict[str, dict[str, Any]] = {
        "causal": {},
        "images": {"span": image.long(), "kinds": kinds},
        "prefix": {"span": (place < 7).long()},
        "isolated": {"span": image.long(), "kinds": kinds, "causal": ~image},
        # text sees text only, images see all: keys with holes
        "kinds": {"kinds": kinds, "sees": torch.where(image, 3, int(Kind.TEXT))},
        "encoder": {"causal": False, "sees_all": True},
    }
    return encode_words(segment, **fields[family])


def cut(words: Tensor, num_ranks: int, method: Any = "lpt", mode: Any = "row") -> dict[str, Any]:
    """Arguments of `shard_sequence` for one way to cut a row."""
    bounds, _ = row_bounds(BitfieldMask.from_words(words))
    segments = decode_words(words[0]).segment.numpy()
    first, last = bounds.first[0].long().numpy(), bounds.last[0].long().numpy()
    found = assign_context(first, last, num_ranks, block=BLOCK, method=method, mode=mode, segment_ids=segments)
    return {"order": found.order, "positions": found.positions, "gathered": found.gathered, "block": BLOCK}


def needed_blocks(words: Tensor, order: np.ndarray, num_ranks: int) -> np.ndarray:
    """The blocks `[R, n]` whose segments lie on several ranks, and of each rank as many as of the neediest one."""
    tokens = torch.as_tensor(order)
    shards = torch.where(tokens >= 0, decode_words(words[0]).segment[tokens.clamp_min(0)], 0).view(num_ranks, -1)
    homes = torch.stack([torch.bincount(shard, minlength=int(shards.max()) + 1) > 0 for shard in shards])
    spanning = homes.sum(0) > 1
    spanning[0] = False
    needed = spanning[shards].view(num_ranks, -1, BLOCK).any(2)
    most = int(needed.sum(1).max())
    return needed.int().argsort(dim=1, descending=True, stable=True)[:, :most].sort(dim=1).values.numpy()


@dataclass(frozen=True)
class Inputs:
    """Tensors of one attention call, of a whole row or of one rank, and the gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    sinks: Tensor | None
    options: dict[str, Any]

    @classmethod
    def draw(cls, seed: int, length: int, heads: tuple[int, int], sinks: bool = False, **options: Any) -> Inputs:
        """Random float64 tensors of head dimension 8."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        query, grad_out = normal(2, 1, heads[0], length, 8)
        key, value = normal(2, 1, heads[1], length, 8)
        return cls(query, key, value, grad_out, normal(heads[0]) if sinks else None, options)

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""
        tensors = (self.query, self.key, self.value, self.grad_out, self.sinks)
        return Inputs(*(None if t is None else t.to(dtype) for t in tensors), self.options)  # type: ignore[arg-type]

    def of_rank(self, shard: Any) -> Inputs:
        """One rank's rows; padding gets numbers that must not matter."""
        tensors = (self.query, self.key, self.value)
        rows = [shard.take(tensor, 2, padding=7.0) for tensor in tensors]
        return Inputs(*rows, shard.take(self.grad_out, 2), self.sinks, self.options)

    def run(self, attention: Any, *where: Any) -> dict[str, Tensor]:
        """Output and gradients of `attention(query, key, value, *where, sinks=..., **options)`."""
        leaves = {"query": self.query, "key": self.key, "value": self.value, "sinks": self.sinks}
        leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items() if t is not None}
        states = (leaves["query"], leaves["key"], leaves["value"])
        out = attention(*states, *where, sinks=leaves.get("sinks"), **self.options)
        out.backward(self.grad_out)
        return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}  # type: ignore[dict-item]


def one_rank(inputs: Inputs, words: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the definition on the whole row, in float64; rows of padding get 0."""

    def attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, **options: Any) -> Tensor:
        held = words[0] != 0
        mask = BitfieldMask.from_words(words)
        mask = BitfieldMask(*(tensor[:, held] for tensor in vars(mask).values()))
        rows = (query[:, :, held], key[:, :, held], value[:, :, held])
        out = torch.zeros_like(query)
        out[:, :, held] = reference_attention(*rows, mask, sinks=sinks, **options)[0]
        return out

    return inputs.run(attention)
