"""Simulates candidates on real batches: slices of their replicas first, then all, then several batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost.memory import state_per_rank
from ..cost.sharded_passes import REDUCES_IN_PASSES
from ..cost.stage_memory import stage_memories
from ..plan import LANGUAGE_MODEL, SampleSizes, sync_groups
from ..plan.parallel_plan import ShardingSettings
from ..plan.schedules import Schedule
from ..steps.representatives import predict_batch
from ..steps.step_planner import Prediction, StepPlanner
from .candidates import CandidateSpace, EstimatedCandidate
from .large_samples import runs_large_samples_alone
from .options import ParallelConfig
from .problem import Candidate, PlanningProblem, RankedPlan, draw_batch

_NUM_BATCHES, _FEWER_BATCHES = 3, 2
_MANY_SAMPLES = 4096  # batch size from which batches are so similar that fewer are enough
_LEAST_RANKS = 128
_SMALL_STEP = 1024  # tasks up to which a step is simulated without a slice
_FEW_RANKS, _FEW_CANDIDATES = 8, 1024
_FEW_TASKS = 40_000
_OPTIMISTIC = 1.3  # maximum ratio of the closed-form estimate to the step time
_SLICE_MEMORY = 1.1  # tolerance of the memory limit for slices
_ORDERED_LAYOUTS, _ORDERS = 4, 4
_MUCH_SLOWER = 1.15  # ratio to the best step above which other schedules and arrangements are not tried
_SHARDED_LAYOUTS = 3  # fastest layouts with which other shardings are tried
_AS_LONG = 1.01  # ratio of the closed form to that of the current sharding up to which another one is tried
_MAX_PREDICTIONS = 16  # number of fastest steps whose predictions stay in memory
_PROMISING = 1.05  # ratio to the best step up to which an order is simulated with all replicas, by its slice
_SPREAD = 1.05  # ratio to the best mean up to which plans run the next batch as well
AS_FAST = 1.005
"""Ratio to the fastest step up to which plans count as equally fast; the one with the smallest memory comes first."""


@dataclass
class _Simulated:
    """
    A simulated candidate whose state fits the memory.

    Args:
        estimated ([`EstimatedCandidate`]): Its closed-form estimate.
        candidate ([`Candidate`]): Its sizes.
        step_ms (`float`): Step time of its slice, or of its whole step if `is_whole`.
        is_whole (`bool`, *optional*, defaults to `False`): Whether all replicas were simulated.
        prediction ([`Prediction`], *optional*): Prediction of the first batch; dropped for slow candidates.
    """

    estimated: EstimatedCandidate
    candidate: Candidate
    step_ms: float
    is_whole: bool = False
    prediction: Prediction | None = None


class Simulations:
    """
    Simulates each candidate once: first a slice of its replicas, then all.

    Args:
        space ([`CandidateSpace`]): The candidates.
    """

    def __init__(self, space: CandidateSpace):
        self.space, self.problem = space, space.problem
        count = _NUM_BATCHES if self.problem.global_batch_size < _MANY_SAMPLES else _FEWER_BATCHES
        self.batches = [draw_batch(self.problem, number) for number in range(count)]
        self.effort = self.problem.effort * max(_LEAST_RANKS, self.problem.num_ranks)  # in tasks
        self._simulated: dict[str, _Simulated] = {}  # candidates that fit so far
        self._too_large: dict[str, Candidate] = {}
        self._over: dict[str, tuple[float, Candidate]] = {}  # too large by single samples only, with peak bytes

    # Slices of candidates

    def screen(self, candidates: Iterable[EstimatedCandidate], share: float, least: int) -> int:
        """
        Simulates slices of candidates, or all replicas if they have few tasks: as many as a share of the effort
        allows, at least `least`. Returns how many fit.
        """
        num_fitting = num_tasks = num_tried = 0
        for estimated in candidates:
            if num_tried >= least and num_tasks >= share * self.effort:
                break
            candidate = self.space.candidate(estimated)
            tasks = self._try(candidate, estimated)
            num_tried += tasks > 0
            num_fitting += tasks > 0 and _key(candidate) in self._simulated
            num_tasks += tasks
        return num_fitting

    @property
    def num_waiting(self) -> int:
        """Number of slices that fit, of candidates that have not been simulated with all replicas."""
        return sum(not simulated.is_whole for simulated in self._simulated.values())

    def _try(self, candidate: Candidate, estimated: EstimatedCandidate) -> int:
        """
        Simulates a slice of a candidate, or all of a small step; returns the effort, 0 if the candidate is known.
        """
        key = _key(candidate)
        if key in self._simulated or key in self._too_large:
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
            self._simulated[key] = _Simulated(estimated, candidate, step_ms)
        else:
            self._too_large[key] = candidate
        return num_tasks

    @property
    def num_simulated(self) -> int:
        """Number of simulated layouts that fit."""
        return len({str(simulated.candidate) for simulated in self._simulated.values()})

    def best_placement(self) -> Mapping[str, str] | None:
        """Placement of the candidate with the fastest slice."""
        simulated = self._simulated.values()
        return min(simulated, key=lambda s: s.step_ms).estimated.colocated_with if simulated else None

    def _slice(self, candidate: Candidate, estimated: EstimatedCandidate, parts: int) -> tuple[float, bool]:
        """
        Step time from simulating a 1/`parts` slice of the replicas on 1/`parts` of the first batch, and whether it
        fits the memory. Replica imbalance and the larger all-reduce are added from the closed form.
        """
        batch, limit = self.batches[0], self.problem.memory_bytes
        small = _slice_of(candidate, parts)
        few = small.layouts
        if limit is not None:  # fewer copies divide the state
            whole_bytes, slice_bytes = (_state_bytes(self.problem, own) for own in (candidate, small))
            limit += max(0.0, slice_bytes - whole_bytes)
        order = np.argsort(batch.tokens[LANGUAGE_MODEL], kind="stable")
        samples = batch.take(np.sort(order[parts // 2 :: parts]))
        try:
            prediction = self._predict(small, samples, limit)
        except ValueError:  # these samples are larger than average
            prediction = self._predict(small, samples, None)
        uneven = self.space.options[LANGUAGE_MODEL].unevenness(parts * few[LANGUAGE_MODEL].dp_size)
        longer = self._sums_ms(estimated, 1) - self._sums_ms(estimated, parts)
        # Samples of a slice may be larger than those of the whole batch.
        fits = limit is None or prediction.peak_memory_bytes <= (limit if parts == 1 else _SLICE_MEMORY * limit)
        if not fits:
            self._note_large_samples(candidate, prediction)
        return uneven * prediction.step_ms + longer, fits

    def _sums_ms(self, estimated: EstimatedCandidate, parts: int) -> float:
        """Time of gradient all-reduces with 1/`parts` of a candidate's replicas."""
        sums: dict[str, float] = {}
        for name, estimate in estimated.estimates.items():
            host = estimated.colocated_with.get(name, name)
            sum_ms = self.space.options[name].sync_ms(estimate.kind, estimate.dp_size // parts, estimate.pp_size)
            sums[host] = sums.get(host, 0.0) + sum_ms
        return max(sums.values())

    # All replicas

    def simulate(self, share: float, least: int) -> None:
        """
        Simulates all replicas of the candidates with the fastest slices, `least` diverse ones, on the first batch.
        """
        num_tasks = 0
        waiting = sorted((s for s in self._simulated.values() if not s.is_whole), key=lambda s: s.step_ms)
        for simulated in waiting:
            if len(distinct_sizes(self._whole())) >= least and num_tasks >= share * self.effort:
                break
            num_tasks += simulated.candidate.num_tasks
            self._simulate_whole(simulated.candidate, simulated.estimated)

    def _whole(self) -> list[_Simulated]:
        """Candidates simulated with all replicas, fastest first."""
        return sorted((s for s in self._simulated.values() if s.is_whole), key=lambda s: s.step_ms)

    @property
    def best_ms(self) -> float:
        """The fastest step time with all replicas."""
        return min((s.step_ms for s in self._simulated.values() if s.is_whole), default=float("inf"))

    def _simulate_whole(self, candidate: Candidate, estimated: EstimatedCandidate) -> None:
        """Simulates the first batch with all replicas."""
        key, prediction = _key(candidate), self._fitting(candidate, self.batches[0])
        if prediction is None:
            self._drop(candidate)
            return
        self._simulated[key] = _Simulated(estimated, candidate, prediction.step_ms, True, prediction)
        for slow in self._whole()[_MAX_PREDICTIONS:]:
            slow.prediction = None

    def _drop(self, candidate: Candidate) -> None:
        """Marks a candidate that does not fit."""
        key = _key(candidate)
        self._simulated.pop(key, None)
        self._too_large[key] = candidate

    def simulate_remaining(self) -> None:
        """
        Simulates candidates that could be faster than the best one, in the order of their estimates: all of a small
        problem.
        """
        best_ms = self.best_ms
        if self.problem.num_ranks > _FEW_RANKS and self.space.num_within(best_ms) > _FEW_CANDIDATES:
            return
        num_tasks = 0
        for estimated in self.space:
            if estimated.step_ms > _OPTIMISTIC * best_ms or num_tasks > _FEW_TASKS:
                break
            if estimated.min_compute_ms >= best_ms:
                continue
            candidate = self.space.candidate(estimated)
            key = _key(candidate)
            known = self._simulated.get(key)
            if key in self._too_large or (known is not None and known.is_whole):
                continue
            if not _state_fits(self.problem, candidate):
                self._too_large[key] = candidate
                continue
            num_tasks += candidate.num_tasks
            self._simulate_whole(candidate, estimated)
            best_ms = min(best_ms, self._simulated[key].step_ms if key in self._simulated else best_ms)

    # Schedules and arrangements

    def try_orders(self, share: float) -> None:
        """
        Tries other schedules and arrangements, if these are left open. For the fastest layout of each shape (placement
        and numbers of stages), slices run with each schedule and arrangement. The best of these are simulated with all
        replicas for this layout and the next ones of its shape, if the slices say that they could be the fastest.
        Covers as many shapes as a share of the effort allows, at least two, but none that is much slower.
        """
        if len(self.problem.schedules) == len(self.problem.arrangements) == 1:
            return
        shapes: dict[tuple, list[_Simulated]] = {}
        for simulated in sorted(self._simulated.values(), key=lambda s: s.step_ms):
            shapes.setdefault(_shape(simulated.candidate), []).append(simulated)
        num_tasks = 0
        for number, layouts in enumerate(shapes.values()):
            first = layouts[0]
            if (number > 1 and num_tasks > share * self.effort) or first.step_ms > _MUCH_SLOWER * self.best_ms:
                break
            orders, slice_tasks = self._best_orders(first)
            num_tasks += slice_tasks
            for index, simulated in enumerate(layouts[:_ORDERED_LAYOUTS]):
                for (schedule, arrangement), ratio in orders[: 1 if index else _ORDERS]:
                    if ratio * simulated.step_ms <= _PROMISING * self.best_ms:
                        candidate = replace(simulated.candidate, schedule=schedule, arrangement=arrangement)
                        self._simulate_whole(candidate, simulated.estimated)
                        num_tasks += candidate.num_tasks

    def _best_orders(self, first: _Simulated) -> tuple[list[tuple[tuple[Schedule, str], float]], int]:
        """
        Other schedules and arrangements in the order of their slices' step times, each with the ratio of its time to
        that of the candidate's order; and the number of tasks of all slices.
        """
        candidate, times = first.candidate, {}
        parts = 1 if candidate.num_tasks <= _SMALL_STEP else _parts(candidate)
        for schedule, arrangement in itertools.product(self.problem.schedules, self.problem.arrangements):
            ordered = replace(candidate, schedule=schedule, arrangement=arrangement)
            step_ms, fits = self._slice(ordered, first.estimated, parts)
            if fits:
                times[schedule, arrangement] = step_ms
        num_tasks = len(times) * candidate.num_tasks // parts
        first_ms = times.pop((candidate.schedule, candidate.arrangement), first.step_ms)
        orders = sorted(times, key=times.__getitem__)
        return [(order, times[order] / first_ms) for order in orders], num_tasks

    # Sharding

    def try_shardings(self, share: float) -> None:
        """
        Tries what else the copies of modules can divide, for the fastest layouts: module by module, what is fastest so
        far with the other ZeRO stages, over all copies and over those of a node, unless the closed form is slower. As
        many as a share of the effort allows.
        """
        num_tasks = 0
        for simulated in distinct_sizes(self._whole())[:_SHARDED_LAYOUTS]:
            for name in simulated.candidate.layouts:
                best = simulated
                for sharding in self._shardings(simulated.candidate, name):
                    layout = replace(simulated.candidate.layouts[name], sharding=sharding)
                    layouts = {**simulated.candidate.layouts, name: layout}
                    candidate = replace(simulated.candidate, layouts=layouts)
                    key = _key(candidate)
                    if key in self._simulated or key in self._too_large:
                        continue
                    if num_tasks > share * self.effort:
                        return
                    num_tasks += candidate.num_tasks
                    self._simulate_whole(candidate, simulated.estimated)
                    found = self._simulated.get(key)
                    if found is not None and found.step_ms < best.step_ms:
                        best = found
                simulated = best

    def _shardings(self, candidate: Candidate, name: str) -> list[ShardingSettings]:
        """
        Other shardings of a module in a candidate, fastest first by the closed form, which excludes slow passes. It
        excludes no sums, since other tasks may hide them.
        """
        options, layout = self.space.options[name], candidate.layouts[name]
        num_copies = layout.dp_size * layout.cp_size
        if num_copies == 1:
            return []
        per_node = options.copies_per_node(layout.tp_size) // layout.pp_size
        divides = 1 < per_node < num_copies and num_copies % per_node == 0
        sizes = [None, per_node] if divides else [None]
        given = self.problem.fixed.get(name, {})
        sizes = [given["shard_size"]] if "shard_size" in given else sizes
        limit_ms = _AS_LONG * self._module_ms(candidate, name, layout.sharding)
        every = [own for own in options.all_shardings(sizes) if own != layout.sharding]
        times = {own: self._module_ms(candidate, name, own) for own in every}
        chosen = [own for own in times if times[own] <= limit_ms or own.zero_stage < REDUCES_IN_PASSES]
        return sorted(chosen, key=times.__getitem__)

    def _module_ms(self, candidate: Candidate, name: str, sharding: ShardingSettings) -> float:
        """Closed form of the time of a module in a step with another sharding."""
        options, layout, count = self.space.options[name], candidate.layouts[name], candidate.num_microbatches
        kind = ParallelConfig(layout.cp_size, layout.tp_size, layout.activation_checkpointing, sharding=sharding)
        kind = kind.with_shards(layout.dp_size)
        num_samples = self.problem.global_batch_size / layout.dp_size / count
        stage_ms = float(options.layer_ms(kind, num_samples).sum()) / layout.pp_size
        return count * stage_ms + options.sync_ms(kind, layout.dp_size, layout.pp_size)

    # Several batches

    def finalists(self, share: float, least: int) -> list[RankedPlan]:
        """
        The fastest candidates over all batches. Step times differ between batches, so that all candidates within
        [`_SPREAD`] of the best mean run the next batch: as many as a share of the effort allows, at least `least`
        diverse ones.
        """
        num_tasks = 0
        racing: list[tuple[_Simulated, list[Prediction]]] = [(simulated, []) for simulated in self._whole()]
        for batch in self.batches[1:]:
            racing.sort(key=_mean_ms)
            slowest_ms = _SPREAD * _mean_ms(racing[0]) if racing else 0.0
            ahead: list[tuple[_Simulated, list[Prediction]]] = []
            for simulated, predictions in racing:
                could_win = _mean_ms((simulated, predictions)) <= slowest_ms and num_tasks < share * self.effort
                diverse = distinct_sizes(other for other, _ in ahead)
                is_new = all(_sizes(other.candidate) != _sizes(simulated.candidate) for other in diverse)
                if not could_win and len(diverse) >= least:
                    break
                if could_win or is_new:
                    num_tasks += simulated.candidate.num_tasks
                    prediction = self._fitting(simulated.candidate, batch)
                    if prediction is None:
                        self._drop(simulated.candidate)
                    else:
                        ahead.append((simulated, [*predictions, prediction]))
            racing = ahead
        return in_order(self._ranked(simulated, predictions) for simulated, predictions in racing)

    def _ranked(self, simulated: _Simulated, others: list[Prediction]) -> RankedPlan:
        """A candidate with the predictions of all batches."""
        candidate = simulated.candidate
        first = simulated.prediction or self._predict(candidate, self.batches[0], self.problem.memory_bytes)
        return RankedPlan(candidate, first.plan, (first, *others), simulated.estimated.step_ms)

    def with_large_samples(self, least: int) -> list[RankedPlan]:
        """
        Plans that exceed the memory only by samples larger than a microbatch may be, smallest memory first. Such a
        sample has a microbatch of its own, whose memory is an estimate.

        Args:
            least (`int`): Number of diverse plans.
        """
        result: list[RankedPlan] = []
        limit = self.problem.memory_bytes
        for _, candidate in sorted(self._over.values(), key=lambda entry: entry[0]):
            if limit is None or len(distinct_sizes(result)) >= least:
                break
            try:
                predictions = [self._predict(candidate, batch, limit) for batch in self.batches]
            except ValueError:  # its state leaves no memory for one of the batches
                continue
            if all(p.peak_memory_bytes <= limit or runs_large_samples_alone(p) for p in predictions):
                result.append(RankedPlan(candidate, predictions[0].plan, tuple(predictions), 0.0))
        return sorted(result, key=lambda plan: plan.peak_memory_bytes)

    def rejected(self) -> dict[str, int]:
        """Reason -> number of candidates rejected for it."""
        fitting = {str(simulated.candidate) for simulated in self._simulated.values()}
        layouts = {str(candidate) for candidate in self._too_large.values()} - fitting
        too_large = self.space.num_too_large + len(layouts)
        return {"needs more memory than a rank has": too_large} if too_large else {}

    def _fitting(self, candidate: Candidate, batch: SampleSizes) -> Prediction | None:
        """Prediction of a batch, `None` if it does not fit."""
        limit = self.problem.memory_bytes
        try:
            prediction = self._predict(candidate, batch, limit)
        except ValueError:  # its state leaves no memory for activations
            return None
        if limit is None or prediction.peak_memory_bytes <= limit:
            return prediction
        self._note_large_samples(candidate, prediction)
        return None

    def _note_large_samples(self, candidate: Candidate, prediction: Prediction) -> None:
        """Marks a candidate that exceeds the memory by single samples only."""
        if runs_large_samples_alone(prediction):
            self._over[_key(candidate)] = (prediction.peak_memory_bytes, candidate)

    def _predict(self, candidate: Candidate, batch: SampleSizes, memory_bytes: float | None) -> Prediction:
        """Predicts a batch."""
        problem = replace(self.problem, global_batch_size=batch.num_samples, memory_bytes=memory_bytes)
        planner = step_planner(problem, candidate)
        return predict_batch(planner, batch)


def _parts(candidate: Candidate) -> int:
    """Number of equal parts that the replicas of a candidate can be split into; one if their passes communicate."""
    if any(layout.zero_stage >= REDUCES_IN_PASSES for layout in candidate.layouts.values()):
        return 1
    return math.gcd(*(layout.dp_size for layout in candidate.layouts.values()))


def _shape(candidate: Candidate) -> tuple:
    """
    What schedules and arrangements depend on: the placement, the number of stages of each module, and whether its
    passes communicate.
    """
    layouts = candidate.layouts.values()
    return candidate.placement, tuple((own.pp_size, own.zero_stage >= REDUCES_IN_PASSES) for own in layouts)


def _mean_ms(racer: tuple[_Simulated, list[Prediction]]) -> float:
    """Mean step time over the batches so far."""
    simulated, others = racer
    return (simulated.step_ms + sum(other.step_ms for other in others)) / (1 + len(others))


def _key(candidate: Candidate) -> str:
    """Identifies a candidate."""
    return f"{candidate}; {candidate.schedule}, {candidate.arrangement}"


def _sizes(candidate: Candidate) -> tuple:
    """All sizes but the number of microbatches and their order."""
    return candidate.colocated_with, candidate.layouts


def distinct_sizes(ranked: Iterable[Any]) -> list[Any]:
    """
    Entries that differ from all before them in more than the number of microbatches and their order.

    Args:
        ranked (`Iterable`): Objects with a `candidate`, such as [`RankedPlan`].
    """
    seen, result = [], []
    for entry in ranked:
        sizes = _sizes(entry.candidate)
        if sizes not in seen:
            seen.append(sizes)
            result.append(entry)
    return result


def in_order(plans: Iterable[RankedPlan]) -> list[RankedPlan]:
    """
    Plans in order of step time; among equally fast ones, see [`AS_FAST`], the one with the smallest peak memory comes
    first.

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
    """Whether weights, gradients and optimizer state fit into each rank's memory."""
    if problem.memory_bytes is None:
        return True
    is_divided = any(layout.zero_stage for layout in candidate.layouts.values())
    small = candidate if is_divided else _slice_of(candidate, _parts(candidate))
    return _state_bytes(problem, small) <= problem.memory_bytes


def _state_bytes(problem: PlanningProblem, candidate: Candidate) -> float:
    """Weights, gradients and optimizer state on the rank with most of them."""
    plan = candidate.plan(problem.spec)
    states = state_per_rank(plan, stage_memories(problem.costs, plan))
    return max(state.total for state in states.values())


def _slice_of(candidate: Candidate, parts: int) -> Candidate:
    """The candidate with 1/`parts` of its replicas."""
    few = {name: replace(layout, dp_size=layout.dp_size // parts) for name, layout in candidate.layouts.items()}
    return replace(candidate, layouts=few)


def step_planner(problem: PlanningProblem, candidate: Candidate) -> StepPlanner:
    """The step planner of a candidate, as in training."""
    plan = candidate.plan(problem.spec)
    dp_size = candidate.layouts[LANGUAGE_MODEL].dp_size
    microbatch_size = -(-problem.global_batch_size // (dp_size * candidate.num_microbatches))
    return StepPlanner(
        problem.costs,
        plan,
        sync_groups(problem.spec, plan),
        microbatch_size,
        candidate.arrangement,
        memory_bytes=problem.memory_bytes,
    )
