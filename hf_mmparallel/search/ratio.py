"""Ranks in proportion to the operations of each module: the ratio-based baseline of DistTrain (section 7.2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..cost import module_model_flops
from .allocation import proportional_allocation
from .candidates import CandidateSpace, Estimated
from .combinations import Combinations, LayoutTable, side_by_side
from .options import divisors
from .problem import Candidate, Layout, PlanningProblem
from .single_layout import even_layers


class RatioLayouts(CandidateSpace):
    """
    All plans in which every module has ranks of its own, as many as its share of the model's operations.

    The paper says what decides, "the computational demands (flops) of each module", and no more. Here the operations
    are those of forward and backward of a mean sample; the ranks of each copy of the language model are the nearest
    whole numbers to the shares, at least one; what a module does with its ranks (copies, stages, tensor parallelism,
    recomputation) is the best by the closed form. Layers are cut evenly.

    Args:
        problem ([`PlanningProblem`]): The question; sizes that the user has set do not count.
    """

    def __init__(self, problem: PlanningProblem):
        super().__init__(problem)
        self.work = {}
        for name, options in self.options.items():
            self.work[name] = float(module_model_flops(problem.spec, name, options.tokens, options.squares))

    def ranks(self, dp_size: int) -> dict[str, int]:
        """Module -> its ranks beside so many copies of the language model; empty if these have too few."""
        per_copy, rest = divmod(self.problem.num_ranks, dp_size)
        if rest or per_copy < len(self.work):
            return {}
        shares = proportional_allocation(self.work, per_copy, rounding="nearest")
        return {name: dp_size * count for name, count in shares.items()}

    def _combined(self) -> Iterator[tuple[Mapping[str, LayoutTable], Mapping[str, str], int, Combinations]]:
        """See [`CandidateSpace`]: encoders beside each other, all else one after the other."""
        spec = self.problem.spec
        for dp_size in divisors(self.problem.global_batch_size):
            ranks = self.ranks(dp_size)
            if not ranks:
                continue
            total = self.problem.num_ranks
            for count in self._microbatch_counts(dp_size):
                tables = {name: self._table(name, dp_size, count) for name in self.options}
                parts = {n: Combinations.of(n, table).of_ranks(ranks[n]) for n, table in tables.items()}
                encoders = [parts.pop(name) for name in spec.encoders]
                combined = side_by_side(encoders, float(count - 1), total) if encoders else None
                for part in parts.values():
                    combined = part if combined is None else combined.beside(part, None, total, in_series=True)
                if combined is not None:
                    yield tables, {}, count, combined

    def candidate(self, estimated: Estimated) -> Candidate:
        """The candidate with its layers cut evenly."""
        layouts = {
            name: Layout(
                even_layers(self.options[name].part.num_layers, choice.pp_size),
                choice.dp_size,
                choice.kind.cp_size,
                choice.kind.tp_size,
                choice.kind.checkpointing,
            )
            for name, choice in estimated.choices.items()
        }
        return Candidate(layouts, {}, estimated.num_microbatches, self.problem.first_schedule)
