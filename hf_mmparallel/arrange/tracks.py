"""Encoders and generators as the arrangement sees them: those on the same ranks, with as many replicas, are one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads, encoders_of, generators_of
from ..plan.step_plan import Slots
from .estimate import stage_share
from .exchange import Room, exchange
from .greedy import fill_bins

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

    def copies(self, replica: NDArray, microbatch: NDArray, count: int, room: Room | None) -> NDArray:
        """
        Divides the microbatches of each group among its replicas.

        Args:
            replica (`numpy.ndarray` of shape `[num_samples]`): Language-model replica of each sample.
            microbatch (`numpy.ndarray` of shape `[num_samples]`): Microbatch of each sample in this track.
            count (`int`): Microbatches.
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
        place, work = group[some] * count + microbatch[some], self.work[some]
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

    def microbatches(self, copy: NDArray, microbatch: NDArray, count: int) -> tuple[tuple[Slots, ...], ...]:
        """
        Args:
            copy (`numpy.ndarray` of shape `[num_samples]`): The track's replica of each sample.
            microbatch (`numpy.ndarray` of shape `[num_samples]`): Microbatch of each sample in this track.
            count (`int`): Microbatches.

        Returns:
            `tuple[tuple[tuple[int, ...], ...], ...]`: Replica -> microbatch -> slots with work, ascending.
        """
        some = np.flatnonzero(self.work > 0)
        return cut(some, (copy * count + microbatch)[some], self.dp_size, count)

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


def cut(slots: NDArray, places: NDArray, dp_size: int, count: int) -> tuple[tuple[Slots, ...], ...]:
    """Replica -> microbatch -> slots, ascending; the place of a slot is `replica * count + microbatch`."""
    flat = slots[np.argsort(places, kind="stable")].tolist()
    stops = np.cumsum(np.bincount(places, minlength=dp_size * count)).tolist()
    found = [tuple(flat[start:stop]) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    return tuple(tuple(found[first : first + count]) for first in range(0, dp_size * count, count))


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
def _paces(key: _ByIdentity) -> tuple[float, ...]:
    """What the slowest stage of each replica of the language model takes for a millisecond on one rank."""
    replicas = key.plan.modules[LANGUAGE_MODEL].replicas
    return tuple(max(stage_share(key.plan, LANGUAGE_MODEL, stage) for stage in stages) for stages in replicas)


def paces_of(plan: ParallelPlan) -> NDArray:
    """What the slowest stage of each language-model replica `[replicas]` takes for a millisecond on one rank."""
    return np.array(_paces(_ByIdentity(plan)))


def tracks_of(plan: ParallelPlan, workloads: Workloads, weight: Mapping[str, float]) -> tuple[Track, ...]:
    """
    The tracks of the encoders of a plan.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): What samples cost.
        weight (`Mapping[str, float]`): Module -> what a millisecond of its forward counts.
    """
    return _tracks(plan, workloads, weight, encoders_of(plan))


def generator_tracks(plan: ParallelPlan, workloads: Workloads, weight: Mapping[str, float]) -> tuple[Track, ...]:
    """The tracks of the generators of a plan, see [`tracks_of`]."""
    return _tracks(plan, workloads, weight, generators_of(plan))


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
