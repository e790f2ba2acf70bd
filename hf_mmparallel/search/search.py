"""The plan search: candidates by closed-form estimate, the best of them simulated on real batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..steps.representatives import on_all_ranks
from .candidates import CandidateSpace, diversify
from .explain import bound_of, no_plan_error, reason_for
from .finalists import finalists, with_large_samples
from .offloading import offloaded_problems, try_host_memory
from .options import ModuleOptions
from .orders import try_orders
from .problem import PlanningProblem, RankedPlan, SearchResult
from .ranking import distinct_sizes, in_order
from .shardings import try_shardings
from .simulations import FEW_RANKS, Simulations, key_of

_RUNNERS_UP = 3


def search_plans(problem: PlanningProblem) -> SearchResult:
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
    raises `ValueError`, which says by how much memory or fixed sizes fail, with a remedy.
    """
    start = time.perf_counter()
    with _without_collection():
        return _searched(problem, start)


def _searched(problem: PlanningProblem, start: float) -> SearchResult:
    spaces = [CandidateSpace(own) for own in nested_problems(problem)]
    simulator, found = Simulations(spaces[-1]), dict[str, RankedPlan]()
    for space in spaces:
        simulator.space = space
        found |= {key_of(plan.candidate): plan for plan in _best_of(simulator)}
    for own in offloaded_problems(problem):
        if not found:
            simulator.space = CandidateSpace(own)
            found |= {key_of(plan.candidate): plan for plan in _best_of(simulator)}
    simulator.space = spaces[-1]
    ranked = in_order(found.values()) or with_large_samples(simulator, 1 + _RUNNERS_UP)
    if not ranked:
        raise no_plan_error(problem)
    best, *others = (
        replace(plan, predictions=tuple(map(on_all_ranks, plan.predictions)))
        for plan in distinct_sizes(ranked)[: 1 + _RUNNERS_UP]
    )
    return SearchResult(
        problem,
        replace(best, bound=bound_of(best.predictions, problem.memory_bytes)),
        tuple(replace(other, bound=bound_of(other.predictions, problem.memory_bytes)) for other in others),
        tuple(reason_for(best, other) for other in others),
        simulator.rejected(),
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


def _best_of(simulator: Simulations) -> list[RankedPlan]:
    """The fastest plans of the simulator's candidates that fit all batches."""
    space = simulator.space
    simulator.screen(diversify(space.expected_to_fit(shares_passes=False)), share=0.2, least=32)
    placement = simulator.best_placement()
    placed = (c for c in space.expected_to_fit(shares_passes=False) if c.colocated_with == placement)
    simulator.screen(placed, share=0.1, least=16)
    simulator.screen(space.expected_to_fit(shares_passes=False), share=0.05, least=0)
    simulator.screen(diversify(space.expected_to_fit(shares_passes=True)), share=0.1, least=8)
    simulator.screen(diversify(space.above_memory_limit()), share=0.05, least=4)
    simulator.simulate(share=0.2, least=6)
    simulator.simulate_remaining()
    try_shardings(simulator, share=0.2)
    try_orders(simulator, share=0.6)
    try_shardings(simulator, share=0.2)
    try_host_memory(simulator, share=0.1)
    ranked = finalists(simulator, share=0.3, least=1 + _RUNNERS_UP)
    while not ranked and (
        simulator.screen(space.smallest_memory_first(), share=0.1, least=6) or simulator.num_waiting
    ):
        simulator.simulate(share=0.2, least=6)
        ranked = finalists(simulator, share=0.3, least=1 + _RUNNERS_UP)
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
