"""Tokens and token pairs that the chunks of a step compute, with padded or packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ModulePlan, ParallelPlan, SampleSizes, StepPlan
from ..plan.layout import ModuleLayout
from ..plan.step_plan import ChunkTable
from .activations import MASKED_ATTENTION
from .analytic import layer_flops
from .layers import PACKED_ATTENTION, CostModel

ChunkKey = tuple[str, int, int, int]
_FULL_OVER_CAUSAL = 2.0  # costs per squared sequence length of the language model are those of causal attention


class ChunkSize(NamedTuple):
    """Amount of computation of a chunk."""

    tokens: float  # in the layers, including padding
    squares: float  # squared sequence lengths for the cost of attention; causal in the language model
    scores: float  # token pairs with stored values: entries of a dense mask, or attention scores


_ROUNDING = 1e-6  # of a number of sequences

# Work of the busiest of the ranks that share an encoder's chunk, over the mean, above which they share the tokens of
# each image rather than whole images. Keys and values then travel, and each rank computes what is around the layers.
SHARES_ABOVE = 1.5

NO_TOKENS = ChunkSize(0, 0, 0)  # the size of the chunk of an empty task, see `build_graph`


@dataclass(frozen=True)
class RowLayout:
    """Memory layout of the samples of a chunk in one module."""

    attention: str  # the module's attention function
    padded: bool  # each sample is a row, padded to the longest sample of its chunk
    block: int = 1  # tokens of a chunk are rounded up to a multiple of it
    causal: bool = False  # costs per squared sequence length are those of causal attention
    masked_share: float = 1.0  # speed of attention with a dense mask, relative to what the costs assume
    window: int = 0  # smallest sliding window of a layer in tokens, 0 for none
    sharing: int = 1  # cp ranks that share whole sequences, of which the busiest may have more than its part
    # where the ranks would wait too long for the busiest, and share the tokens of all sequences: the work of a rank,
    # with what travels, over an even part of the work; 0 if they can't
    token_excess: float = 0.0

    @classmethod
    def of(cls, costs: CostModel, name: str, module: ModulePlan | ModuleLayout | None = None) -> RowLayout:
        """
        Layout of a module in a plan: encoders have no padding, and their cp ranks share images; rows of a
        language model are padded unless they are packed, and under context parallelism its cp ranks have equally many
        blocks of a packed row.
        """
        module_spec = costs.spec.modules[name]
        attention = module_spec.attention
        if name != LANGUAGE_MODEL:
            if module is None or module.cp_size == 1:
                return cls(attention, padded=False)
            return cls(
                attention, padded=False, sharing=module.cp_size, token_excess=_token_excess(costs, name, module)
            )
        if module is not None and module.cp_size > 1:
            return cls(PACKED_ATTENTION, padded=False, block=module.context.block * module.cp_size, causal=True)
        window = min(filter(None, module_spec.windows), default=0)
        share = costs.device.masked_attention_share
        if attention == PACKED_ATTENTION:  # with a dense mask it falls back to `"sdpa"`
            share /= costs.device.block_attention_share
        return cls(attention, padded=not costs.packs_rows, causal=True, masked_share=share, window=window)

    def sizes(self, count: NDArray, tokens: NDArray, squares: NDArray, longest: NDArray, even: NDArray) -> NDArray:
        """
        Columns of [`ChunkSize`] `[chunks, 3]` of chunks, from `[chunks]` each: samples, their tokens and squared
        lengths, tokens of the longest one, and whether all have equally many.
        """
        # `"eager"` attention computes all token pairs of a row. So do `"sdpa"`, and `"bitfield"` that falls back to it
        # for padded rows, with a dense mask: if rows are padded or at least as long as a window. Other functions skip
        # padding and masked pairs of causal attention.
        padded_squares = count * longest.astype(float) ** 2
        pairs = padded_squares if self.padded else squares
        is_dense = np.full(len(count), self.attention == "eager")
        takes_mask = self.padded and self.attention in MASKED_ATTENTION
        if takes_mask:
            is_dense = ~even | ((longest >= self.window) & (self.window > 0))
        computed = -(-tokens // self.block) * self.block
        if self.padded:
            computed = count * longest
            squares = padded_squares if takes_mask else squares
        if self.causal:
            share = self.masked_share if takes_mask else 1.0
            squares = np.where(is_dense, _FULL_OVER_CAUSAL * pairs / share, squares)
        return np.stack([computed, squares, np.where(is_dense, pairs, 0.0)], axis=1).astype(float)

    def excess(self, tokens: NDArray, squares: NDArray) -> NDArray:
        """
        Work of the busiest of the ranks that share the sequences of chunks, over the mean of all of them. A chunk
        counts as one of equal sequences with these tokens and [`~SampleSizes.whole_squares`], of which long ones count
        more.
        """
        count = np.divide(np.square(tokens, dtype=float), squares, out=np.ones(len(tokens)), where=squares > 0)
        count = np.maximum(count, 1.0)
        whole = self.sharing * np.ceil(count / self.sharing - _ROUNDING) / count
        return np.where(whole > SHARES_ABOVE, self.token_excess, whole) if self.token_excess else whole

    def of_samples(self, sizes: SampleSizes, name: str, even: bool) -> NDArray:
        """
        Squared sequence lengths and tokens `[2, samples]` of single samples, as parts of the work of their chunk;
        `even` tells whether the other samples of their chunk have the same length.
        """
        tokens, squares = sizes.tokens[name], sizes.squares[name]
        ones = np.ones_like(tokens)
        result = replace(self, block=1).sizes(ones, tokens, squares, tokens, np.full(len(tokens), even))
        return result[:, [1, 0]].T

    def of_groups(self, sizes: SampleSizes, name: str, groups: Sequence) -> NDArray:
        """Columns of [`ChunkSize`] `[groups, 3]` of groups of samples, each on one rank; no group is empty."""
        count = np.fromiter(map(len, groups), np.int64)
        return self._of_rows(sizes, name, count, np.fromiter(chain.from_iterable(groups), np.int64))

    def of_chunks(self, sizes: SampleSizes, name: str, table: ChunkTable) -> NDArray:
        """[`~RowLayout.of_groups`] for the chunks of a step; at least one is in the module."""
        return self._of_rows(
            sizes, name, np.bincount(table.chunk_of), table.batch_indices[np.argsort(table.chunk_of, kind="stable")]
        )

    def _of_rows(self, sizes: SampleSizes, name: str, count: NDArray, order: NDArray) -> NDArray:
        """Sizes of consecutive groups with `count[i]` samples of `order` each."""
        starts = np.cumsum(count) - count
        tokens = sizes.tokens[name][order]
        longest, shortest = np.maximum.reduceat(tokens, starts), np.minimum.reduceat(tokens, starts)
        squares = np.add.reduceat(sizes.squares[name][order], starts)
        totals = np.add.reduceat(tokens, starts)
        result = self.sizes(count, totals, squares, longest, longest == shortest)
        if self.sharing > 1:
            result *= self.excess(totals, np.add.reduceat(sizes.whole_squares(name)[order], starts))[:, None]
        return result


def _token_excess(costs: CostModel, name: str, module: ModulePlan | ModuleLayout) -> float:
    """The [`RowLayout.token_excess`] of a module: each rank computes what is around the layers for all tokens."""
    spec = costs.spec.modules[name]
    if not spec.shares_tokens:
        return 0.0
    flops = [layer_flops(costs.spec, name, index)[0] for index in range(-1, spec.num_layers + 1)]
    around, total = flops[0] + flops[-1], sum(flops)
    tp_size, cp_size = (module.tp_size, module.cp_size)
    link = costs.device.link_bytes_per_ms(tuple(range(0, cp_size * tp_size, tp_size)))
    # of a token, in the layers: keys and values of the other ranks, beside an even part of the operations
    received = 2 * spec.num_kv_heads * spec.head_width * costs.value_bytes * spec.num_layers * (cp_size - 1) / cp_size
    computed_ms = total / cp_size / costs.device.flops_per_ms
    return 1 + (cp_size - 1) * around / total + received / link / computed_ms


def chunk_sizes(costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes) -> dict[ChunkKey, ChunkSize]:
    """(module, replica, microbatch, chunk) -> size of the chunk, which determines its times and memory."""
    result: dict[ChunkKey, ChunkSize] = {}
    by_module: dict[str, dict[ChunkKey, Sequence[int]]] = {}
    for key, parts in step.chunks.items():
        for number, batch_indices in enumerate(parts):
            by_module.setdefault(key[0], {})[*key, number] = batch_indices
    for name, chunks in by_module.items():
        rows = RowLayout.of(costs, name, plan.modules[name]).of_groups(sizes, name, list(chunks.values()))
        result.update(zip(chunks, map(ChunkSize._make, rows.tolist()), strict=True))
    return result
