"""How many microbatches each replica of the language model computes; of unequal replicas the faster ones more."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .._portable import weighted_sum
from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from .estimate import stage_share


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
