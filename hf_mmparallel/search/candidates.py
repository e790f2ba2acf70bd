"""Candidates for a plan, fastest first by the closed form: the upper tier of the search."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..plan import LANGUAGE_MODEL
from ..schedule import keeps_all
from .options import ModuleOptions, divisors
from .problem import Candidate, PlanningProblem
from .rank_tables import MOST_KEPT, NONE, Choices, RankTable, module_table

_MOST_MICROBATCHES = 256
_LOOKED_AT = 512  # candidates of one placement, number of copies and of microbatches
_KEPT = 16  # of them
_MANY_RANKS = 128
_PER_FAMILY = 2


@dataclass(frozen=True)
class Estimated:
    """
    A candidate with the closed form of its step.

    Args:
        step_ms (`float`): `sum of stages + (microbatches - 1) x slowest stage` (Entrain, equation 4.2), with the sum
            of gradients.
        choices (`Mapping[str, Choice]`): Sizes by module.
        hosts (`Mapping[str, str]`): Module -> the module whose ranks it shares.
        num_microbatches (`int`): Of each replica of the language model.
    """

    step_ms: float
    choices: Choices
    hosts: Mapping[str, str]
    num_microbatches: int

    @property
    def family(self) -> tuple:
        """What kind of plan it is, for a choice of unlike ones: where modules are, and how they are cut."""
        kinds = ((c.kind.tp_size, c.kind.cp_size, c.kind.checkpointing, c.pp_size > 1) for c in self.choices.values())
        return (tuple(sorted(self.hosts.items())), tuple(kinds))

    def memory_bytes(self, problem: PlanningProblem) -> float:
        """Of the fullest rank, about: first stages, with as many microbatches in flight as 1F1B has."""
        behind = self._depths(problem)
        needed: dict[str, float] = {}
        for name, choice in self.choices.items():
            late = name in problem.spec.encoders  # samples may be taken a microbatch later
            in_flight = min(self.num_microbatches, choice.pp_size + behind[name] + late)
            if keeps_all(problem.schedule, late):
                in_flight = self.num_microbatches
            host = self.hosts.get(name, name)
            needed[host] = needed.get(host, 0.0) + choice.state_bytes + in_flight * choice.kept_bytes
        return max(needed.values())

    def _depths(self, problem: PlanningProblem) -> dict[str, int]:
        """Module -> stages behind it."""
        behind = dict.fromkeys(self.choices, 0)
        for edge in reversed(problem.spec.edges):
            depth = behind[edge.target] + self.choices[edge.target].pp_size
            behind[edge.source] = max(behind[edge.source], depth)
        return behind


class CandidateSpace:
    """
    All candidates of a problem, see [`PlanningProblem`].

    Copies of modules divide each other and the global batch. Every module may be on ranks of its own or on those of
    the language model, and encoders together on ranks of their own (Cornstarch, section 4.2); modules on the same
    ranks may have different sizes there.
    """

    def __init__(self, problem: PlanningProblem):
        self.problem = problem
        self.options = {name: ModuleOptions(problem, name) for name in problem.spec.modules}
        # Ways to divide ranks between modules grow with the square of both.
        self._few = MOST_KEPT if problem.num_ranks <= _MANY_RANKS else 3
        self.num_too_large = 0

    def __iter__(self) -> Iterator[Estimated]:
        """The best candidates of every placement, number of copies and number of microbatches, in no order."""
        problem = self.problem
        for dp_size in divisors(problem.global_batch_size):
            if dp_size > problem.num_ranks or not self.options[LANGUAGE_MODEL].allows("dp_size", dp_size):
                continue
            for count in self._microbatch_counts(dp_size):
                tables = {name: self._table(name, dp_size, count) for name in self.options}
                for hosts in self.placements():
                    found = self._estimated(tables, hosts, count)
                    yield from itertools.islice((own for own in found if self._fits(own)), _KEPT)

    def _fits(self, found: Estimated) -> bool:
        """Whether a candidate fits the memory, about."""
        limit = self.problem.memory_bytes
        fits = limit is None or found.memory_bytes(self.problem) <= limit
        self.num_too_large += not fits
        return fits

    def _microbatch_counts(self, dp_size: int) -> list[int]:
        """Numbers of microbatches of a replica."""
        replica = self.problem.global_batch_size // dp_size
        if self.problem.microbatch_size is not None:
            return [-(-replica // self.problem.microbatch_size)]
        found = [count for count in divisors(replica) if count <= _MOST_MICROBATCHES]
        return [count for count in found if count & (count - 1) == 0 or count in (found[-1], replica)]

    def _table(self, name: str, dp_size: int, count: int) -> RankTable:
        """The layouts of a module beside `dp_size` copies of the language model."""
        sizes = [dp_size]
        if name != LANGUAGE_MODEL:
            sizes = [
                size
                for size in divisors(self.problem.global_batch_size)
                if size <= self.problem.num_ranks
                and (size % dp_size == 0 or dp_size % size == 0)
                and self.options[name].allows("dp_size", size)
            ]
        return module_table(self.options[name], count, sizes)

    def placements(self) -> list[dict[str, str]]:
        """Module -> the module whose ranks it shares, for every placement."""
        others = [name for name in self.options if name != LANGUAGE_MODEL]
        encoders = list(self.problem.spec.encoders)
        found = []
        for shared in itertools.product((False, True), repeat=len(others)):
            found.append({name: LANGUAGE_MODEL for name, there in zip(others, shared, strict=True) if there})
        if len(encoders) > 1:
            joined = dict.fromkeys(encoders[1:], encoders[0])
            generators = [name for name in others if name not in encoders]
            found += [joined, {**joined, **dict.fromkeys(generators, LANGUAGE_MODEL)}]
        unique = {tuple(sorted(hosts.items())): hosts for hosts in found}
        return list(unique.values())

    def _estimated(self, tables: Mapping[str, RankTable], hosts: Mapping[str, str], count: int) -> Iterator[Estimated]:
        """The best candidates of a placement."""
        weight, ranks = float(count - 1), self.problem.num_ranks
        joined = dict(tables)
        for name, host in hosts.items():
            joined[host] = joined[host].together(joined.pop(name)).first(MOST_KEPT, weight)
        language = joined.pop(LANGUAGE_MODEL)
        generators = [joined.pop(name) for name in self.problem.spec.generators if name in joined]
        if generators:
            behind = self._side_by_side(generators, weight).first(self._few, weight)
            language = language.first(self._few, weight).beside(behind, weight, in_series=True)
        if not joined:
            yield from self._alone(language, hosts, count)
            return
        side = self._side_by_side(list(joined.values()), weight)
        division = language.divided(side, ranks, weight, in_series=True)
        for place in division.order[:_LOOKED_AT]:
            step_ms = division.fill_ms[place] + weight * division.bottleneck_ms[place]
            yield Estimated(float(step_ms), division.choices(place), hosts, count)

    def _side_by_side(self, tables: list[RankTable], weight: float) -> RankTable:
        """Modules on ranks of their own that do not feed each other."""
        side, *others = tables
        for table in others:
            side = side.first(self._few, weight).beside(table.first(self._few, weight), weight)
        return side

    def _alone(self, table: RankTable, hosts: Mapping[str, str], count: int) -> Iterator[Estimated]:
        """Candidates in which all ranks are those of one table."""
        scores = table.fill_ms[-1] + (count - 1) * table.bottleneck_ms[-1]
        for place, score in enumerate(scores.tolist()):
            if score < NONE:
                yield Estimated(score, table.choices(self.problem.num_ranks, place), hosts, count)

    def candidate(self, found: Estimated) -> Candidate:
        """The candidate with its stages cut."""
        layouts = {
            name: self.options[name].layout(choice.kind, choice.dp_size, choice.pp_size, choice.num_samples)
            for name in self.options
            for choice in [found.choices[name]]
        }
        return Candidate(layouts, found.hosts, found.num_microbatches, self.problem.schedule)


def unlike(found: Iterable[Estimated]) -> Iterator[Estimated]:
    """The candidates in their order, but for those of a family of which there have been enough."""
    seen: Counter = Counter()
    for own in found:
        seen[own.family] += 1
        if seen[own.family] <= _PER_FAMILY:
            yield own
