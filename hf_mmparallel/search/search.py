"""The search: candidates by the closed form, the best of them simulated on real batches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from ..cost import fitting_tokens
from ..plan import LANGUAGE_MODEL, SampleSizes, sync_groups
from ..schedule import condense
from .candidates import CandidateSpace, Estimated, unlike
from .condense import on_all_ranks, predict_condensed
from .explain import bound_of, no_plan_error, reason_for
from .problem import Candidate, PlanningProblem, RankedPlan, SearchResult, draw_batch
from .steps import Prediction, StepPlanner

_NUM_BATCHES = 3
_RUNNERS_UP = 3
_LEAST_RANKS = 16


def search_plans(problem: PlanningProblem) -> SearchResult:
    """
    Finds the plan that is expected to train fastest.

    Every layout of every module, placement and number of microbatches is estimated by the closed form of Entrain
    (algorithm 3, which contains Cornstarch's algorithm 1). Of the best, of unlike families, and then of more with the
    best's placement, as few replicas as there can be are simulated with their part of a real batch in its
    arrangement; of the fastest of these all replicas; the finalists with several batches.

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
    simulator.screen(unlike(found), share=0.2, least=20)
    best = simulator.best_placement()
    simulator.screen((own for own in found if own.hosts == best), share=0.1, least=8)
    simulator.screen(found, share=0.05, least=0)
    simulator.simulate(share=0.2, least=6)
    ranked = simulator.finalists(share=0.2, least=1 + _RUNNERS_UP)
    while not ranked and (simulator.screen(found, share=0.1, least=6) or simulator.num_waiting):
        simulator.simulate(share=0.2, least=6)
        ranked = simulator.finalists(share=0.2, least=1 + _RUNNERS_UP)
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
        len(simulator.screened),
        time.perf_counter() - start,
    )


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
    """Simulates candidates, each once, as long as they fit the memory: first a slice of their replicas, then all."""

    def __init__(self, space: CandidateSpace):
        self.space, self.problem = space, space.problem
        self.batches = [draw_batch(self.problem, number) for number in range(_NUM_BATCHES)]
        self.effort = self.problem.effort * max(_LEAST_RANKS, self.problem.num_ranks)  # in tasks
        self.screened: list[tuple[float, Estimated, Candidate]] = []
        self._waiting: list[tuple[float, Estimated, Candidate]] = []  # for all of their replicas
        self.plans: list[RankedPlan] = []
        self._seen: set[str] = set()
        self._num_too_large = 0

    def screen(self, candidates: Iterable[Estimated], share: float, least: int) -> int:
        """
        Simulates slices of candidates with room for the batch: as many as a share of the effort allows, but `least`.
        Returns how many.
        """
        added = num_tasks = 0
        for found in candidates:
            if added >= least and num_tasks >= share * self.effort:
                break
            candidate = self.space.candidate(found)
            if str(candidate) in self._seen:
                continue
            self._seen.add(str(candidate))
            parts = math.gcd(*(own.dp_size for own in candidate.layouts.values()))
            few = {
                name: replace(layout, dp_size=layout.dp_size // parts) for name, layout in candidate.layouts.items()
            }
            small = replace(candidate, layouts=few)
            num_tasks += small.num_ranks
            if not _has_room(step_planner(self.problem, small), candidate, self.batches[0]):
                self._num_too_large += 1
                continue
            self.screened.append((self._screened(found, small, parts), found, candidate))
            self._waiting.append(self.screened[-1])
            added, num_tasks = added + 1, num_tasks + small.num_tasks
        return added

    @property
    def num_waiting(self) -> int:
        """Screened candidates that have not been simulated whole."""
        return len(self._waiting)

    def best_placement(self) -> Mapping[str, str] | None:
        """Of the fastest slice."""
        return min(self.screened, key=lambda found: found[0])[1].hosts if self.screened else None

    def simulate(self, share: float, least: int) -> None:
        """All replicas of the candidates with the fastest slices, with the first batch."""
        num_tasks = 0
        self._waiting.sort(key=lambda found: -found[0])
        while self._waiting and (len(_unlike_plans(self.plans)) < least or num_tasks < share * self.effort):
            _, own, candidate = self._waiting.pop()
            prediction = self._fitting(candidate, self.batches[0])
            if prediction is None:
                self._num_too_large += 1
                continue
            self.plans.append(RankedPlan(candidate, prediction.plan, (prediction,), own.step_ms))
            num_tasks += candidate.num_tasks

    def finalists(self, share: float, least: int) -> list[RankedPlan]:
        """The fastest that fit all batches: as many as a share of the effort allows, but `least` unlike."""
        result, num_tasks = [], 0
        for plan in sorted(self.plans, key=_speed):
            if len(_unlike_plans(result)) >= least and num_tasks >= share * self.effort:
                break
            num_tasks += 2 * plan.candidate.num_tasks
            more = [self._fitting(plan.candidate, batch) for batch in self.batches[1:]]
            fitting = [found for found in more if found is not None]
            if len(fitting) < len(more):
                self._num_too_large += 1
                self.plans.remove(plan)
                continue
            result.append(replace(plan, predictions=(*plan.predictions, *fitting)))
        return sorted(result, key=_speed)

    def _screened(self, found: Estimated, small: Candidate, parts: int) -> float:
        """
        What a step takes by as few replicas as there can be, one of several equal parts, with their part of the first
        batch: replicas do the same on other samples. How uneven they are, and the longer gradient sums, are those of
        the closed form.
        """
        batch = self.batches[0]
        order = np.argsort(batch.tokens[LANGUAGE_MODEL], kind="stable")
        samples = batch.take(np.sort(order[parts // 2 :: parts]))
        try:
            prediction = self._predict(small, samples, self.problem.memory_bytes)
        except ValueError:  # these samples are larger than the mean
            prediction = self._predict(small, samples, None)
        uneven = self.space.options[LANGUAGE_MODEL].unevenness(parts * small.layouts[LANGUAGE_MODEL].dp_size)
        longer = self._sums_ms(found, 1) - self._sums_ms(found, parts)
        return uneven * prediction.step_ms + longer

    def _sums_ms(self, own: Estimated, parts: int) -> float:
        """Gradient sums of one of several equal parts of a candidate's replicas."""
        sums: dict[str, float] = {}
        for name, choice in own.choices.items():
            host = own.hosts.get(name, name)
            found = self.space.options[name].sync_ms(choice.kind, choice.dp_size // parts, choice.pp_size)
            sums[host] = sums.get(host, 0.0) + found
        return max(sums.values())

    def rejected(self) -> dict[str, int]:
        """Reason -> how many candidates were left out for it."""
        too_large = self.space.num_too_large + self._num_too_large
        return {"needs more memory than a rank has": too_large} if too_large else {}

    def _fitting(self, candidate: Candidate, batch: SampleSizes) -> Prediction | None:
        """What a batch takes, `None` where it does not fit."""
        limit = self.problem.memory_bytes
        if not _has_room(step_planner(self.problem, candidate), candidate, batch):
            return None
        try:
            prediction = self._predict(candidate, batch, limit)
        except ValueError:  # its samples can't be packed into microbatches that fit
            return None
        return prediction if limit is None or prediction.peak_memory_bytes <= limit else None

    def _predict(self, candidate: Candidate, batch: SampleSizes, memory_bytes: float | None) -> Prediction:
        """What a batch takes."""
        problem = replace(self.problem, global_batch_size=batch.num_samples, memory_bytes=memory_bytes)
        planner = step_planner(problem, candidate)
        return predict_condensed(planner, condense(planner.plan, tuple(planner.groups)), batch)


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
