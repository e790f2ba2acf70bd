"""The search: candidates by the closed form, the best of them simulated on real batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..steps.condensed import on_all_ranks
from .candidates import CandidateSpace, unlike
from .explain import bound_of, no_plan_error, reason_for
from .problem import PlanningProblem, SearchResult
from .simulations import Simulations, unlike_sizes

_RUNNERS_UP = 3


def search_plans(problem: PlanningProblem) -> SearchResult:
    """
    Finds the plan that is expected to train fastest.

    Every layout of every module, placement and number of microbatches is estimated by the closed form of Entrain
    (algorithm 3, which contains Cornstarch's algorithm 1). Of the best, of unlike families, then of more with the
    best's placement, and of some that may be too large for the memory, as few replicas as there can be are simulated
    with their part of a real batch in its arrangement; of the fastest of these all replicas. On up to 8 ranks, and
    where no more than 1,024 others compute less on their slowest rank than the best takes, all of these are simulated
    as well, as long as they have no more than 40,000 tasks together: small problems are solved by brute force. The
    fastest layouts are tried with the other schedules and arrangements, where these are left open; the finalists run
    several batches. Among plans that are as fast, see [`AS_FAST`], the leanest comes first.

    Where no plan fits, one is returned that exceeds the memory by nothing but samples which are larger than a
    microbatch may be: training runs each of them in a microbatch of its own. `bound` of such a plan says so.

    Args:
        problem (`PlanningProblem`): The question.

    Returns:
        `SearchResult`: The best plan, what bounds it, and the next best ones.

    Raises:
        `ValueError`: If no plan fits the memory or the sizes that are set; it says by how much, and what helps.
    """
    start = time.perf_counter()
    with _without_collection():
        return _searched(problem, start)


def _searched(problem: PlanningProblem, start: float) -> SearchResult:
    """See [`search_plans`]."""
    space = CandidateSpace(problem)
    if not len(space):
        raise no_plan_error(problem)
    simulator = Simulations(space)
    simulator.screen(unlike(space.expected_to_fit()), share=0.2, least=32)
    placement = simulator.best_placement()
    simulator.screen((own for own in space.expected_to_fit() if own.hosts == placement), share=0.1, least=16)
    simulator.screen(space.expected_to_fit(), share=0.05, least=0)
    simulator.screen(unlike(space.doubtful()), share=0.05, least=4)
    simulator.simulate(share=0.2, least=6)
    simulator.simulate_the_rest()
    simulator.try_orders(share=0.6)
    ranked = simulator.finalists(share=0.3, least=1 + _RUNNERS_UP)
    while not ranked and (simulator.screen(space.leanest_first(), share=0.1, least=6) or simulator.num_waiting):
        simulator.simulate(share=0.2, least=6)
        ranked = simulator.finalists(share=0.3, least=1 + _RUNNERS_UP)
    ranked = ranked or simulator.with_large_samples(1 + _RUNNERS_UP)
    if not ranked:
        raise no_plan_error(problem)
    best, *others = (
        replace(plan, predictions=tuple(map(on_all_ranks, plan.predictions)))
        for plan in unlike_sizes(ranked)[: 1 + _RUNNERS_UP]
    )
    return SearchResult(
        problem,
        replace(best, bound=bound_of(problem, best)),
        tuple(replace(other, bound=bound_of(problem, other)) for other in others),
        tuple(reason_for(best, other) for other in others),
        simulator.rejected(),
        space.num_estimated,
        simulator.num_simulated,
        time.perf_counter() - start,
    )


@contextmanager
def _without_collection() -> Iterator[None]:
    """
    Leaves out cyclic garbage collection: a search makes millions of small objects that hold each other in no circle,
    and a fifth of its time would go into walking through those of the process again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
