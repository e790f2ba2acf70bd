"""A lower bound of the time of a step on a batch: no schedule and no arrangement of its samples is faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel, layer_table
from ..cost.stage_times import with_ends
from ..plan import LANGUAGE_MODEL, SampleSizes
from ..plan.layout import ModuleLayout
from ..plan.methods import POLICIES
from ..schedule.kinds import KINDS, WHOLE_PASSES
from .problem import Candidate, PlanningProblem

# a forward, a backward, and what of a split backward the stages before it wait for
_PASSES = (*WHOLE_PASSES, *(kind for kind in KINDS.values() if kind.closes and kind not in WHOLE_PASSES))


@dataclass(frozen=True)
class ModuleWork:
    """
    Times on one rank of what a batch computes in a module, `[passes, num_layers]` each; the first layer includes what
    is before it, the last one what follows.
    """

    whole: NDArray  # of all samples, each by itself, without constants of chunks
    launch: NDArray  # host times to launch a chunk, which longer times hide
    first: NDArray  # of a chunk with the fewest tokens and squared lengths that a sample has
    longest: NDArray  # of a chunk with a sample that has much work
    num_absent: int  # samples without tokens in the module

    @classmethod
    def of(cls, costs: CostModel, name: str, layout: ModuleLayout, batch: SampleSizes, longest: int) -> ModuleWork:
        """The work of a module on a rank of a layout; `longest` is the batch index of a sample with much work."""
        table = layer_table(costs, name, layout.tp_size, layout.activation_checkpointing)
        tokens, squares = batch.tokens[name], batch.squares[name]
        present = tokens > 0

        def times(sizes: NDArray) -> NDArray:
            """Of squared lengths, tokens and chunks `[3, num_layers + 2]`."""
            return np.stack([with_ends((table.of_kind(kind) * sizes.T).sum(axis=1)) for kind in _PASSES])

        # attention in windows is no sum: several samples together take longer than each by itself
        whole = table.sizes(tokens, squares, layout.cp_size).sum(axis=2)
        least = tokens[present].min(initial=0), squares[present].min(initial=0)
        return cls(
            times(whole * [[1.0], [1.0], [0.0]]),
            np.stack([with_ends(table.launched_ms(kind)) for kind in _PASSES]),
            times(table.sizes(*least, layout.cp_size)),
            times(table.sizes(tokens[longest], squares[longest], layout.cp_size)),
            int((~present).sum()),
        )

    def on(self, layers: tuple[int, ...]) -> ModuleWork:
        """The times `[passes, stages]` of stages with so many layers."""
        starts = [0, *accumulate(layers[:-1])]
        tables = (self.whole, self.launch, self.first, self.longest)
        whole, launch, first, longest = (np.add.reduceat(own, starts, axis=1) for own in tables)
        runs = whole > 0  # others have no backward, or no samples
        first, longest = (np.maximum(own, launch) * (own > 0) * runs for own in (first, longest))
        return ModuleWork(whole, launch, first, longest, self.num_absent)


class StepBounds:
    """Lower bounds of the steps of candidates on the first batch of a problem, see [`~StepBounds.least_ms`]."""

    def __init__(self, problem: PlanningProblem):
        self.problem, self.batch = problem, problem.batches[0]
        self._longest = int(np.argmax(np.sum(list(self.batch.tokens.values()), axis=0)))
        self._works: dict[tuple, ModuleWork] = {}
        # virtual stages, and whether backwards are split
        self._orders = {(vp_size, POLICIES[name].splits_backward) for name, vp_size in problem.schedules}

    def least_ms(self, candidate: Candidate, any_order: bool = False) -> float:
        """
        No step of a candidate is shorter until its last task ends, with its schedule or with any that is searched: it
        takes the busiest rank of a module, what has to run before its first task and after its last one; or what is
        longer, a sample through all stages, or the work of all ranks on average.
        """
        own = candidate.vp_size, POLICIES[candidate.schedule].splits_backward
        return min(self._of_order(candidate, *order) for order in ({own, *self._orders} if any_order else {own}))

    def _of_order(self, candidate: Candidate, vp_size: int, splits: bool) -> float:
        """The bound with so many virtual stages, and with or without split backwards."""
        layouts = {name: own.with_virtual_stages(vp_size) for name, own in candidate.layouts.items()}
        stages = {name: self._work(name, layout).on(layout.layers) for name, layout in layouts.items()}
        back = 2 if splits else 1  # of a backward, what the stages before wait for
        least = sum(float(own.longest[[0, back]].sum()) for own in stages.values())
        on_ranks: dict[str, float] = {}  # work of all ranks that some modules share
        before = np.zeros(2)  # forward and backward of the least chunk in the modules before
        for level in (self.problem.spec.encoders, (LANGUAGE_MODEL,), self.problem.spec.generators):
            through = np.zeros(2)
            for name in level:
                own, layout = stages[name], layouts[name]
                load = own.whole / layout.dp_size  # without constants and launches: microbatches may be empty
                host = candidate.colocated_with.get(name, name)
                mesh = layout.dp_size * layout.cp_size * layout.tp_size
                on_ranks[host] = on_ranks.get(host, 0.0) + mesh * float(load[:2].sum())
                least = max(least, *_rank_ms(load, own.first, before, layout.pp_size, back))
                if not own.num_absent:
                    through = np.maximum(through, own.first[[0, back]].sum(axis=1))
            before += through
        return max(least, *(work / layouts[host].num_ranks for host, work in on_ranks.items()))

    def _work(self, name: str, layout: ModuleLayout) -> ModuleWork:
        key = name, layout.tp_size, layout.cp_size, layout.ep_size, layout.activation_checkpointing
        if key not in self._works:
            experts = tuple(range(layout.ep_size)) if layout.ep_size > 1 else ()
            costs = self.problem.costs.sharing_experts({name: experts})
            self._works[key] = ModuleWork.of(costs, name, layout, self.batch, self._longest)
        return self._works[key]


def _rank_ms(load: NDArray, first: NDArray, before: NDArray, num_ranks: int, back: int) -> Iterator[float]:
    """For each rank of a pipeline, its work with what has to run before its first task and after its last one."""
    lead, drain = (start + np.cumsum(own) - own for start, own in zip(before, first[[0, back]], strict=True))
    for rank in range(num_ranks):
        hosted = slice(rank, None, num_ranks)
        busy, waited = float(load[:2, hosted].sum()), float(load[[0, back], hosted].sum())
        has_backward = bool(load[1, hosted].any())
        yield float(lead[rank]) + (max(busy, waited + float(drain[rank])) if has_backward else busy)
