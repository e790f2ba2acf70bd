"""The search: candidates by the closed form, the best of them simulated on real batches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from ..cost.memory import state_per_rank
from ..cost.stage_memory import stage_memories
from ..plan import LANGUAGE_MODEL, SampleSizes, sync_groups
from ..plan.parallel_plan import Schedule
from ..schedule import condense
from .candidates import CandidateSpace, Estimated, unlike
from .condense import on_all_ranks, predict_condensed
from .explain import bound_of, no_plan_error, reason_for
from .problem import Candidate, PlanningProblem, RankedPlan, SearchResult, draw_batch
from .steps import Prediction, StepPlanner

_NUM_BATCHES = 3
_RUNNERS_UP = 3
_LEAST_RANKS = 64
_SMALL_STEP = 1024  # tasks: no need for a slice
_FEW_RANKS, _FEW_CANDIDATES = 8, 1024
_FEW_TASKS = 40_000
_OPTIMISTIC = 1.3  # steps are at least the closed form over that
_SLICE_MEMORY = 1.1  # of the limit, by which a slice may be larger than the whole
_ORDERED_LAYOUTS, _ORDERS = 3, 2
_MUCH_SLOWER = 1.15  # than the best, with which other schedules and arrangements are not tried


def search_plans(problem: PlanningProblem) -> SearchResult:
    """
    Finds the plan that is expected to train fastest.

    Every layout of every module, placement and number of microbatches is estimated by the closed form of Entrain
    (algorithm 3, which contains Cornstarch's algorithm 1). Of the best, of unlike families, then of more with the
    best's placement, and of some that may be too large for the memory, as few replicas as there can be are simulated
    with their part of a real batch in its arrangement; of the fastest of these all replicas. On up to 8 ranks, and
    where no more than 1,024 others compute less on their slowest rank than the best takes, all of these are simulated
    as well, as long as they have no more than 40,000 tasks together: small problems are solved by brute force. The
    fastest layouts are tried with the other schedules and arrangements, where these are left open; the finalists run
    several batches.

    Args:
        problem (`PlanningProblem`): The question.

    Returns:
        `SearchResult`: The best plan, what bounds it, and the next best ones.

    Raises:
        `ValueError`: If no plan fits the memory or the sizes that are set; it says by how much, and what helps.
    """
    start = time.perf_counter()
    space = CandidateSpace(problem)
    if not len(space):
        raise no_plan_error(problem)
    simulator = _Simulator(space)
    simulator.screen(unlike(space.expected_to_fit()), share=0.2, least=32)
    placement = simulator.best_placement()
    simulator.screen((own for own in space.expected_to_fit() if own.hosts == placement), share=0.1, least=16)
    simulator.screen(space.expected_to_fit(), share=0.05, least=0)
    simulator.screen(unlike(space.doubtful()), share=0.05, least=4)
    simulator.simulate(share=0.2, least=6)
    simulator.simulate_the_rest()
    simulator.try_orders(share=0.3)
    ranked = simulator.finalists(share=0.2, least=1 + _RUNNERS_UP)
    while not ranked and (simulator.screen(space, share=0.1, least=6) or simulator.num_waiting):
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
        space.num_estimated,
        simulator.num_simulated,
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
    """Simulates candidates, each once: first a slice of their replicas, then all."""

    def __init__(self, space: CandidateSpace):
        self.space, self.problem = space, space.problem
        self.batches = [draw_batch(self.problem, number) for number in range(_NUM_BATCHES)]
        self.effort = self.problem.effort * max(_LEAST_RANKS, self.problem.num_ranks)  # in tasks
        self.plans: list[RankedPlan] = []
        self._screened: dict[str, tuple[float, Estimated, Candidate]] = {}
        self._waiting: list[tuple[float, Estimated, Candidate]] = []  # for all of their replicas
        self._too_large: set[str] = set()

    # Slices of candidates

    def screen(self, candidates: Iterable[Estimated], share: float, least: int) -> int:
        """
        Simulates slices of candidates, or all of those with few tasks: as many as a share of the effort allows, but
        `least`. Returns how many fit.
        """
        added = num_tasks = num_tried = 0
        for estimated in candidates:
            if num_tried >= least and num_tasks >= share * self.effort:
                break
            candidate = self.space.candidate(estimated)
            key = str(candidate)
            if key in self._screened or key in self._too_large:
                continue
            num_tried += 1
            parts = 1 if candidate.num_tasks <= _SMALL_STEP else _parts(candidate)
            num_tasks += candidate.num_ranks // parts
            if not _state_fits(self.problem, candidate):
                self._too_large.add(key)
                continue
            num_tasks += candidate.num_tasks // parts
            if parts == 1:
                fits = self._simulate_whole(candidate, estimated)
                step_ms = self.plans[-1].step_ms if fits else float("inf")
            else:
                step_ms, fits = self._slice(candidate, estimated, parts)
            if not fits:
                self._too_large.add(key)
                continue
            self._screened[key] = (step_ms, estimated, candidate)
            if parts > 1:
                self._waiting.append(self._screened[key])
            added += 1
        return added

    @property
    def num_waiting(self) -> int:
        """Screened candidates that have not been simulated whole."""
        return len(self._waiting)

    @property
    def num_simulated(self) -> int:
        """Candidates that were simulated and not found to be too large."""
        return len(self._screened.keys() - self._too_large)

    def best_placement(self) -> Mapping[str, str] | None:
        """Of the fastest slice."""
        screened = self._screened.values()
        return min(screened, key=lambda entry: entry[0])[1].hosts if screened else None

    def _slice(self, candidate: Candidate, estimated: Estimated, parts: int) -> tuple[float, bool]:
        """
        What a step takes by as few replicas as there can be, one of several equal parts, with their part of the first
        batch, and whether they fit the memory: replicas do the same on other samples. How uneven they are, and the
        longer gradient sums, are those of the closed form.
        """
        batch, limit = self.batches[0], self.problem.memory_bytes
        few = {name: replace(layout, dp_size=layout.dp_size // parts) for name, layout in candidate.layouts.items()}
        order = np.argsort(batch.tokens[LANGUAGE_MODEL], kind="stable")
        samples = batch.take(np.sort(order[parts // 2 :: parts]))
        small = replace(candidate, layouts=few)
        try:
            prediction = self._predict(small, samples, limit)
        except ValueError:  # these samples are larger than the mean
            prediction = self._predict(small, samples, None)
        uneven = self.space.options[LANGUAGE_MODEL].unevenness(parts * few[LANGUAGE_MODEL].dp_size)
        longer = self._sums_ms(estimated, 1) - self._sums_ms(estimated, parts)
        # Samples of a slice may be larger than those of the batch.
        fits = limit is None or prediction.peak_memory_bytes <= (limit if parts == 1 else _SLICE_MEMORY * limit)
        return uneven * prediction.step_ms + longer, fits

    def _sums_ms(self, estimated: Estimated, parts: int) -> float:
        """Gradient sums of one of several equal parts of a candidate's replicas."""
        sums: dict[str, float] = {}
        for name, choice in estimated.choices.items():
            host = estimated.hosts.get(name, name)
            sum_ms = self.space.options[name].sync_ms(choice.kind, choice.dp_size // parts, choice.pp_size)
            sums[host] = sums.get(host, 0.0) + sum_ms
        return max(sums.values())

    # All replicas

    def simulate(self, share: float, least: int) -> None:
        """All replicas of the candidates with the fastest slices, with the first batch."""
        num_tasks = 0
        self._waiting.sort(key=lambda entry: -entry[0])
        while self._waiting and (len(_unlike_plans(self.plans)) < least or num_tasks < share * self.effort):
            _, estimated, candidate = self._waiting.pop()
            num_tasks += candidate.num_tasks
            if not self._simulate_whole(candidate, estimated):
                self._too_large.add(str(candidate))

    def _simulate_whole(self, candidate: Candidate, estimated: Estimated) -> bool:
        """Whether the first batch fits; then the candidate becomes a plan."""
        prediction = self._fitting(candidate, self.batches[0])
        if prediction is not None:
            self.plans.append(RankedPlan(candidate, prediction.plan, (prediction,), estimated.step_ms))
        return prediction is not None

    def simulate_the_rest(self) -> None:
        """
        Candidates that could be faster than the best, those with the best closed form first: of a small problem all.
        """
        best_ms = min((plan.step_ms for plan in self.plans), default=float("inf"))
        if self.problem.num_ranks > _FEW_RANKS and self.space.num_within(best_ms) > _FEW_CANDIDATES:
            return
        whole, num_tasks = {str(plan.candidate) for plan in self.plans}, 0
        for estimated in self.space:
            if estimated.step_ms > _OPTIMISTIC * best_ms or num_tasks > _FEW_TASKS:
                break
            if estimated.least_ms >= best_ms:
                continue
            candidate = self.space.candidate(estimated)
            key = str(candidate)
            if key in whole or key in self._too_large:
                continue
            if not _state_fits(self.problem, candidate):
                self._too_large.add(key)
                continue
            num_tasks += candidate.num_tasks
            if self._simulate_whole(candidate, estimated):
                self._screened[key] = (self.plans[-1].step_ms, estimated, candidate)
                best_ms = min(best_ms, self.plans[-1].step_ms)
            else:
                self._too_large.add(key)

    # Schedules and arrangements

    def try_orders(self, share: float) -> None:
        """
        Other schedules and arrangements, where these are left open: of the fastest layout of each shape (which modules
        share ranks, which have several stages) slices with each arrangement, then with each schedule; all replicas
        with the best of them, and those of the next layouts of that shape. As many shapes as a share of the effort
        allows, but two, and none that is much slower.
        """
        if len(self.problem.schedules) == len(self.problem.methods) == 1:
            return
        times = {str(plan.candidate): plan.step_ms for plan in self.plans}
        screened = [(times.get(key, entry[0]), entry) for key, entry in self._screened.items()]
        shapes: dict[tuple, list[tuple[float, Estimated, Candidate]]] = {}
        for step_ms, (_, estimated, candidate) in sorted(screened, key=lambda pair: pair[0]):
            if str(candidate) not in self._too_large:
                shapes.setdefault(_shape(candidate), []).append((step_ms, estimated, candidate))
        num_tasks = 0
        for number, layouts in enumerate(shapes.values()):
            step_ms, estimated, candidate = layouts[0]
            best_ms = min((plan.step_ms for plan in self.plans), default=step_ms)
            if (number > 1 and num_tasks > share * self.effort) or step_ms > _MUCH_SLOWER * best_ms:
                break
            orders, tried = self._best_orders(candidate, estimated)
            num_tasks += tried
            for place, (_, estimated, candidate) in enumerate(layouts[:_ORDERED_LAYOUTS]):
                for schedule, method in orders if place == 0 else orders[:1]:
                    self._simulate_whole(replace(candidate, schedule=schedule, method=method), estimated)
                    num_tasks += candidate.num_tasks

    def _best_orders(self, candidate: Candidate, estimated: Estimated) -> tuple[list[tuple[Schedule, str]], int]:
        """The schedules and arrangements with which a slice is fastest, besides the candidate's; and its tasks."""
        times: dict[tuple[Schedule, str], float] = {}
        parts = 1 if candidate.num_tasks <= _SMALL_STEP else _parts(candidate)

        def try_one(schedule: Schedule, method: str) -> None:
            if (schedule, method) not in times:
                step_ms, fits = self._slice(replace(candidate, schedule=schedule, method=method), estimated, parts)
                times[schedule, method] = step_ms if fits else float("inf")

        for method in self.problem.methods:
            try_one(candidate.schedule, method)
        best_method = min(times, key=times.__getitem__)[1]
        for schedule in self.problem.schedules:
            try_one(schedule, best_method)
        num_tasks = len(times) * candidate.num_tasks // parts
        del times[candidate.schedule, candidate.method]
        orders = sorted((order for order in times if times[order] < float("inf")), key=times.__getitem__)
        return orders[:_ORDERS], num_tasks

    # Several batches

    def finalists(self, share: float, least: int) -> list[RankedPlan]:
        """The fastest that fit all batches: as many as a share of the effort allows, but `least` unlike."""
        result, num_tasks = [], 0
        for plan in sorted(self.plans, key=_speed):
            if len(_unlike_plans(result)) >= least and num_tasks >= share * self.effort:
                break
            num_tasks += 2 * plan.candidate.num_tasks
            more = [self._fitting(plan.candidate, batch) for batch in self.batches[1:]]
            fitting = [prediction for prediction in more if prediction is not None]
            if len(fitting) < len(more):
                self._too_large.add(str(plan.candidate))
                self.plans.remove(plan)
                continue
            result.append(replace(plan, predictions=(*plan.predictions, *fitting)))
        return sorted(result, key=_speed)

    def rejected(self) -> dict[str, int]:
        """Reason -> how many candidates were left out for it."""
        too_large = self.space.num_too_large + len(self._too_large)
        return {"needs more memory than a rank has": too_large} if too_large else {}

    def _fitting(self, candidate: Candidate, batch: SampleSizes) -> Prediction | None:
        """What a batch takes, `None` where it does not fit."""
        limit = self.problem.memory_bytes
        try:
            prediction = self._predict(candidate, batch, limit)
        except ValueError:  # its state or its largest sample does not fit
            return None
        return prediction if limit is None or prediction.peak_memory_bytes <= limit else None

    def _predict(self, candidate: Candidate, batch: SampleSizes, memory_bytes: float | None) -> Prediction:
        """What a batch takes."""
        problem = replace(self.problem, global_batch_size=batch.num_samples, memory_bytes=memory_bytes)
        planner = step_planner(problem, candidate)
        return predict_condensed(planner, condense(planner.plan, tuple(planner.groups)), batch)


def _parts(candidate: Candidate) -> int:
    """Equal parts that the replicas of a candidate can be divided into."""
    return math.gcd(*(layout.dp_size for layout in candidate.layouts.values()))


def _shape(candidate: Candidate) -> tuple:
    """What decides about schedules: the placement, and which modules have several stages."""
    return candidate.placement, tuple(layout.pp_size > 1 for layout in candidate.layouts.values())


def _state_fits(problem: PlanningProblem, candidate: Candidate) -> bool:
    """Whether weights, gradients and optimizer state leave any memory on each rank."""
    if problem.memory_bytes is None:
        return True
    parts = _parts(candidate)
    few = {name: replace(layout, dp_size=layout.dp_size // parts) for name, layout in candidate.layouts.items()}
    plan = replace(candidate, layouts=few).plan(problem.spec)
    states = state_per_rank(plan, stage_memories(problem.costs, plan))
    return max(state.total for state in states.values()) <= problem.memory_bytes


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
        candidate.method,
        memory_bytes=problem.memory_bytes,
    )
