"""Other schedules and arrangements for the fastest layouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ..arrange import Arrangement
from ..cost.sharded_passes import REDUCES_IN_PASSES
from ..plan.schedules import Schedule
from .problem import Candidate
from .ranking import AS_FAST
from .simulations import Simulated, Simulations
from .slices import SMALL_STEP, num_parts

_LAYOUTS, _ORDERS = 4, 4
_MUCH_SLOWER = 1.15  # ratio to the best step above which nothing is tried
_PROMISING = 1.05  # ratio to the best step up to which an order is simulated with all replicas, by its slice
_FEW_SHAPES = 2


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
        is_far = first.step_ms > _MUCH_SLOWER * simulations.best_ms
        if is_far or (number >= _FEW_SHAPES and num_tasks > share * simulations.effort):
            break
        # no other schedules where the busiest rank computes about as long as the best step
        waits = AS_FAST * (first.busy_ms + first.optimizer_ms) < min(first.step_ms, simulations.best_ms)
        if not waits and problem.memory_bytes is not None:  # arrangements that keep limits compute alike
            continue
        schedules = problem.schedules if waits else (first.candidate.schedule,)
        orders, slice_tasks = _best_orders(simulations, first, schedules)
        num_tasks += slice_tasks
        for index, simulated in enumerate(layouts[:_LAYOUTS]):
            for (schedule, arrangement), ratio in orders[: 1 if index else _ORDERS]:
                if ratio * simulated.step_ms <= _PROMISING * simulations.best_ms:
                    candidate = replace(simulated.candidate, schedule=schedule, arrangement=arrangement)
                    num_tasks += simulations.simulate_new(candidate, simulated.estimated)


def _best_orders(
    simulations: Simulations, first: Simulated, schedules: Sequence[Schedule]
) -> tuple[list[tuple[tuple[Schedule, str | Arrangement], float]], int]:
    """
    Other schedules and arrangements in the order of their slices' step times, each with the ratio of its time to that
    of the candidate's order; and the number of tasks of all slices.
    """
    problem, candidate, times = simulations.problem, first.candidate, {}
    parts = 1 if candidate.num_tasks <= SMALL_STEP else num_parts(candidate)
    known_ms = first.step_ms if parts == 1 and first.is_whole else first.slice_ms
    for schedule, arrangement in itertools.product(schedules, problem.arrangements):
        ordered = replace(candidate, schedule=schedule, arrangement=arrangement)
        if ordered == candidate and known_ms is not None:
            times[schedule, arrangement] = known_ms
            continue
        found = simulations.slice(ordered, first.estimated, parts)
        if found is not None:
            times[schedule, arrangement] = found.step_ms
    num_tasks = len(times) * candidate.num_tasks // parts
    first_ms = times.pop((candidate.schedule, candidate.arrangement), first.step_ms)
    orders = sorted(times, key=times.__getitem__)
    return [(order, times[order] / first_ms) for order in orders], num_tasks


def _shape(candidate: Candidate) -> tuple:
    """What schedules and arrangements depend on: placement, stages, and whether passes communicate."""
    layouts = candidate.layouts.values()
    return candidate.placement, tuple((own.pp_size, own.zero_stage >= REDUCES_IN_PASSES) for own in layouts)
