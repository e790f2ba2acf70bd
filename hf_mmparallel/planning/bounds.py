"""A lower bound of the time of a step on a batch: no schedule and no arrangement of its samples is faster."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel, layer_table
from ..cost.layer_table import LayerTable, with_ends
from ..cost.row_sizes import RowLayout
from ..plan import LANGUAGE_MODEL, SampleSizes
from ..plan.layout import ModuleLayout
from ..plan.methods import POLICIES
from ..schedule.kinds import KINDS, WHOLE_PASSES
from .problem import Candidate, PlanningProblem

# a forward, a backward, and what of a split backward the stages before it wait for
_PASSES = (*WHOLE_PASSES, *(kind for kind in KINDS.values() if kind.closes and kind not in WHOLE_PASSES))
_WHOLE = slice(len(WHOLE_PASSES))
_COUNTS_PER_DOUBLING = 8  # numbers of chunks that bounds look at


@dataclass(frozen=True)
class ModuleWork:
    """
    Times on one rank of what a batch computes in a module, `[passes, num_layers]` each, where the first layer includes
    what is before it, the last one what follows; after [`~ModuleWork.on`] `[passes, stages]`.
    """

    # numbers of chunks `[2, cases]` that the batch may be computed in: from and to
    counts: NDArray
    whole: NDArray  # `[cases, ...]` of all samples in at most so many chunks, without constants of chunks
    constant: NDArray  # of each chunk
    launch: NDArray  # host times to launch a chunk, which longer times hide
    least: NDArray  # of the fewest tokens and squared lengths that a sample has, without the constant
    longest: NDArray  # of a chunk with a sample that has much work
    num_absent: int  # samples without tokens in the module

    @classmethod
    def of(cls, costs: CostModel, name: str, layout: ModuleLayout, batch: SampleSizes, longest: int) -> ModuleWork:
        """The work of a module on a rank of a layout; `longest` is the batch index of a sample with much work."""
        table = layer_table(costs, name, layout.tp_size, layout.activation_checkpointing)
        tokens, squares = batch.tokens[name], batch.squares[name]
        present = tokens > 0

        def times(sizes: NDArray) -> NDArray:
            """Of squared lengths, tokens and chunks `[..., 3, num_layers + 2]`."""
            passes = [np.einsum("rk,...kr->...r", table.of_kind(kind), sizes) for kind in _PASSES]
            return with_ends(np.stack(passes, axis=-2))

        counts = _counts(int(present.sum()))
        unit = np.array([[1.0], [1.0], [0.0]])
        rows = RowLayout.of(costs, name, layout)
        whole = np.zeros((len(counts[0]), 3, len(table.windows)))
        whole[:, 0] = _least_squares(table, rows, batch, name, counts[1]) / layout.cp_size
        whole[:, 1] = tokens.sum() / layout.cp_size
        least = tokens[present].min(initial=0), squares[present].min(initial=0)
        return cls(
            counts,
            times(whole),
            times(np.broadcast_to(1.0 - unit, (3, len(table.windows)))),
            with_ends(np.stack([table.launched_ms(kind) for kind in _PASSES])),
            times(table.sizes(*least, layout.cp_size) * unit),
            times(table.sizes(tokens[longest], squares[longest], layout.cp_size)),
            int((~present).sum()),
        )

    def on(self, layers: tuple[int, ...], fewest: int = 1, most: int | None = None) -> ModuleWork:
        """The work on stages with so many layers, in any number of chunks from `fewest` to `most`."""
        starts = [0, *accumulate(layers[:-1])]
        tables = (self.whole, self.constant, self.launch, self.least, self.longest)
        whole, constant, launch, least, longest = (np.add.reduceat(own, starts, axis=-1) for own in tables)
        counts = self.counts
        if most is not None:
            possible = (counts[1] >= fewest) & (counts[0] <= most)
            counts, whole = np.clip(counts[:, possible], fewest, most), whole[possible]
        runs = (whole > 0).any(axis=0)  # others have no backward, or no samples
        own = (constant * runs, launch * runs, least * runs, np.maximum(longest, launch) * runs)
        return ModuleWork(counts, whole, *own, self.num_absent)

    def chunk_ms(self, num_samples: int = 1) -> NDArray:
        """Time at least of a chunk with so many samples `[passes, stages]`."""
        return np.maximum(num_samples * self.least + self.constant, self.launch)

    @property
    def loads(self) -> NDArray:
        """Time at least of all chunks `[cases, passes, stages]`."""
        fewest = self.counts[0][:, None, None]
        return np.maximum(self.whole + fewest * self.constant, fewest * self.launch)


def _counts(most: int) -> NDArray:
    """Ranges of numbers of chunks `[2, cases]` from 1 to `most`, wider the larger they are."""
    doubling, part = np.divmod(np.arange(_COUNTS_PER_DOUBLING * max(most, 1).bit_length()), _COUNTS_PER_DOUBLING)
    ends = np.unique(np.minimum(np.left_shift(1, doubling) * (1 + part / _COUNTS_PER_DOUBLING), most).astype(np.int64))
    return np.stack([np.append(0, ends[:-1]) + 1, ends]) if most else np.zeros((2, 0), np.int64)


def _least_squares(table: LayerTable, rows: RowLayout, batch: SampleSizes, name: str, counts: NDArray) -> NDArray:
    """
    Squared lengths within the windows of layers `[counts, num_layers + 2]` that a batch in at most so many chunks has.
    """
    # with a dense mask attention computes more pairs, unless all samples of a chunk have one length
    (even, tokens), (uneven, _) = (rows.of_samples(batch, name, even) for even in (True, False))
    # attention in windows is no sum: several samples together take longer than each by itself
    even, uneven = (table.sizes(tokens, squares)[0] for squares in (even, uneven))
    _, length = np.unique(batch.tokens[name], return_inverse=True)
    saved = np.stack([np.bincount(length, own) for own in np.maximum(uneven - even, 0.0)])
    most = np.cumsum(-np.sort(-saved, axis=1), axis=1)[:, np.minimum(counts, saved.shape[1]) - 1]
    return (np.maximum(uneven, even).sum(axis=1)[:, None] - most).T


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
        longer, a sample or the largest chunk through all stages, or the work of all ranks on average. The number of
        chunks is the one for which that is least.
        """
        own = candidate.vp_size, POLICIES[candidate.schedule].splits_backward
        return min(self._of_order(candidate, *order) for order in ({own, *self._orders} if any_order else {own}))

    def _of_order(self, candidate: Candidate, vp_size: int, splits: bool) -> float:
        """The bound with so many virtual stages, and with or without split backwards."""
        layouts = {name: own.with_virtual_stages(vp_size) for name, own in candidate.layouts.items()}
        chunks, num_samples = self._chunks(candidate)
        stages = {
            name: self._work(name, own).on(own.layers, *(chunks if name == LANGUAGE_MODEL else ()))
            for name, own in layouts.items()
        }
        back = 2 if splits else 1  # of a backward, what the stages before wait for
        least = sum(float(own.longest[[0, back]].sum()) for own in stages.values())
        on_ranks: dict[str, float] = {}  # work of all ranks that some modules share
        before = np.zeros(2)  # forward and backward of the least chunk in the modules before
        for level in (self.problem.spec.encoders, (LANGUAGE_MODEL,), self.problem.spec.generators):
            through = np.zeros(2)
            for name in level:
                own, layout = stages[name], layouts[name]
                first = own.chunk_ms(num_samples if name == LANGUAGE_MODEL else 1)
                loads, host = own.loads, candidate.colocated_with.get(name, name)
                mesh = layout.dp_size * layout.cp_size * layout.tp_size
                work = loads[:, _WHOLE].sum(axis=(1, 2)) / layout.dp_size
                on_ranks[host] = on_ranks.get(host, 0.0) + mesh * float(work.min(initial=np.inf) if len(work) else 0.0)
                ranks_ms = _ranks_ms(loads / layout.dp_size, first, before, layout.pp_size, back)
                # of the largest chunk
                share = 1 / own.counts[1][:, None, None]
                chunk = np.maximum(own.whole * share + own.constant, own.launch)[:, [0, back]].sum(axis=(1, 2))
                of_counts = np.maximum(ranks_ms, chunk + before.sum())
                least = max(least, float(of_counts.min()) if len(of_counts) else 0.0)
                if not own.num_absent:
                    through = np.maximum(through, first[[0, back]].sum(axis=1))
            before += through
        return max(least, *(work / layouts[host].num_ranks for host, work in on_ranks.items()))

    def _chunks(self, candidate: Candidate) -> tuple[tuple[int, int], int]:
        """
        From and to how many chunks the language model has, and the fewest samples of one: as in the sampler's order;
        other arrangements may leave some chunks empty, and a chunk may have one sample.
        """
        count, dp_size = self.batch.num_samples, candidate.layouts[LANGUAGE_MODEL].dp_size
        most = -(-count // (dp_size * candidate.num_microbatches))
        num_chunks = -(-count // most)
        if self.problem.arrangements != ("contiguous",):
            return (1, num_chunks), 1
        return (num_chunks, num_chunks), count - (num_chunks - 1) * most

    def _work(self, name: str, layout: ModuleLayout) -> ModuleWork:
        key = name, layout.tp_size, layout.cp_size, layout.ep_size, layout.activation_checkpointing
        if key not in self._works:
            experts = tuple(range(layout.ep_size)) if layout.ep_size > 1 else ()
            costs = self.problem.costs.in_layout({name: (experts, bool(layout.storage.float8))})
            self._works[key] = ModuleWork.of(costs, name, layout, self.batch, self._longest)
        return self._works[key]


def _ranks_ms(loads: NDArray, first: NDArray, before: NDArray, num_ranks: int, back: int) -> NDArray:
    """
    Of the busiest rank of a pipeline `[cases]`, its work with what has to run before its first task and after its last
    one.
    """
    lead, drain = (start + np.cumsum(own) - own for start, own in zip(before, first[[0, back]], strict=True))
    result = np.zeros(len(loads))
    for rank in range(num_ranks):
        hosted = loads[..., rank::num_ranks].sum(axis=-1)
        busy, waited = hosted[:, _WHOLE].sum(axis=1), hosted[:, [0, back]].sum(axis=1)
        ends = np.maximum(busy, waited + drain[rank])
        result = np.maximum(result, lead[rank] + np.where(hosted[:, 1] > 0, ends, busy))
    return result
