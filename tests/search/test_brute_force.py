"""The search against brute force over all layouts, with limits of memory; `benchmarks/search_quality.py` has more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from benchmarks.brute_force import Layouts, brute_force, named, simulated
from benchmarks.search_quality import Case
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes
from hf_mmparallel.search.candidates import CandidateSpace
from hf_mmparallel.search.problem import PlanningProblem
from hf_mmparallel.search.search import search_plans
from hf_mmparallel.search.simulations import AS_FAST
from tests.deep_cases import deep
from tests.search.test_search import problem_of

SLOWER = 1.01


def text_problem(num_ranks: int, batch: int, tokens: int, dtype: str) -> PlanningProblem:
    """The language model of the small model alone, with samples of one length."""
    problem = problem_of(num_ranks, batch)
    language = problem.spec.language_model
    parameters = tuple(replace(p, dtype=dtype) for p in language.parameters)
    modules = {LANGUAGE_MODEL: replace(language, parameters=parameters)}
    spec = replace(problem.spec, modules=modules)
    sizes = SampleSizes.uniform({LANGUAGE_MODEL: tokens}, batch)
    return replace(
        problem,
        costs=replace(problem.costs.with_spec(spec), layers=type(problem.costs.layers)(spec, problem.costs.device)),
        sizes=sizes,
    )


@cache
def needed_bytes(build: Callable[..., PlanningProblem], *settings: Any) -> float:
    """Memory that the fastest of all layouts of a problem needs."""
    problem = named(build(*settings))
    best = brute_force(problem).candidate
    assert best is not None
    found = simulated(problem, best, 0)
    assert found is not None
    return found.peak_memory_bytes


def with_less_memory(share: float, build: Callable[..., PlanningProblem], *settings: Any) -> PlanningProblem:
    """The problem of some settings with a part of the memory that the fastest of all layouts needs."""
    return replace(build(*settings), memory_bytes=share * needed_bytes(build, *settings))


def check(problem: PlanningProblem) -> None:
    """The search is no slower than the best of all layouts, whose simulation has to have come to its end."""
    brute = brute_force(problem)
    assert brute.is_complete and brute.num_simulated > 1
    assert search_plans(problem).best.step_ms <= SLOWER * brute.step_ms, str(brute.candidate)


@pytest.mark.parametrize("share", [0.6, deep(0.9)])
@pytest.mark.parametrize("dtype", ["float32", deep("bfloat16")])
@pytest.mark.parametrize("num_ranks, batch, tokens", [(2, 8, 64), (4, 4, 4096), deep(6, 12, 512)])
def test_text_models(num_ranks, batch, tokens, dtype, share):
    check(named(with_less_memory(share, text_problem, num_ranks, batch, tokens, dtype)))


@pytest.mark.parametrize(
    "num_ranks, batch, frozen, share",
    [
        (2, 2, ("vision",), 0.6),
        *(deep(*case, share) for case in ((2, 4, ()), (3, 6, ("vision",)), (4, 4, ())) for share in (0.6, 0.9)),
    ],
)
def test_multimodal_models(num_ranks, batch, frozen, share):
    check(named(with_less_memory(share, problem_of, num_ranks, batch, frozen)))


@pytest.mark.deep
def test_the_commonest_setup():
    """A Llama of 8B parameters in float32 on one node: layouts that do not fit used to push out one that does."""
    check(named(Case("-M", "float32", "h100", 8, 16, "8192").problem()))


@pytest.mark.deep
@pytest.mark.parametrize(
    "case", [Case("SS", "float32", "a40", 8, 16, "cocoqa"), Case("-S", "bfloat16", "a40", 16, 32, "16384")], ids=str
)
def test_models_of_real_size(case):
    check(named(case.problem()))


def test_the_search_estimates_all_layouts_that_brute_force_lists():
    problem = named(problem_of(3, 4))
    space = CandidateSpace(problem)
    listed = {str(layout) for layouts in [Layouts(problem)] for layout in map(layouts.candidate, layouts)}
    assert listed <= {str(space.candidate(own)) for own in space}


@pytest.mark.parametrize("num_ranks, batch", [(2, 2), deep(4, 6)])
def test_open_schedules_and_arrangements_are_never_slower(num_ranks, batch):
    problem = problem_of(num_ranks, batch, seed=1)
    best, plain = search_plans(problem).best, search_plans(named(problem)).best
    assert best.step_ms <= AS_FAST * plain.step_ms
    assert best.plan.schedule == best.candidate.schedule


@pytest.mark.parametrize(
    ("schedule", "arrangement"),
    [("gpipe", "contiguous"), deep("eager", "tapered"), deep("encoders_first", "batch_rebalance")],
)
def test_the_chosen_schedule_is_as_fast_as_each_that_is_named(schedule, arrangement):
    problem = problem_of(3, 6, seed=2)
    other = search_plans(replace(problem, schedule=schedule, arrangement=arrangement)).best
    assert other.plan.schedule == schedule and other.candidate.arrangement == arrangement
    assert search_plans(problem).best.step_ms <= SLOWER * other.step_ms


@pytest.mark.parametrize("build", [problem_of, partial(with_less_memory, 0.7, problem_of)])
def test_counts_add_up(build):
    result = search_plans(build(2, 2, (), 1))
    assert 0 < result.num_simulated <= result.num_candidates
    assert result.num_not_simulated >= 0
