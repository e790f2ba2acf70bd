"""Plans of models with modules behind the language model: found, priced, printed and drawn."""

import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hf_mmparallel.cost import StepCost, analytic_costs, fitting_in_flight, memory_per_rank
from hf_mmparallel.cost.limits import steady_in_flight
from hf_mmparallel.drawing.timeline import gantt_text
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes, StepPlan, check_plan
from hf_mmparallel.planner.text import plan_table
from hf_mmparallel.schedule import Message, Task, in_flight_1f1b
from hf_mmparallel.search.candidates import CandidateSpace
from hf_mmparallel.search.problem import Candidate, Layout, PlanningProblem
from hf_mmparallel.search.search import search_plans
from hf_mmparallel.search.simulations import step_planner
from hf_mmparallel.steps.representatives import predict_batch
from tests.cost.models import HIDDEN, PLAIN, model, module
from tests.deep_cases import deep
from tests.search.test_search import Exhaustive, problem_of

IMAGE, AUDIO = "image_generator", "audio_generator"


def model_with(*generators: str, frozen: tuple[str, ...] = (), encoder: bool = True) -> ModelSpec:
    """The model of the tests of costs with modules behind it."""
    whole = model(frozen)
    modules = {name: part for name, part in whole.modules.items() if encoder or name == LANGUAGE_MODEL}
    for name in generators:
        modules[name] = replace(module(name, name in frozen), features=())
    return replace(whole, modules=modules)


class ExhaustiveInSeries(Exhaustive):
    """The closed form where encoders come before the language model and generators after it."""

    def placed(self, language, own_ranks, found, ranks, count):
        spec = self.problem.spec
        names = [name for name in spec.modules if name != LANGUAGE_MODEL]
        for shared in itertools.product((False, True), repeat=len(found)):
            there = dict(zip(names, shared, strict=True))
            parts = dict(zip(names, found, strict=True))
            sizes = dict(zip(names, ranks, strict=True))
            if any(there[name] and sizes[name] != own_ranks for name in names):
                continue
            if own_ranks + sum(sizes[name] for name in names if not there[name]) != self.problem.num_ranks:
                continue
            busy, fill = (language[place] + sum(parts[n][place] for n in names if there[n]) for place in (0, 1))
            for side in (spec.encoders, spec.generators):
                fill += max((parts[name][1] for name in side if not there[name]), default=0.0)
            yield fill + (count - 1) * max([busy, *(parts[name][0] for name in names if not there[name])])


@settings(max_examples=8)
@given(
    st.integers(1, 5),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([(), (LANGUAGE_MODEL,), (IMAGE,)]),
    st.integers(0, 9),
)
def test_the_best_estimate_with_a_generator_is_that_of_exhaustive_search(ranks, batch, frozen, seed):
    problem = problem_of(
        ranks, batch, seed=seed, spec=model_with(IMAGE, frozen=frozen, encoder=False), arrangement="contiguous"
    )
    found = min((own.step_ms for own in CandidateSpace(problem)), default=float("inf"))
    assert found == pytest.approx(ExhaustiveInSeries(problem).best_ms(), rel=1e-9)


@pytest.mark.parametrize(
    ("names", "encoder", "ranks"),
    [
        ((IMAGE,), True, 3),
        deep((IMAGE,), True, 4),
        deep((IMAGE, AUDIO), False, 4),
    ],
)
def test_modules_on_both_sides_are_divided_as_exhaustive_search_does(names, encoder, ranks):
    spec = model_with(*names, encoder=encoder)
    problem = problem_of(
        ranks, 2, spec=spec, checkpointing=dict.fromkeys(spec.modules, False), arrangement="contiguous"
    )
    exhaustive = ExhaustiveInSeries(problem)
    whole = exhaustive.module
    exhaustive.module = lambda name, dp, pp, tp, again, count: (
        (1e9, 1e9) if again else whole(name, dp, pp, tp, False, count)
    )
    found = min(own.step_ms for own in CandidateSpace(problem))
    assert found == pytest.approx(exhaustive.best_ms(), rel=1e-9)


def test_every_module_is_on_its_own_ranks_or_on_the_language_models():
    space = CandidateSpace(problem_of(4, 2, spec=model_with(IMAGE, AUDIO)))
    found = [tuple(sorted(hosts.items())) for hosts in space.placements()]
    assert len(found) == len(set(found)) == 8
    assert {name for hosts in found for name, _ in hosts} == {"vision", IMAGE, AUDIO}


@pytest.fixture(scope="module")
def answer():
    spec = model_with(IMAGE)
    problem = problem_of(3, 4, spec=spec, memory_bytes=2e9, microbatch_size=2, effort=1)
    # A third of the samples generates nothing.
    problem.sizes.tokens[IMAGE][::3] = 0
    problem.sizes.squares[IMAGE][::3] = 0
    return problem, search_plans(problem)


def test_answers_hold_generators(answer):
    problem, result = answer
    for ranked in (result.best, *result.runners_up):
        check_plan(ranked.plan, problem.spec)
        assert ranked.plan.world_size == 3
        for own in ranked.predictions:
            assert own.peak_memory_bytes <= 2e9
            simulation, step = own.simulation, own.planned.step
            assert {span.task.module for span in simulation.spans} == set(problem.spec.modules)
            generated = sorted(
                batch_index
                for replica in step.microbatches[IMAGE]
                for batch_indices in replica
                for batch_index in batch_indices
            )
            assert generated == np.flatnonzero(own.sizes.tokens[IMAGE]).tolist()
            assert all(
                step.location_of[IMAGE, batch_index][1] == step.location_of[LANGUAGE_MODEL, batch_index][1]
                for batch_index in generated
            )


def test_generators_are_printed_and_drawn(answer):
    problem, result = answer
    ranked = result.best
    prediction = ranked.predictions[0]
    console = Console(file=io.StringIO(), width=200)
    console.print(plan_table(ranked.plan, problem.spec, prediction.simulation, prediction.memory))
    assert IMAGE in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{IMAGE} s0" in gantt_text(prediction.simulation)
    assert IMAGE in str(ranked.candidate)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate({"vision": Layout((4,)), LANGUAGE_MODEL: Layout((2, 2)), IMAGE: Layout((1, 3), 2)}, {}, 4),
        Candidate(
            {"vision": Layout((4,), 2), LANGUAGE_MODEL: Layout((2, 2), 2), IMAGE: Layout((4,), 2, 1, 2)},
            {IMAGE: LANGUAGE_MODEL},
            4,
        ),
        Candidate({"vision": Layout((4,)), LANGUAGE_MODEL: Layout((4,), 2), IMAGE: Layout((4,))}, {}, 2, "eager"),
    ],
    ids=str,
)
def test_layouts_of_any_kind_are_predicted(candidate):
    problem = problem_of(candidate.num_ranks, 16, spec=model_with(IMAGE), schedule=candidate.schedule)
    planner = step_planner(problem, candidate)
    check_plan(planner.plan, problem.spec)
    found = predict_batch(planner, problem.batches[1])
    least = max(found.simulation.busy_ms.values())
    assert found.step_ms >= least > 0 and 0 < found.flops_utilisation < 1
    assert set(found.memory) == set(range(candidate.num_ranks))


def alike(problem: PlanningProblem, tokens: int) -> PlanningProblem:
    """The problem with samples that are all the same."""
    sizes = SampleSizes.uniform(dict.fromkeys(problem.spec.modules, tokens), 2 * problem.global_batch_size, known=True)
    return replace(problem, sizes=sizes)


def in_flight_case(generator: bool) -> tuple[PlanningProblem, Candidate]:
    layouts = {"vision": Layout((4,)), LANGUAGE_MODEL: Layout((2, 2))}
    if generator:
        layouts[IMAGE] = Layout((1, 1, 2))
    spec = model_with(IMAGE) if generator else model_with()
    candidate = Candidate(layouts, {}, 8)
    return alike(problem_of(candidate.num_ranks, 16, spec=spec), 400), candidate


def test_the_language_model_keeps_more_in_flight_in_front_of_a_generator():
    kept = {}
    for generator in (False, True):
        problem, candidate = in_flight_case(generator)
        planner = step_planner(problem, candidate)
        batch = problem.batches[0]
        found = predict_batch(planner, batch)
        assert steady_in_flight(planner.plan)[LANGUAGE_MODEL, 0, 0] == 2 + 3 * generator
        assert found.simulation.peak_in_flight[LANGUAGE_MODEL, 0, 0] == 2 + 3 * generator
        rank = planner.plan.stage(LANGUAGE_MODEL, 0, 0).all_ranks[0]
        step = found.planned.step
        kept[generator] = [
            memory_per_rank(problem.costs, planner.plan, step, batch, {(LANGUAGE_MODEL, 0, 0): count})[
                rank
            ].activations
            for count in (0, found.simulation.peak_in_flight[LANGUAGE_MODEL, 0, 0])
        ]
    assert kept[True][1] > kept[False][1]


def test_room_goes_to_modules_in_front_first():
    problem, candidate = in_flight_case(True)
    planner = step_planner(problem, replace(candidate, schedule="eager"))
    batch = problem.batches[0]
    step = predict_batch(planner, batch).planned.step
    least = in_flight_1f1b(planner.plan, step)
    max_in_flight = fitting_in_flight(problem.costs, planner.plan, step, batch, 1e12)
    assert max_in_flight["vision", 0, 0] == 8 and all(max_in_flight[key] >= limit for key, limit in least.items())


def test_a_generator_gets_the_hidden_states_of_all_tokens_of_its_samples():
    spec = model_with(IMAGE)
    candidate = Candidate({"vision": Layout((4,)), LANGUAGE_MODEL: Layout((4,)), IMAGE: Layout((4,))}, {}, 1)
    plan, costs = candidate.plan(spec), analytic_costs(spec, PLAIN)
    tokens = {"vision": [4, 900, 0], LANGUAGE_MODEL: [10, 20, 400], IMAGE: [5000, 0, 7]}
    sizes = SampleSizes.of_sequences({name: [[n] for n in own] for name, own in tokens.items()})
    batch_indices = {"vision": (0, 1), LANGUAGE_MODEL: (0, 1, 2), IMAGE: (0, 2)}
    targets = {"vision": (LANGUAGE_MODEL,), LANGUAGE_MODEL: (IMAGE,)}
    step = StepPlan((0, 1, 2), {name: ((own,),) for name, own in batch_indices.items()}, targets)
    cost = StepCost(costs, plan, step, sizes)
    link = costs.device.link_bytes_per_ms([0, 1])
    forwards = {name: Task("fwd", name, 0, 0, 0) for name in plan.modules}
    backwards = {name: Task("bwd", name, 0, 0, 0) for name in plan.modules}
    for source, target, rows in (("vision", LANGUAGE_MODEL, 4 + 20), (LANGUAGE_MODEL, IMAGE, 10 + 400)):
        there = cost.message_ms(Message("act", forwards[source], forwards[target]))
        back = cost.message_ms(Message("grad", backwards[target], backwards[source]))
        assert there == back == pytest.approx(2 * HIDDEN * rows / link)


@pytest.mark.parametrize(("names", "encoder"), [((IMAGE,), True), ((IMAGE, AUDIO), False)])
def test_modules_on_their_own_ranks_take_the_closed_form(names, encoder):
    spec = model_with(*names, encoder=encoder)
    problem = alike(problem_of(6, 24, spec=spec, checkpointing=dict.fromkeys(spec.modules, False)), 4096)
    space = CandidateSpace(problem)
    apart = sorted((own for own in space if not own.colocated_with), key=lambda own: own.step_ms)
    assert apart
    for own in apart[:4]:
        planner = step_planner(problem, space.candidate(own))
        found = predict_batch(planner, problem.batches[0])
        assert found.step_ms == pytest.approx(own.step_ms, rel=0.1)
