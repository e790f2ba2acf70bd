"""Encoders and generators as the arrangement sees them: those on the same ranks, with as many replicas, are one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from ..plan.step_plan import Slots, turn_of
from .estimate import stage_share
from .exchange import Room, exchange, stable_order
from .greedy import fill_bins
from .replicas import replica_counts

_EXCHANGES = 4  # rounds between the replicas that share a microbatch


@dataclass(frozen=True)
class Track:
    """
    Encoders, or generators, on the same ranks, which take turns there.

    Replicas are in groups, as many as divide the numbers of replicas of these modules and of the language model: the
    replicas of a group serve the language-model replicas of the same group, so that a rank has few partners.

    Args:
        modules (`tuple[str, ...]`): The encoders, or the generators.
        work (`numpy.ndarray` of shape `[num_samples]`): Time of each sample on their slowest stages.
        dp_size (`int`): Replicas of each of them.
        num_groups (`int`): Groups of replicas.
        language_dp_size (`int`): Replicas of the language model.
    """

    modules: tuple[str, ...]
    work: NDArray
    dp_size: int
    num_groups: int
    language_dp_size: int

    @property
    def num_copies(self) -> int:
        """Replicas of a group."""
        return self.dp_size // self.num_groups

    @property
    def num_served(self) -> int:
        """Language-model replicas of a group."""
        return self.language_dp_size // self.num_groups

    def copies(self, replica: NDArray, turn: NDArray, count: int, room: Room | None) -> NDArray:
        """
        Divides the microbatches of each group among its replicas.

        Args:
            replica (`numpy.ndarray` of shape `[num_samples]`): Language-model replica of each sample.
            turn (`numpy.ndarray` of shape `[num_samples]`): Microbatch of each sample in this track.
            count (`int`): The most microbatches of a group.
            room ([`Room`], *optional*): Limits of a microbatch.

        Returns:
            `numpy.ndarray`: The track's replica of each sample, int64 `[num_samples]`; of samples without work, any.

        Raises:
            `NoRoomError`: If a microbatch does not fit.
        """
        group = replica // self.num_served
        if self.num_copies == 1 and room is None:
            return group
        some = np.flatnonzero(self.work > 0)
        place, work = group[some] * count + turn[some], self.work[some]
        inner = room and Room(room.sizes[some], room.limits)
        loads = np.zeros((self.num_groups * count, self.num_copies, 1))
        order = np.argsort(-work, kind="stable")
        part = fill_bins(place, work[:, None], order, np.ones(self.num_copies), loads, inner)
        means = np.bincount(place, work, len(loads))[:, None, None] / self.num_copies
        targets = np.broadcast_to(means, loads.shape)
        part = exchange(place * self.num_copies + part, work[:, None], targets, _EXCHANGES, inner) % self.num_copies
        sums = np.bincount(place * self.num_copies + part, work, loads.size).reshape(self.num_groups, count, -1)
        taker = self._takers(sums).reshape(-1, self.num_copies)
        result = group * self.num_copies
        result[some] += taker[place, part]
        return result

    def turns(self, counts: NDArray) -> NDArray:
        """
        Microbatches of the replicas of each group, int64 `[num_groups]`: as many as that replica of the language model
        has, of those that they serve, that has most of them.
        """
        return counts.reshape(self.num_groups, self.num_served).max(axis=1)

    def turn(self, replica: NDArray, microbatch: NDArray, counts: NDArray) -> NDArray:
        """
        In which of its group's turns each sample is due, see [`StepPlan`].

        Args:
            replica (`numpy.ndarray` of shape `[num_samples]`): Language-model replica of each sample.
            microbatch (`numpy.ndarray` of shape `[num_samples]`): A microbatch of that replica for each sample.
            counts (`numpy.ndarray` of shape `[language_dp_size]`): Microbatches of each replica.
        """
        return turn_of(microbatch, counts[replica], self.turns(counts)[replica // self.num_served])

    def microbatches(self, copy: NDArray, turn: NDArray, counts: NDArray) -> tuple[tuple[Slots, ...], ...]:
        """
        Args:
            copy (`numpy.ndarray` of shape `[num_samples]`): The track's replica of each sample.
            turn (`numpy.ndarray` of shape `[num_samples]`): Microbatch of each sample in this track.
            counts (`numpy.ndarray` of shape `[language_dp_size]`): Microbatches of each language-model replica.

        Returns:
            `tuple[tuple[tuple[int, ...], ...], ...]`: Replica -> microbatch -> slots with work, ascending.
        """
        some = np.flatnonzero(self.work > 0)
        return cut(some, copy[some], turn[some], self.turns(counts).repeat(self.num_copies))

    def _takers(self, sums: NDArray) -> NDArray:
        """Who takes each part `[groups, count, copies]`: the heaviest of a microbatch goes to who has least so far."""
        total, taker = np.zeros(sums[:, 0].shape), np.empty(sums.shape, np.int64)
        for index in range(sums.shape[1]):
            parts = np.argsort(-sums[:, index], axis=1, kind="stable")
            takers = np.argsort(total, axis=1, kind="stable")
            np.put_along_axis(taker[:, index], parts, takers, 1)
            added = np.take_along_axis(sums[:, index], parts, 1)
            np.put_along_axis(total, takers, np.take_along_axis(total, takers, 1) + added, 1)
        return taker


def cut(slots: NDArray, replica: NDArray, microbatch: NDArray, counts: NDArray) -> tuple[tuple[Slots, ...], ...]:
    """Replica -> microbatch -> slots, ascending; `counts` are the microbatches of each replica."""
    ends = np.cumsum(counts)
    places = (ends - counts)[replica] + microbatch
    flat = slots[stable_order(places, int(ends[-1]))].tolist()
    stops = np.cumsum(np.bincount(places, minlength=ends[-1])).tolist()
    found = [tuple(flat[start:stop]) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    return tuple(tuple(found[end - count : end]) for end, count in zip(ends.tolist(), counts.tolist(), strict=True))


class _ByIdentity:
    """A plan as a key: plans can't be hashed, and to compare all ranks would take as long as what is remembered."""

    __slots__ = ("plan",)

    def __init__(self, plan: ParallelPlan):
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.plan is other.plan


@lru_cache(maxsize=32)
def _together(key: _ByIdentity, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The modules; those on the same ranks are together if they have as many replicas as each other."""
    modules = {name: key.plan.modules[name] for name in names}
    ranks = {
        name: {(module.dp_size, rank) for _, _, stage in module.stages() for rank in stage.all_ranks}
        for name, module in modules.items()
    }
    found: list[tuple[str, ...]] = []
    for name in ranks:
        joined = [names for names in found if any(ranks[name] & ranks[other] for other in names)]
        found = [names for names in found if names not in joined]
        found.append((*(other for names in joined for other in names), name))
    return tuple(found)


@lru_cache(maxsize=16)
def _shares(key: _ByIdentity) -> tuple[NDArray, NDArray]:
    """
    What the stages on the way of a replica of the language model take for a millisecond of each module.

    Returns:
        All of its stages together `[replicas, modules]`, and each of its ranks `[replicas, ranks, modules]`. Modules
        that serve several replicas are left out on ranks: whoever gets a microbatch, they have the same to do.
    """
    plan = key.plan
    size = plan.modules[LANGUAGE_MODEL].dp_size
    whole, by_rank = np.zeros((size, len(plan.modules))), [{} for _ in range(size)]
    for number, (name, module) in enumerate(plan.modules.items()):
        groups = math.gcd(size, module.dp_size)
        copies, served = module.dp_size // groups, size // groups
        for replica in range(size):
            first = replica // served * copies
            for stages in module.replicas[first : first + copies]:
                shares = [stage_share(plan, name, stage) / copies for stage in stages]
                whole[replica, number] = max(whole[replica, number], sum(shares))
                for stage, share in zip(stages, shares, strict=True) if served == 1 else ():
                    for rank in stage.all_ranks:
                        by_rank[replica].setdefault(rank, np.zeros(len(plan.modules)))[number] += share
    ranks = np.zeros((size, max(map(len, by_rank)), len(plan.modules)))
    for row, found in zip(ranks, by_rank, strict=True):
        row[: len(found)] = list(found.values())
    return whole, ranks


def microbatch_counts(plan: ParallelPlan, workloads: Workloads, count: int) -> NDArray:
    """
    How many microbatches each replica of the language model has: more where its stages are faster.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): What the samples cost; microbatches count as equal.
        count (`int`): Microbatches of a replica, on average.

    Returns:
        `numpy.ndarray`: int64 `[language_dp_size]`, see [`replica_counts`].
    """
    whole, ranks = _shares(_ByIdentity(plan))
    names = list(plan.modules)
    work = np.array([float(np.sum(workloads.forward_ms[n])) * (1 + workloads.backward_ratio[n]) for n in names])
    beside = whole * work
    sides = (plan.encoders, [LANGUAGE_MODEL], plan.generators)
    # Encoders are chains side by side, and so are generators.
    fill = sum(beside[:, [names.index(n) for n in side]].max(axis=1, initial=0.0) for side in sides)
    return replica_counts(count * len(whole), np.asarray(fill), (ranks @ work).max(axis=1))


def tracks_of(plan: ParallelPlan, workloads: Workloads, weight: Mapping[str, float]) -> tuple[Track, ...]:
    """
    The tracks of the encoders of a plan.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): What samples cost.
        weight (`Mapping[str, float]`): Module -> what a millisecond of its forward counts.
    """
    return _tracks(plan, workloads, weight, plan.encoders)


def generator_tracks(plan: ParallelPlan, workloads: Workloads, weight: Mapping[str, float]) -> tuple[Track, ...]:
    """The tracks of the generators of a plan, see [`tracks_of`]."""
    return _tracks(plan, workloads, weight, plan.generators)


def _tracks(
    plan: ParallelPlan, workloads: Workloads, weight: Mapping[str, float], modules: tuple[str, ...]
) -> tuple[Track, ...]:
    language_dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    tracks = []
    for names in _together(_ByIdentity(plan), modules):
        work = np.sum([np.asarray(workloads.forward_ms[name], dtype=float) * weight[name] for name in names], axis=0)
        dp_size = plan.modules[names[0]].dp_size
        groups = math.gcd(language_dp_size, dp_size)
        tracks.append(Track(names, work, dp_size, groups, language_dp_size))
    return tuple(tracks)
