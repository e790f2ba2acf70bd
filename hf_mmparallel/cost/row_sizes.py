"""How many tokens, and pairs of tokens, the chunks of a step compute: padded rows, or packed ones without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ModulePlan, ParallelPlan, SampleSizes, StepPlan
from ..plan.step_plan import ChunkCuts
from .kept import MASKED_ATTENTION
from .layers import PACKED_ATTENTION, CostModel

ChunkKey = tuple[str, int, int, int]
_FULL_OVER_CAUSAL = 2.0  # the cost of a squared token of the language model is that of causal attention


class ChunkSize(NamedTuple):
    """
    What one chunk computes.

    Args:
        tokens (`float`): Tokens that its layers see, padding included.
        squares (`float`): Squared tokens by which attention is charged; causal ones in the language model.
        scores (`float`): Pairs of tokens of which something is stored: a dense mask, or the scores themselves.
    """

    tokens: float
    squares: float
    scores: float


@dataclass(frozen=True)
class RowLayout:
    """
    How the samples of a chunk of one module lie in memory.

    Args:
        attention (`str`): The module's attention function.
        padded (`bool`): Whether each sample is a row that is padded to the longest of its chunk.
        block (`int`, *optional*, defaults to 1): What the tokens of a chunk are rounded up to.
        causal (`bool`, *optional*, defaults to `False`): Whether the cost of a squared token is that of causal
            attention.
        masked_share (`float`, *optional*, defaults to 1.0): How fast attention is under a dense mask, of the speed by
            which squares are charged.
        window (`int`, *optional*, defaults to 0): Tokens of the smallest sliding window of a layer, 0 for none.
    """

    attention: str
    padded: bool
    block: int = 1
    causal: bool = False
    masked_share: float = 1.0
    window: int = 0

    @classmethod
    def of(cls, costs: CostModel, name: str, module: ModulePlan | None = None) -> RowLayout:
        """
        The layout of a module in a plan: encoders compute real tokens; the rows of a language model are padded unless
        they are packed, and under context parallelism its ranks have equally many blocks of a packed row.
        """
        part = costs.spec.modules[name]
        attention = part.attention
        if name != LANGUAGE_MODEL:
            return cls(attention, padded=False)
        if module is not None and module.cp_size > 1:
            return cls(PACKED_ATTENTION, padded=False, block=module.context.block * module.cp_size, causal=True)
        window = min(filter(None, part.windows), default=0)
        share = costs.device.masked_attention_share
        if attention == PACKED_ATTENTION:  # under a dense mask it is `"sdpa"`
            share /= costs.device.block_attention_share
        return cls(attention, padded=not costs.packs_rows, causal=True, masked_share=share, window=window)

    def sizes(self, count: NDArray, tokens: NDArray, squares: NDArray, longest: NDArray, even: NDArray) -> NDArray:
        """
        What chunks compute. `"eager"` attention computes all pairs of tokens of a row; so do `"sdpa"` and
        `"bitfield"`, which computes padded rows as that does, where the mask is a dense tensor: where rows are padded
        or as long as a window. Other functions skip padding and what causality hides.

        Args:
            count (`np.ndarray` of shape `[chunks]`): Samples.
            tokens (`np.ndarray` of shape `[chunks]`): Their tokens.
            squares (`np.ndarray` of shape `[chunks]`): Their squared tokens.
            longest (`np.ndarray` of shape `[chunks]`): Tokens of the longest sample.
            even (`np.ndarray` of shape `[chunks]`): Whether all samples of a chunk have the same number of tokens.

        Returns:
            `np.ndarray` of shape `[chunks, 3]`: The columns of [`ChunkSize`].
        """
        rows = count * longest.astype(float) ** 2
        pairs = rows if self.padded else squares
        is_dense = np.full(len(count), self.attention == "eager")
        takes_mask = self.padded and self.attention in MASKED_ATTENTION
        if takes_mask:
            is_dense = ~even | ((longest >= self.window) & (self.window > 0))
        computed = -(-tokens // self.block) * self.block
        if self.padded:
            computed = count * longest
            squares = rows if takes_mask else squares
        if self.causal:
            share = self.masked_share if takes_mask else 1.0
            squares = np.where(is_dense, _FULL_OVER_CAUSAL * pairs / share, squares)
        return np.stack([computed, squares, np.where(is_dense, pairs, 0.0)], axis=1).astype(float)

    def of_samples(self, sizes: SampleSizes, name: str, even: bool) -> NDArray:
        """
        What each sample of a module computes, whatever the tokens of a chunk are rounded up to.

        Args:
            sizes (`SampleSizes`): The samples.
            name (`str`): The module.
            even (`bool`): Whether the samples beside it are as long as it is.

        Returns:
            `np.ndarray` of shape `[2, samples]`: Squared tokens and tokens.
        """
        tokens, squares = sizes.tokens[name], sizes.squares[name]
        ones = np.ones_like(tokens)
        found = replace(self, block=1).sizes(ones, tokens, squares, tokens, np.full(len(tokens), even))
        return found[:, [1, 0]].T

    def of_groups(self, sizes: SampleSizes, name: str, groups: Sequence) -> NDArray:
        """
        What groups of samples of a module compute, each on one rank.

        Args:
            sizes (`SampleSizes`): The samples.
            name (`str`): The module.
            groups (`Sequence`): The places of each group's samples; none is empty.

        Returns:
            `np.ndarray` of shape `[groups, 3]`: The columns of [`ChunkSize`].
        """
        count = np.fromiter(map(len, groups), np.int64)
        return self._of_rows(sizes, name, count, np.fromiter(chain.from_iterable(groups), np.int64))

    def of_chunks(self, sizes: SampleSizes, name: str, cuts: ChunkCuts) -> NDArray:
        """
        [`~RowLayout.of_groups`] of chunks of a step.

        Args:
            sizes (`SampleSizes`): The samples.
            name (`str`): The module.
            cuts ([`ChunkCuts`]): Chunks of it; there is at least one.
        """
        return self._of_rows(
            sizes, name, np.bincount(cuts.of_slot), cuts.slots[np.argsort(cuts.of_slot, kind="stable")]
        )

    def _of_rows(self, sizes: SampleSizes, name: str, count: NDArray, order: NDArray) -> NDArray:
        """What groups compute whose samples, `count[i]` of each, are one after the other."""
        starts = np.cumsum(count) - count
        tokens = sizes.tokens[name][order]
        longest, shortest = np.maximum.reduceat(tokens, starts), np.minimum.reduceat(tokens, starts)
        squares = np.add.reduceat(sizes.squares[name][order], starts)
        return self.sizes(count, np.add.reduceat(tokens, starts), squares, longest, longest == shortest)


def chunk_sizes(costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes) -> dict[ChunkKey, ChunkSize]:
    """
    What every chunk of a step computes, which its time and its memory follow from.

    Args:
        costs (`CostModel`): The model, and whether its rows are packed.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.

    Returns:
        `dict[tuple[str, int, int, int], ChunkSize]`: (module, replica, microbatch, chunk) -> its size.
    """
    result: dict[ChunkKey, ChunkSize] = {}
    by_module: dict[str, dict[ChunkKey, Sequence[int]]] = {}
    for key, found in step.chunks.items():
        by_module.setdefault(key[0], {}).update(((*key, number), slots) for number, slots in enumerate(found))
    for name, chunks in by_module.items():
        if not chunks:
            continue
        found = RowLayout.of(costs, name, plan.modules[name]).of_groups(sizes, name, list(chunks.values()))
        result.update(zip(chunks, map(ChunkSize._make, found.tolist()), strict=True))
    return result


def group_sizes(costs: CostModel, name: str, sizes: SampleSizes, groups: Sequence[NDArray]) -> tuple[NDArray, NDArray]:
    """Tokens and squared tokens `[groups]` that groups of samples compute, each on one rank; a group may be empty."""
    result = np.zeros((len(groups), 3))
    some = [index for index, own in enumerate(groups) if len(own)]
    if some:
        result[some] = RowLayout.of(costs, name).of_groups(sizes, name, [groups[index] for index in some])
    return result[:, 0], result[:, 1]
