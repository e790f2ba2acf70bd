"""A global batch whose samples have replicas of the language model, and its cut into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from ..plan.step_plan import Slots
from .deferral import defer, pair_means, pair_order, shuffled_pairs
from .estimate import Pipeline
from .exchange import Room, exchange, padded
from .greedy import fill_bins
from .microbatch_sizes import LARGEST, Sizes, best_count, best_sizes
from .replicas import assign_replicas
from .tracks import Track, cut, generator_tracks, microbatch_counts, tracks_of

_EXCHANGES = 20  # most rounds of them for each of the weights
_SWEEPS = 3  # of deferral
_EQUAL = 0.02  # of their size: by how much microbatches that change places may differ
_LARGE = 1.2  # times the mean: when a microbatch of full size holds up the others
_TRIALS, _WIDTH = 16, 512  # orders of pairs that are tried, for one replica and for all together
_HEAVIEST = 16  # samples of a replica that are looked at one by one


@dataclass(frozen=True)
class Placement:
    """
    Where each sample is.

    Args:
        counts (`numpy.ndarray` of shape `[replicas]`): Microbatches of each replica.
        replica (`numpy.ndarray` of shape `[num_samples]`): Of the language model.
        microbatch (`numpy.ndarray` of shape `[num_samples]`): In the language model.
        encoder (`tuple[numpy.ndarray, ...]`): For each track, the microbatch `[num_samples]` of each sample there.
        copy (`tuple[numpy.ndarray, ...]`): For each track, the encoder replica `[num_samples]` of each sample.
    """

    counts: NDArray
    replica: NDArray
    microbatch: NDArray
    encoder: tuple[NDArray, ...]
    copy: tuple[NDArray, ...]


class Batch:
    """
    A global batch whose samples have replicas, to be cut into microbatches.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): What samples cost.
        count (`int`): Microbatches of each replica, on average.
    """

    def __init__(self, plan: ParallelPlan, workloads: Workloads, count: int):
        if workloads.row_ms is not None:
            workloads = replace(workloads, forward_ms={**workloads.forward_ms, LANGUAGE_MODEL: workloads.row_ms})
        self.plan, self.workloads = plan, workloads
        self.pipeline = Pipeline.of(plan, workloads.backward_ratio)
        self.language = np.asarray(workloads.forward_ms[LANGUAGE_MODEL], dtype=float)
        self.all_replicas = plan.modules[LANGUAGE_MODEL].dp_size
        self.members = np.arange(self.all_replicas)
        self.tracks = tracks_of(plan, workloads, self.pipeline.bottleneck)
        self.generators = generator_tracks(plan, workloads, self.pipeline.bottleneck)
        self.around = (*self.tracks, *self.generators)
        self.work = np.stack([np.zeros(len(self.language)), *(track.work for track in self.around)], axis=1)[:, 1:]
        self.busy = np.asarray((self.work > 0).any(axis=1))
        self.limits = {name: limit for name, limit in workloads.max_tokens.items() if name in plan.modules}
        self.replica = assign_replicas(self.language, self.work, self.counts(count))

    @property
    def dp_size(self) -> int:
        """Replicas of the language model."""
        return len(self.members)

    def counts(self, count: int) -> NDArray:
        """Microbatches `[replicas]` of all replicas, of `count` on average."""
        return microbatch_counts(self.plan, self.workloads, count)

    def part(self, members: NDArray) -> tuple[Batch, NDArray]:
        """The batch of some of the replicas, and its samples."""
        if len(members) == self.dp_size:
            return self, np.arange(len(self.replica))
        chosen = np.flatnonzero(np.isin(self.replica, members))
        part = self.with_replicas(np.searchsorted(members, self.replica[chosen]))
        part.members = members
        part.language, part.work, part.busy = self.language[chosen], self.work[chosen], self.busy[chosen]
        part.workloads = self.workloads.take(chosen)
        return part, chosen

    def with_replicas(self, replica: NDArray) -> Batch:
        """A copy in which samples have other replicas."""
        result = copy(self)
        for name in ("totals", "mean_ms"):
            result.__dict__.pop(name, None)
        result.replica = replica
        return result

    @cached_property
    def totals(self) -> NDArray:
        """Work `[replicas, 1 + tracks]` of the language model and of each track, generators last."""
        columns = [self.language, *self.work.T]
        return np.stack([np.bincount(self.replica, column, self.dp_size) for column in columns], axis=1)

    @cached_property
    def mean_ms(self) -> dict[str, float]:
        """Module -> forward of the samples of a replica, on average."""
        return {
            name: float(np.sum(self.workloads.forward_ms[name])) / module.dp_size * (self.all_replicas / self.dp_size)
            for name, module in self.plan.modules.items()
        }

    def room(self, names: list[str], per_copy: bool = False) -> Room | None:
        """
        What a microbatch may hold of some modules: that of an encoder replica if `per_copy`, otherwise the share of it
        that belongs to one replica of the language model.
        """
        names = [name for name in names if name in self.limits]
        if not names:
            return None
        sizes = np.stack([self.workloads.tokens_of_limit(name) for name in names], axis=1).astype(float)
        limits = np.array([self.limits[name] for name in names], dtype=float)
        if not per_copy:
            limits *= [self.plan.modules[name].dp_size / self.all_replicas for name in names]
        return Room(sizes, np.maximum(limits, sizes.max(axis=0, initial=0)))

    @property
    def fewest(self) -> NDArray:
        """Microbatches `[replicas]` that the limits need at least."""
        room = self.room(list(self.limits))
        if room is None:
            return np.ones(self.dp_size, np.int64)
        needed = np.stack([np.bincount(self.replica, sizes, self.dp_size) for sizes in room.sizes.T], axis=1)
        return np.ceil((needed / np.maximum(room.limits, 1)).max(axis=1) - 1e-9).astype(np.int64)

    def sizes(self, count: int) -> Sizes:
        """The sizes that `count` microbatches should have."""
        typical = float(np.median(self.language)) if len(self.language) else 0.0
        smallest = typical * count / max(self.mean_ms[LANGUAGE_MODEL], 1e-300)
        return best_sizes(
            self.pipeline, self.mean_ms, count, smallest, min(LARGEST, count / max(1, self.fewest.max()))
        )

    def best_count(self, count: int) -> int:
        """At most `count` microbatches: fewer where single samples are so large that others would wait for them."""
        heaviest = {}
        for name in (name for track in self.around for name in track.modules):
            work = np.asarray(self.workloads.forward_ms[name], dtype=float)
            order = np.argsort(-work, kind="stable")
            own = np.append(work[order], 0.0)[padded(self.replica[order], self.dp_size)][:, :_HEAVIEST]
            if own.size and own.max() * count > self.mean_ms[name]:
                heaviest[name] = own
        return best_count(self.pipeline, self.mean_ms, count, heaviest) if heaviest else count

    def placed(self, bins: NDArray, microbatch: NDArray, counts: NDArray, wanted: Mapping[int, Sizes]) -> Placement:
        """
        Divides what encoders and generators have to do among their microbatches and replicas.

        Args:
            bins (`numpy.ndarray` of shape `[num_samples]`):
                The microbatch of the language model in whose turn each sample is encoded, as far as is known.
            microbatch (`numpy.ndarray` of shape `[num_samples]`): The one that has it.
            counts (`numpy.ndarray` of shape `[replicas]`): Microbatches of each replica.
            wanted (`Mapping[int, Sizes]`): Number of microbatches -> the sizes that they should have.

        Raises:
            `NoRoomError`: If a microbatch does not fit.
        """
        most = int(counts.max())
        encoder = tuple(self._balanced(track, bins, microbatch, counts, wanted) for track in self.tracks)
        copies = tuple(
            track.copies(self.replica, own, most, self.room(list(track.modules), per_copy=True))
            for track, own in zip(self.tracks, encoder, strict=True)
        )
        for track in self.generators:  # whether what the language model takes fits them
            turn = track.turn(self.replica, microbatch, counts)
            track.copies(self.replica, turn, most, self.room(list(track.modules), per_copy=True))
        return Placement(counts, self.replica, microbatch, encoder, copies)

    def divide(self, sizes: Sizes, language_weight: float, spread: bool) -> tuple[NDArray, NDArray]:
        """
        Cuts the samples of replicas that have as many microbatches as each other.

        Args:
            sizes ([`Sizes`]): How much each microbatch should have.
            language_weight (`float`): What the language model counts beside an encoder in exchanges.
            spread (`bool`): See [`arrange_batch`].

        Returns:
            For each sample the microbatch of the language model in whose turn it is encoded, and the one that has it.
        """
        encoder_sizes, language_sizes = np.array(sizes.encoder), np.array(sizes.language)
        count = len(encoder_sizes)
        bins = self._stratified(encoder_sizes, language_sizes, language_weight)
        bins = self.spread_out(bins, count) if spread else self._ordered(bins, encoder_sizes, language_sizes)
        targets = self.totals[:, :1] * language_sizes / count
        nothing = np.zeros(len(bins), dtype=bool)
        room = _as_one(self.room([LANGUAGE_MODEL, *(name for track in self.generators for name in track.modules)]))
        return bins, bins + defer(self.replica * count + bins, self.language, nothing, targets, _SWEEPS, room)

    def _stratified(self, sizes: NDArray, language_sizes: NDArray, language_weight: float) -> NDArray:
        """
        The microbatch of each sample by its work in encoders and generators; samples without any fill up the language
        model.
        """
        count, some = len(sizes), np.flatnonzero(self.busy)
        replica, work = self.replica[some], np.append(self.work[some], self.language[some, None], axis=1)
        sums = np.stack([_sums(replica, column, self.dp_size) for column in work.T], axis=1)
        work /= np.maximum(sums.max(axis=0), 1e-300)
        sums /= np.maximum(sums.max(axis=0), 1e-300)
        room = self.room(list(self.plan.modules))
        inner = room and Room(room.sizes[some], room.limits)
        order = np.lexsort((-work[:, :-1].sum(axis=1), _lower_half(work[:, -1], replica)))
        # Where several encoder replicas work for one of the language model, a microbatch is as many bins.
        parts = self.tracks[0].num_copies if self._each_alone and room is None else 1
        scale = np.append(np.ones(work.shape[1] - 1), language_weight)
        shares = (
            np.stack([*[sizes] * (work.shape[1] - 1), language_sizes], axis=1).repeat(parts, axis=0) / count / parts
        )
        loads = np.zeros((self.dp_size, count * parts, work.shape[1] - 1))
        found = fill_bins(replica, work[:, :-1], order, shares[:, 0], loads, inner) + replica * count * parts
        targets = shares * (sums * scale)[:, None, :]
        found = exchange(found, work * scale, targets, _EXCHANGES * len(scale), inner) // parts
        bins = np.zeros(len(self.replica), np.int64)
        bins[some] = found - replica * count

        rest = np.flatnonzero(~self.busy)
        loads = self._loads(found, self.language[some], count)[:, :, None]
        used = None
        if room is not None:
            used = np.stack([self._loads(found, own, count) for own in room.sizes[some].T], axis=2)
            room = Room(room.sizes[rest], room.limits)
        order = np.argsort(-self.language[rest], kind="stable")
        bins[rest] = fill_bins(self.replica[rest], self.language[rest, None], order, language_sizes, loads, room, used)
        return bins

    @property
    def _each_alone(self) -> bool:
        """Whether no two replicas of the language model share an encoder replica."""
        return len(self.tracks) == 1 and self.tracks[0].num_served == 1

    def _loads(self, places: NDArray, weights: NDArray, count: int) -> NDArray:
        """Sums of weights `[replicas, count]`."""
        return _sums(places, weights, self.dp_size * count).reshape(-1, count)

    def _ordered(self, bins: NDArray, sizes: NDArray, language_sizes: NDArray) -> NDArray:
        """The same microbatches in an order that suits deferral; only the largest, which are equal, change places."""
        count, large = len(sizes), np.stack([sizes / sizes.max(), language_sizes / language_sizes.max()])
        full = np.flatnonzero((large >= 1 - _EQUAL).all(axis=0))
        loads = self._loads(self.replica * count + bins, self.language, count)
        surplus = loads - self.totals[:, :1] * language_sizes / count
        number = np.full(count, -1)
        number[full] = np.arange(len(full))
        rows = np.where(number[bins] >= 0, self.replica * len(full) + number[bins], self.dp_size * len(full))
        order = pair_order(rows, self.language, surplus[:, full], surplus[:, : full[:1].sum()].sum(axis=1))
        order = self._soonest(full[order], full, bins, loads)
        place = np.tile(np.arange(count), (self.dp_size, 1))
        np.put_along_axis(place, order, np.broadcast_to(full, order.shape), 1)
        return place[self.replica, bins]

    def spread_out(self, bins: NDArray, count: int) -> NDArray:
        """
        The same microbatches in an order where those of replicas that share an encoder or a generator fit beside each
        other: the largest first, each to the place where these have most room.
        """
        shared = [(name, track) for track in self.around for name in track.modules if name in self.limits]
        if not shared:
            return bins
        places = self.replica * count + bins
        # What each microbatch takes of all that a module has at one place `[modules, replicas, count]`.
        taken = np.stack(
            [
                self._loads(places, self.workloads.tokens_of_limit(name), count)
                / (self.limits[name] * track.num_copies)
                for name, track in shared
            ]
        )
        groups = np.stack([self.members // track.num_served for _, track in shared])
        used, module = np.zeros((len(shared), self.all_replicas, count)), np.arange(len(shared))
        place, free = np.zeros((self.dp_size, count), np.int64), np.ones((self.dp_size, count), dtype=bool)
        for index in np.argsort(-taken.max(axis=0), axis=None, kind="stable").tolist():
            replica, number = divmod(index, count)
            own = module, groups[:, replica]
            after = (used[own] + taken[:, replica, number, None]).max(axis=0)
            best = int(np.where(free[replica], after, np.inf).argmin())
            used[(*own, best)] += taken[:, replica, number]
            place[replica, number], free[replica, best] = best, False
        return place[self.replica, bins]

    def _soonest(self, order: NDArray, full: NDArray, bins: NDArray, language: NDArray) -> NDArray:
        """
        The order of pairs `[replicas, len(full)]` with which each replica is estimated to end first, of a few.

        Microbatches with a sample that is larger than they should be hold up all stages. Where two of them, of
        different modules, are computed at the same time, they hold them up once.
        """
        count, loads = language.shape[1], {}
        for name in (name for track in self.around for name in track.modules):
            scale = self.all_replicas / self.plan.modules[name].dp_size
            work = np.asarray(self.workloads.forward_ms[name], dtype=float)
            loads[name] = scale * self._loads(self.replica * count + bins, work, count)
        loads[LANGUAGE_MODEL] = pair_means(order, language)
        num_trials = min(_TRIALS, _WIDTH // self.dp_size)
        if (
            num_trials < 2
            or len(full) < 4
            or all(own[:, full].max() <= _LARGE * own[:, full].mean() for own in loads.values())
        ):
            return order
        trials = shuffled_pairs(order, num_trials)
        source = np.broadcast_to(np.arange(count), (*trials.shape[:2], count)).copy()
        source[:, :, full] = trials
        replica = np.arange(self.dp_size)[:, None]
        rows = {name: own[replica, source].reshape(-1, count) for name, own in loads.items()}
        best = self.pipeline.iteration_ms(rows).reshape(num_trials, -1).argmin(axis=0)
        return trials[best, replica[:, 0]]

    def _balanced(
        self, track: Track, bins: NDArray, microbatch: NDArray, counts: NDArray, sizes: Mapping[int, Sizes]
    ) -> NDArray:
        """
        The microbatch of each sample in a track: the one before that of the language model or the same, whichever
        makes the track's microbatches more even. They are even already when a track is alone and serves one replica,
        unless microbatches are made by length.
        """
        early = track.turn(self.replica, bins, counts)
        room, by_length = self.room(list(track.modules)), self.workloads.row_ms is not None
        if not by_length and (self._each_alone or room is not None):
            return early
        count, some = int(counts.max()), np.flatnonzero(track.work > 0)
        group, work = self.replica[some] // track.num_served, track.work[some]
        targets = np.zeros((track.num_groups, count))
        for own, turns in zip(targets, track.turns(counts).tolist(), strict=True):
            own[:turns] = np.array(sizes[turns].encoder) / turns
        targets = np.bincount(group, work, track.num_groups)[:, None] * targets[:, ::-1]
        # Deferral in reverse: from the microbatch of the language model back to the one before.
        late = track.turn(self.replica, microbatch, counts)[some]
        place = group * count + count - 1 - late
        result = early.copy()
        shared = room and _as_one(Room(room.sizes[some], room.limits * track.num_served))
        result[some] = late - defer(place, work, (bins < microbatch)[some], targets, _SWEEPS, shared)
        return result

    def microbatches(self, placement: Placement) -> dict[str, tuple[tuple[Slots, ...], ...]]:
        """Module -> replica -> microbatch -> slots, of encoders and language model."""
        counts, replica, result = placement.counts, placement.replica, {}
        for track, encoder, chosen in zip(self.tracks, placement.encoder, placement.copy, strict=True):
            result.update(dict.fromkeys(track.modules, track.microbatches(chosen, encoder, counts)))
        result[LANGUAGE_MODEL] = cut(np.arange(len(replica)), replica, placement.microbatch, counts)
        return result


def _sums(places: NDArray, weights: NDArray, size: int) -> NDArray:
    """float64 `[size]`: the weights at each place."""
    return np.bincount(places, weights, size).astype(float)  # NumPy counts with integers where there is nothing


def _lower_half(weights: NDArray, replica: NDArray) -> NDArray:
    """Whether each sample is among the lighter half of its replica."""
    counts = np.bincount(replica)
    place = np.empty(len(weights), np.int64)
    descending = np.lexsort((-weights, replica))
    place[descending] = np.arange(len(weights)) - np.repeat(np.cumsum(counts) - counts, counts)
    return 2 * place >= counts[replica]


def _as_one(room: Room | None) -> Room | None:
    """One limit within which all limits hold: of each item counts what it takes most of."""
    if room is None or len(room.limits) == 1:
        return room
    return Room((room.sizes / np.maximum(room.limits, 1)).max(axis=1, keepdims=True), np.ones(1))
