"""Plans of models with modules behind the language model: found, priced, printed and drawn."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from hf_mmparallel.cost import StepCost, analytic_costs, fitting_in_flight, memory_per_rank
from hf_mmparallel.cost.limits import steady_in_flight
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes, StepPlan, check_plan
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.planning.candidates import CandidateSpace
from hf_mmparallel.planning.gantt import gantt_text
from hf_mmparallel.planning.problem import Candidate, PlanningProblem
from hf_mmparallel.planning.search import search_plans
from hf_mmparallel.planning.simulations import step_planner
from hf_mmparallel.planning.text import plan_table
from hf_mmparallel.schedule import Message, Task, in_flight_1f1b
from tests.cost.messages import message_ms
from tests.cost.models import HIDDEN, PLAIN
from tests.planning.test_search import IMAGE, answers, model_with, problem_of

AUDIO = "audio_generator"


def test_answers_hold_generators_and_show_them():
    spec = model_with(IMAGE)
    settings = {"memory_bytes": 2e9, "microbatch_size": 2, "checkpointing": dict.fromkeys(spec.modules, False)}
    problem = problem_of(3, 4, spec=spec, schedule="1f1b", effort=1, **settings)
    for sizes in (problem.sizes.tokens, problem.sizes.squares):
        sizes[IMAGE][::3] = 0  # a third of the samples generates nothing
    result = search_plans(problem)
    for ranked in answers(result):
        check_plan(ranked.plan, problem.spec)
        assert ranked.plan.world_size == 3
        for own in ranked.predictions:
            assert own.peak_memory_bytes <= 2e9
            simulation, step = own.timeline, own.planned.step
            assert {span.task.module for span in simulation.spans} == set(problem.spec.modules)
            generated = sorted(
                batch_index
                for replica in step.microbatches[IMAGE]
                for batch_indices in replica
                for batch_index in batch_indices
            )
            assert generated == np.flatnonzero(own.sizes.tokens[IMAGE]).tolist()
            for batch_index in generated:
                turns = [step.location_of[name, batch_index][1] for name in (IMAGE, LANGUAGE_MODEL)]
                assert turns[0] == turns[1]
    ranked = result.best
    prediction = ranked.predictions[0]
    console = Console(file=io.StringIO(), width=200)
    console.print(plan_table(ranked.plan, problem.spec, prediction.timeline, prediction.memory))
    assert IMAGE in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{IMAGE} s0" in gantt_text(prediction.timeline)
    assert IMAGE in str(ranked.candidate)


def alike(problem: PlanningProblem, tokens: int) -> PlanningProblem:
    """The problem with samples that are all the same."""
    sizes = SampleSizes.uniform(dict.fromkeys(problem.spec.modules, tokens), 2 * problem.global_batch_size, known=True)
    return replace(problem, sizes=sizes)


def in_flight_case(generator: bool) -> tuple[PlanningProblem, Candidate]:
    layouts = {"vision": ModuleLayout((4,)), LANGUAGE_MODEL: ModuleLayout((2, 2))}
    if generator:
        layouts[IMAGE] = ModuleLayout((1, 1, 2))
    candidate = Candidate(layouts, {}, 8)
    spec = model_with(*[IMAGE] * generator)
    return alike(problem_of(candidate.num_ranks, 16, spec=spec), 400), candidate


def test_the_language_model_keeps_more_in_flight_in_front_of_a_generator():
    kept, first = [], (LANGUAGE_MODEL, 0, 0)
    for generator in (False, True):
        problem, candidate = in_flight_case(generator)
        planner, batch = step_planner(problem, candidate), problem.batches[0]
        found = planner.predict_batch(batch)
        count = 2 + 3 * generator
        assert steady_in_flight(planner.plan)[first] == found.timeline.peak_in_flight[first] == count
        memory = memory_per_rank(problem.costs, planner.plan, found.planned.step, batch, {first: count})
        kept.append(memory[planner.plan.stage(*first).all_ranks[0]].activations)
    assert kept[1] > kept[0]


def test_room_goes_to_modules_in_front_first():
    problem, candidate = in_flight_case(True)
    planner, batch = step_planner(problem, replace(candidate, schedule="eager")), problem.batches[0]
    step = planner.predict_batch(batch).planned.step
    least = in_flight_1f1b(planner.plan, step)
    max_in_flight = fitting_in_flight(problem.costs, planner.plan, step, batch, 1e12)
    assert max_in_flight["vision", 0, 0] == 8 and all(max_in_flight[key] >= limit for key, limit in least.items())


def test_a_generator_gets_the_hidden_states_of_all_tokens_of_its_samples():
    spec = model_with(IMAGE)
    plan = Candidate(dict.fromkeys(spec.modules, ModuleLayout((4,))), {}, 1).plan(spec)
    tokens = {"vision": [4, 900, 0], LANGUAGE_MODEL: [10, 20, 400], IMAGE: [5000, 0, 7]}
    sizes = SampleSizes.of_sequences({name: [[n] for n in own] for name, own in tokens.items()})
    batch_indices = {"vision": (0, 1), LANGUAGE_MODEL: (0, 1, 2), IMAGE: (0, 2)}
    targets = {"vision": (LANGUAGE_MODEL,), LANGUAGE_MODEL: (IMAGE,)}
    step = StepPlan((0, 1, 2), {name: ((own,),) for name, own in batch_indices.items()}, targets)
    cost = StepCost(analytic_costs(spec, PLAIN), plan, step, sizes)
    link = PLAIN.link_bytes_per_ms([0, 1])
    forwards, backwards = ({name: Task(kind, name, 0, 0, 0) for name in plan.modules} for kind in ("fwd", "bwd"))
    for source, target, rows in (("vision", LANGUAGE_MODEL, 4 + 20), (LANGUAGE_MODEL, IMAGE, 10 + 400)):
        there = message_ms(cost, Message("act", forwards[source], forwards[target]))
        back = message_ms(cost, Message("grad", backwards[target], backwards[source]))
        assert there == back == pytest.approx(2 * HIDDEN * rows / link)


@pytest.mark.parametrize(("names", "encoders"), [((IMAGE,), ("vision",)), ((IMAGE, AUDIO), ())])
def test_modules_on_their_own_ranks_take_the_closed_form(names, encoders):
    spec = model_with(*names, encoders=encoders)
    problem = alike(problem_of(6, 24, spec=spec, checkpointing=dict.fromkeys(spec.modules, False)), 4096)
    space = CandidateSpace(problem)
    apart = sorted((own for own in space if not own.colocated_with), key=lambda own: own.step_ms)
    assert apart
    for own in apart[:4]:
        found = step_planner(problem, space.candidate(own)).predict_batch(problem.batches[0])
        assert found.step_ms == pytest.approx(own.step_ms, rel=0.1)
