"""The plan search: one queue of candidates, those first whose steps are expected to be the fastest."""

from __future__ import annotations

import gc
import math
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .._portable import exp, log
from ..cost.layers import data_gradients
from ..cost.sharded_passes import GATHERS_IN_PASSES
from ..cost.step_planner import Prediction
from ..plan import ModuleSpec
from ..plan.checkpointing import SELECTIVE
from ..plan.methods import POLICIES
from ..plan.parallel_plan import ShardingSettings, StorageSettings
from ..plan.plugin import STORAGE
from .bounds import StepBounds
from .candidates import CandidateSpace, EstimatedCandidate
from .explain import bound_of, no_plan_error, reason_for
from .options import ParallelConfig
from .problem import Candidate, PlanningProblem, RankedPlan, SearchResult
from .simulations import (
    Simulated,
    Simulations,
    caution,
    cautious_ms,
    distinct_sizes,
    in_order,
    key_of,
    runs_large_samples_alone,
    sizes_of,
    state_fits,
)

_NUM_RUNNERS_UP = 3

# The queue.

# Of a simulated step to what is expected of it, where nothing like it was simulated: of layouts by their closed form,
# and of another schedule, arrangement, sharding or storage by the step of the candidate that differs in it alone.
_USUAL_RATIO, _USUAL_OF_NEIGHBOURS = 0.8, 0.95
_USUAL_IDLE = 0.6  # of the time in which the busiest rank does not work, what another schedule leaves
_QUANTILE = 0.1  # of what was seen
_SURE = 2  # how many steps of a group count as much as what is usual
_MISFITS, _MOST_MISFITS = 8, 128  # in a row, after which memory counts as much as time, and which end a search
_LEAST_EXCESS = 1e-6  # of an estimate of memory over the limit that counts
_MOST_EFFORT = 2  # times the effort, where too few plans fit
# of the effort since a faster step was found, for candidates that are not expected to be the fastest
_DOUBTFUL_SHARE = 0.5
_LEAST_RANKS = 128  # ranks for which there is effort at least
_RANKS_PER_SHARE = 4  # of more ranks, so many have the effort of one
_FEW_RANKS, _FEW_TIMES = 64, 4  # below which there is more effort, in proportion, up to so many times as much

Made = tuple[Candidate, EstimatedCandidate]


class _Low:
    """A low one of the values that were seen, at first a usual one."""

    def __init__(self, usual: float):
        self.value, self._usual, self._seen = usual, usual, list[float]()

    def learn(self, value: float) -> None:
        insort(self._seen, value)
        low, count = self._seen[int(_QUANTILE * len(self._seen))], len(self._seen)
        self.value = (_SURE * self._usual + count * low) / (_SURE + count)


class _Group:
    """Candidates that are waiting, whose steps should be off alike from what is expected of them."""

    def __init__(self, usual: float):
        self.ratio = _Low(usual)  # of what steps take beyond the least to what is expected of that
        self.gain = _Low(_USUAL_OF_NEIGHBOURS)  # of steps to what is expected
        self.entries: list[Made | int] = []  # candidates, or their indices in the space
        self.columns = np.empty((3, 0))  # expected ms, least ms, and the estimated memory over the limit
        self._first: dict[tuple[float, float, float], tuple[bool, float, int]] = {}  # until an entry comes or goes

    def add(self, entries: Sequence[Made | int], *columns: NDArray | float) -> None:
        self._first.clear()
        self.entries += entries
        added = np.stack([np.broadcast_to(column, len(entries)) for column in columns])
        self.columns = np.concatenate([self.columns, added], axis=1)

    def learn(self, step_ms: float, expected_ms: float, least_ms: float) -> None:
        """Learns from the step of an entry what may become of the others."""
        self._first.clear()
        self.gain.learn(step_ms / expected_ms)
        if expected_ms > least_ms:
            self.ratio.learn((step_ms - least_ms) / (expected_ms - least_ms))

    def first(self, best_ms: float, gain: float, power: float) -> tuple[bool, float, int]:
        """Of the next entry: whether it is not expected to be the fastest, its place in the queue, and its index."""
        key = best_ms, gain, power
        if key not in self._first:
            self._first[key] = self._find_first(best_ms, gain, power)
        return self._first[key]

    def _find_first(self, best_ms: float, gain: float, power: float) -> tuple[bool, float, int]:
        if not self.entries:
            return True, math.inf, -1
        expected_ms, least_ms, excess = self.columns
        promised_ms = least_ms + gain * self.ratio.value * np.maximum(expected_ms - least_ms, 0.0)
        # memory decides what comes first, since estimates are off, but not what is left out
        over, relative = np.square(np.maximum(1.0, excess)), np.clip(excess, _LEAST_EXCESS, 1 / _LEAST_EXCESS)
        score = promised_ms * over * over * exp(power * log(relative))
        expected = np.flatnonzero(promised_ms < best_ms)
        index = int(expected[np.argmin(score[expected])] if len(expected) else np.argmin(score))
        return not len(expected), float(score[index]), index

    def pop(self, index: int) -> tuple[Made | int, float, float]:
        """Takes an entry out, with the time that was expected of it and the least that it can have."""
        self._first.clear()
        entry, (expected_ms, least_ms, _) = self.entries[index], self.columns[:, index].tolist()
        self.entries[index], self.columns[:, index] = self.entries[-1], self.columns[:, -1]
        self.entries.pop()
        self.columns = self.columns[:, :-1]
        return entry, expected_ms, least_ms


class Queue:
    """
    All candidates that may be simulated. Those come first whose steps may be the fastest: by a closed form, or by the
    step of a candidate like them, and by what became of others of their group. None is simulated whose bound is above
    the best step.
    """

    def __init__(self, simulations: Simulations, space: CandidateSpace):
        self.simulations, self.space, self.problem = simulations, space, space.problem
        self.bounds = StepBounds(self.problem)
        # in tasks
        self.effort = self.problem.effort * max(_LEAST_RANKS, self.problem.num_ranks // _RANKS_PER_SHARE)
        self.effort *= max(1.0, min(_FEW_TIMES, _FEW_RANKS / self.problem.num_ranks))
        self.slices = _Group(1.0)  # candidates of which a slice was simulated
        self.crowded = _Group(1.0)  # of which hardly one fits, see [`Simulations.crowded`]
        self.layouts: dict[int, _Group] = {}  # by kind
        self.neighbours: dict[tuple, _Group] = {}  # of simulated candidates, by what differs
        self.storages = list(offloading_problems(self.problem))
        self.misfits = 0  # in a row
        self.leaves_out = not space.is_whole  # whether there may be candidates that no bound excludes
        # schedule, virtual stages and arrangement with which layouts are simulated first: those of the best step
        self.order = (*self.problem.schedules[0], self.problem.first_arrangement)
        self._tried: set[str] = set()
        self._seen: set[tuple[str, float]] = set()  # sizes and schedules, and what their steps took
        self._counts = defaultdict[str, set[int]](set)  # of microbatches with which sizes have a step that was seen
        columns = space.columns
        idle = _USUAL_IDLE if len(self.problem.schedules) > 1 else 1.0  # another schedule may leave less of it
        expected_ms = columns.busy_ms + idle * (columns.step_ms - columns.busy_ms)
        for kind in np.unique(columns.kind).tolist():
            own = np.flatnonzero(columns.kind == kind)
            self.layouts[kind] = _Group(_USUAL_RATIO)
            self.layouts[kind].add(own.tolist(), expected_ms[own], 0.0, columns.excess[own])

    def run(self, least: int, advance: Callable[[float], None]) -> bool:
        """
        Simulates candidates until none is expected to be faster than the best, or the effort is spent, and at least
        `least` diverse ones with all replicas; returns whether the bounds leave none. `advance` is called with shares
        of the effort.
        """
        simulations, start = self.simulations, self.simulations.num_tasks
        best_ms, of_best = math.inf, 0.0
        while True:
            doubtful, _, index, group = min(self._first_of_groups(), key=lambda first: first[:2])
            spent = (simulations.num_tasks - start) / self.effort
            if simulations.best_ms < best_ms:
                best_ms, of_best = simulations.best_ms, spent
            ends = spent > min(1.0, of_best + _DOUBTFUL_SHARE if doubtful else 1.0) and bool(simulations.known)
            if ends:
                needs_more = len(distinct_sizes(simulations.fastest())) < least and spent < _MOST_EFFORT
                # slices that look faster than the best step are simulated whole
                is_slower, _, next_slice = self.slices.first(simulations.best_ms, 1.0, 0.0)
                if is_slower and not needs_more:
                    return self._is_proven()
                group, index = (self.slices, next_slice) if self.slices.entries else (group, index)
            if index < 0 or self.misfits > _MOST_MISFITS:
                return self._is_proven()
            before = simulations.num_tasks
            self._simulate(group, index, is_needed=ends)
            advance((simulations.num_tasks - before) / self.effort)

    def _first_of_groups(self) -> Iterator[tuple[bool, float, int, _Group]]:
        """The next entry of each group."""
        waiting_ms, power = self.slices.columns[0].min(initial=math.inf), self.misfits / _MISFITS
        best_ms = min(self.simulations.best_ms, waiting_ms)
        yield *self.slices.first(best_ms * (1 + 1e-9), 1.0, power), self.slices
        yield True, *self.crowded.first(best_ms, 1.0, power)[1:], self.crowded
        # layouts may get another schedule later
        usual = _USUAL_OF_NEIGHBOURS if len(self.problem.schedules) > 1 else 1.0
        gains = dict.fromkeys(self.layouts, min(1.0, usual))
        for key, group in self.neighbours.items():
            if key[0] in gains:
                gains[key[0]] = min(gains[key[0]], group.gain.value)
            yield *group.first(best_ms, 1.0, power), group
        for kind, group in self.layouts.items():
            yield *group.first(best_ms, gains[kind], power), group

    def _simulate(self, group: _Group, index: int, is_needed: bool) -> None:
        """Simulates an entry, or a slice of it, and adds its neighbours."""
        simulations = self.simulations
        entry, expected_ms, least_ms = group.pop(index)
        first, estimated = self._made(entry)
        is_again = group in (self.slices, self.crowded)
        if not is_again and (key_of(first) in self._tried or not _differs(self.problem, first)):
            return
        if not is_needed and max(least_ms, bound_ms := self._least_ms(entry)) >= simulations.best_ms:
            # with another arrangement or sharding it may take less than the work of its busiest rank
            self.leaves_out |= bound_ms < simulations.best_ms
            return
        candidate = self._in_best_order(first) if isinstance(entry, int) else first
        key = key_of(candidate)
        self._tried.add(key)
        found = simulations.simulate(self.space, candidate, estimated)
        self.misfits = self.misfits + 1 if found is None else 0
        if found is not None:
            if not found.is_whole:
                self.slices.add([(candidate, estimated)], cautious_ms(found), 0.0, 1.0)
            # other numbers of microbatches and arrangements often give the same ones
            step = key_of(replace(candidate, num_microbatches=1, arrangement="")), found.step_ms
            if step not in self._seen and group is not self.slices:
                group.learn(cautious_ms(found), expected_ms, least_ms)
                self._add_neighbours(found, with_schedules=isinstance(entry, int))
            if found.is_whole and cautious_ms(found) <= simulations.best_ms:
                self.order = candidate.schedule, candidate.vp_size, candidate.arrangement
            self._seen.add(step)
            self._counts[str(replace(candidate, num_microbatches=1))].add(candidate.num_microbatches)
        elif group is not self.crowded:
            if key in simulations.crowded:
                promised_ms = least_ms + group.ratio.value * max(expected_ms - least_ms, 0.0)
                self.crowded.add([(candidate, estimated)], promised_ms, least_ms, simulations.crowded[key])
            if isinstance(entry, int):
                self._add_storage(first, estimated, expected_ms)
                if candidate != first:  # which may have fewer microbatches in flight
                    self._add(("first",), (first, estimated), expected_ms)

    def try_counts(self) -> None:
        """Simulates the fastest candidates with other numbers of microbatches, whose later batches may be faster."""
        for own in self.simulations.fastest()[:_NUM_RUNNERS_UP]:
            for count in sorted(self._counts[str(replace(own.candidate, num_microbatches=1))]):
                candidate = replace(own.candidate, num_microbatches=count)
                if key_of(candidate) not in self._tried:
                    self.simulations.simulate(self.space, candidate, own.estimated)

    def _made(self, entry: Made | int) -> Made:
        if not isinstance(entry, int):
            return entry
        estimated = self.space.estimated(entry)
        return self.space.candidate(estimated), estimated

    def _in_best_order(self, candidate: Candidate) -> Candidate:
        """A layout with the schedule and arrangement of the best step, where it can have them."""
        schedule, vp_size, arrangement = self.order
        ordered = replace(candidate, schedule=schedule, vp_size=vp_size, arrangement=arrangement)
        return ordered if _differs(self.problem, ordered) else candidate

    def _least_ms(self, entry: Made | int) -> float:
        """The bound of an entry; a layout may have another schedule later."""
        candidate = self._made(entry)[0]
        if isinstance(entry, int):
            return self.bounds.least_ms(candidate, any_order=True)
        return caution(candidate) * self.bounds.least_ms(candidate)

    def _add(self, key: tuple, made: Made, expected_ms: float, least_ms: float = 0.0) -> None:
        """Adds a neighbour."""
        usual = _USUAL_IDLE if least_ms else _USUAL_OF_NEIGHBOURS
        self.neighbours.setdefault(key, _Group(usual)).add([made], expected_ms, least_ms, 1.0)

    def _add_neighbours(self, found: Simulated, with_schedules: bool) -> None:
        """Adds candidates with another arrangement, another sharding of a module, or another schedule."""
        problem, candidate, estimated, step_ms = self.problem, found.candidate, found.estimated, cautious_ms(found)
        own = candidate.schedule, candidate.vp_size
        for schedule, vp_size in problem.schedules if with_schedules else ():
            other = replace(candidate, schedule=schedule, vp_size=vp_size)
            if other != candidate:
                # it changes what the busiest rank waits, not what that computes
                expected_ms, least_ms = (caution(other) * own for own in (found.step_ms, found.least_ms))
                # what a schedule gains is relative to that of the layout
                key = (estimated.kind, schedule, vp_size, found.is_whole, own)
                self._add(key, (other, estimated), expected_ms, least_ms)
        for arrangement in problem.arrangements:
            if arrangement != candidate.arrangement:
                self._add((arrangement,), (replace(candidate, arrangement=arrangement), estimated), step_ms)
        for name in candidate.layouts:
            for sharding, longer_ms in self._shardings(candidate, name):
                key = (name, sharding.zero_stage, sharding.shard_size is None, sharding.reshard_after_forward)
                layouts = {**candidate.layouts, name: replace(candidate.layouts[name], sharding=sharding)}
                self._add(key, (replace(candidate, layouts=layouts), estimated), step_ms + longer_ms)

    def _add_storage(self, candidate: Candidate, estimated: EstimatedCandidate, expected_ms: float) -> None:
        """Adds a candidate that does not fit with as little in host memory as lets its state fit."""
        others = ((problem, _stored(candidate, problem)) for problem in self.storages)
        fitting = (own for problem, own in others if own not in (None, candidate) and state_fits(problem, own))
        if (stored := next(fitting, None)) is not None:
            self._add(("storage",), (stored, estimated), expected_ms)

    def _shardings(self, candidate: Candidate, name: str) -> list[tuple[ShardingSettings, float]]:
        """Other shardings of a module in a candidate, with what they add to the closed form of its time."""
        options, layout = self.space.options[name], candidate.layouts[name]
        num_copies = layout.dp_size * layout.cp_size
        if num_copies == 1:
            return []
        per_node = options.copies_per_node(layout.tp_size) // layout.pp_size
        divides = 1 < per_node < num_copies and num_copies % per_node == 0
        sizes = [None, per_node] if divides else [None]
        given = self.problem.fixed.get(name, {})
        sizes = [given["shard_size"]] if "shard_size" in given else sizes
        now_ms = self._module_ms(candidate, name, layout.sharding)
        others = [own for own in options.all_shardings(sizes) if own != layout.sharding]
        return [(own, self._module_ms(candidate, name, own) - now_ms) for own in others]

    def _module_ms(self, candidate: Candidate, name: str, sharding: ShardingSettings) -> float:
        """Closed form of the time of a module in a step with another sharding."""
        options, layout = self.space.options[name], candidate.layouts[name]
        kind = ParallelConfig.of(replace(layout, sharding=sharding)).with_shards(layout.dp_size)
        num_samples = self.problem.global_batch_size / layout.dp_size / candidate.num_microbatches
        stage_ms = float(options.layer_ms(kind, num_samples).sum()) / layout.pp_size
        return candidate.num_microbatches * stage_ms + options.sync_ms(kind, layout.dp_size, layout.pp_size)

    def _is_proven(self) -> bool:
        """Whether no candidate that is waiting can be faster than the best, on the first batch."""
        groups = (self.slices, self.crowded, *self.neighbours.values(), *self.layouts.values())
        left = (own.entries[i] for own in groups for i in np.argsort(own.columns[0], kind="stable").tolist())
        return not self.leaves_out and all(self._least_ms(entry) >= self.simulations.best_ms for entry in left)


def _differs(problem: PlanningProblem, candidate: Candidate) -> bool:
    """Whether a candidate has the virtual stages and split backwards of its schedule, unless it is named, anywhere."""
    if problem.schedule is not None or POLICIES[candidate.schedule].is_plain:
        return True
    modules = candidate.plan(problem.spec).modules.values()
    splits = not POLICIES[candidate.schedule].splits_backward or any(own.splits_backward for own in modules)
    return splits and (candidate.vp_size == 1 or any(own.vp_size > 1 for own in modules))


# Plans that keep optimizer state and frozen weights in host memory, for layouts that do not fit otherwise.


def offloading_problems(problem: PlanningProblem) -> Iterator[PlanningProblem]:
    """
    The problem with what the user leaves open in host memory: frozen weights, which come back beside the computation,
    then the optimizer, then both; activations, then all of it.
    """
    if problem.memory_bytes is None or problem.host_bytes is None or not problem.offloads:
        return
    possible = {name: _possible(problem, name, module) for name, module in problem.spec.modules.items()}
    everything = tuple(key for key in STORAGE if any(key in own for own in possible.values()))
    singly = (("offload_params",), ("offload_optimizer",), ("offload_params", "offload_optimizer"))
    for keys in dict.fromkeys((*singly, ("offload_activations",), everything)):
        chosen = {name: [key for key in keys if key in own] for name, own in possible.items()}
        if keys and all(any(key in own for own in chosen.values()) for key in keys):
            added = {name: dict.fromkeys(own, True) for name, own in chosen.items()}
            fixed = {name: {**problem.fixed.get(name, {}), **own} for name, own in added.items()}
            yield replace(problem, fixed={name: own for name, own in fixed.items() if own})


def _possible(problem: PlanningProblem, name: str, module: ModuleSpec) -> list[str]:
    """What of a module can be put into host memory: frozen layers, and the optimizer of trained parameters."""
    given = problem.fixed.get(name, {})
    in_layers = [p for p in module.parameters if 0 <= p.layer < module.num_layers]
    result, is_selective = [], problem.checkpointing.get(name) == SELECTIVE
    is_frozen = bool(in_layers) and not is_selective and not any(p.trainable for p in in_layers)
    if is_frozen and "offload_params" not in given and given.get("zero_stage") != GATHERS_IN_PASSES:
        result.append("offload_params")
    if any(p.trainable for p in module.parameters) and "offload_optimizer" not in given:
        result.append("offload_optimizer")
    if "offload_activations" not in given and not is_selective and data_gradients(problem.spec)[name][-1]:
        result.append("offload_activations")
    return result


def _stored(candidate: Candidate, problem: PlanningProblem) -> Candidate | None:
    """The candidate with a problem's storage; `None` if copies divide weights that would be in host memory."""
    layouts = {}
    for name, layout in candidate.layouts.items():
        storage: StorageSettings = problem.storage_of(name)
        if storage.offload_params and layout.zero_stage >= GATHERS_IN_PASSES:
            return None
        layouts[name] = replace(layout, storage=storage)
    return replace(candidate, layouts=layouts)


# The fastest candidates on several batches.

_NEXT_BATCH_RATIO = 1.05  # ratio to the best mean up to which plans run the next batch as well


def finalists(simulations: Simulations, effort: float, least: int) -> list[RankedPlan]:
    """
    The fastest candidates over all batches, within an effort and at least `least` diverse ones. Step times
    differ between batches, so that all candidates within [`_NEXT_BATCH_RATIO`] of the best mean run the next batch.
    """
    num_tasks = 0
    racing: list[tuple[Simulated, list[Prediction]]] = [(simulated, []) for simulated in simulations.fastest()]
    for number in range(1, len(simulations.batches)):
        racing.sort(key=_mean_ms)
        slowest_ms = _NEXT_BATCH_RATIO * _mean_ms(racing[0]) if racing else 0.0
        ahead: list[tuple[Simulated, list[Prediction]]] = []
        for simulated, predictions in racing:
            could_win = _mean_ms((simulated, predictions)) <= slowest_ms and num_tasks < effort
            diverse = distinct_sizes(other for other, _ in ahead)
            is_new = all(sizes_of(other.candidate) != sizes_of(simulated.candidate) for other in diverse)
            if not could_win and len(diverse) >= least:
                break
            if could_win or is_new:
                num_tasks += simulated.candidate.num_tasks
                prediction = simulations.on_later_batch(simulated.candidate, number)
                if prediction is None:
                    simulations.drop(simulated.candidate)
                else:
                    ahead.append((simulated, [*predictions, prediction]))
        racing = ahead
    return in_order(_ranked(simulations, simulated, predictions) for simulated, predictions in racing)


def _mean_ms(racer: tuple[Simulated, list[Prediction]]) -> float:
    """Mean step time over the batches so far, see [`cautious_ms`]."""
    simulated, others = racer
    mean_ms = (simulated.step_ms + sum(other.step_ms for other in others)) / (1 + len(others))
    return mean_ms * caution(simulated.candidate)


def _ranked(simulations: Simulations, simulated: Simulated, others: list[Prediction]) -> RankedPlan:
    """A candidate with the predictions of all batches."""
    candidate, limit = simulated.candidate, simulations.problem.memory_bytes
    first = simulated.prediction or simulations.predict(candidate, simulations.batches[0], limit)
    return RankedPlan(candidate, first.plan, (first, *others), simulated.estimated.step_ms)


def with_large_samples(simulations: Simulations, least: int) -> list[RankedPlan]:
    """
    Plans that exceed the memory only by samples larger than a microbatch may be, up to `least` diverse ones, smallest
    memory first. Such a sample has a microbatch of its own, whose memory is an estimate.
    """
    result: list[RankedPlan] = []
    limit = simulations.problem.memory_bytes
    for _, candidate in sorted(simulations.over.values(), key=lambda entry: entry[0]):
        if limit is None or len(distinct_sizes(result)) >= least:
            break
        try:
            predictions = [simulations.predict(candidate, batch, limit) for batch in simulations.batches]
        except ValueError:  # its state leaves no memory for one of the batches
            continue
        if all(p.peak_memory_bytes <= limit or runs_large_samples_alone(p.planned) for p in predictions):
            result.append(RankedPlan(candidate, predictions[0].plan, tuple(predictions), 0.0))
    return sorted(result, key=lambda plan: plan.peak_memory_bytes)


_FINALISTS_SHARE = 0.3  # of the effort
_QUEUE_SHARE = 0.9  # of the time of a search, roughly


def search_plans(problem: PlanningProblem, advance: Callable[[float], None] = lambda share: None) -> SearchResult:
    """
    Searches for the plan with the fastest predicted training step, and says what bounds it and the next best ones.

    Every layout of every module, placement and number of microbatches gets a closed-form estimate (Entrain, algorithm
    3, which contains Cornstarch's algorithm 1), and all of them are in one queue with what differs from a simulated
    candidate in its schedule, its arrangement, what the copies of a module divide, or, if it does not fit, in what is
    in host memory. Those come first that are expected to be the fastest. Of a step with many tasks a slice is
    simulated first: as few replicas as possible, with their part of a real batch. No candidate is simulated whose
    lower bound is above the best step: if all others are left out for that, the answer is proven. The finalists run
    several batches.

    If no plan fits, the result is one that exceeds the memory only by samples larger than a microbatch may be:
    training runs each of them in a microbatch of its own. `bound` of such a plan says so. If there is none either,
    raises `ValueError`, which says by how much memory or fixed sizes fail, with a remedy. `advance` is called with
    shares of the search, as they are done.
    """
    start = time.perf_counter()
    with _without_collection():
        return _searched(problem, start, advance)


def _searched(problem: PlanningProblem, start: float, advance: Callable[[float], None]) -> SearchResult:
    simulations, space = Simulations(problem), CandidateSpace(problem)
    ranked, is_proven = _best_of(simulations, space, advance)
    for own in offloading_problems(problem):
        if not ranked:
            ranked, is_proven = _best_of(simulations, CandidateSpace(own), advance)
    ranked = ranked or with_large_samples(simulations, 1 + _NUM_RUNNERS_UP)
    if not ranked:
        raise no_plan_error(problem)
    best, *others = distinct_sizes(ranked)[: 1 + _NUM_RUNNERS_UP]
    return SearchResult(
        problem,
        replace(best, bound=bound_of(best.predictions, problem.memory_bytes)),
        tuple(replace(other, bound=bound_of(other.predictions, problem.memory_bytes)) for other in others),
        tuple(reason_for(best, other) for other in others),
        simulations.rejection_counts(space),
        space.num_estimated,
        simulations.num_simulated,
        is_proven,
        time.perf_counter() - start,
    )


def _best_of(
    simulations: Simulations, space: CandidateSpace, advance: Callable[[float], None]
) -> tuple[list[RankedPlan], bool]:
    """The fastest plans of some candidates that fit all batches, and whether the first one is proven to be."""
    queue, told = Queue(simulations, space), 0.0

    def tell(share: float) -> None:
        nonlocal told
        share = max(0.0, min(share, _QUEUE_SHARE - told))
        told += share
        advance(share)

    is_proven = queue.run(1 + _NUM_RUNNERS_UP, tell)
    queue.try_counts()
    tell(1.0)
    return finalists(simulations, _FINALISTS_SHARE * queue.effort, 1 + _NUM_RUNNERS_UP), is_proven


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disables cyclic garbage collection."""
    # A search makes millions of small objects without reference cycles, and a fifth of its time would go into repeated
    # traversals of all objects of the process.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
