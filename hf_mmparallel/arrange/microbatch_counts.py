"""Number of microbatches of a step, and their target sizes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from .._portable import exp, log, weighted_sum
from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from .estimate import Pipeline, stage_share

# How many microbatches each replica of the language model computes; of unequal replicas the faster ones more.


def num_microbatches(num_samples: int, microbatch_size: int, dp_size: int = 1) -> int:
    """Mean number of microbatches of each of `dp_size` replicas for a batch of `num_samples`, rounded up."""
    return max(1, -(-num_samples // (microbatch_size * dp_size)))


def plan_for_batch(
    plan: ParallelPlan,
    num_samples: int,  # of a full global batch
    microbatch_size: int,  # of one language model replica
) -> ParallelPlan:
    """
    Sets the plan's number of microbatches to that of a full global batch.

    Raises `ValueError` if `replica_microbatches` of the plan add up to another number.
    """
    if plan.replica_microbatches is None:
        dp_size = plan.modules[LANGUAGE_MODEL].dp_size
        return replace(plan, num_microbatches=num_microbatches(num_samples, microbatch_size, dp_size))
    total = num_microbatches(num_samples, microbatch_size)
    if plan.total_microbatches != total:
        raise ValueError(
            f"`replica_microbatches={list(plan.replica_microbatches)}` of the plan are {plan.total_microbatches} "
            f"microbatches, but a global batch of {num_samples} samples in microbatches of {microbatch_size} has "
            f"{total}. Change the batch sizes or these numbers, or leave them out, so that they are chosen by the "
            "predicted times."
        )
    return plan


def fastest_counts(
    fill_ms: Sequence[float],  # time of the first microbatch in each pipeline, through all of its stages
    slowest_ms: Sequence[float],  # time of each further one, that of the slowest stage
    num_microbatches: int,  # of all pipelines
) -> list[int]:
    """
    Divides microbatches over unequal pipelines such that the last one ends as early as possible, at least one each.

    A pipeline takes `fill + (count - 1) * slowest` (Entrain, equation 4.2; Oobleck, section 2.4.2.2). Each microbatch
    goes to the pipeline that would end with it first. That is optimal: ends only grow, and if a pipeline had fewer,
    another one would exceed the resulting maximum. Raises `ValueError` if there are fewer microbatches than pipelines.
    """
    num_pipelines = len(fill_ms)
    if num_microbatches < num_pipelines:
        raise ValueError(
            f"{num_microbatches} microbatches are too few for {num_pipelines} pipelines, each of which needs one. Use "
            "a larger global batch or smaller microbatches."
        )
    if len(set(fill_ms)) == len(set(slowest_ms)) == 1:  # microbatches in turns, without the heap
        each, rest = divmod(num_microbatches, num_pipelines)
        return [each + (index < rest) for index in range(num_pipelines)]
    counts = [1] * num_pipelines
    ends = [(fill + slowest, index) for index, (fill, slowest) in enumerate(zip(fill_ms, slowest_ms, strict=True))]
    heapq.heapify(ends)
    for _ in range(num_microbatches - num_pipelines):
        end_ms, index = ends[0]
        counts[index] += 1
        heapq.heapreplace(ends, (end_ms + slowest_ms[index], index))
    return counts


def microbatch_counts(plan: ParallelPlan, workloads: Workloads, total: int) -> NDArray:
    """
    Number of microbatches `[language_dp_size]` of each replica, `total` together and at least 1 each: in the
    proportions of `replica_microbatches`, by default such that the last replica is predicted to end as early as
    possible.
    """
    if plan.replica_microbatches is not None:
        return np.array(plan.microbatches_for(total))
    whole, ranks = _shares(ByIdentity(plan))
    names = list(plan.modules)
    work = np.array([float(np.sum(workloads.forward_ms[n])) * (1 + workloads.backward_ratio[n]) for n in names])
    stage_ms = whole * work  # as if microbatches were equal
    sides = (plan.encoders, [LANGUAGE_MODEL], plan.generators)
    # Encoders are parallel chains, and so are generators.
    fill_ms = np.sum([stage_ms[:, [names.index(n) for n in side]].max(axis=1, initial=0.0) for side in sides], axis=0)
    each = -(-total // len(whole))
    return np.array(
        fastest_counts(fill_ms.tolist(), weighted_sum(ranks, work).max(axis=1).tolist(), each * len(whole))
    )


def with_fastest_counts(
    plan: ParallelPlan,
    workloads: Workloads,  # of a typical global batch
) -> ParallelPlan:
    """
    Sets the plan's `replica_microbatches`, if it has none, to the [`microbatch_counts`] of a full global batch.

    A plan whose replicas are alike stays the same.
    """
    counts = tuple(microbatch_counts(plan, workloads, plan.total_microbatches).tolist())
    return plan if counts == plan.microbatch_counts else replace(plan, replica_microbatches=counts)


def counts_of(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> list[int]:
    """Number of microbatches of each language model replica, see [`microbatch_counts`]."""
    total = num_microbatches(workloads.num_samples, microbatch_size)
    return microbatch_counts(plan, workloads, total).tolist()


class ByIdentity:
    """Hashes a plan by identity, as a cache key: plans are not hashable, and comparing all ranks would be slow."""

    __slots__ = ("plan",)

    def __init__(self, plan: ParallelPlan):
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.plan is other.plan


@lru_cache(maxsize=16)
def _shares(key: ByIdentity) -> tuple[NDArray, NDArray]:
    """
    Times of the stages on the path of a language model replica per millisecond of each module: all stages together
    `[replicas, modules]`, and each rank `[replicas, ranks, modules]`.
    """
    plan = key.plan
    dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    whole, by_rank = np.zeros((dp_size, len(plan.modules))), [{} for _ in range(dp_size)]
    for number, (name, module) in enumerate(plan.modules.items()):
        for replica, stages in enumerate(module.replicas):
            served = plan.served_replicas(name, replica)
            copies = module.dp_size * len(served) // dp_size
            shares = [stage_share(plan, name, stage) / copies for stage in stages]
            whole[served, number] = np.maximum(whole[served, number], sum(shares))
            # The work of a module that serves several replicas does not depend on the replica of a microbatch.
            for stage, share in zip(stages, shares, strict=True) if len(served) == 1 else ():
                for rank in stage.all_ranks:
                    by_rank[served[0]].setdefault(rank, np.zeros(len(plan.modules)))[number] += share
    ranks = np.zeros((dp_size, max(map(len, by_rank)), len(plan.modules)))
    for of_rank, shares in zip(ranks, by_rank, strict=True):
        of_rank[: len(shares)] = list(shares.values())
    return whole, ranks


MAX_RELATIVE_SIZE = 1.35  # maximum size relative to the mean, so that memory stays close to that of equal sizes
_MIN_RELATIVE_SIZE = 0.05  # minimum size relative to the mean, even for tiny samples: an empty microbatch has no use
_LOG_QUANTUM = 0.05  # quantum of the logarithm of a module's share of the work
_CHANGE_PENALTY, _DEFERRAL_PENALTY = 2e-4, 1e-3  # of changed sizes and of deferred work, relative to the time
_MIN_GAIN = 0.01  # minimum relative gain of unequal sizes, or of fewer microbatches
_FEWER_RATIOS = (0.75, 0.5, 0.375, 0.25)
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Sizes:
    """Share of the work of each microbatch in the encoders and in the language model, 1 on average."""

    encoder: tuple[float, ...]
    language: tuple[float, ...]

    @classmethod
    def even(cls, count: int) -> Sizes:
        return cls((1.0,) * count, (1.0,) * count)


def best_sizes(
    pipeline: Pipeline,
    totals: Mapping[str, float],  # module -> milliseconds of one replica's samples
    count: int,
    smallest: float = 0.0,  # relative to the mean, at least 0.05
    largest: float = MAX_RELATIVE_SIZE,  # relative to the mean
) -> Sizes:
    """
    Finds the sizes with the shortest step if samples could be divided arbitrarily.

    Microbatches are small at the start, while the pipeline fills, and at the end, while it drains, because stages wait
    for them there. Sizes and the times of all tasks are the solution of a linear program for the order of
    [`Pipeline.time_steps`], where the language model processes samples in the encoder's microbatch or one later.
    """
    max_total_ms = max(totals.values())
    if pipeline.num_stages == 1 or smallest >= 1 or largest <= 1 or count < 3 or max_total_ms <= 0:
        return Sizes.even(count)
    weights = np.array([totals[name] for name in pipeline.modules]) + 1e-9 * max_total_ms
    work = weights * np.array(list(pipeline.bottleneck.values()))
    # rounded, since batches of a dataset are similar and solutions are cached
    steps = np.rint(log(work / work.max()) / _LOG_QUANTUM).astype(int)
    solved = min(count, 4 * pipeline.num_stages + 16)  # of many microbatches, those in the middle are equal
    smallest = max(_MIN_RELATIVE_SIZE, math.ceil(10 * smallest) / 10)
    solution = _solve(pipeline, tuple(steps.tolist()), solved, smallest, round(largest, 2))
    return Sizes(_stretched(solution.encoder, count), _stretched(solution.language, count))


def _stretched(sizes: Sequence[float], count: int) -> tuple[float, ...]:
    """Repeats the largest size until there are `count`, and rescales the mean to 1."""
    middle = int(np.argmax(sizes))
    longer = np.insert(np.array(sizes), middle, np.full(count - len(sizes), sizes[middle]))
    return tuple((longer * count / longer.sum()).tolist())


class _Constraints:
    """Constraints `sum of coefficients <= 0` of a linear program."""

    def __init__(self):
        self.entries: list[tuple[int, int, float]] = []
        self.count = 0

    def add(self, *terms: tuple[int, float]) -> None:
        self.entries += [(self.count, variable, value) for variable, value in terms]
        self.count += 1

    def matrix(self, num_variables: int) -> csr_array:
        rows, columns, values = zip(*self.entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(self.count, num_variables)).tocsr()


@lru_cache(maxsize=256)
def _solve(pipeline: Pipeline, steps: tuple[int, ...], count: int, smallest: float, largest: float) -> Sizes:
    """Solves the linear program of [`best_sizes`]."""
    # Variables: sizes in the encoders and in the language model, starts of all tasks, the end, and smoothing terms:
    # changes of sizes, and differences between encoders and language model.
    work = exp(_LOG_QUANTUM * np.array(steps)) / np.array(list(pipeline.bottleneck.values())) / count
    costs = pipeline.costs * work[:, None]
    # Generators have the language model's microbatches.
    language = pipeline.modules.index(LANGUAGE_MODEL)
    kinds = [int(position >= language) for position in range(len(pipeline.modules))]
    by_kind = np.stack([costs[:, [kind == k for k in kinds]].sum(axis=1) for kind in range(2)], axis=1)
    when, num_stages = pipeline.time_steps(count), len(pipeline.depth)
    end = 2 * count + 2 * num_stages * count
    change, other = end + 1, end + 1 + 2 * count
    constraints = _Constraints()

    def start(direction: int, microbatch: int, stage: int) -> int:
        """The variable of the start of a task."""
        return 2 * count + (direction * count + microbatch) * num_stages + stage

    def after(direction: int, microbatch: int, stage: int, following: int) -> None:
        """Constrains variable `following` to be at least the end of a task."""
        terms = [(kind * count + microbatch, float(by_kind[direction, kind, stage])) for kind in range(2)]
        constraints.add(
            (start(direction, microbatch, stage), 1.0), *(term for term in terms if term[1]), (following, -1.0)
        )

    for stage, sources in enumerate(pipeline.before):
        for microbatch in range(count):
            for source in sources:
                after(0, microbatch, source, start(0, microbatch, stage))
                if pipeline.backwards[source]:
                    after(1, microbatch, stage, start(1, microbatch, source))
        directions = range(1 + pipeline.backwards[stage])
        order = sorted((int(when[way, index, stage]), way, index) for way in directions for index in range(count))
        for (_, way, index), (_, next_way, next_index) in zip(order, order[1:], strict=False):
            after(way, index, stage, start(next_way, next_index, stage))
        after(order[-1][1], order[-1][2], stage, end)
    encoded = [(index, 1.0) for index in range(count)]
    consumed = [(count + index, 1.0) for index in range(count)]
    for index in range(count):
        constraints.add(*consumed[: index + 1], *((variable, -1.0) for variable, _ in encoded[: index + 1]))
        constraints.add(*encoded[:index], *((variable, -1.0) for variable, _ in consumed[: index + 1]))
        for kind in range(2 * (index > 0)):
            here, extra = kind * count + index, change + kind * count + index
            constraints.add((here, 1.0), (here - 1, -1.0), (extra, -1.0))
            constraints.add((here, -1.0), (here - 1, 1.0), (extra, -1.0))
        constraints.add((index, 1.0), (count + index, -1.0), (other + index, -1.0))
        constraints.add((index, -1.0), (count + index, 1.0), (other + index, -1.0))

    num_variables = other + count
    whole = np.zeros((2, num_variables))
    whole[0, :count] = whole[1, count : 2 * count] = 1.0
    objective = np.zeros(num_variables)
    objective[end], objective[change:other], objective[other:] = 1.0, _CHANGE_PENALTY, _DEFERRAL_PENALTY
    lowest, highest = np.zeros(num_variables), np.full(num_variables, np.inf)
    lowest[: 2 * count], highest[: 2 * count] = smallest, largest
    solution = linprog(
        objective,
        A_ub=constraints.matrix(num_variables),
        b_ub=np.zeros(constraints.count),
        A_eq=whole,
        b_eq=[count, count],
        bounds=np.stack([lowest, highest], axis=1),
        method="highs",
    )
    even = {name: np.full((1, count), work_ms) for name, work_ms in zip(pipeline.modules, work, strict=True)}
    if solution.x is None or solution.x[end] > (1 - _MIN_GAIN) * pipeline.iteration_ms(even)[0]:
        return Sizes.even(count)
    sizes = np.round(solution.x[: 2 * count], 3)
    return Sizes(tuple(sizes[:count].tolist()), tuple(sizes[count:].tolist()))


def best_count(
    pipeline: Pipeline,
    totals: Mapping[str, float],  # module -> milliseconds of one replica's samples
    count: int,
    # encoder -> milliseconds [replicas, any] of the heaviest samples of each replica, descending
    heaviest: Mapping[str, NDArray],
) -> int:
    """
    Finds the best number of microbatches, at most `count`, if single samples are heavier than a microbatch should be.

    With fewer microbatches such a sample is closer to the others, but the pipeline takes longer to fill and to drain;
    the trade-off is estimated. (Entrain, section 4.5.1, divides the work of all samples by that of the largest one,
    regardless of the pipeline.)
    """
    best, best_ms = count, math.inf
    for trial in (count, *(max(1, round(share * count)) for share in _FEWER_RATIOS)):
        loads = {name: np.full((1, trial), total / trial) for name, total in totals.items()}
        loads |= {name: _around(samples, totals[name], trial) for name, samples in heaviest.items()}
        num_trials = max(map(len, loads.values()))
        loads = {name: np.broadcast_to(values, (num_trials, trial)) for name, values in loads.items()}
        time_ms = float(pipeline.iteration_ms(loads).max())
        if time_ms < (1 - _MIN_GAIN) * best_ms:
            best, best_ms = trial, time_ms
    return best


def _around(samples: NDArray, total: float, count: int) -> NDArray:
    """Loads `[replicas, count]` if samples above the mean have their own microbatches and all others are even."""
    samples = samples[:, : count - 1]
    rest = total - np.pad(np.cumsum(samples, axis=1), ((0, 0), (1, 0)))
    level = np.maximum(rest, 0) / (count - np.arange(rest.shape[1]))
    alone = np.cumprod(samples > level[:, :-1], axis=1)
    even = np.take_along_axis(level, alone.sum(axis=1, keepdims=True), 1)
    loads = np.repeat(even, count, axis=1)
    loads[:, : samples.shape[1]] = np.where(alone > 0, samples, even)
    # Spread out, so that they are not at the start, where they would cost most.
    return loads[:, np.argsort((np.arange(count) * _GOLDEN + 0.5) % 1, kind="stable")]
