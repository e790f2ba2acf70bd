"""Groups of colocated encoders or generators, which the arrangement treats as one module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from ..plan.step_plan import BatchIndices, Replicas, turn_of
from .estimate import Pipeline
from .greedy import Capacity, CapacityError, exchange, fill_bins, stable_order
from .microbatch_counts import ByIdentity

_EXCHANGES = 4  # rounds between the replicas that split a microbatch


@dataclass(frozen=True)
class ColocatedModules:
    """
    Encoders, or generators, on the same ranks, where they run in turns.

    Replicas form groups, as many as divide the numbers of replicas of these modules and of the language model: the
    replicas of a group serve the language model replicas of the same group, so that a rank has few peers.
    """

    modules: tuple[str, ...]  # the encoders, or the generators
    work: NDArray  # [num_samples] time on their slowest stages
    dp_size: int  # replicas of each module
    num_groups: int  # of replicas
    language_dp_size: int  # replicas of the language model

    @property
    def num_copies(self) -> int:
        """Number of replicas in a group."""
        return self.dp_size // self.num_groups

    @property
    def num_served(self) -> int:
        """Number of language model replicas in a group."""
        return self.language_dp_size // self.num_groups

    def copies(
        self,
        replica: NDArray,  # [num_samples] language model replica
        turn: NDArray,  # [num_samples] microbatch in these modules
        count: int,  # maximum number of microbatches of a group
        capacity: Capacity | None,
    ) -> NDArray:
        """
        Splits the microbatches of each group over its replicas: int64 `[num_samples]`, arbitrary without work.

        Raises [`CapacityError`] if a microbatch does not fit.
        """
        group = replica // self.num_served
        if self.num_copies == 1 and capacity is None:
            return group
        some = np.flatnonzero(self.work > 0)
        microbatch, work = group[some] * count + turn[some], self.work[some]
        inner = capacity and Capacity(capacity.sizes[some], capacity.limits)
        loads = np.zeros((self.num_groups * count, self.num_copies, 1))
        order = np.argsort(-work, kind="stable")
        share = fill_bins(microbatch, work[:, None], order, np.ones(self.num_copies), loads, inner)
        means = np.bincount(microbatch, work, len(loads))[:, None, None] / self.num_copies
        targets = np.broadcast_to(means, loads.shape)
        share = (
            exchange(microbatch * self.num_copies + share, work[:, None], targets, _EXCHANGES, inner) % self.num_copies
        )
        sums = np.bincount(microbatch * self.num_copies + share, work, loads.size).reshape(self.num_groups, count, -1)
        owner = self._owners(sums).reshape(-1, self.num_copies)
        result = group * self.num_copies
        result[some] += owner[microbatch, share]
        return result

    def turns(self, counts: NDArray) -> NDArray:
        """Number of microbatches of each group, int64 `[num_groups]`: the maximum over its language model replicas."""
        return counts.reshape(self.num_groups, self.num_served).max(axis=1)

    def turn(
        self,
        replica: NDArray,  # [num_samples] language model replica
        microbatch: NDArray,  # [num_samples] microbatch of that replica
        counts: NDArray,  # [language_dp_size] microbatches
    ) -> NDArray:
        """Returns the turn of its group in which each sample is due, see [`StepPlan`]."""
        return turn_of(microbatch, counts[replica], self.turns(counts)[replica // self.num_served])

    def microbatches(
        self,
        copy: NDArray,  # [num_samples] replica in these modules
        turn: NDArray,  # [num_samples] microbatch in these modules
        counts: NDArray,  # [language_dp_size] microbatches
    ) -> Replicas:
        """Replica -> microbatch -> batch indices with work, ascending."""
        some = np.flatnonzero(self.work > 0)
        return group_by_microbatch(some, copy[some], turn[some], self.turns(counts).repeat(self.num_copies))

    def _owners(self, sums: NDArray) -> NDArray:
        """Replica of each share `[groups, count, copies]`: the heaviest goes to the one with the least work so far."""
        total, owner = np.zeros(sums[:, 0].shape), np.empty(sums.shape, np.int64)
        for index in range(sums.shape[1]):
            shares = np.argsort(-sums[:, index], axis=1, kind="stable")
            owners = np.argsort(total, axis=1, kind="stable")
            np.put_along_axis(owner[:, index], shares, owners, 1)
            added = np.take_along_axis(sums[:, index], shares, 1)
            np.put_along_axis(total, owners, np.take_along_axis(total, owners, 1) + added, 1)
        return owner


def group_by_microbatch(batch_indices: NDArray, replica: NDArray, microbatch: NDArray, counts: NDArray) -> Replicas:
    """Replica -> microbatch -> batch indices, ascending; `counts` are the numbers of microbatches of the replicas."""
    ends = np.cumsum(counts)
    microbatch_index = (ends - counts)[replica] + microbatch
    flat = batch_indices[stable_order(microbatch_index, int(ends[-1]))].tolist()
    stops = np.cumsum(np.bincount(microbatch_index, minlength=ends[-1])).tolist()
    microbatches = [tuple(flat[start:stop]) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    ends_and_counts = zip(ends.tolist(), counts.tolist(), strict=True)
    return tuple(tuple(microbatches[end - count : end]) for end, count in ends_and_counts)


@lru_cache(maxsize=32)
def _by_ranks(key: ByIdentity, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The modules, grouped by shared ranks and equal numbers of replicas."""
    modules = {name: key.plan.modules[name] for name in names}
    ranks = {
        name: {(module.dp_size, rank) for _, _, stage in module.stages() for rank in stage.all_ranks}
        for name, module in modules.items()
    }
    groups: list[tuple[str, ...]] = []
    for name in ranks:
        joined = [names for names in groups if any(ranks[name] & ranks[other] for other in names)]
        groups = [names for names in groups if names not in joined]
        groups.append((*(other for names in joined for other in names), name))
    return tuple(groups)


def colocated_encoders(
    plan: ParallelPlan,
    workloads: Workloads,
    weight: Mapping[str, float],  # module -> weight of a millisecond of its forward
) -> tuple[ColocatedModules, ...]:
    """Groups the encoders of a plan by shared ranks."""
    return _colocated(plan, workloads, weight, plan.encoders)


def colocated_generators(
    plan: ParallelPlan, workloads: Workloads, weight: Mapping[str, float]
) -> tuple[ColocatedModules, ...]:
    """The colocated generators of a plan, see [`colocated_encoders`]."""
    return _colocated(plan, workloads, weight, plan.generators)


def _colocated(
    plan: ParallelPlan, workloads: Workloads, weight: Mapping[str, float], modules: tuple[str, ...]
) -> tuple[ColocatedModules, ...]:
    language_dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    result = []
    for names in _by_ranks(ByIdentity(plan), modules):
        work = np.sum([np.asarray(workloads.forward_ms[name], dtype=float) * weight[name] for name in names], axis=0)
        dp_size = plan.modules[names[0]].dp_size
        groups = math.gcd(language_dp_size, dp_size)
        result.append(ColocatedModules(names, work, dp_size, groups, language_dp_size))
    return tuple(result)


# Arrangement of modality generators (the modules after the language model) with its microbatches.


def arrange_generators(
    plan: ParallelPlan,
    workloads: Workloads,
    language: Sequence[Sequence[BatchIndices]],  # replica -> microbatch -> batch indices of the language model
) -> dict[str, Replicas]:
    """
    Arranges generators: generator -> replica -> microbatch -> batch indices with work.

    A sample is generated in its microbatch of the language model, since its hidden states are available there and wait
    for the gradient. Token limits are respected as far as the language model's microbatches allow it.
    """
    if not plan.generators:
        return {}
    replica, microbatch = (np.zeros(workloads.num_samples, np.int64) for _ in range(2))
    for number, microbatches in enumerate(language):
        for index, batch_indices in enumerate(microbatches):
            replica[list(batch_indices)], microbatch[list(batch_indices)] = number, index
    counts = np.array([len(microbatches) for microbatches in language])
    result = {}
    for colocated in colocated_generators(plan, workloads, Pipeline.of(plan, workloads.backward_ratio).bottleneck):
        turn = colocated.turn(replica, microbatch, counts)
        # the group's samples of a turn, split over its replicas by work
        copy = _copies(colocated, workloads, replica, turn, int(counts.max()))
        result.update(dict.fromkeys(colocated.modules, colocated.microbatches(copy, turn, counts)))
    return result


def _copies(colocated: ColocatedModules, workloads: Workloads, replica: NDArray, turn: NDArray, count: int) -> NDArray:
    """Replica of each sample in colocated modules, within its token limits if possible."""
    names = [name for name in colocated.modules if name in workloads.token_limits]
    if names:
        sizes = np.stack([workloads.tokens_of_limit(name) for name in names], axis=1).astype(float)
        capacity = Capacity(sizes, np.array([workloads.token_limits[name] for name in names], dtype=float))
        with suppress(CapacityError):  # some arrangements ignore limits
            return colocated.copies(replica, turn, count, capacity)
    return colocated.copies(replica, turn, count, None)
