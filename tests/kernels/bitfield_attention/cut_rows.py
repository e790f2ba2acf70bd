"""Packed rows, ways to cut them over ranks, and what attention of the whole row gives on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_mmparallel.arrange.tokens import assign_context
from hf_mmparallel.kernels.bitfield_attention import (
    BitfieldMask,
    Kind,
    decode_words,
    dense_mask,
    encode_words,
    reference_attention,
)

BLOCK = 8
METHODS = ("lpt", "zigzag", "contiguous", "random")
FAMILIES = ("causal", "images", "prefix", "isolated", "kinds", "encoder")


def packed_words(lengths: list[int], family: str = "causal", padding: int = 0) -> Tensor:
    """Words `[1, T]` of samples of these lengths, the second quarter of each being an image, then padding."""
    fields: dict[str, list[Tensor]] = {name: [] for name in ("segment", "image", "place")}
    for i, length in enumerate([*lengths, padding]):
        place = torch.arange(length)
        fields["segment"].append(torch.full((length,), (i + 1) % (len(lengths) + 1)))
        fields["image"].append((place >= length // 4) & (place < length // 2))
        fields["place"].append(place)
    segment, image, place = (torch.cat(parts)[None] for parts in fields.values())
    kinds = torch.where(image, int(Kind.IMAGE), int(Kind.TEXT))
    if family == "causal":
        return encode_words(segment)
    if family == "images":
        return encode_words(segment, span=image.long(), kinds=kinds)
    if family == "prefix":
        return encode_words(segment, span=(place < 7).long())
    if family == "isolated":
        return encode_words(segment, span=image.long(), kinds=kinds, causal=~image)
    if family == "kinds":  # text sees text only, images see all: keys with holes
        return encode_words(segment, kinds=kinds, sees=torch.where(image, 3, int(Kind.TEXT)))
    return encode_words(segment, causal=False, sees_all=True)


def cut(
    words: Tensor, num_ranks: int, method: str = "lpt", mode: str = "row", seed: int = 0, block: int = BLOCK
) -> dict[str, Any]:
    """Arguments of `shard_sequence` for one way to cut a row."""
    seen = dense_mask(BitfieldMask.from_words(words))[0]
    places = torch.arange(words.shape[1])
    first = torch.where(seen, places, words.shape[1]).amin(1).numpy()
    last = torch.where(seen, places, -1).amax(1).numpy()
    found = assign_context(
        first,
        last,
        num_ranks,
        block=block,
        method=method,  # type: ignore[arg-type]
        mode=mode,  # type: ignore[arg-type]
        segment_ids=decode_words(words[0]).segment.numpy(),
        seed=seed,
    )
    return {"order": found.order, "positions": found.positions, "gathered": found.gathered, "block": block}


def needed_blocks(words: Tensor, order: np.ndarray, num_ranks: int) -> np.ndarray:
    """The blocks `[R, n]` whose segments lie on several ranks, and of each rank as many as of the neediest one."""
    segments = torch.where(
        torch.as_tensor(order) >= 0, decode_words(words[0]).segment[torch.as_tensor(order).clamp_min(0)], 0
    )
    shards = segments.view(num_ranks, -1)
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
    def draw(
        cls, generator: torch.Generator, length: int, heads: tuple[int, int], sinks: bool = False, **options: Any
    ) -> Inputs:
        """Random float64 tensors of head dimension 8."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        query, grad_out = normal(1, heads[0], length, 8), normal(1, heads[0], length, 8)
        key, value = normal(1, heads[1], length, 8), normal(1, heads[1], length, 8)
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
        out = attention(
            leaves["query"], leaves["key"], leaves["value"], *where, sinks=leaves.get("sinks"), **self.options
        )
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
