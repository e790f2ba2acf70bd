"""Candidate plans, fastest first by a closed-form estimate."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL
from ..plan.methods import POLICIES
from .combinations import (
    Combinations,
    LayoutEstimate,
    LayoutTable,
    Pairs,
    best_per_group,
    layout_table,
    limit_pairs,
    side_by_side,
)
from .options import ModuleOptions, divisors, microbatch_counts
from .problem import Candidate, PlanningProblem

# Up to so many combinations per placement and counts of replicas and microbatches are all taken.
_MAX_ENUMERATED = 2048
_MAX_CANDIDATES = 512  # candidates of larger numbers of combinations
_MAX_PER_FAMILY = 2


@dataclass(frozen=True)
class EstimatedCandidate:
    """A candidate with a closed-form estimate of its step time."""

    # `sum of stages + (microbatches - 1) x slowest stage` (Entrain, equation 4.2), plus gradient all-reduces
    step_ms: float
    estimates: Mapping[str, LayoutEstimate]
    colocated_with: Mapping[str, str]  # module -> the module whose ranks it shares
    num_microbatches: int  # of each replica of the language model
    kind: int = 0  # that of [`CandidateColumns`]

    @property
    def family(self) -> tuple:
        """Placement and kind of parallelism of all modules; candidates of one family are similar."""
        kinds = tuple((own.kind, own.pp_size > 1) for own in self.estimates.values())
        return tuple(sorted(self.colocated_with.items())), kinds

    def memory_bytes(self, problem: PlanningProblem) -> float:
        """Estimated peak memory of the fullest rank."""
        return float(estimated_peak_bytes(problem, self.estimates, self.colocated_with, self.num_microbatches))


def estimated_peak_bytes(
    problem: PlanningProblem, estimates: Mapping, colocated_with: Mapping[str, str], num_microbatches: int
) -> NDArray:
    """
    Estimates the memory of the fullest rank: the maximum of first stages, with the microbatches in flight of 1F1B, and
    of last stages, which have the logits. `estimates` has a [`LayoutEstimate`] or arrays with the same names by
    module.
    """
    behind = {name: np.asarray(0) for name in estimates}
    for edge in reversed(problem.spec.edges):
        behind[edge.source] = np.maximum(behind[edge.source], behind[edge.target] + estimates[edge.target].pp_size)
    first: dict[str, NDArray] = {}
    last: dict[str, NDArray] = {}
    for name, estimate in estimates.items():
        is_encoder, host = name in problem.spec.encoders, colocated_with.get(name, name)
        # Samples of an encoder may be deferred by a microbatch.
        in_flight = np.minimum(num_microbatches, estimate.pp_size + behind[name] + is_encoder)
        at_the_end = np.minimum(num_microbatches, 1 + behind[name] + is_encoder)
        if POLICIES[problem.first_schedule].keeps_all(is_encoder):
            in_flight = at_the_end = np.asarray(num_microbatches)
        early = estimate.state_bytes + in_flight * estimate.saved_bytes + estimate.running_bytes
        late = estimate.last_state_bytes + at_the_end * estimate.saved_bytes + estimate.last_running_bytes
        first[host], last[host] = first.get(host, 0.0) + early, last.get(host, 0.0) + late
    return np.max([np.maximum(first[host], last[host]) for host in first], axis=0)


@dataclass(frozen=True)
class _Block:
    """Combinations with the same placement and the same numbers of replicas and microbatches."""

    tables: Mapping[str, LayoutTable]
    colocated_with: Mapping[str, str]
    num_microbatches: int
    combinations: Combinations
    step_ms: NDArray
    busy_ms: NDArray
    memory_bytes: NDArray
    num_estimated: int
    num_too_large: int

    @property
    def kind(self) -> NDArray:
        """int64 `[combinations]`: which modules have several stages, and of which passes communicate."""
        result = np.zeros(len(self.step_ms), np.int64)
        for name, table in self.tables.items():
            rows = self.combinations.rows[name]
            shares = np.array([kind.shares_passes for kind in table.kinds], bool)[table.kind[rows]]
            result = 4 * result + 2 * shares + (table.pp_size[rows] > 1)
        return result

    def candidate(self, index: int) -> EstimatedCandidate:
        """The candidate at an index."""
        estimates = {name: table.estimate(self.combinations.rows[name][index]) for name, table in self.tables.items()}
        return EstimatedCandidate(float(self.step_ms[index]), estimates, self.colocated_with, self.num_microbatches)


@dataclass(frozen=True)
class CandidateColumns:
    """All candidates of a space, `[candidates]` each."""

    step_ms: NDArray  # closed form of the step
    busy_ms: NDArray  # of it, what the slowest stage computes
    excess: NDArray  # estimated memory over the limit
    kind: NDArray  # number of the placement, with the modules that have several stages and communicate in passes
    block: NDArray
    row: NDArray  # index within the block


@dataclass(frozen=True)
class _Column:
    """The rows of a module in combinations, with the attributes that [`estimated_peak_bytes`] reads."""

    module: str
    table: LayoutTable
    combined: Combinations | Pairs

    def __getattr__(self, name: str) -> NDArray:
        return self.combined.of_rows(self.module, getattr(self.table, name))


class CandidateSpace:
    """
    All candidates of a problem, see [`PlanningProblem`], fastest first by the closed-form estimate.

    Numbers of replicas of modules divide each other and the global batch. Every module may have its own ranks or share
    those of the language model, and encoders may share ranks of their own (Cornstarch, section 4.2); modules on the
    same ranks may have different sizes there.

    Memory estimates, which may be too high or too low, exclude no candidate; only a lower bound above the memory does:
    that of one microbatch, averaged over ranks.
    """

    def __init__(self, problem: PlanningProblem):
        self.problem = problem
        self.options = {name: ModuleOptions(problem, name) for name in problem.spec.modules}

    def __iter__(self) -> Iterator[EstimatedCandidate]:
        """All candidates, those that are expected to fit into memory first, and of these the fastest."""
        columns = self.columns
        return map(self.estimated, np.lexsort((columns.step_ms, columns.excess > 1)).tolist())

    def __len__(self) -> int:
        return len(self.columns.step_ms)

    def expected_to_fit(self) -> Iterator[EstimatedCandidate]:
        """Candidates with a memory estimate within the limit, fastest first."""
        return itertools.islice(self, int((self.columns.excess <= 1).sum()))

    @cached_property
    def columns(self) -> CandidateColumns:
        """All candidates as arrays."""
        limit, placements = self.problem.memory_bytes or np.inf, list[Mapping[str, str]](self.placements())
        parts: list[tuple[NDArray, ...]] = [(*np.empty((3, 0)), *np.empty((3, 0), np.int64))]
        for number, block in enumerate(self._blocks):
            count = len(block.step_ms)
            kind = len(placements) * block.kind + placements.index(block.colocated_with)
            times, numbers = (block.step_ms, block.busy_ms), (np.full(count, number), np.arange(count))
            parts.append((*times, block.memory_bytes / limit, kind, *numbers))
        return CandidateColumns(*map(np.concatenate, zip(*parts, strict=True)))

    @property
    def is_whole(self) -> bool:
        """Whether these are all combinations that may fit."""
        return all(block.combinations.is_whole for block in self._blocks)

    def estimated(self, index: int) -> EstimatedCandidate:
        """The candidate at an index of [`~CandidateSpace.columns`]."""
        columns = self.columns
        estimated = self._blocks[columns.block[index]].candidate(int(columns.row[index]))
        return replace(estimated, kind=int(columns.kind[index]))

    @property
    def num_estimated(self) -> int:
        """Number of combinations of sizes with an estimate."""
        return sum(block.num_estimated for block in self._blocks)

    @property
    def num_too_large(self) -> int:
        """Number of combinations that can't fit into memory."""
        return sum(block.num_too_large for block in self._blocks)

    @cached_property
    def _blocks(self) -> list[_Block]:
        return [self._block(*parts) for parts in self._combined()]

    def _combined(self) -> Iterator[tuple[Mapping[str, LayoutTable], Mapping[str, str], int, Combinations | Pairs]]:
        """Layout tables of modules, a placement, a number of microbatches, and all their combinations."""
        problem = self.problem
        for dp_size in divisors(problem.global_batch_size):
            if dp_size > problem.num_ranks or not self.options[LANGUAGE_MODEL].allows("dp_size", dp_size):
                continue
            for count in microbatch_counts(self.problem, dp_size):
                tables = {name: self._table(name, dp_size, count) for name in self.options}
                for colocated_with in self.placements():
                    yield tables, colocated_with, count, self._combinations_of_placement(tables, colocated_with, count)

    def _block(
        self,
        tables: Mapping[str, LayoutTable],
        colocated_with: Mapping[str, str],
        count: int,
        combined: Combinations | Pairs,
    ) -> _Block:
        """Selects the combinations that are candidates."""
        limit = self.problem.memory_bytes
        num_estimated = len(combined)
        if limit is not None:
            combined = combined.take(np.flatnonzero(combined.mean_bytes <= limit))
        num_too_large = num_estimated - len(combined)
        step_ms = combined.warm_up_ms + (count - 1) * combined.slowest_stage_ms
        columns = {name: _Column(name, table, combined) for name, table in tables.items()}
        memory_bytes = estimated_peak_bytes(self.problem, columns, colocated_with, count)
        # the fastest ones, the fastest ones that are estimated to fit, and both of each family
        if len(combined) > _MAX_ENUMERATED:
            fits = memory_bytes <= (np.inf if limit is None else limit)
            fastest = best_per_group(np.zeros(len(combined), np.int64), step_ms, _MAX_CANDIDATES)
            fitting = best_per_group(fits.astype(int), step_ms, _MAX_CANDIDATES)
            family = best_per_group(2 * combined.family + fits, step_ms, 1)
            chosen = np.unique(np.concatenate([fastest, fitting, family]))
            combined, step_ms, memory_bytes = combined.keep(chosen), step_ms[chosen], memory_bytes[chosen]
        if isinstance(combined, Pairs):
            combined = combined.combined()
        times = step_ms, count * combined.slowest_stage_ms
        return _Block(tables, colocated_with, count, combined, *times, memory_bytes, num_estimated, num_too_large)

    def _table(self, name: str, dp_size: int, count: int) -> LayoutTable:
        """The layouts of a module with `dp_size` replicas of the language model."""
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
            placements.append({name: LANGUAGE_MODEL for name, is_in in zip(others, shared, strict=True) if is_in})
        if len(encoders) > 1:
            joined = dict.fromkeys(encoders[1:], encoders[0])
            generators = [name for name in others if name not in encoders]
            placements += [joined, {**joined, **dict.fromkeys(generators, LANGUAGE_MODEL)}]
        unique = {tuple(sorted(colocated_with.items())): colocated_with for colocated_with in placements}
        return list(unique.values())

    def _combinations_of_placement(
        self, tables: Mapping[str, LayoutTable], colocated_with: Mapping[str, str], count: int
    ) -> Combinations | Pairs:
        """The combinations of a placement that use all ranks."""
        weight, ranks = float(count - 1), self.problem.num_ranks
        groups = {name: Combinations.of(name, table) for name, table in tables.items()}
        for name, host in colocated_with.items():
            groups[host] = groups[host].colocate(groups.pop(name)).prune(weight)
        language = groups.pop(LANGUAGE_MODEL)
        generators = [groups.pop(name) for name in self.problem.spec.generators if name in groups]
        encoders = list(groups.values())
        if generators and encoders:
            after = side_by_side(generators, weight, ranks)
            language, after = limit_pairs([language, after], weight)
            language = language.best_on_separate_ranks(after, ranks, in_series=True, weight=weight)
        elif generators:
            encoders = generators
        if not encoders:
            return language.with_ranks(ranks)
        return Pairs.of(language, side_by_side(encoders, weight, ranks), ranks, in_series=True)

    def candidate(self, estimated: EstimatedCandidate) -> Candidate:
        """The candidate with its stages, and the default schedule and arrangement."""
        layouts = {
            name: self.options[name].layout(estimate.kind, estimate.dp_size, estimate.pp_size, estimate.num_samples)
            for name in self.options
            for estimate in [estimated.estimates[name]]
        }
        problem = self.problem
        return Candidate(
            layouts,
            estimated.colocated_with,
            estimated.num_microbatches,
            problem.first_schedule,
            problem.first_arrangement,
            problem.schedules[0][1],
        )


def diversify(candidates: Iterable[EstimatedCandidate]) -> Iterator[EstimatedCandidate]:
    """Candidates in order, at most `_MAX_PER_FAMILY` per family."""
    seen: Counter = Counter()
    for candidate in candidates:
        seen[candidate.family] += 1
        if seen[candidate.family] <= _MAX_PER_FAMILY:
            yield candidate
