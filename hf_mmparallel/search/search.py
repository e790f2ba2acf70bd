"""The search: candidates by the closed form, the best of them simulated on real batches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..cost import fitting_tokens
from ..plan import LANGUAGE_MODEL, SampleSizes, sync_groups
from .candidates import CandidateSpace, Estimated
from .condense import condense, on_all_ranks, predict_condensed
from .explain import bound_of, no_plan_error, reason_for
from .problem import Candidate, PlanningProblem, RankedPlan, SearchResult, draw_batch
from .steps import Prediction, StepPlanner

_NUM_BATCHES = 3
_PER_FAMILY = 2
_RUNNERS_UP = 3
_LEAST_RANKS = 16


def search_plans(problem: PlanningProblem) -> SearchResult:
    """
    Finds the plan that is expected to train fastest.

    Every layout of every module, placement and number of microbatches is estimated by the closed form of Entrain
    (algorithm 3, which contains Cornstarch's algorithm 1). The best, of unlike families, are simulated with a real
    batch in its arrangement; then more with the best's placement; the finalists with several batches.

    Args:
        problem (`PlanningProblem`): The question.

    Returns:
        `SearchResult`: The best plan, what bounds it, and the next best ones.

    Raises:
        `ValueError`: If no plan fits the memory or the sizes that are set; it says by how much, and what helps.
    """
    start = time.perf_counter()
    space = CandidateSpace(problem)
    found = sorted(space, key=lambda own: own.step_ms)
    if not found:
        raise no_plan_error(problem)
    simulator = _Simulator(space)
    simulator.simulate(_unlike(found, _PER_FAMILY), share=0.5, least=6)
    best = [own.hosts for own, _ in simulator.best(1)]
    simulator.simulate((own for own in found if own.hosts in best), share=0.2, least=2)
    simulator.simulate(found, share=0.1, least=0 if simulator.plans else 6)
    if not simulator.plans:
        raise no_plan_error(problem)
    ranked = simulator.finalists(share=0.2, least=4)
    if not ranked:
        raise no_plan_error(problem)
    best, *others = (
        replace(plan, predictions=tuple(map(on_all_ranks, plan.predictions)))
        for plan in _unlike_plans(ranked)[: 1 + _RUNNERS_UP]
    )
    return SearchResult(
        problem,
        replace(best, bound=bound_of(problem, best)),
        tuple(replace(other, bound=bound_of(problem, other)) for other in others),
        tuple(reason_for(best, other) for other in others),
        simulator.rejected(),
        len(found) + space.num_too_large,
        len(simulator.plans),
        time.perf_counter() - start,
    )


def _unlike(found: Iterable[Estimated], limit: int) -> Iterator[Estimated]:
    """The candidates, at most `limit` of each family."""
    seen: Counter = Counter()
    for own in found:
        seen[own.family] += 1
        if seen[own.family] <= limit:
            yield own


def _unlike_plans(ranked: Iterable[RankedPlan]) -> list[RankedPlan]:
    """The plans that differ from those before them in more than the number of microbatches."""
    seen, result = [], []
    for plan in ranked:
        sizes = (plan.candidate.hosts, plan.candidate.layouts)
        if sizes not in seen:
            seen.append(sizes)
            result.append(plan)
    return result


def _speed(plan: RankedPlan) -> tuple[float, float]:
    """What plans are ordered by: of equally fast ones the leaner comes first."""
    return plan.step_ms, max(own.peak_memory_bytes for own in plan.predictions)


class _Simulator:
    """Simulates candidates, each once, as long as they fit the memory."""

    def __init__(self, space: CandidateSpace):
        self.space, self.problem = space, space.problem
        self.batches = [draw_batch(self.problem, number) for number in range(_NUM_BATCHES)]
        self.effort = self.problem.effort * max(_LEAST_RANKS, self.problem.num_ranks)  # in tasks
        self.plans: list[tuple[Estimated, RankedPlan]] = []
        self._seen: set[str] = set()
        self._num_too_large = 0

    def simulate(self, candidates: Iterable[Estimated], share: float, least: int) -> None:
        """Adds candidates that fit: as many as a share of the effort allows, but `least` of them."""
        added = num_tasks = 0
        for own in candidates:
            if added >= least and num_tasks >= share * self.effort:
                return
            candidate = self.space.candidate(own)
            if str(candidate) in self._seen:
                continue
            self._seen.add(str(candidate))
            prediction = self._predict(candidate, self.batches[0])
            if prediction is None:
                self._num_too_large += 1
                continue
            self.plans.append((own, RankedPlan(candidate, prediction.plan, (prediction,), own.step_ms)))
            added, num_tasks = added + 1, num_tasks + candidate.num_tasks

    def best(self, count: int) -> list[tuple[Estimated, RankedPlan]]:
        """The fastest so far."""
        return sorted(self.plans, key=lambda pair: _speed(pair[1]))[:count]

    def finalists(self, share: float, least: int) -> list[RankedPlan]:
        """The fastest by the first batch that fit all batches: as many as a share of the effort allows but `least`."""
        result, num_tasks = [], 0
        for _, plan in self.best(len(self.plans)):
            if len(result) >= least and num_tasks >= share * self.effort:
                break
            num_tasks += plan.candidate.num_tasks
            more = [self._predict(plan.candidate, batch) for batch in self.batches[1:]]
            if any(found is None for found in more):
                self._num_too_large += 1
                continue
            result.append(replace(plan, predictions=(*plan.predictions, *more)))
        return sorted(result, key=_speed)

    def rejected(self) -> dict[str, int]:
        """Reason -> how many candidates were left out for it."""
        too_large = self.space.num_too_large + self._num_too_large
        return {"needs more memory than a rank has": too_large} if too_large else {}

    def _predict(self, candidate: Candidate, batch: SampleSizes) -> Prediction | None:
        """What a batch takes, `None` where it does not fit."""
        problem = self.problem
        planner = step_planner(problem, candidate)
        if not _has_room(planner, candidate, batch):
            return None
        prediction = predict_condensed(planner, condense(planner.plan, tuple(planner.groups)), batch)
        fits = problem.memory_bytes is None or prediction.peak_memory_bytes <= problem.memory_bytes
        return prediction if fits else None


def _has_room(planner: StepPlanner, candidate: Candidate, batch: SampleSizes) -> bool:
    """Whether microbatches of the candidate's size, and the largest sample, fit beside the state of each rank."""
    if planner.memory_bytes is None:
        return True
    try:
        limits = fitting_tokens(planner.costs, planner.plan, batch, planner.memory_bytes)
    except ValueError:  # weights, gradients and optimizer state alone are too large
        return False
    for name, limit in limits.items():
        tokens, parts = batch.tokens[name], candidate.layouts[name].dp_size * candidate.num_microbatches
        if limit < max(tokens.sum() / parts, tokens.max()):
            return False
    return True


def step_planner(problem: PlanningProblem, candidate: Candidate) -> StepPlanner:
    """Plans steps of a candidate as training does."""
    plan = candidate.plan(problem.spec)
    dp_size = candidate.layouts[LANGUAGE_MODEL].dp_size
    microbatch_size = -(-problem.global_batch_size // (dp_size * candidate.num_microbatches))
    return StepPlanner(
        problem.costs,
        plan,
        sync_groups(problem.spec, plan),
        microbatch_size,
        problem.method,
        memory_bytes=problem.memory_bytes,
    )
