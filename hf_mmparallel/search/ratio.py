"""Ranks in proportion to the operations of each module: the ratio-based baseline of DistTrain (section 7.2.1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..cost import training_flops
from .allocation import proportional_allocation
from .candidates import CandidateSpace, Estimated
from .options import divisors
from .problem import Candidate, Layout, PlanningProblem
from .rank_tables import NONE, RankTable
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
            per_token, per_square = training_flops(problem.spec, name)
            self.work[name] = per_token * options.tokens + per_square * options.squares

    def ranks(self, dp_size: int) -> dict[str, int]:
        """Module -> its ranks beside so many copies of the language model; empty if these have too few."""
        per_copy, rest = divmod(self.problem.num_ranks, dp_size)
        if rest or per_copy < len(self.work):
            return {}
        shares = proportional_allocation(self.work, per_copy, rounding="nearest")
        return {name: dp_size * count for name, count in shares.items()}

    def __iter__(self) -> Iterator[Estimated]:
        """All of them with the closed form of their step, in no order."""
        for dp_size in divisors(self.problem.global_batch_size):
            ranks = self.ranks(dp_size)
            if not ranks:
                continue
            for count in self._microbatch_counts(dp_size):
                tables = {name: self._table(name, dp_size, count) for name in self.options}
                places = [_places(tables[name], ranks[name]) for name in tables]
                for chosen in itertools.product(*places):
                    own = dict(zip(tables, chosen, strict=True))
                    found = self._of(tables, ranks, own, count)
                    if self._fits(found):
                        yield found

    def _of(
        self, tables: dict[str, RankTable], ranks: dict[str, int], places: dict[str, int], count: int
    ) -> Estimated:
        """One choice of each module: encoders beside each other, all else one after the other."""
        choices, fills, slowest = {}, {}, 0.0
        for name, place in places.items():
            choices |= tables[name].choices(ranks[name], place)
            fills[name] = float(tables[name].fill_ms[ranks[name], place])
            slowest = max(slowest, float(tables[name].bottleneck_ms[ranks[name], place]))
        encoders = [fills[name] for name in fills if name in self.problem.spec.encoders]
        others = sum(fill for name, fill in fills.items() if name not in self.problem.spec.encoders)
        return Estimated(max(encoders, default=0.0) + others + (count - 1) * slowest, choices, {}, count)

    def candidate(self, found: Estimated) -> Candidate:
        """The candidate with its layers cut evenly."""
        layouts = {
            name: Layout(
                even_layers(self.options[name].part.num_layers, choice.pp_size),
                choice.dp_size,
                choice.kind.cp_size,
                choice.kind.tp_size,
                choice.kind.checkpointing,
            )
            for name, choice in found.choices.items()
        }
        return Candidate(layouts, {}, found.num_microbatches, self.problem.schedule)


def _places(table: RankTable, num_ranks: int) -> list[int]:
    """The choices that a table has for so many ranks."""
    if num_ranks >= len(table.fill_ms):
        return []
    return [place for place, fill in enumerate(table.fill_ms[num_ranks].tolist()) if fill < NONE]
