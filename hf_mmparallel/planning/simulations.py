"""Simulates candidates on real batches: slices of their replicas first, then all."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost.memory import state_per_rank
from ..cost.sharded_passes import REDUCES_IN_PASSES
from ..cost.stage_memory import RankMemory, stage_memories
from ..cost.step_planner import PlannedStep, Prediction, StepPlanner
from ..plan import LANGUAGE_MODEL, SampleSizes, StepPlan, sync_groups
from ..plan.methods import POLICIES
from ..plan.parallel_plan import ShardingSettings
from .candidates import CandidateSpace, EstimatedCandidate
from .problem import Candidate, PlanningProblem, RankedPlan

# Samples larger than the predicted limit of a microbatch, which run in microbatches of their own.


def large_samples(prediction: Prediction) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """
    Yields the microbatches of a step that exceed the predicted limit of tokens: module, batch indices of the samples,
    their tokens, and the maximum tokens of a microbatch there.
    """
    workloads = prediction.planned.workloads
    for name, limit in workloads.token_limits.items():
        tokens = workloads.tokens[name]
        for replica in prediction.planned.step.microbatches.get(name, ()):
            for batch_indices in replica:
                total = int(tokens[list(batch_indices)].sum())
                if total > limit:
                    yield name, tuple(batch_indices), total, limit


def runs_large_samples_alone(prediction: Prediction) -> bool:
    """
    Checks that there are such microbatches, all with a single sample, which no arrangement can make smaller, and few
    of them: less than half of the samples in the module with the fewest.
    """
    counts = dict.fromkeys(prediction.planned.workloads.token_limits, 0)
    for name, batch_indices, _, _ in large_samples(prediction):
        if len(batch_indices) > 1:
            return False
        counts[name] += 1
    # Modules on the same ranks split the memory in proportion to their work, so that large samples of one module lower
    # the limits of the others as well.
    return any(counts.values()) and 2 * min(counts.values()) < prediction.sizes.num_samples


# Step times that plans are compared by.

# Ratio by which a step with virtual stages or split backwards has to be faster: their tasks take a little longer than
# predicted (`benchmarks/split_backward.py`), and have not been measured on GPUs.
SURE_RATIO = 1.03


def caution(candidate: Candidate) -> float:
    """What the predicted step time of a candidate is multiplied by to compare it with others."""
    return 1.0 if POLICIES[candidate.schedule].is_plain else SURE_RATIO


def cautious_ms(simulated: Simulated | RankedPlan) -> float:
    """Predicted step time, for virtual stages and split backwards longer by [`SURE_RATIO`]."""
    return simulated.step_ms * caution(simulated.candidate)


# Slices of candidates, a part of their replicas that stands for all of them, and the state of their ranks.

SMALL_STEP = 1024  # tasks up to which a step is simulated without a slice


def num_parts(candidate: Candidate) -> int:
    """Number of equal parts that the replicas of a candidate can be split into; one if their passes communicate."""
    if any(layout.zero_stage >= REDUCES_IN_PASSES for layout in candidate.layouts.values()):
        return 1
    return math.gcd(*(layout.dp_size for layout in candidate.layouts.values()))


def state_fits(problem: PlanningProblem, candidate: Candidate) -> bool:
    """Checks that weights, gradients and optimizer state fit into each rank's memory."""
    if not host_fits(problem, candidate):
        return False
    if problem.memory_bytes is None:
        return True
    is_divided = any(layout.zero_stage for layout in candidate.layouts.values())
    small = candidate if is_divided else slice_of(candidate, num_parts(candidate))
    return state_bytes(problem, small) <= problem.memory_bytes


def host_fits(problem: PlanningProblem, candidate: Candidate) -> bool:
    """Checks that each node has room for what is in host memory; on an unknown host only what the user asks for."""
    storages = {name: layout.storage for name, layout in candidate.layouts.items()}
    if not any(own.keeps_on_host for own in storages.values()):
        return True
    if problem.host_bytes is None:
        return all(own == problem.storage_of(name) for name, own in storages.items())
    plan = candidate.plan(problem.spec)
    return _has_room(problem, state_per_rank(plan, stage_memories(problem.costs, plan)))


def _has_room(problem: PlanningProblem, memory: Mapping[int, RankMemory]) -> bool:
    """Checks that each node has room for what its ranks have in host memory."""
    nodes = defaultdict[int, float](float)
    for rank, own in memory.items():
        nodes[rank // problem.costs.device.node_size] += own.host
    return problem.host_bytes is None or max(nodes.values()) <= problem.host_bytes


def state_bytes(problem: PlanningProblem, candidate: Candidate) -> float:
    """Weights, gradients and optimizer state on the rank with most of them."""
    plan = candidate.plan(problem.spec)
    states = state_per_rank(plan, stage_memories(problem.costs, plan))
    return max(state.total for state in states.values())


def slice_of(candidate: Candidate, parts: int) -> Candidate:
    """The candidate with 1/`parts` of its replicas."""
    few = {name: replace(layout, dp_size=layout.dp_size // parts) for name, layout in candidate.layouts.items()}
    return replace(candidate, layouts=few)


# The order of simulated plans, and which of them differ.

AS_FAST = 1.005  # ratio to the fastest step up to which plans count as equally fast, so that something else decides


def sizes_of(candidate: Candidate) -> tuple:
    """All sizes but the number of microbatches and their order."""
    return candidate.colocated_with, candidate.layouts


def distinct_sizes(ranked: Iterable[Any]) -> list[Any]:
    """Entries whose `candidate` differs from all before in more than the microbatches and their order."""
    seen, result = [], []
    for entry in ranked:
        sizes = sizes_of(entry.candidate)
        if sizes not in seen:
            seen.append(sizes)
            result.append(entry)
    return result


def in_order(plans: Iterable[RankedPlan]) -> list[RankedPlan]:
    """
    Plans in order of step time, see [`cautious_ms`]; among equally fast ones, see [`AS_FAST`], the one whose copies
    divide what they hold among the fewest ranks comes first, and of these the one with the smallest peak memory.
    """
    result, left = [], sorted(plans, key=lambda plan: (cautious_ms(plan), plan.peak_memory_bytes))
    while left:
        as_fast = [plan for plan in left if cautious_ms(plan) <= AS_FAST * cautious_ms(left[0])]
        left = left[len(as_fast) :]
        # Fewer ranks wait for each other, and predictions of their collectives are surer.
        result += sorted(as_fast, key=lambda p: (shard_size(p.candidate), p.peak_memory_bytes, p.step_ms))
    return result


def shard_size(candidate: Candidate) -> int:
    """Most ranks over modules among which copies divide what they hold; all copies where they divide nothing."""
    layouts = candidate.layouts.values()
    return max(layout.shard_size or layout.dp_size * layout.cp_size for layout in layouts)


_LEAST_RANKS = 128
_MAX_FEW_CANDIDATES = 1024
_MAX_FEW_TASKS = 40_000
_SLICE_MEMORY = 1.1  # tolerance of the memory limit for slices
_MAX_PREDICTIONS = 16  # number of fastest steps whose predictions stay in memory
_MAX_KEPT = 64  # number of arrangements, and of planners, that stay in memory
FEW_RANKS = 8  # ranks up to which a problem is small
MAX_ESTIMATE_RATIO = 1.3  # maximum ratio of the closed-form estimate to the step time


@dataclass
class Simulated:
    """A simulated candidate whose state fits the memory."""

    estimated: EstimatedCandidate
    candidate: Candidate
    step_ms: float  # of its slice, or of its whole step if `is_whole`
    busy_ms: float  # part of it in which its busiest rank computes, which no order of tasks makes shorter
    optimizer_ms: float  # part of it after the last gradient sum
    slice_ms: float | None = None  # step time of its slice, if that was simulated
    is_whole: bool = False  # simulated with all replicas
    prediction: Prediction | None = None  # of the first batch; dropped for slow candidates


class Simulations:
    """Simulates each candidate once: first a slice of its replicas, then all."""

    def __init__(self, space: CandidateSpace):
        self.space, self.problem = space, space.problem
        self.batches = self.problem.batches
        self.effort = self.problem.effort * max(_LEAST_RANKS, self.problem.num_ranks)  # in tasks
        self.known: dict[str, Simulated] = {}  # candidates that fit so far
        self.too_large: dict[str, Candidate] = {}
        self.over: dict[str, tuple[float, Candidate]] = {}  # too large by single samples only, with peak bytes
        self._steps: dict[tuple, StepPlan] = {}
        self._planners: dict[tuple, StepPlanner] = {}
        self._later: dict[tuple[str, int], Prediction | None] = {}

    # Slices of candidates

    def screen(self, candidates: Iterable[EstimatedCandidate], share: float, least: int) -> int:
        """
        Simulates slices of candidates, or all replicas if they have few tasks: as many as a share of the effort
        allows, at least `least`, and none whose bound is above the best step. Returns how many fit.
        """
        num_fitting = num_tasks = num_tried = 0
        for estimated in candidates:
            best_ms = self.best_ms
            is_far = estimated.step_ms > MAX_ESTIMATE_RATIO * best_ms
            if num_tried >= least and (is_far or num_tasks >= share * self.effort):
                break
            if estimated.least_ms >= best_ms and num_tried >= least:
                continue
            candidate = self.space.candidate(estimated)
            tasks = self.screen_one(candidate, estimated)
            num_tried += tasks > 0
            num_fitting += tasks > 0 and key_of(candidate) in self.known
            num_tasks += tasks
        return num_fitting

    @property
    def num_waiting(self) -> int:
        """Number of slices that fit, of candidates that have not been simulated with all replicas."""
        return sum(not simulated.is_whole for simulated in self.known.values())

    def screen_one(self, candidate: Candidate, estimated: EstimatedCandidate) -> int:
        """Simulates a slice, or all of a small step; returns the effort, 0 if the candidate is known."""
        key = key_of(candidate)
        if key in self.known or key in self.too_large:
            return 0
        parts = 1 if candidate.num_tasks <= SMALL_STEP else num_parts(candidate)
        num_tasks = candidate.num_ranks // parts
        if not state_fits(self.problem, candidate):
            self.too_large[key] = candidate
            return num_tasks
        num_tasks += candidate.num_tasks // parts
        if parts == 1:
            self.simulate_whole(candidate, estimated)
            return num_tasks
        found = self.slice(candidate, estimated, parts)
        if found is None:
            self.too_large[key] = candidate
        else:
            self.known[key] = found
        return num_tasks

    @property
    def num_simulated(self) -> int:
        """Number of simulated layouts that fit."""
        return len({str(simulated.candidate) for simulated in self.known.values()})

    def best_placement(self) -> Mapping[str, str] | None:
        """Placement of the candidate with the fastest slice."""
        simulated = self.known.values()
        return min(simulated, key=lambda s: s.step_ms).estimated.colocated_with if simulated else None

    def slice(self, candidate: Candidate, estimated: EstimatedCandidate, parts: int) -> Simulated | None:
        """Simulates 1/`parts` of the replicas on that part of the first batch; `None` if it does not fit."""
        batch, limit = self.batches[0], self.problem.memory_bytes
        small = slice_of(candidate, parts)
        few = small.layouts
        if limit is not None:  # fewer copies divide the state
            whole_bytes, slice_bytes = (state_bytes(self.problem, own) for own in (candidate, small))
            limit += max(0.0, slice_bytes - whole_bytes)
        order = np.argsort(batch.tokens[LANGUAGE_MODEL], kind="stable")
        samples = batch.take(np.sort(order[parts // 2 :: parts]))
        try:
            prediction = self.predict(small, samples, limit)
        except ValueError:  # these samples are larger than average
            prediction = self.predict(small, samples, None)
        # Replica imbalance and the larger all-reduce are added from the closed form.
        uneven = self.space.options[LANGUAGE_MODEL].unevenness(parts * few[LANGUAGE_MODEL].dp_size)
        longer = self._sums_ms(estimated, 1) - self._sums_ms(estimated, parts)
        # Samples of a slice may be larger than those of the whole batch.
        fits = limit is None or prediction.peak_memory_bytes <= (limit if parts == 1 else _SLICE_MEMORY * limit)
        if not fits:
            self._note_large_samples(candidate, prediction)
            return None
        step_ms, busy_ms = (uneven * time_ms for time_ms in (prediction.step_ms, _busy_ms(prediction)))
        step_ms += longer
        return Simulated(estimated, candidate, step_ms, busy_ms, prediction.optimizer_ms, step_ms)

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
        """Simulates the fastest slices' candidates whole, at least `least` diverse ones, on the first batch."""
        num_tasks = 0
        waiting = sorted((s for s in self.known.values() if not s.is_whole), key=lambda s: s.step_ms)
        for simulated in waiting:
            if len(distinct_sizes(self.whole())) >= least and num_tasks >= share * self.effort:
                break
            num_tasks += simulated.candidate.num_tasks
            self.simulate_whole(simulated.candidate, simulated.estimated)

    def whole(self) -> list[Simulated]:
        """Candidates simulated with all replicas, fastest first."""
        return sorted((s for s in self.known.values() if s.is_whole), key=cautious_ms)

    @property
    def best_ms(self) -> float:
        """The fastest step time with all replicas, see [`cautious_ms`]."""
        return min((cautious_ms(s) for s in self.known.values() if s.is_whole), default=float("inf"))

    def simulate_whole(self, candidate: Candidate, estimated: EstimatedCandidate) -> None:
        """Simulates the first batch with all replicas."""
        key, prediction = key_of(candidate), self.fitting(candidate, self.batches[0])
        if prediction is None:
            self.drop(candidate)
            return
        slice_ms = self.known[key].slice_ms if key in self.known else None
        times = (prediction.step_ms, _busy_ms(prediction), prediction.optimizer_ms, slice_ms)
        self.known[key] = Simulated(estimated, candidate, *times, True, prediction)
        for slow in self.whole()[_MAX_PREDICTIONS:]:
            slow.prediction = None

    def simulate_new(self, candidate: Candidate, estimated: EstimatedCandidate) -> int:
        """Simulates the first batch with all replicas; returns the effort, 0 if that was done before."""
        known = self.known.get(key := key_of(candidate))
        if key in self.too_large or (known is not None and known.is_whole):
            return 0
        self.simulate_whole(candidate, estimated)
        return candidate.num_tasks

    def on_later_batch(self, candidate: Candidate, number: int) -> Prediction | None:
        """Prediction of a batch after the first one, `None` if it does not fit."""
        key = key_of(candidate), number
        if key not in self._later:
            self._later[key] = self.fitting(candidate, self.batches[number])
        return self._later[key]

    def drop(self, candidate: Candidate) -> None:
        """Marks a candidate that does not fit."""
        key = key_of(candidate)
        self.known.pop(key, None)
        self.too_large[key] = candidate

    def simulate_remaining(self) -> None:
        """Simulates candidates that could be faster than the best, by estimate: all of a small problem."""
        best_ms = self.best_ms
        if self.problem.num_ranks > FEW_RANKS and self.space.num_within(best_ms) > _MAX_FEW_CANDIDATES:
            return
        num_tasks = 0
        for estimated in self.space:
            if estimated.step_ms > MAX_ESTIMATE_RATIO * best_ms or num_tasks > _MAX_FEW_TASKS:
                break
            if estimated.least_ms >= best_ms:
                continue
            candidate = self.space.candidate(estimated)
            key = key_of(candidate)
            known = self.known.get(key)
            if key in self.too_large or (known is not None and known.is_whole):
                continue
            if not state_fits(self.problem, candidate):
                self.too_large[key] = candidate
                continue
            num_tasks += self.simulate_new(candidate, estimated)
            best_ms = min(best_ms, self.known[key].step_ms if key in self.known else best_ms)

    def rejection_counts(self) -> dict[str, int]:
        """Reason -> number of candidates rejected for it."""
        fitting = {str(simulated.candidate) for simulated in self.known.values()}
        layouts = {str(candidate) for candidate in self.too_large.values()} - fitting
        too_large = self.space.num_too_large + len(layouts)
        return {"needs more memory than a rank has": too_large} if too_large else {}

    def fitting(self, candidate: Candidate, batch: SampleSizes) -> Prediction | None:
        """Prediction of a batch, `None` if it does not fit."""
        limit = self.problem.memory_bytes
        try:
            prediction = self.predict(candidate, batch, limit)
        except ValueError:  # its state leaves no memory for activations
            return None
        if not _has_room(self.problem, prediction.memory):
            return None
        if limit is None or prediction.peak_memory_bytes <= limit:
            return prediction
        self._note_large_samples(candidate, prediction)
        return None

    def _note_large_samples(self, candidate: Candidate, prediction: Prediction) -> None:
        """Marks a candidate that exceeds the memory by single samples only."""
        if runs_large_samples_alone(prediction):
            self.over[key_of(candidate)] = (prediction.peak_memory_bytes, candidate)

    def predict(self, candidate: Candidate, batch: SampleSizes, memory_bytes: float | None) -> Prediction:
        """Predicts a batch."""
        problem = replace(self.problem, global_batch_size=batch.num_samples, memory_bytes=memory_bytes)
        # candidates with the same stages share what is known of these
        splits = POLICIES[candidate.schedule].splits_backward
        stages = (*candidate.layouts.items(), candidate.placement, candidate.vp_size, splits)
        planner = step_planner(problem, candidate, self._planners.get(stages))
        _keep(self._planners, stages, planner)
        workloads = planner.workloads(batch)
        layouts = tuple((name, replace(own, sharding=ShardingSettings())) for name, own in candidate.layouts.items())
        keeps_all = tuple(map(planner.plan.policy.keeps_all, (False, True)))
        order = (candidate.num_microbatches, candidate.vp_size, candidate.arrangement, keeps_all)
        limits = tuple(workloads.token_limits.items())
        key = (layouts, candidate.placement, order, limits, batch.tokens[LANGUAGE_MODEL].tobytes())
        # Candidates that differ in nothing that an arrangement depends on share it.
        step = self._steps.get(key)
        if step is None:
            step = planner.assign_samples(range(batch.num_samples), workloads)
            _keep(self._steps, key, step)
        return planner.predict(PlannedStep(step, batch, workloads))


def _busy_ms(prediction: Prediction) -> float:
    """Time in which the busiest rank computes."""
    return max(prediction.timeline.busy_ms.values())


def key_of(candidate: Candidate) -> str:
    """Identifies a candidate."""
    return f"{candidate}; {candidate.schedule} x {candidate.vp_size}, {candidate.arrangement}"


def _keep(kept: dict, key: tuple, value: Any) -> None:
    """Puts a value among those that stay in memory."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _MAX_KEPT:
        kept.pop(next(iter(kept)))


def step_planner(problem: PlanningProblem, candidate: Candidate, like: StepPlanner | None = None) -> StepPlanner:
    """The step planner of a candidate, as in training; `like` is that of a candidate with the same stages."""
    plan = candidate.plan(problem.spec)
    dp_size = candidate.layouts[LANGUAGE_MODEL].dp_size
    microbatch_size = -(-problem.global_batch_size // (dp_size * candidate.num_microbatches))
    groups = sync_groups(problem.spec, plan) if like is None else like.sync_groups
    planner = StepPlanner(
        problem.costs, plan, groups, microbatch_size, candidate.arrangement, memory_bytes=problem.memory_bytes
    )
    return planner if like is None else planner.sharing(like)
