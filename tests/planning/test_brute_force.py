"""The search against brute force over all layouts, with limits of memory; `benchmarks/search_quality.py` has more."""

from dataclasses import replace

import pytest

from benchmarks.brute_force import Layouts, brute_force, named, simulated
from benchmarks.search_quality import Case
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes
from hf_mmparallel.planning.candidates import CandidateSpace
from hf_mmparallel.planning.problem import PlanningProblem
from hf_mmparallel.planning.search import search_plans
from hf_mmparallel.planning.simulations import AS_FAST
from tests.deep_cases import deep
from tests.planning.test_search import model_with, problem_of

SLOWER = 1.01


def text_problem(num_ranks: int, batch: int, tokens: int, dtype: str) -> PlanningProblem:
    """The language model of the small model alone, with samples of one length."""
    spec = model_with(encoders=())
    language = spec.language_model
    parameters = tuple(replace(p, dtype=dtype) for p in language.parameters)
    spec = replace(spec, modules={LANGUAGE_MODEL: replace(language, parameters=parameters)})
    sizes = SampleSizes.uniform({LANGUAGE_MODEL: tokens}, batch)
    return replace(problem_of(num_ranks, batch, spec=spec), sizes=sizes)


def with_less_memory(problem: PlanningProblem, share: float) -> PlanningProblem:
    """The problem with a part of the memory that the fastest of all layouts needs, and with its first order."""
    problem = named(problem)
    best = brute_force(problem).candidate
    assert best is not None
    found = simulated(problem, best, 0)
    assert found is not None
    return replace(problem, memory_bytes=share * found.peak_memory_bytes)


def check(problem: PlanningProblem) -> None:
    """The search is no slower than the best of all layouts, whose simulation has to have come to its end."""
    brute = brute_force(problem)
    assert brute.is_complete and brute.num_simulated > 1 and brute.candidate is not None
    assert search_plans(problem).best.step_ms <= SLOWER * brute.step_ms, str(brute.candidate)


TEXTS = [(2, 8, 64, "float32", 0.6), (4, 4, 4096, "bfloat16", 0.6), deep(6, 12, 512, "float32", 0.9)]
MULTIMODAL = [(2, 4, ("vision",), 0.9), deep(3, 6, ("vision",), 0.95), deep(2, 4, (), 0.6)]


@pytest.mark.parametrize("num_ranks, batch, tokens, dtype, share", TEXTS)
def test_text_models(num_ranks, batch, tokens, dtype, share):
    check(with_less_memory(text_problem(num_ranks, batch, tokens, dtype), share))


@pytest.mark.parametrize("num_ranks, batch, frozen, share", MULTIMODAL)
def test_multimodal_models(num_ranks, batch, frozen, share):
    check(with_less_memory(problem_of(num_ranks, batch, frozen), share))


CASES = [
    Case("-M", "float32", "h100", 8, 16, "8192"),  # layouts that do not fit used to push out one that does
    Case("SS", "float32", "a40", 8, 16, "cocoqa"),
    Case("-S", "bfloat16", "a40", 16, 32, "16384"),
]


@pytest.mark.deep
@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_of_real_size(case):
    check(named(case.problem()))


def test_the_search_estimates_all_layouts_that_brute_force_lists():
    problem = named(problem_of(3, 4))
    space, layouts = CandidateSpace(problem), Layouts(problem)
    assert {str(layouts.candidate(own)) for own in layouts} <= {str(space.candidate(own)) for own in space}


@pytest.mark.parametrize("num_ranks, batch", [(2, 2), deep(4, 6)])
def test_open_schedules_and_arrangements_are_never_slower(num_ranks, batch):
    problem = problem_of(num_ranks, batch, seed=1)
    result = search_plans(problem)
    assert result.best.step_ms <= AS_FAST * search_plans(named(problem)).best.step_ms
    assert result.best.plan.schedule == result.best.candidate.schedule
    assert 0 < result.num_simulated <= result.num_candidates and result.num_not_simulated >= 0


@pytest.mark.parametrize(
    ("schedule", "arrangement"), [("gpipe", "contiguous"), deep("encoders_first", "batch_rebalance")]
)
def test_the_chosen_schedule_is_as_fast_as_each_that_is_named(schedule, arrangement):
    problem = problem_of(3, 6, seed=2, effort=64)
    other = search_plans(replace(problem, schedule=schedule, arrangement=arrangement)).best
    assert other.plan.schedule == schedule and other.candidate.arrangement == arrangement
    assert search_plans(problem).best.step_ms <= SLOWER * other.step_ms
