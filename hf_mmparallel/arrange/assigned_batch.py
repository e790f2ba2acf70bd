"""A global batch with samples assigned to replicas of the language model, and its split into microbatches."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from ..plan.step_plan import Replicas
from .colocated_modules import ColocatedModules, colocated_encoders, colocated_generators, group_by_microbatch
from .deferral import defer, pair_means, pair_order, shuffled_pairs
from .estimate import Pipeline
from .greedy import Capacity, exchange, fill_bins, members_by_bin
from .microbatch_counts import MAX_RELATIVE_SIZE, Sizes, best_count, best_sizes, microbatch_counts

# Assignment of samples to the data-parallel replicas of the language model.

_ROUNDS = 5


def deal_samples(
    work: NDArray,  # [num_samples]
    order: NDArray,  # [num_dealt] the samples to deal, in order
    paces: NDArray,  # [num_groups] load of a group for each unit of work
    loads: NDArray | None = None,  # [num_groups] initial; 0 by default
) -> NDArray:
    """Deals samples in order, each to the group with the least load, the first of equal ones: `[num_dealt]` groups."""
    if len(paces) == 1:
        return np.zeros(len(order), np.int64)
    starts = [0.0] * len(paces) if loads is None else loads.tolist()
    heap = [(load, group) for group, load in enumerate(starts)]
    heapq.heapify(heap)
    pace_of, groups, put = paces.tolist(), [], heapq.heapreplace
    for item in work[order].tolist():
        load, group = heap[0]
        put(heap, (load + item * pace_of[group], group))
        groups.append(group)
    return np.array(groups, np.int64)


def assign_replicas(
    language: NDArray,  # [num_samples] workload
    encoders: NDArray,  # [num_samples, num_encoders] workload
    counts: NDArray,  # [num_replicas] microbatches
) -> NDArray:
    """
    Assigns samples to replicas such that all have similar work per microbatch, in every module.

    Samples go in the order of decreasing encoder workload, each to the replica with the least work in the language
    model (Entrain, section 4.3); samples without encoder work come last, longest first. Exchanges then balance the
    totals.
    """
    order = np.lexsort((-language, -encoders.sum(axis=1)))
    replicas = np.zeros(len(language), np.int64)
    replicas[order] = deal_samples(language, order, 1 / counts)
    if len(counts) == 1 or not len(language):
        return replicas
    totals = np.append(language[:, None], encoders, axis=1)
    # A replica's share is proportional to its microbatches; on this scale all weights count equally.
    weights = totals / np.maximum(totals.sum(axis=0), 1e-300)
    targets = np.where(weights.any(axis=0), (counts / counts.sum())[:, None], 0.0)[None]
    return exchange(replicas, weights, targets, _ROUNDS * weights.shape[1])


_EXCHANGES = 20  # maximum rounds of exchanges per weight
_SWEEPS = 3  # of deferral
_SWAP_TOLERANCE = 0.02  # maximum relative difference of microbatches that may swap positions
_STALL_RATIO = 1.2  # ratio to the mean from which a microbatch of full size stalls the others
_TRIALS, _WIDTH = 16, 512  # tried orders of pairs, for one replica and for all together
_MAX_HEAVY_SAMPLES = 16  # number of heaviest samples of a replica that are considered one by one


@dataclass(frozen=True)
class SamplePlacement:
    """Assignment of samples to replicas and microbatches."""

    counts: NDArray  # [replicas] number of microbatches
    replica: NDArray  # [num_samples] language model replica
    microbatch: NDArray  # [num_samples] language model microbatch
    encoder: tuple[NDArray, ...]  # for each group of colocated encoders: [num_samples] microbatch
    copy: tuple[NDArray, ...]  # for each group of colocated encoders: [num_samples] encoder replica


class Batch:
    """A global batch with samples assigned to replicas, to be split into microbatches (`total` on all replicas)."""

    def __init__(self, plan: ParallelPlan, workloads: Workloads, total: int):
        if workloads.row_ms is not None:
            workloads = replace(workloads, forward_ms={**workloads.forward_ms, LANGUAGE_MODEL: workloads.row_ms})
        self.plan, self.workloads = plan, workloads
        self.pipeline = Pipeline.of(plan, workloads.backward_ratio)
        self.language = np.asarray(workloads.forward_ms[LANGUAGE_MODEL], dtype=float)
        self.all_replicas = plan.modules[LANGUAGE_MODEL].dp_size
        self.members = np.arange(self.all_replicas)
        self.encoders = colocated_encoders(plan, workloads, self.pipeline.bottleneck)
        self.generators = colocated_generators(plan, workloads, self.pipeline.bottleneck)
        self.colocated = (*self.encoders, *self.generators)
        self.work = np.stack(
            [np.zeros(len(self.language)), *(colocated.work for colocated in self.colocated)], axis=1
        )[:, 1:]
        self.busy = np.asarray((self.work > 0).any(axis=1))
        self.token_limits = {name: limit for name, limit in workloads.token_limits.items() if name in plan.modules}
        self.replica = assign_replicas(self.language, self.work, self.counts(total))

    @property
    def dp_size(self) -> int:
        """Number of replicas of the language model."""
        return len(self.members)

    def counts(self, total: int) -> NDArray:
        """Number of microbatches `[replicas]` of all replicas, which need `total` together."""
        return microbatch_counts(self.plan, self.workloads, total)

    def of_replicas(self, members: NDArray) -> tuple[Batch, NDArray]:
        """The batch of some replicas, and its samples."""
        if len(members) == self.dp_size:
            return self, np.arange(len(self.replica))
        chosen = np.flatnonzero(np.isin(self.replica, members))
        subset = self.with_replicas(np.searchsorted(members, self.replica[chosen]))
        subset.members = members
        subset.language, subset.work, subset.busy = self.language[chosen], self.work[chosen], self.busy[chosen]
        subset.workloads = self.workloads.take(chosen)
        return subset, chosen

    def with_replicas(self, replica: NDArray) -> Batch:
        """A copy with samples assigned to other replicas."""
        result = copy(self)
        for name in ("totals", "mean_ms"):
            result.__dict__.pop(name, None)
        result.replica = replica
        return result

    @cached_property
    def totals(self) -> NDArray:
        """Work `[replicas, 1 + groups]` in the language model and each group of colocated modules, generators last."""
        columns = [self.language, *self.work.T]
        return np.stack([np.bincount(self.replica, column, self.dp_size) for column in columns], axis=1)

    @cached_property
    def mean_ms(self) -> dict[str, float]:
        """Module -> mean forward time of the samples of a replica."""
        return {
            name: float(np.sum(self.workloads.forward_ms[name])) / module.dp_size * (self.all_replicas / self.dp_size)
            for name, module in self.plan.modules.items()
        }

    def capacity(self, names: list[str], per_copy: bool = False) -> Capacity | None:
        """Limits of a microbatch: of an encoder replica if `per_copy`, else its share of a language model replica."""
        names = [name for name in names if name in self.token_limits]
        if not names:
            return None
        sizes = np.stack([self.workloads.tokens_of_limit(name) for name in names], axis=1).astype(float)
        limits = np.array([self.token_limits[name] for name in names], dtype=float)
        if not per_copy:
            limits *= [self.plan.modules[name].dp_size / self.all_replicas for name in names]
        return Capacity(sizes, np.maximum(limits, sizes.max(axis=0, initial=0)))

    @property
    def fewest(self) -> NDArray:
        """Minimum number of microbatches `[replicas]` by the limits."""
        capacity = self.capacity(list(self.token_limits))
        if capacity is None:
            return np.ones(self.dp_size, np.int64)
        needed = np.stack([np.bincount(self.replica, sizes, self.dp_size) for sizes in capacity.sizes.T], axis=1)
        return np.ceil((needed / np.maximum(capacity.limits, 1)).max(axis=1) - 1e-9).astype(np.int64)

    def sizes(self, count: int) -> Sizes:
        """Target sizes of `count` microbatches."""
        typical = float(np.median(self.language)) if len(self.language) else 0.0
        smallest = typical * count / max(self.mean_ms[LANGUAGE_MODEL], 1e-300)
        return best_sizes(
            self.pipeline, self.mean_ms, count, smallest, min(MAX_RELATIVE_SIZE, count / max(1, self.fewest.max()))
        )

    def best_count(self, count: int) -> int:
        """At most `count` microbatches; fewer if single samples are so large that other microbatches would wait."""
        heaviest = {}
        for name in (name for colocated in self.colocated for name in colocated.modules):
            work = np.asarray(self.workloads.forward_ms[name], dtype=float)
            order = np.argsort(-work, kind="stable")
            members = members_by_bin(self.replica[order], self.dp_size)[:, :_MAX_HEAVY_SAMPLES]
            times = np.append(work[order], 0.0)[members]
            if times.size and times.max() * count > self.mean_ms[name]:
                heaviest[name] = times
        return best_count(self.pipeline, self.mean_ms, count, heaviest) if heaviest else count

    def place_modules(
        self,
        bins: NDArray,  # [num_samples] language model microbatch in whose turn each sample is encoded, as far as known
        microbatch: NDArray,  # [num_samples] language model microbatch
        counts: NDArray,  # [replicas]
        wanted: Mapping[int, Sizes],  # number of microbatches -> target sizes
    ) -> SamplePlacement:
        """
        Assigns the work of encoders and generators to their microbatches and replicas.

        Raises [`CapacityError`] if a microbatch does not fit.
        """
        max_count = int(counts.max())
        encoder = tuple(self._balanced(colocated, bins, microbatch, counts, wanted) for colocated in self.encoders)
        copies = tuple(
            colocated.copies(
                self.replica, encoder_bins, max_count, self.capacity(list(colocated.modules), per_copy=True)
            )
            for colocated, encoder_bins in zip(self.encoders, encoder, strict=True)
        )
        for colocated in self.generators:  # checks that the language model's microbatches fit
            turn = colocated.turn(self.replica, microbatch, counts)
            colocated.copies(self.replica, turn, max_count, self.capacity(list(colocated.modules), per_copy=True))
        return SamplePlacement(counts, self.replica, microbatch, encoder, copies)

    def divide(
        self,
        sizes: Sizes,
        language_weight: float,  # of exchanges, relative to an encoder
        spread: bool,  # see `arrange_batch`
    ) -> tuple[NDArray, NDArray]:
        """
        Splits the samples of replicas with equal numbers of microbatches.

        Returns for each sample the language model microbatch in whose turn it is encoded, and its own microbatch.
        """
        encoder_sizes, language_sizes = np.array(sizes.encoder), np.array(sizes.language)
        count = len(encoder_sizes)
        bins = self._stratified(encoder_sizes, language_sizes, language_weight)
        bins = self.align_replicas(bins, count) if spread else self._ordered(bins, encoder_sizes, language_sizes)
        targets = self.totals[:, :1] * language_sizes / count
        nothing = np.zeros(len(bins), dtype=bool)
        capacity = _as_one(
            self.capacity([LANGUAGE_MODEL, *(name for colocated in self.generators for name in colocated.modules)])
        )
        return bins, bins + defer(self.replica * count + bins, self.language, nothing, targets, _SWEEPS, capacity)

    def _stratified(self, sizes: NDArray, language_sizes: NDArray, language_weight: float) -> NDArray:
        """Microbatch of each sample by its work in encoders and generators; without any, by the language model's."""
        count, some = len(sizes), np.flatnonzero(self.busy)
        replica, work = self.replica[some], np.append(self.work[some], self.language[some, None], axis=1)
        sums = np.stack([_sums(replica, column, self.dp_size) for column in work.T], axis=1)
        work /= np.maximum(sums.max(axis=0), 1e-300)
        sums /= np.maximum(sums.max(axis=0), 1e-300)
        capacity = self.capacity(list(self.plan.modules))
        inner = capacity and Capacity(capacity.sizes[some], capacity.limits)
        order = np.lexsort((-work[:, :-1].sum(axis=1), _lower_half(work[:, -1], replica)))
        # If several encoder replicas serve one of the language model, a microbatch consists of as many bins.
        num_bins = self.encoders[0].num_copies if self._each_alone and capacity is None else 1
        scale = np.append(np.ones(work.shape[1] - 1), language_weight)
        shares = (
            np.stack([*[sizes] * (work.shape[1] - 1), language_sizes], axis=1).repeat(num_bins, axis=0)
            / count
            / num_bins
        )
        loads = np.zeros((self.dp_size, count * num_bins, work.shape[1] - 1))
        flat_bins = fill_bins(replica, work[:, :-1], order, shares[:, 0], loads, inner) + replica * count * num_bins
        targets = shares * (sums * scale)[:, None, :]
        flat_bins = exchange(flat_bins, work * scale, targets, _EXCHANGES * len(scale), inner) // num_bins
        bins = np.zeros(len(self.replica), np.int64)
        bins[some] = flat_bins - replica * count

        rest = np.flatnonzero(~self.busy)
        loads = self._loads(flat_bins, self.language[some], count)[:, :, None]
        used = None
        if capacity is not None:
            used = np.stack([self._loads(flat_bins, size, count) for size in capacity.sizes[some].T], axis=2)
            capacity = Capacity(capacity.sizes[rest], capacity.limits)
        order = np.argsort(-self.language[rest], kind="stable")
        bins[rest] = fill_bins(
            self.replica[rest], self.language[rest, None], order, language_sizes, loads, capacity, used
        )
        return bins

    @property
    def _each_alone(self) -> bool:
        """Whether no two replicas of the language model share an encoder replica."""
        return len(self.encoders) == 1 and self.encoders[0].num_served == 1

    def _loads(self, flat_bins: NDArray, weights: NDArray, count: int) -> NDArray:
        """Sums of weights `[replicas, count]`."""
        return _sums(flat_bins, weights, self.dp_size * count).reshape(-1, count)

    def _ordered(self, bins: NDArray, sizes: NDArray, language_sizes: NDArray) -> NDArray:
        """Reorders microbatches for deferral; only the largest ones, which are equal, change positions."""
        count, large = len(sizes), np.stack([sizes / sizes.max(), language_sizes / language_sizes.max()])
        full = np.flatnonzero((large >= 1 - _SWAP_TOLERANCE).all(axis=0))
        loads = self._loads(self.replica * count + bins, self.language, count)
        surplus = loads - self.totals[:, :1] * language_sizes / count
        number = np.full(count, -1)
        number[full] = np.arange(len(full))
        in_full = np.where(number[bins] >= 0, self.replica * len(full) + number[bins], self.dp_size * len(full))
        order = pair_order(in_full, self.language, surplus[:, full], surplus[:, : full[:1].sum()].sum(axis=1))
        order = self._soonest(full[order], full, bins, loads)
        position = np.tile(np.arange(count), (self.dp_size, 1))
        np.put_along_axis(position, order, np.broadcast_to(full, order.shape), 1)
        return position[self.replica, bins]

    def align_replicas(self, bins: NDArray, count: int) -> NDArray:
        """Reorders microbatches such that those of replicas with a shared encoder or generator fit together."""
        shared = [
            (name, colocated)
            for colocated in self.colocated
            for name in colocated.modules
            if name in self.token_limits
        ]
        if not shared:
            return bins
        flat_bins = self.replica * count + bins
        # Share of each microbatch of the capacity of a module at one position `[modules, replicas, count]`.
        demand = np.stack(
            [
                self._loads(flat_bins, self.workloads.tokens_of_limit(name), count)
                / (self.token_limits[name] * colocated.num_copies)
                for name, colocated in shared
            ]
        )
        groups = np.stack([self.members // colocated.num_served for _, colocated in shared])
        used, module = np.zeros((len(shared), self.all_replicas, count)), np.arange(len(shared))
        position, free = np.zeros((self.dp_size, count), np.int64), np.ones((self.dp_size, count), dtype=bool)
        # largest first, each to the position with the most free capacity
        for index in np.argsort(-demand.max(axis=0), axis=None, kind="stable").tolist():
            replica, number = divmod(index, count)
            group = module, groups[:, replica]
            after = (used[group] + demand[:, replica, number, None]).max(axis=0)
            best = int(np.where(free[replica], after, np.inf).argmin())
            used[(*group, best)] += demand[:, replica, number]
            position[replica, number], free[replica, best] = best, False
        return position[self.replica, bins]

    def _soonest(self, order: NDArray, full: NDArray, bins: NDArray, language: NDArray) -> NDArray:
        """Returns the order of pairs `[replicas, len(full)]` with the shortest estimated step, of random orders."""
        # A microbatch with a sample above its target size stalls all stages. Two of them, of different modules, stall
        # the stages only once if they are computed at the same time.
        count, loads = language.shape[1], {}
        for name in (name for colocated in self.colocated for name in colocated.modules):
            scale = self.all_replicas / self.plan.modules[name].dp_size
            work = np.asarray(self.workloads.forward_ms[name], dtype=float)
            loads[name] = scale * self._loads(self.replica * count + bins, work, count)
        loads[LANGUAGE_MODEL] = pair_means(order, language)
        num_trials = min(_TRIALS, _WIDTH // self.dp_size)
        if (
            num_trials < 2
            or len(full) < 4
            or all(load[:, full].max() <= _STALL_RATIO * load[:, full].mean() for load in loads.values())
        ):
            return order
        trials = shuffled_pairs(order, num_trials)
        source = np.broadcast_to(np.arange(count), (*trials.shape[:2], count)).copy()
        source[:, :, full] = trials
        replica = np.arange(self.dp_size)[:, None]
        trial_loads = {name: load[replica, source].reshape(-1, count) for name, load in loads.items()}
        best = self.pipeline.iteration_ms(trial_loads).reshape(num_trials, -1).argmin(axis=0)
        return trials[best, replica[:, 0]]

    def _balanced(
        self,
        colocated: ColocatedModules,
        bins: NDArray,
        microbatch: NDArray,
        counts: NDArray,
        sizes: Mapping[int, Sizes],
    ) -> NDArray:
        """Microbatch of each sample in colocated encoders: the language model's or the one before, to even them."""
        early = colocated.turn(self.replica, bins, counts)
        capacity, by_length = self.capacity(list(colocated.modules)), self.workloads.row_ms is not None
        # Encoders that serve one replica each are even already, unless microbatches are grouped by length.
        if not by_length and (self._each_alone or capacity is not None):
            return early
        count, some = int(counts.max()), np.flatnonzero(colocated.work > 0)
        group, work = self.replica[some] // colocated.num_served, colocated.work[some]
        targets = np.zeros((colocated.num_groups, count))
        for target, turns in zip(targets, colocated.turns(counts).tolist(), strict=True):
            target[:turns] = np.array(sizes[turns].encoder) / turns
        targets = np.bincount(group, work, colocated.num_groups)[:, None] * targets[:, ::-1]
        # Deferral in reverse: from the language model's microbatch back to the one before.
        late = colocated.turn(self.replica, microbatch, counts)[some]
        late_first = group * count + count - 1 - late
        result = early.copy()
        shared = capacity and _as_one(Capacity(capacity.sizes[some], capacity.limits * colocated.num_served))
        result[some] = late - defer(late_first, work, (bins < microbatch)[some], targets, _SWEEPS, shared)
        return result

    def microbatches(self, placement: SamplePlacement) -> dict[str, Replicas]:
        """Module -> replica -> microbatch -> batch indices, of encoders and the language model."""
        counts, replica, result = placement.counts, placement.replica, {}
        for colocated, encoder, chosen in zip(self.encoders, placement.encoder, placement.copy, strict=True):
            result.update(dict.fromkeys(colocated.modules, colocated.microbatches(chosen, encoder, counts)))
        result[LANGUAGE_MODEL] = group_by_microbatch(np.arange(len(replica)), replica, placement.microbatch, counts)
        return result


def _sums(bins: NDArray, weights: NDArray, size: int) -> NDArray:
    """float64 `[size]`: sum of weights in each bin."""
    return np.bincount(bins, weights, size).astype(float)  # NumPy returns integers for empty inputs


def _lower_half(weights: NDArray, replica: NDArray) -> NDArray:
    """Whether each sample is in the lighter half of its replica."""
    counts = np.bincount(replica)
    position = np.empty(len(weights), np.int64)
    descending = np.lexsort((-weights, replica))
    position[descending] = np.arange(len(weights)) - np.repeat(np.cumsum(counts) - counts, counts)
    return 2 * position >= counts[replica]


def _as_one(capacity: Capacity | None) -> Capacity | None:
    """A single limit that implies all limits: an item counts with its largest share of a limit."""
    if capacity is None or len(capacity.limits) == 1:
        return capacity
    return Capacity((capacity.sizes / np.maximum(capacity.limits, 1)).max(axis=1, keepdims=True), np.ones(1))
