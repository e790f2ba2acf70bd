"""Candidates simulated on real batches: slices of their replicas first, then all, then several batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost.memory import state_per_rank
from ..cost.stage_memory import stage_memories
from ..plan import LANGUAGE_MODEL, SampleSizes, sync_groups
from ..plan.schedules import Schedule
from ..steps.condensed import predict_condensed
from ..steps.step_planner import Prediction, StepPlanner
from .candidates import CandidateSpace, Estimated
from .large_samples import runs_large_samples_alone
from .problem import Candidate, PlanningProblem, RankedPlan, draw_batch

_NUM_BATCHES, _FEWER_BATCHES = 3, 2
_MANY_SAMPLES = 4096  # of a batch, beside which others are so alike that fewer are enough
_LEAST_RANKS = 128
_SMALL_STEP = 1024  # tasks: no need for a slice
_FEW_RANKS, _FEW_CANDIDATES = 8, 1024
_FEW_TASKS = 40_000
_OPTIMISTIC = 1.3  # steps are at least the closed form over that
_SLICE_MEMORY = 1.1  # of the limit, by which a slice may be larger than the whole
_ORDERED_LAYOUTS, _ORDERS = 4, 4
_MUCH_SLOWER = 1.15  # than the best, with which other schedules and arrangements are not tried
_KEPT = 16  # of the fastest simulated steps, whose spans are not simulated again
_PROMISING = 1.05  # times the best: what slices may say of another order that is then simulated whole
_SPREAD = 1.05  # times the best mean so far: plans that run the next batch as well
AS_FAST = 1.005
"""Times the fastest step: plans within it count as equally fast, and the leanest of them comes first."""


@dataclass
class _Tried:
    """
    A candidate whose state fits the memory.

    Args:
        estimated ([`Estimated`]): Its closed form.
        candidate ([`Candidate`]): Its sizes.
        step_ms (`float`): By its slice, or by its whole step where `is_whole`.
        is_whole (`bool`, *optional*, defaults to `False`): Whether all replicas were simulated.
        prediction ([`Prediction`], *optional*): Of the first batch, which is not kept of slow candidates.
    """

    estimated: Estimated
    candidate: Candidate
    step_ms: float
    is_whole: bool = False
    prediction: Prediction | None = None


class Simulations:
    """
    Simulates candidates, each once: first a slice of their replicas, then all.

    Args:
        space ([`CandidateSpace`]): The candidates.
    """

    def __init__(self, space: CandidateSpace):
        self.space, self.problem = space, space.problem
        count = _NUM_BATCHES if self.problem.global_batch_size < _MANY_SAMPLES else _FEWER_BATCHES
        self.batches = [draw_batch(self.problem, number) for number in range(count)]
        self.effort = self.problem.effort * max(_LEAST_RANKS, self.problem.num_ranks)  # in tasks
        self._tried: dict[str, _Tried] = {}  # what fits so far
        self._too_large: dict[str, Candidate] = {}
        self._over: dict[str, tuple[float, Candidate]] = {}  # by single samples alone, with bytes of the fullest rank

    # Slices of candidates

    def screen(self, candidates: Iterable[Estimated], share: float, least: int) -> int:
        """
        Simulates slices of candidates, or all of those with few tasks: as many as a share of the effort allows, but
        `least`. Returns how many fit.
        """
        num_fitting = num_tasks = num_tried = 0
        for estimated in candidates:
            if num_tried >= least and num_tasks >= share * self.effort:
                break
            candidate = self.space.candidate(estimated)
            tasks = self._try(candidate, estimated)
            num_tried += tasks > 0
            num_fitting += tasks > 0 and _key(candidate) in self._tried
            num_tasks += tasks
        return num_fitting

    @property
    def num_waiting(self) -> int:
        """Slices that fit, of candidates that have not been simulated whole."""
        return sum(not own.is_whole for own in self._tried.values())

    def _try(self, candidate: Candidate, estimated: Estimated) -> int:
        """Simulates a slice of a candidate, or all of a small step; returns the effort, 0 if it is known already."""
        key = _key(candidate)
        if key in self._tried or key in self._too_large:
            return 0
        parts = 1 if candidate.num_tasks <= _SMALL_STEP else _parts(candidate)
        num_tasks = candidate.num_ranks // parts
        if not _state_fits(self.problem, candidate):
            self._too_large[key] = candidate
            return num_tasks
        num_tasks += candidate.num_tasks // parts
        if parts == 1:
            self._simulate_whole(candidate, estimated)
            return num_tasks
        step_ms, fits = self._slice(candidate, estimated, parts)
        if fits:
            self._tried[key] = _Tried(estimated, candidate, step_ms)
        else:
            self._too_large[key] = candidate
        return num_tasks

    @property
    def num_simulated(self) -> int:
        """Layouts that were simulated and not found to be too large."""
        return len({str(own.candidate) for own in self._tried.values()})

    def best_placement(self) -> Mapping[str, str] | None:
        """Of the fastest slice."""
        tried = self._tried.values()
        return min(tried, key=lambda own: own.step_ms).estimated.hosts if tried else None

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
        if not fits:
            self._note_large_samples(candidate, prediction)
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
        """All replicas of the candidates with the fastest slices, with the first batch: `least` unlike ones."""
        num_tasks = 0
        waiting = sorted((own for own in self._tried.values() if not own.is_whole), key=lambda own: own.step_ms)
        for own in waiting:
            if len(unlike_sizes(self._whole())) >= least and num_tasks >= share * self.effort:
                break
            num_tasks += own.candidate.num_tasks
            self._simulate_whole(own.candidate, own.estimated)

    def _whole(self) -> list[_Tried]:
        """What was simulated with all replicas, the fastest first."""
        return sorted((own for own in self._tried.values() if own.is_whole), key=lambda own: own.step_ms)

    @property
    def best_ms(self) -> float:
        """The fastest whole step."""
        return min((own.step_ms for own in self._tried.values() if own.is_whole), default=float("inf"))

    def _simulate_whole(self, candidate: Candidate, estimated: Estimated) -> None:
        """The first batch with all replicas."""
        key, prediction = _key(candidate), self._fitting(candidate, self.batches[0])
        if prediction is None:
            self._drop(candidate)
            return
        self._tried[key] = _Tried(estimated, candidate, prediction.step_ms, True, prediction)
        for own in self._whole()[_KEPT:]:
            own.prediction = None

    def _drop(self, candidate: Candidate) -> None:
        """Notes that a candidate does not fit."""
        key = _key(candidate)
        self._tried.pop(key, None)
        self._too_large[key] = candidate

    def simulate_the_rest(self) -> None:
        """
        Candidates that could be faster than the best, those with the best closed form first: of a small problem all.
        """
        best_ms = self.best_ms
        if self.problem.num_ranks > _FEW_RANKS and self.space.num_within(best_ms) > _FEW_CANDIDATES:
            return
        num_tasks = 0
        for estimated in self.space:
            if estimated.step_ms > _OPTIMISTIC * best_ms or num_tasks > _FEW_TASKS:
                break
            if estimated.least_ms >= best_ms:
                continue
            candidate = self.space.candidate(estimated)
            key = _key(candidate)
            known = self._tried.get(key)
            if key in self._too_large or (known is not None and known.is_whole):
                continue
            if not _state_fits(self.problem, candidate):
                self._too_large[key] = candidate
                continue
            num_tasks += candidate.num_tasks
            self._simulate_whole(candidate, estimated)
            best_ms = min(best_ms, self._tried[key].step_ms if key in self._tried else best_ms)

    # Schedules and arrangements

    def try_orders(self, share: float) -> None:
        """
        Other schedules and arrangements, where these are left open: of the fastest layout of each shape (which modules
        share ranks, how many stages each has) slices with each schedule and each arrangement; all replicas of it with
        the best of them, and of the next layouts of that shape, as far as the slices say that they could be the
        fastest. As many shapes as a share of the effort allows, but two, and none that is much slower.
        """
        if len(self.problem.schedules) == len(self.problem.methods) == 1:
            return
        shapes: dict[tuple, list[_Tried]] = {}
        for own in sorted(self._tried.values(), key=lambda own: own.step_ms):
            shapes.setdefault(_shape(own.candidate), []).append(own)
        num_tasks = 0
        for number, layouts in enumerate(shapes.values()):
            first = layouts[0]
            if (number > 1 and num_tasks > share * self.effort) or first.step_ms > _MUCH_SLOWER * self.best_ms:
                break
            orders, tried = self._best_orders(first)
            num_tasks += tried
            for place, own in enumerate(layouts[:_ORDERED_LAYOUTS]):
                for (schedule, method), ratio in orders[: 1 if place else _ORDERS]:
                    if ratio * own.step_ms <= _PROMISING * self.best_ms:
                        candidate = replace(own.candidate, schedule=schedule, method=method)
                        self._simulate_whole(candidate, own.estimated)
                        num_tasks += candidate.num_tasks

    def _best_orders(self, first: _Tried) -> tuple[list[tuple[tuple[Schedule, str], float]], int]:
        """
        The schedules and arrangements with which a slice is fastest, besides the candidate's, each with its time over
        that; and the tasks of all slices.
        """
        candidate, times = first.candidate, {}
        parts = 1 if candidate.num_tasks <= _SMALL_STEP else _parts(candidate)
        for schedule, method in itertools.product(self.problem.schedules, self.problem.methods):
            ordered = replace(candidate, schedule=schedule, method=method)
            step_ms, fits = self._slice(ordered, first.estimated, parts)
            if fits:
                times[schedule, method] = step_ms
        num_tasks = len(times) * candidate.num_tasks // parts
        own_ms = times.pop((candidate.schedule, candidate.method), first.step_ms)
        orders = sorted(times, key=times.__getitem__)
        return [(order, times[order] / own_ms) for order in orders], num_tasks

    # Several batches

    def finalists(self, share: float, least: int) -> list[RankedPlan]:
        """
        The fastest over all batches. A batch says little of the next one, so that all that are not slower than the
        best of it by [`_SPREAD`] run the next: as many as a share of the effort allows, but `least` unlike ones.
        """
        num_tasks = 0
        racing: list[tuple[_Tried, list[Prediction]]] = [(own, []) for own in self._whole()]
        for batch in self.batches[1:]:
            racing.sort(key=_mean_ms)
            slowest_ms = _SPREAD * _mean_ms(racing[0]) if racing else 0.0
            ahead: list[tuple[_Tried, list[Prediction]]] = []
            for own, predictions in racing:
                could_win = _mean_ms((own, predictions)) <= slowest_ms and num_tasks < share * self.effort
                unlike = unlike_sizes(known for known, _ in ahead)
                is_unlike = all(_sizes(known.candidate) != _sizes(own.candidate) for known in unlike)
                if not could_win and len(unlike) >= least:
                    break
                if could_win or is_unlike:
                    num_tasks += own.candidate.num_tasks
                    prediction = self._fitting(own.candidate, batch)
                    if prediction is None:
                        self._drop(own.candidate)
                    else:
                        ahead.append((own, [*predictions, prediction]))
            racing = ahead
        return in_order(self._ranked(own, predictions) for own, predictions in racing)

    def _ranked(self, own: _Tried, others: list[Prediction]) -> RankedPlan:
        """A candidate with what all batches take."""
        first = own.prediction or self._predict(own.candidate, self.batches[0], self.problem.memory_bytes)
        return RankedPlan(own.candidate, first.plan, (first, *others), own.estimated.step_ms)

    def with_large_samples(self, least: int) -> list[RankedPlan]:
        """
        The leanest of what exceeds the memory by nothing but samples that are larger than a microbatch may be: such a
        sample has a microbatch of its own, and what that needs is an estimate.

        Args:
            least (`int`): How many unlike ones.
        """
        result: list[RankedPlan] = []
        limit = self.problem.memory_bytes
        for _, candidate in sorted(self._over.values(), key=lambda own: own[0]):
            if limit is None or len(unlike_sizes(result)) >= least:
                break
            try:
                predictions = [self._predict(candidate, batch, limit) for batch in self.batches]
            except ValueError:  # its state leaves no room beside one of the batches
                continue
            if all(own.peak_memory_bytes <= limit or runs_large_samples_alone(own) for own in predictions):
                result.append(RankedPlan(candidate, predictions[0].plan, tuple(predictions), 0.0))
        return sorted(result, key=lambda plan: plan.peak_memory_bytes)

    def rejected(self) -> dict[str, int]:
        """Reason -> how many candidates were left out for it."""
        layouts = {str(own) for own in self._too_large.values()} - {str(own.candidate) for own in self._tried.values()}
        too_large = self.space.num_too_large + len(layouts)
        return {"needs more memory than a rank has": too_large} if too_large else {}

    def _fitting(self, candidate: Candidate, batch: SampleSizes) -> Prediction | None:
        """What a batch takes, `None` where it does not fit."""
        limit = self.problem.memory_bytes
        try:
            prediction = self._predict(candidate, batch, limit)
        except ValueError:  # its state leaves no room
            return None
        if limit is None or prediction.peak_memory_bytes <= limit:
            return prediction
        self._note_large_samples(candidate, prediction)
        return None

    def _note_large_samples(self, candidate: Candidate, prediction: Prediction) -> None:
        """Notes a candidate that exceeds the memory by single samples alone."""
        if runs_large_samples_alone(prediction):
            self._over[_key(candidate)] = (prediction.peak_memory_bytes, candidate)

    def _predict(self, candidate: Candidate, batch: SampleSizes, memory_bytes: float | None) -> Prediction:
        """What a batch takes."""
        problem = replace(self.problem, global_batch_size=batch.num_samples, memory_bytes=memory_bytes)
        planner = step_planner(problem, candidate)
        return predict_condensed(planner, planner.condensed, batch)


def _parts(candidate: Candidate) -> int:
    """Equal parts that the replicas of a candidate can be divided into."""
    return math.gcd(*(layout.dp_size for layout in candidate.layouts.values()))


def _shape(candidate: Candidate) -> tuple:
    """What decides about schedules and arrangements: the placement, and how many stages each module has."""
    return candidate.placement, tuple(layout.pp_size for layout in candidate.layouts.values())


def _mean_ms(racer: tuple[_Tried, list[Prediction]]) -> float:
    """Of the batches so far."""
    own, others = racer
    return (own.step_ms + sum(other.step_ms for other in others)) / (1 + len(others))


def _key(candidate: Candidate) -> str:
    """What tells candidates apart."""
    return f"{candidate}; {candidate.schedule}, {candidate.method}"


def _sizes(candidate: Candidate) -> tuple:
    """All but the number of microbatches and their order."""
    return candidate.hosts, candidate.layouts


def unlike_sizes(ranked: Iterable[Any]) -> list[Any]:
    """
    Those that differ from all before them in more than the number of microbatches and their order.

    Args:
        ranked (`Iterable`): Objects with a `candidate`, such as [`RankedPlan`].
    """
    seen, result = [], []
    for own in ranked:
        sizes = _sizes(own.candidate)
        if sizes not in seen:
            seen.append(sizes)
            result.append(own)
    return result


def in_order(plans: Iterable[RankedPlan]) -> list[RankedPlan]:
    """
    The fastest first; of those that are as fast as it, see [`AS_FAST`], the one whose fullest rank needs least, and so
    on with the others.

    Args:
        plans (`Iterable[RankedPlan]`): The plans.
    """
    result, left = [], sorted(plans, key=lambda plan: (plan.step_ms, plan.peak_memory_bytes))
    while left:
        as_fast = [plan for plan in left if plan.step_ms <= AS_FAST * left[0].step_ms]
        left = left[len(as_fast) :]
        result += sorted(as_fast, key=lambda plan: (plan.peak_memory_bytes, plan.step_ms))
    return result


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
