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


def large_samples(planned: PlannedStep) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """
    Yields the microbatches of a step that exceed the predicted limit of tokens: module, batch indices of the samples,
    their tokens, and the maximum tokens of a microbatch there.
    """
    workloads = planned.workloads
    for name, limit in workloads.token_limits.items():
        tokens = workloads.tokens[name]
        for replica in planned.step.microbatches.get(name, ()):
            for batch_indices in replica:
                total = int(tokens[list(batch_indices)].sum())
                if total > limit:
                    yield name, tuple(batch_indices), total, limit


def runs_large_samples_alone(planned: PlannedStep) -> bool:
    """
    Checks that there are such microbatches, all with a single sample, which no arrangement can make smaller, and few
    of them: less than half of the samples in the module with the fewest.
    """
    counts = dict.fromkeys(planned.workloads.token_limits, 0)
    for name, batch_indices, _, _ in large_samples(planned):
        if len(batch_indices) > 1:
            return False
        counts[name] += 1
    # Modules on the same ranks split the memory in proportion to their work, so that large samples of one module lower
    # the limits of the others as well.
    return any(counts.values()) and 2 * min(counts.values()) < len(planned.step.samples)


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

SMALL_STEP = 512  # tasks up to which a step is simulated without a slice


def num_parts(candidate: Candidate) -> int:
    """Number of equal parts that the replicas of a candidate can be split into, replicas with joint tasks in one."""
    counts = []
    for layout in candidate.layouts.values():
        joint = max(1, layout.ep_size // (layout.cp_size * layout.tp_size))
        if layout.zero_stage >= REDUCES_IN_PASSES:
            copies = layout.shard_size or layout.dp_size * layout.cp_size
            joint = math.lcm(joint, max(1, copies // layout.cp_size))
        counts.append(layout.dp_size // joint)
    return math.gcd(*counts)


def state_of(problem: PlanningProblem, candidate: Candidate) -> dict[int, RankMemory]:
    """Rank -> weights, gradients and optimizer state, see [`state_per_rank`]."""
    plan = candidate.plan(problem.spec)
    return state_per_rank(plan, stage_memories(problem.costs, plan))


def state_fits(problem: PlanningProblem, candidate: Candidate) -> bool:
    """
    Checks that weights, gradients and optimizer state fit into the memory of each rank and of its node; into that of
    an unknown host only what the user asks for.
    """
    storages = {name: own.storage for name, own in candidate.layouts.items() if own.storage.keeps_on_host}
    if problem.host_bytes is None and any(own != problem.storage_of(name) for name, own in storages.items()):
        return False
    memory = state_of(problem, candidate)
    return _has_room(problem, memory) and (problem.memory_bytes is None or _most(memory) <= problem.memory_bytes)


def _most(memory: Mapping[int, RankMemory]) -> float:
    """Bytes of the fullest rank."""
    return max(own.total for own in memory.values())


def _has_room(problem: PlanningProblem, memory: Mapping[int, RankMemory]) -> bool:
    """Checks that each node has room for what its ranks have in host memory."""
    if problem.host_bytes is None:
        return True
    nodes = defaultdict[int, float](float)
    for rank, own in memory.items():
        nodes[rank // problem.costs.device.node_size] += own.host
    return max(nodes.values()) <= problem.host_bytes


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


_TASKS_PER_PLAN, _TASKS_PER_RANK = 64, 2  # what a plan takes besides that is simulated
_RANKS_PER_TASK = 8  # and of which a slice is
_SLICE_MEMORY = 1.1  # tolerance of the memory limit for slices
_KEPT_RATIO = 1.02  # ratio to the fastest step so far up to which predictions stay in memory
_MAX_KEPT = 64  # number of arrangements, and of planners, that stay in memory


@dataclass
class Simulated:
    """A simulated candidate whose state fits the memory."""

    estimated: EstimatedCandidate
    candidate: Candidate
    step_ms: float  # of its slice, or of its whole step if `is_whole`
    least_ms: float = 0.0  # what it takes with any schedule: its busiest rank computes, and the optimizer step
    is_whole: bool = False  # simulated with all replicas
    prediction: Prediction | None = None  # of the first batch; not of slow candidates


@dataclass(frozen=True)
class _Arranged:
    """A batch that is arranged for a candidate."""

    candidate: Candidate
    planner: StepPlanner
    planned: PlannedStep
    key: tuple  # that of all with the same stages, schedule and microbatches


class Simulations:
    """Simulates candidates, a slice of their replicas or all, and keeps what fits."""

    def __init__(self, problem: PlanningProblem):
        self.problem, self.batches = problem, problem.batches
        self.known: dict[str, Simulated] = {}  # candidates that fit so far
        self.too_large: dict[str, Candidate] = {}
        self.over: dict[str, tuple[float, Candidate]] = {}  # too large by single samples only, with peak bytes
        self.num_tasks = 0  # of all simulated steps
        self.best_ms = float("inf")  # the fastest step time with all replicas, see [`cautious_ms`]
        self._steps: dict[tuple, StepPlan] = {}
        self._predictions: dict[tuple, Prediction] = {}
        self._planners: dict[tuple, StepPlanner] = {}
        self._later: dict[tuple[str, int], Prediction | None] = {}

    @property
    def num_simulated(self) -> int:
        """Number of simulated layouts that fit."""
        return len({str(simulated.candidate) for simulated in self.known.values()})

    def simulate(self, space: CandidateSpace, candidate: Candidate, estimated: EstimatedCandidate) -> Simulated | None:
        """
        Simulates all replicas on the first batch, of a step with many tasks only a slice the first time; `None` if
        the candidate does not fit.
        """
        key = key_of(candidate)
        is_known = key in self.known
        parts = 1 if is_known or candidate.num_tasks <= SMALL_STEP else num_parts(candidate)
        found = None
        self.num_tasks += candidate.num_ranks // _RANKS_PER_TASK
        if is_known or state_fits(self.problem, candidate):
            if parts == 1:
                found = self._whole(candidate, estimated)
            else:
                found = self._slice(space, candidate, estimated, parts)
        if found is None:
            self.drop(candidate)
        else:
            self.known[key] = found
        return found

    def _slice(
        self, space: CandidateSpace, candidate: Candidate, estimated: EstimatedCandidate, parts: int
    ) -> Simulated | None:
        """Simulates 1/`parts` of the replicas on that part of the first batch; `None` if it does not fit."""
        batch, limit = self.batches[0], self.problem.memory_bytes
        small = slice_of(candidate, parts)
        few = small.layouts
        if limit is not None:  # fewer copies divide the state
            whole_bytes, slice_bytes = (_most(state_of(self.problem, own)) for own in (candidate, small))
            limit += max(0.0, slice_bytes - whole_bytes)
        order = np.argsort(batch.tokens[LANGUAGE_MODEL], kind="stable")
        samples = batch.take(np.sort(order[parts // 2 :: parts]))
        try:
            arranged = self._arrange(small, samples, limit)
        except ValueError:  # these samples are larger than average
            arranged = self._arrange(small, samples, None)
        # Samples of a slice may be larger than those of the whole batch.
        prediction = self._fitting(candidate, arranged, None if limit is None else _SLICE_MEMORY * limit)
        if prediction is None:
            return None
        # Replica imbalance and the larger all-reduce are added from the closed form.
        uneven = space.options[LANGUAGE_MODEL].unevenness(parts * few[LANGUAGE_MODEL].dp_size)
        longer = _sums_ms(space, estimated, 1) - _sums_ms(space, estimated, parts)
        return Simulated(estimated, candidate, uneven * prediction.step_ms + longer)

    def _whole(self, candidate: Candidate, estimated: EstimatedCandidate) -> Simulated | None:
        """Simulates all replicas on the first batch; `None` if the candidate does not fit."""
        prediction = self.fitting(candidate, self.batches[0])
        if prediction is None:
            return None
        least_ms = max(prediction.timeline.busy_ms.values()) + prediction.optimizer_ms
        found = Simulated(estimated, candidate, prediction.step_ms, least_ms, True)
        self.best_ms = min(self.best_ms, cautious_ms(found))
        if cautious_ms(found) <= _KEPT_RATIO * self.best_ms:
            found.prediction = prediction
        return found

    def fastest(self) -> list[Simulated]:
        """Candidates simulated with all replicas, fastest first."""
        return sorted((s for s in self.known.values() if s.is_whole), key=cautious_ms)

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
        self.best_ms = min((cautious_ms(s) for s in self.known.values() if s.is_whole), default=float("inf"))

    def rejection_counts(self, space: CandidateSpace) -> dict[str, int]:
        """Reason -> number of candidates rejected for it."""
        fitting = {str(simulated.candidate) for simulated in self.known.values()}
        layouts = {str(candidate) for candidate in self.too_large.values()} - fitting
        too_large = space.num_too_large + len(layouts)
        return {"needs more memory than a rank has": too_large} if too_large else {}

    def fitting(self, candidate: Candidate, batch: SampleSizes) -> Prediction | None:
        """Prediction of a batch, `None` if it does not fit."""
        limit = self.problem.memory_bytes
        try:
            prediction = self._fitting(candidate, self._arrange(candidate, batch, limit), limit)
        except ValueError:  # its state leaves no memory for activations
            return None
        if prediction is None or not _has_room(self.problem, prediction.memory):
            return None
        return prediction

    def _fitting(self, candidate: Candidate, arranged: _Arranged, limit: float | None) -> Prediction | None:
        """Prediction of an arranged batch of a candidate, or of a slice of it; `None` if it exceeds a limit."""
        if limit is None:
            return self._predict(arranged)
        # before it is simulated, since hardly a stage has fewer microbatches in flight than it may
        peak_bytes = _most(arranged.planner.most_memory(arranged.planned))
        if peak_bytes <= limit:
            prediction = self._predict(arranged)
            if prediction.peak_memory_bytes <= limit:
                return prediction
            peak_bytes = prediction.peak_memory_bytes
        if runs_large_samples_alone(arranged.planned):
            self.over[key_of(candidate)] = (peak_bytes, candidate)
        return None

    def predict(self, candidate: Candidate, batch: SampleSizes, memory_bytes: float | None) -> Prediction:
        """Predicts a batch."""
        return self._predict(self._arrange(candidate, batch, memory_bytes))

    def _predict(self, arranged: _Arranged) -> Prediction:
        """Predicts an arranged batch, once for all candidates that are alike then."""
        candidate = arranged.candidate
        if arranged.key not in self._predictions:
            self.num_tasks += candidate.num_tasks + _TASKS_PER_RANK * candidate.num_ranks
            _keep(self._predictions, arranged.key, arranged.planner.predict(arranged.planned))
        return replace(self._predictions[arranged.key], plan=arranged.planner.plan, planned=arranged.planned)

    def _arrange(self, candidate: Candidate, batch: SampleSizes, memory_bytes: float | None) -> _Arranged:
        """Arranges a batch."""
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
        self.num_tasks += _TASKS_PER_PLAN
        fills = memory_bytes if POLICIES[candidate.schedule].fills_memory else None
        alike = (stages, candidate.schedule, fills, tuple(step.microbatches.items()), key[-1])
        return _Arranged(candidate, planner, PlannedStep(step, batch, workloads), alike)


def _sums_ms(space: CandidateSpace, estimated: EstimatedCandidate, parts: int) -> float:
    """Time of gradient all-reduces with 1/`parts` of a candidate's replicas."""
    sums: dict[str, float] = {}
    for name, estimate in estimated.estimates.items():
        host = estimated.colocated_with.get(name, name)
        sum_ms = space.options[name].sync_ms(estimate.kind, estimate.dp_size // parts, estimate.pp_size)
        sums[host] = sums.get(host, 0.0) + sum_ms
    return max(sums.values())


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
