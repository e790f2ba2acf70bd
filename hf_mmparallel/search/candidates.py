"""Candidates for a plan, fastest first by the closed form."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL
from ..plan.schedules import POLICIES
from .combinations import (
    Choice,
    Combinations,
    LayoutTable,
    few_enough,
    first_of_groups,
    layout_table,
    side_by_side,
)
from .options import ModuleOptions, divisors
from .problem import Candidate, PlanningProblem

MOST_MICROBATCHES = 256
"""Of a replica."""
_ALL = 2048  # combinations of one placement, number of copies and of microbatches that are all candidates
_FASTEST = 512  # of more
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
        least_ms (`float`, *optional*, defaults to 0.0): What its slowest rank computes at least.
    """

    step_ms: float
    choices: Mapping[str, Choice]
    hosts: Mapping[str, str]
    num_microbatches: int
    least_ms: float = 0.0

    @property
    def family(self) -> tuple:
        """What kind of plan it is, for a choice of unlike ones: where modules are, and how they are cut."""
        kinds = ((c.kind.tp_size, c.kind.cp_size, c.kind.checkpointing, c.pp_size > 1) for c in self.choices.values())
        return (tuple(sorted(self.hosts.items())), tuple(kinds))

    def memory_bytes(self, problem: PlanningProblem) -> float:
        """Of the fullest rank, about."""
        return float(needed_bytes(problem, self.choices, self.hosts, self.num_microbatches))


def needed_bytes(
    problem: PlanningProblem, choices: Mapping, hosts: Mapping[str, str], num_microbatches: int
) -> NDArray:
    """
    Memory of the fullest rank, about: that of first stages, with as many microbatches in flight as 1F1B has, or of
    last ones, where logits are.

    Args:
        problem ([`PlanningProblem`]): The question.
        choices (`Mapping`): Module -> a [`Choice`], or an object with arrays of the same names.
        hosts (`Mapping[str, str]`): Module -> the module whose ranks it shares.
        num_microbatches (`int`): Of each replica of the language model.
    """
    behind = {name: np.asarray(0) for name in choices}
    for edge in reversed(problem.spec.edges):
        behind[edge.source] = np.maximum(behind[edge.source], behind[edge.target] + choices[edge.target].pp_size)
    first: dict[str, NDArray] = {}
    last: dict[str, NDArray] = {}
    for name, choice in choices.items():
        is_encoder, host = name in problem.spec.encoders, hosts.get(name, name)
        # Samples of an encoder may be used a microbatch later.
        in_flight = np.minimum(num_microbatches, choice.pp_size + behind[name] + is_encoder)
        at_the_end = np.minimum(num_microbatches, 1 + behind[name] + is_encoder)
        if POLICIES[problem.first_schedule].keeps_all(is_encoder):
            in_flight = at_the_end = np.asarray(num_microbatches)
        early = choice.state_bytes + in_flight * choice.kept_bytes + choice.running_bytes
        late = choice.last_state_bytes + at_the_end * choice.kept_bytes + choice.last_running_bytes
        first[host], last[host] = first.get(host, 0.0) + early, last.get(host, 0.0) + late
    return np.max([np.maximum(first[host], last[host]) for host in first], axis=0)


@dataclass(frozen=True)
class _Block:
    """Combinations with one placement, number of copies of the language model and of microbatches."""

    tables: Mapping[str, LayoutTable]
    hosts: Mapping[str, str]
    num_microbatches: int
    combinations: Combinations
    step_ms: NDArray
    memory_bytes: NDArray
    num_estimated: int
    num_too_large: int

    def estimated(self, place: int) -> Estimated:
        """One of them."""
        choices = {name: table.choice(self.combinations.rows[name][place]) for name, table in self.tables.items()}
        step_ms, least_ms = (float(values[place]) for values in (self.step_ms, self.combinations.least_ms))
        return Estimated(step_ms, choices, self.hosts, self.num_microbatches, least_ms)


@dataclass(frozen=True)
class _Column:
    """What [`needed_bytes`] reads of a module's layouts, for some rows."""

    table: LayoutTable
    rows: NDArray

    def __getattr__(self, name: str) -> NDArray:
        return getattr(self.table, name)[self.rows]


class CandidateSpace:
    """
    All candidates of a problem, see [`PlanningProblem`], fastest first by the closed form.

    Copies of modules divide each other and the global batch. Every module may be on ranks of its own or on those of
    the language model, and encoders together on ranks of their own (Cornstarch, section 4.2); modules on the same
    ranks may have different sizes there.

    Nothing is left out for an estimate of memory, which may be too high or too low: candidates go only where what
    every plan with such sizes holds, on average over its ranks and with one microbatch, exceeds the memory. Of very
    many combinations with the same numbers of copies and microbatches the fastest stay, the fastest that are expected
    to fit, and both of each family (tensor and context parallelism, recomputation, one stage or several).
    """

    def __init__(self, problem: PlanningProblem):
        self.problem = problem
        self.options = {name: ModuleOptions(problem, name) for name in problem.spec.modules}

    def __iter__(self) -> Iterator[Estimated]:
        """All candidates, fastest first."""
        return self._in_order(self._step_ms, np.ones(len(self), bool))

    def __len__(self) -> int:
        return len(self._step_ms)

    def leanest_first(self) -> Iterator[Estimated]:
        """All candidates, those with the least estimate of memory first."""
        return self._in_order(self._memory_bytes, np.ones(len(self), bool))

    def expected_to_fit(self) -> Iterator[Estimated]:
        """Those whose estimate of memory is within the limit, fastest first."""
        return self._in_order(self._step_ms, self._fits)

    def doubtful(self) -> Iterator[Estimated]:
        """Those whose estimate of memory is above the limit, fastest first."""
        return self._in_order(self._step_ms, ~self._fits)

    @property
    def num_estimated(self) -> int:
        """Combinations of sizes that were looked at."""
        return sum(block.num_estimated for block in self._blocks)

    @property
    def num_too_large(self) -> int:
        """Those of them that can't fit."""
        return sum(block.num_too_large for block in self._blocks)

    def num_within(self, step_ms: float) -> int:
        """Candidates whose slowest rank computes less than that in a step, at least."""
        return sum(int((block.combinations.least_ms < step_ms).sum()) for block in self._blocks)

    def _in_order(self, score: NDArray, chosen: NDArray) -> Iterator[Estimated]:
        """Some of the candidates, those with the least score first."""
        places = np.flatnonzero(chosen)
        starts = np.cumsum([0, *(len(block.step_ms) for block in self._blocks)])
        for place in places[np.argsort(score[places], kind="stable")].tolist():
            block = int(np.searchsorted(starts, place, "right")) - 1
            yield self._blocks[block].estimated(place - int(starts[block]))

    @cached_property
    def _step_ms(self) -> NDArray:
        return np.concatenate([np.empty(0), *(block.step_ms for block in self._blocks)])

    @cached_property
    def _memory_bytes(self) -> NDArray:
        return np.concatenate([np.empty(0), *(block.memory_bytes for block in self._blocks)])

    @property
    def _fits(self) -> NDArray:
        limit = self.problem.memory_bytes
        return self._memory_bytes <= (np.inf if limit is None else limit)

    @cached_property
    def _blocks(self) -> list[_Block]:
        return [self._block(*parts) for parts in self._combined()]

    def _combined(self) -> Iterator[tuple[Mapping[str, LayoutTable], Mapping[str, str], int, Combinations]]:
        """The layouts of modules, a placement, a number of microbatches, and all combinations that these have."""
        problem = self.problem
        for dp_size in divisors(problem.global_batch_size):
            if dp_size > problem.num_ranks or not self.options[LANGUAGE_MODEL].allows("dp_size", dp_size):
                continue
            for count in self._microbatch_counts(dp_size):
                tables = {name: self._table(name, dp_size, count) for name in self.options}
                for hosts in self.placements():
                    yield tables, hosts, count, self._placed(tables, hosts, count)

    def _block(
        self, tables: Mapping[str, LayoutTable], hosts: Mapping[str, str], count: int, combined: Combinations
    ) -> _Block:
        """The combinations that are candidates."""
        limit = self.problem.memory_bytes
        num_estimated = len(combined)
        if limit is not None:
            combined = combined.take(np.flatnonzero(combined.mean_bytes <= limit))
        num_too_large = num_estimated - len(combined)
        step_ms = combined.fill_ms + (count - 1) * combined.bottleneck_ms
        columns = {name: _Column(tables[name], rows) for name, rows in combined.rows.items()}
        memory_bytes = needed_bytes(self.problem, columns, hosts, count)
        if len(combined) > _ALL:
            fits = memory_bytes <= (np.inf if limit is None else limit)
            fastest = np.argsort(step_ms, kind="stable")[:_FASTEST]
            fitting = first_of_groups(fits.astype(int), step_ms, _FASTEST)
            family = first_of_groups(2 * combined.family + fits, step_ms, 1)
            kept = np.unique(np.concatenate([fastest, fitting, family]))
            combined, step_ms, memory_bytes = combined.take(kept), step_ms[kept], memory_bytes[kept]
        return _Block(tables, hosts, count, combined, step_ms, memory_bytes, num_estimated, num_too_large)

    def _microbatch_counts(self, dp_size: int) -> list[int]:
        """Numbers of microbatches of a replica."""
        replica = self.problem.global_batch_size // dp_size
        if self.problem.microbatch_size is not None:
            return [-(-replica // self.problem.microbatch_size)]
        return [count for count in divisors(replica) if count <= MOST_MICROBATCHES]

    def _table(self, name: str, dp_size: int, count: int) -> LayoutTable:
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
        return layout_table(self.options[name], count, sizes)

    def placements(self) -> list[dict[str, str]]:
        """Module -> the module whose ranks it shares, for every placement."""
        others = [name for name in self.options if name != LANGUAGE_MODEL]
        encoders = list(self.problem.spec.encoders)
        placements = []
        for shared in itertools.product((False, True), repeat=len(others)):
            placements.append({name: LANGUAGE_MODEL for name, there in zip(others, shared, strict=True) if there})
        if len(encoders) > 1:
            joined = dict.fromkeys(encoders[1:], encoders[0])
            generators = [name for name in others if name not in encoders]
            placements += [joined, {**joined, **dict.fromkeys(generators, LANGUAGE_MODEL)}]
        unique = {tuple(sorted(hosts.items())): hosts for hosts in placements}
        return list(unique.values())

    def _placed(self, tables: Mapping[str, LayoutTable], hosts: Mapping[str, str], count: int) -> Combinations:
        """The combinations of a placement that take all ranks."""
        weight, ranks = float(count - 1), self.problem.num_ranks
        groups = {name: Combinations.of(name, table) for name, table in tables.items()}
        for name, host in hosts.items():
            groups[host] = groups[host].sharing(groups.pop(name)).thinned(weight)
        language = groups.pop(LANGUAGE_MODEL)
        generators = [groups.pop(name) for name in self.problem.spec.generators if name in groups]
        encoders = list(groups.values())
        if generators and encoders:
            behind = side_by_side(generators, weight, ranks)
            language, behind = few_enough([language, behind], weight)
            language = language.beside(behind, None, ranks, in_series=True).thinned(weight)
        elif generators:
            encoders = generators
        if not encoders:
            return language.of_ranks(ranks)
        return language.beside(side_by_side(encoders, weight, ranks), ranks, ranks, in_series=True)

    def candidate(self, estimated: Estimated) -> Candidate:
        """The candidate with its stages cut, and the schedule and arrangement that are looked at first."""
        layouts = {
            name: self.options[name].layout(choice.kind, choice.dp_size, choice.pp_size, choice.num_samples)
            for name in self.options
            for choice in [estimated.choices[name]]
        }
        problem = self.problem
        return Candidate(
            layouts, estimated.hosts, estimated.num_microbatches, problem.first_schedule, problem.first_method
        )


def unlike(candidates: Iterable[Estimated]) -> Iterator[Estimated]:
    """Candidates in their order, at most a few of each family."""
    seen: Counter = Counter()
    for candidate in candidates:
        seen[candidate.family] += 1
        if seen[candidate.family] <= _PER_FAMILY:
            yield candidate
