"""Ranks in proportion to the FLOPs of each module: the ratio-based baseline of DistTrain (section 7.2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..cost import module_model_flops
from ..cost.sharded_passes import REDUCES_IN_PASSES
from .allocation import proportional_allocation
from .candidates import CandidateSpace, EstimatedCandidate
from .combinations import Combinations, LayoutTable, side_by_side
from .options import divisors
from .problem import Candidate, Layout, PlanningProblem
from .single_layout import even_layers


class RatioLayouts(CandidateSpace):
    """
    All plans in which every module has separate ranks, in proportion to its share of the model's FLOPs; sizes set by
    the user do not apply.

    The paper defines only the criterion, "the computational demands (flops) of each module". Here FLOPs are those of
    the forward and backward of a mean sample; the ranks per replica of the language model are the nearest integers to
    the shares, at least one; the layout of a module on its ranks (replicas, stages, tensor parallelism, recomputation)
    is the best one by the closed-form estimate. Layers are split evenly.
    """

    def __init__(self, problem: PlanningProblem):
        plain = tuple(stage for stage in problem.zero_stages if stage < REDUCES_IN_PASSES)
        super().__init__(replace(problem, zero_stages=plain))
        self.work = {}
        for name, options in self.options.items():
            self.work[name] = float(module_model_flops(problem.spec, name, options.tokens, options.squares))

    def ranks(self, dp_size: int) -> dict[str, int]:
        """Module -> its ranks with `dp_size` replicas of the language model; empty if there are too few ranks."""
        per_copy, rest = divmod(self.problem.num_ranks, dp_size)
        if rest or per_copy < len(self.work):
            return {}
        shares = proportional_allocation(self.work, per_copy, rounding="nearest")
        return {name: dp_size * count for name, count in shares.items()}

    def _combined(self) -> Iterator[tuple[Mapping[str, LayoutTable], Mapping[str, str], int, Combinations]]:
        """See [`CandidateSpace`]: encoders run next to each other, all other modules in sequence."""
        spec = self.problem.spec
        for dp_size in divisors(self.problem.global_batch_size):
            ranks = self.ranks(dp_size)
            if not ranks:
                continue
            total = self.problem.num_ranks
            for count in self._microbatch_counts(dp_size):
                tables = {name: self._table(name, dp_size, count) for name in self.options}
                modules = {n: Combinations.of(n, table).with_ranks(ranks[n]) for n, table in tables.items()}
                encoders = [modules.pop(name) for name in spec.encoders]
                combined = side_by_side(encoders, float(count - 1), total) if encoders else None
                for layouts in modules.values():
                    combined = (
                        layouts
                        if combined is None
                        else combined.on_separate_ranks(layouts, None, total, in_series=True)
                    )
                if combined is not None:
                    yield tables, {}, count, combined

    def candidate(self, estimated: EstimatedCandidate) -> Candidate:
        """The candidate with its layers split evenly."""
        layouts = {
            name: Layout(
                even_layers(self.options[name].module_spec.num_layers, estimate.pp_size),
                estimate.dp_size,
                estimate.kind.cp_size,
                estimate.kind.tp_size,
                estimate.kind.checkpointing,
                self.options[name].sharding(estimate.kind, estimate.dp_size),
            )
            for name, estimate in estimated.estimates.items()
        }
        return Candidate(layouts, {}, estimated.num_microbatches, self.problem.first_schedule)
