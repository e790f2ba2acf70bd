"""Mean size of the microbatches of a module, before any batch is arranged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..arrange.lengths import group_by_length
from ..cost import layer_table
from ..cost.row_sizes import RowLayout
from ..plan import ModulePlan, Stage
from .problem import PlanningProblem

_BY_LENGTH = ("hierarchical", "tapered")  # arrangements that group samples of similar length


class MeanMicrobatches:
    """
    Mean size of a module's microbatches, including padding, see [`RowLayout`]. Padding is that of a batch split like
    the arrangement does: by length, or in the order of the sampler.
    """

    def __init__(self, problem: PlanningProblem, name: str):
        self.problem, self.name = problem, name
        sizes = problem.sizes
        self.tokens, self.squares = (float(values[name].mean()) for values in (sizes.tokens, sizes.squares))
        self.batch = problem.batches[0]
        self._layouts: dict[int, RowLayout] = {}
        self._shares: dict[tuple[RowLayout, int], NDArray] = {}
        self._groups: dict[int, Sequence[NDArray]] = {}

    def sizes(self, cp_size: int, num_samples: float, padded: bool = True) -> NDArray:
        """
        Mean tokens, squared sequence lengths and stored pairs `[3]`, see [`ChunkSize`]. Up to one sample has no
        padding; without padding of rows and rounding of packed rows, they are a lower bound for all arrangements.
        """
        layout, count = self.layout(cp_size), self.batch.num_samples
        if not padded:
            layout = replace(layout, block=1)
        grows = padded and self.grows(cp_size)
        key = layout, min(max(1, round(count / num_samples)), count) if grows else count
        if key not in self._shares:
            self._shares[key] = self._computed_shares(*key)
        return num_samples * np.array([self.tokens, self.squares, self.squares]) * self._shares[key]

    def grows(self, cp_size: int) -> bool:
        """Tells whether a microbatch of several samples computes more than its samples alone."""
        layout = self.layout(cp_size)
        return layout.padded or layout.block > 1

    def layout(self, cp_size: int) -> RowLayout:
        """Memory layout of the samples of a microbatch."""
        if cp_size not in self._layouts:
            mesh = tuple((rank,) for rank in range(cp_size))
            module = ModulePlan(((Stage((0, 1), mesh),),))
            self._layouts[cp_size] = RowLayout.of(self.problem.costs, self.name, module)
        return self._layouts[cp_size]

    def _computed_shares(self, layout: RowLayout, num_microbatches: int) -> NDArray:
        """`[3]`: size of all microbatches of a batch, over the tokens and squared sequence lengths of its samples."""
        if num_microbatches not in self._groups:
            self._groups[num_microbatches] = self._split(num_microbatches)
        computed = layout.of_groups(self.batch, self.name, self._groups[num_microbatches]).sum(axis=0)
        tokens, squares = float(self.batch.tokens[self.name].sum()), float(self.batch.squares[self.name].sum())
        whole = np.array([tokens, squares, squares])
        return np.divide(computed, whole, out=np.array([1.0, 1.0, 0.0]), where=whole > 0)

    def _split(self, num_microbatches: int) -> Sequence[NDArray]:
        """Splits the samples of a batch into microbatches."""
        count = self.batch.num_samples
        if num_microbatches == count or self.problem.first_arrangement not in _BY_LENGTH:
            return np.array_split(np.arange(count), num_microbatches)
        padded = self.layout(1).of_samples(self.batch, self.name, even=False)
        row_ms, _ = layer_table(self.problem.costs, self.name).sample_ms(padded[1], padded[0])
        parts = [np.ones(num_microbatches)]
        _, group = group_by_length(row_ms, self.batch.tokens[self.name], parts, np.zeros((count, 1)))
        order = np.argsort(group, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
