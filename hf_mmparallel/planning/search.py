"""The plan search: candidates by closed-form estimate, the best of them simulated on real batches."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from ..cost.layers import data_gradients
from ..cost.sharded_passes import GATHERS_IN_PASSES, REDUCES_IN_PASSES
from ..cost.step_planner import Prediction
from ..plan import ModuleSpec
from ..plan.methods import POLICIES, Schedule
from ..plan.parallel_plan import ShardingSettings, StorageSettings
from ..plan.plugin import STORAGE
from .candidates import CandidateSpace, EstimatedCandidate, diversify
from .explain import bound_of, no_plan_error, reason_for
from .options import ModuleOptions, ParallelConfig
from .problem import Candidate, PlanningProblem, RankedPlan, SearchResult
from .simulations import (
    AS_FAST,
    FEW_RANKS,
    SMALL_STEP,
    Simulated,
    Simulations,
    caution,
    distinct_sizes,
    in_order,
    key_of,
    num_parts,
    runs_large_samples_alone,
    sizes_of,
    state_fits,
)

_MAX_OFFLOADED = 64  # layouts above the memory limit that are looked at
_MAX_SIMULATED_OFFLOADED = 4  # of these


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
    result = []
    is_frozen = bool(in_layers) and not any(p.trainable for p in in_layers)
    if is_frozen and "offload_params" not in given and given.get("zero_stage") != GATHERS_IN_PASSES:
        result.append("offload_params")
    if any(p.trainable for p in module.parameters) and "offload_optimizer" not in given:
        result.append("offload_optimizer")
    if "offload_activations" not in given and data_gradients(problem.spec)[name][-1]:
        result.append("offload_activations")
    return result


def try_host_memory(simulations: Simulations, share: float) -> None:
    """
    Tries host memory for the layouts above the memory limit that would be faster than the best step, within a share of
    the effort: of each the variant that moves the least.
    """
    space, num_tasks, num_simulated = simulations.space, 0, 0
    problems = list(offloading_problems(simulations.problem))
    above = islice(diversify(space.above_memory_limit()), _MAX_OFFLOADED if problems else 0)
    for estimated in above:
        is_far = max(estimated.step_ms, estimated.least_ms) >= simulations.best_ms
        if is_far or num_simulated >= _MAX_SIMULATED_OFFLOADED or num_tasks > share * simulations.effort:
            return
        candidate = space.candidate(estimated)
        for problem in problems:
            stored = _stored(candidate, problem)
            if stored is None or key_of(stored) in simulations.known or not state_fits(problem, stored):
                continue
            num_simulated += 1
            num_tasks += simulations.screen_one(stored, estimated)
            found = simulations.known.get(key_of(stored))
            if found is not None:
                num_tasks += simulations.simulate_new(stored, estimated) if found.step_ms < simulations.best_ms else 0
                break


def _stored(candidate: Candidate, problem: PlanningProblem) -> Candidate | None:
    """The candidate with a problem's storage; `None` if copies divide weights that would be in host memory."""
    layouts = {}
    for name, layout in candidate.layouts.items():
        storage: StorageSettings = problem.storage_of(name)
        if storage.offload_params and layout.zero_stage >= GATHERS_IN_PASSES:
            return None
        layouts[name] = replace(layout, storage=storage)
    return replace(candidate, layouts=layouts)


# Other schedules and arrangements for the fastest layouts.

_MAX_REORDERED, _ORDERS = 4, 4
_MAX_RATIO_TO_BEST = 1.15  # ratio to the best step above which nothing is tried
_ORDER_RATIO = 1.05  # ratio to the best step up to which an order is simulated with all replicas, by its slice
_MAX_SHAPES = 2


def try_orders(simulations: Simulations, share: float) -> None:
    """
    Tries other schedules and arrangements, if these are left open, within a share of the effort.

    For the fastest layout of each shape (placement and numbers of stages), slices run with each schedule and
    arrangement. The best of these are simulated with all replicas for this layout and the next ones of its shape, if
    the slices say that they could be the fastest. Covers at least two shapes, but none that is much slower.
    """
    problem = simulations.problem
    if len(problem.schedules) == len(problem.arrangements) == 1:
        return
    shapes: dict[tuple, list[Simulated]] = {}
    for simulated in sorted(simulations.known.values(), key=lambda s: s.step_ms):
        shapes.setdefault(_shape(simulated.candidate), []).append(simulated)
    num_tasks = 0
    for number, layouts in enumerate(shapes.values()):
        first = layouts[0]
        is_far = first.step_ms > _MAX_RATIO_TO_BEST * simulations.best_ms
        if is_far or (number >= _MAX_SHAPES and num_tasks > share * simulations.effort):
            break
        # no other schedules where the busiest rank computes about as long as the best step
        waits = AS_FAST * (first.busy_ms + first.optimizer_ms) < min(first.step_ms, simulations.best_ms)
        if not waits and problem.memory_bytes is not None:  # arrangements that keep limits compute alike
            continue
        own: list[tuple[Schedule, int]] = [(first.candidate.schedule, first.candidate.vp_size)]
        schedules = problem.schedules if waits else own
        orders, slice_tasks = _best_orders(simulations, first, schedules)
        num_tasks += slice_tasks
        for index, simulated in enumerate(layouts[:_MAX_REORDERED]):
            for order, ratio in orders[: 1 if index else _ORDERS]:
                if ratio * simulated.step_ms <= _ORDER_RATIO * simulations.best_ms:
                    candidate = replace(simulated.candidate, **order)
                    num_tasks += simulations.simulate_new(candidate, simulated.estimated)


def _best_orders(
    simulations: Simulations, first: Simulated, schedules: Sequence[tuple[Schedule, int]]
) -> tuple[list[tuple[dict[str, Any], float]], int]:
    """
    Other schedules and arrangements in the order of their slices' step times, each with the ratio of its time to that
    of the candidate's order; and the number of tasks of all slices.
    """
    problem, candidate, first_ms = simulations.problem, first.candidate, first.step_ms
    parts = 1 if candidate.num_tasks <= SMALL_STEP else num_parts(candidate)
    known_ms = first.step_ms if parts == 1 and first.is_whole else first.slice_ms
    found: list[tuple[dict[str, Any], float]] = []
    slower: set[tuple] = set()  # schedules and arrangements of which more virtual stages are not tried
    for (schedule, vp_size), arrangement in itertools.product(schedules, problem.arrangements):
        order = {"schedule": schedule, "vp_size": vp_size, "arrangement": arrangement}
        ordered = replace(candidate, **order)
        if ordered == candidate and known_ms is not None:
            first_ms = known_ms
        elif (schedule, arrangement) not in slower and (problem.schedule is not None or _differs(problem, ordered)):
            sliced = simulations.slice(ordered, first.estimated, parts)
            if sliced is None or sliced.step_ms > first_ms:
                slower.add((schedule, arrangement))
            if sliced is not None and ordered == candidate:
                first_ms = sliced.step_ms
            elif sliced is not None:
                found.append((order, sliced.step_ms))
    num_tasks = (1 + len(found)) * candidate.num_tasks // parts
    return [(order, step_ms / first_ms) for order, step_ms in sorted(found, key=lambda own: own[1])], num_tasks


def _differs(problem: PlanningProblem, candidate: Candidate) -> bool:
    """Whether a candidate has the virtual stages and split backwards of its schedule in any module."""
    modules = candidate.plan(problem.spec).modules.values()
    splits = not POLICIES[candidate.schedule].splits_backward or any(own.splits_backward for own in modules)
    return splits and (candidate.vp_size == 1 or any(own.vp_size > 1 for own in modules))


def _shape(candidate: Candidate) -> tuple:
    """What schedules and arrangements depend on: placement, stages, and whether passes communicate."""
    layouts = candidate.layouts.values()
    return candidate.placement, tuple((own.pp_size, own.zero_stage >= REDUCES_IN_PASSES) for own in layouts)


# The fastest candidates on several batches.

_NEXT_BATCH_RATIO = 1.05  # ratio to the best mean up to which plans run the next batch as well


def finalists(simulations: Simulations, share: float, least: int) -> list[RankedPlan]:
    """
    The fastest candidates over all batches, within a share of the effort and at least `least` diverse ones. Step times
    differ between batches, so that all candidates within [`_NEXT_BATCH_RATIO`] of the best mean run the next batch.
    """
    num_tasks = 0
    racing: list[tuple[Simulated, list[Prediction]]] = [(simulated, []) for simulated in simulations.whole()]
    for number in range(1, len(simulations.batches)):
        racing.sort(key=_mean_ms)
        slowest_ms = _NEXT_BATCH_RATIO * _mean_ms(racing[0]) if racing else 0.0
        ahead: list[tuple[Simulated, list[Prediction]]] = []
        for simulated, predictions in racing:
            could_win = _mean_ms((simulated, predictions)) <= slowest_ms and num_tasks < share * simulations.effort
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
        if all(p.peak_memory_bytes <= limit or runs_large_samples_alone(p) for p in predictions):
            result.append(RankedPlan(candidate, predictions[0].plan, tuple(predictions), 0.0))
    return sorted(result, key=lambda plan: plan.peak_memory_bytes)


_MAX_RESHARDED = 3  # fastest layouts with which other shardings are tried
# Other shardings for the fastest layouts: what else the copies of a module can divide among them.

_RESHARDING_RATIO = 1.01  # ratio of the closed form to that of the current sharding up to which another one is tried


def try_shardings(simulations: Simulations, share: float) -> None:
    """
    Tries what else the copies of modules can divide, for the fastest layouts and within a share of the effort: module
    by module, what is fastest so far with the other ZeRO stages, over all copies and over those of a node.
    """
    num_tasks = 0
    for simulated in distinct_sizes(simulations.whole())[:_MAX_RESHARDED]:
        communicates = any(own.zero_stage >= REDUCES_IN_PASSES for own in simulated.candidate.layouts.values())
        # the computation alone takes longer than the best step
        if not communicates and simulated.busy_ms >= simulations.best_ms:
            continue
        for name in simulated.candidate.layouts:
            best = simulated
            for sharding in _shardings(simulations, simulated.candidate, name):
                candidate = with_sharding(simulated.candidate, name, sharding)
                if num_tasks > share * simulations.effort:
                    return
                num_tasks += simulations.simulate_new(candidate, simulated.estimated)
                found = simulations.known.get(key_of(candidate))
                if found is not None and found.is_whole and found.step_ms < best.step_ms:
                    best = found
            simulated = best


def with_sharding(candidate: Candidate, name: str, sharding: ShardingSettings) -> Candidate:
    """The candidate with another sharding of a module."""
    layout = replace(candidate.layouts[name], sharding=sharding)
    return replace(candidate, layouts={**candidate.layouts, name: layout})


def _shardings(simulations: Simulations, candidate: Candidate, name: str) -> list[ShardingSettings]:
    """Other shardings of a module in a candidate, fastest first by the closed form, which excludes slow passes."""
    options, layout = simulations.space.options[name], candidate.layouts[name]
    num_copies = layout.dp_size * layout.cp_size
    if num_copies == 1:
        return []
    per_node = options.copies_per_node(layout.tp_size) // layout.pp_size
    divides = 1 < per_node < num_copies and num_copies % per_node == 0
    sizes = [None, per_node] if divides else [None]
    given = simulations.problem.fixed.get(name, {})
    sizes = [given["shard_size"]] if "shard_size" in given else sizes
    limit_ms = _RESHARDING_RATIO * _module_ms(simulations, candidate, name, layout.sharding)
    every = [own for own in options.all_shardings(sizes) if own != layout.sharding]
    times = {own: _module_ms(simulations, candidate, name, own) for own in every}
    # slower sums are tried as well, since other tasks may hide them
    chosen = [own for own in times if times[own] <= limit_ms or own.zero_stage < REDUCES_IN_PASSES]
    return sorted(chosen, key=times.__getitem__)


def _module_ms(simulations: Simulations, candidate: Candidate, name: str, sharding: ShardingSettings) -> float:
    """Closed form of the time of a module in a step with another sharding."""
    options, layout = simulations.space.options[name], candidate.layouts[name]
    recomputes, shared = layout.activation_checkpointing, layout.ep_size
    kind = ParallelConfig(layout.cp_size, layout.tp_size, recomputes, sharding=sharding, ep_size=shared)
    kind = kind.with_shards(layout.dp_size)
    num_samples = simulations.problem.global_batch_size / layout.dp_size / candidate.num_microbatches
    stage_ms = float(options.layer_ms(kind, num_samples).sum()) / layout.pp_size
    return candidate.num_microbatches * stage_ms + options.sync_ms(kind, layout.dp_size, layout.pp_size)


_NUM_RUNNERS_UP = 3
_WHOLE_EFFORT = 2.1  # sum of the shares of a search


def search_plans(problem: PlanningProblem, advance: Callable[[float], None] = lambda share: None) -> SearchResult:
    """
    Searches for the plan with the fastest predicted training step, and says what bounds it and the next best ones.

    Every layout of every module, placement and number of microbatches gets a closed-form estimate (Entrain, algorithm
    3, which contains Cornstarch's algorithm 1). A slice is then simulated (as few replicas as possible, with their
    part of a real batch) for the best candidates of diverse families, for more candidates with the best placement, and
    for some that may exceed the memory; the fastest of these are simulated with all replicas. On up to 8 ranks, and if
    at most 1,024 other candidates have a lower bound below the best step time, all of these are simulated as well, up
    to 40,000 tasks together: small problems are solved by brute force. The fastest layouts are tried with other
    schedules and arrangements, if these are left open; the finalists run several batches. Host memory is for layouts
    that do not fit otherwise.

    If no plan fits, the result is one that exceeds the memory only by samples larger than a microbatch may be:
    training runs each of them in a microbatch of its own. `bound` of such a plan says so. If there is none either,
    raises `ValueError`, which says by how much memory or fixed sizes fail, with a remedy. `advance` is called with
    shares of the search, as they are done.
    """
    start = time.perf_counter()
    with _without_collection():
        return _searched(problem, start, advance)


def _searched(problem: PlanningProblem, start: float, advance: Callable[[float], None]) -> SearchResult:
    spaces = [CandidateSpace(own) for own in nested_problems(problem)]
    simulator, found = Simulations(spaces[-1]), dict[str, RankedPlan]()
    for space in spaces:
        simulator.space = space
        found |= {key_of(p.candidate): p for p in _best_of(simulator, lambda share: advance(share / len(spaces)))}
    for own in offloading_problems(problem):
        if not found:
            simulator.space = CandidateSpace(own)
            found |= {key_of(plan.candidate): plan for plan in _best_of(simulator, advance)}
    simulator.space = spaces[-1]
    ranked = in_order(found.values()) or with_large_samples(simulator, 1 + _NUM_RUNNERS_UP)
    if not ranked:
        raise no_plan_error(problem)
    best, *others = distinct_sizes(ranked)[: 1 + _NUM_RUNNERS_UP]
    return SearchResult(
        problem,
        replace(best, bound=bound_of(best.predictions, problem.memory_bytes)),
        tuple(replace(other, bound=bound_of(other.predictions, problem.memory_bytes)) for other in others),
        tuple(reason_for(best, other) for other in others),
        simulator.rejection_counts(),
        spaces[-1].num_estimated,
        simulator.num_simulated,
        time.perf_counter() - start,
    )


def nested_problems(problem: PlanningProblem) -> list[PlanningProblem]:
    """
    The problems that are searched one after the other, the last with all choices. On few ranks, where a search takes
    little time, the ZeRO stages to choose from grow one by one, so that more of them never give a slower plan: what is
    simulated with the first ones is what a search with these alone simulates.
    """
    stages = sorted(problem.zero_stages)
    counts = range(1, len(stages) + 1) if problem.num_ranks <= FEW_RANKS else [len(stages)]
    problems = [replace(problem, zero_stages=tuple(stages[:count])) for count in counts]
    chosen = {tuple(ModuleOptions(own, name).zero_stages for name in own.spec.modules): own for own in problems}
    return list(chosen.values())


def _best_of(simulator: Simulations, advance: Callable[[float], None]) -> list[RankedPlan]:
    """The fastest plans of the simulator's candidates that fit all batches; says shares of it that are done."""
    space = simulator.space

    def placed() -> Iterator[EstimatedCandidate]:
        placement = simulator.best_placement()
        return (c for c in space.expected_to_fit(shares_passes=False) if c.colocated_with == placement)

    # with shares of the effort
    steps: list[tuple[float, Callable[[float], Any]]] = [
        (0.2, lambda share: simulator.screen(diversify(space.expected_to_fit(shares_passes=False)), share, least=32)),
        (0.1, lambda share: simulator.screen(placed(), share, least=16)),
        (0.05, lambda share: simulator.screen(space.expected_to_fit(shares_passes=False), share, least=0)),
        (0.1, lambda share: simulator.screen(diversify(space.expected_to_fit(shares_passes=True)), share, least=8)),
        (0.05, lambda share: simulator.screen(diversify(space.above_memory_limit()), share, least=4)),
        (0.2, lambda share: simulator.simulate(share, least=6)),
        (0.0, lambda share: simulator.simulate_remaining()),
        (0.2, lambda share: try_shardings(simulator, share)),
        (0.6, lambda share: try_orders(simulator, share)),
        (0.2, lambda share: try_shardings(simulator, share)),
        (0.1, lambda share: try_host_memory(simulator, share)),
    ]
    for share, step in steps:
        step(share)
        advance(share / _WHOLE_EFFORT)
    ranked = finalists(simulator, share=0.3, least=1 + _NUM_RUNNERS_UP)
    while not ranked and (
        simulator.screen(space.smallest_memory_first(), share=0.1, least=6) or simulator.num_waiting
    ):
        simulator.simulate(share=0.2, least=6)
        ranked = finalists(simulator, share=0.3, least=1 + _NUM_RUNNERS_UP)
    return ranked


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
