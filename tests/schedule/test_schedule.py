"""What the policies promise: times, memory in flight, where gradients flow, and speed of planning."""

import time

import pytest

from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, resolve_plan, sync_groups
from hf_mmparallel.schedule import GradientFlow, Simulation, Task, build_graph, build_program, in_flight_1f1b, simulate
from tests.deep_cases import deep
from tests.schedule.builders import Case, chain, make_plan, make_step, module_spec


def run(case: Case, cost=None, **more: float) -> Simulation:
    return simulate(case.plan, build_program(case.plan, case.step, case.sync_groups, cost), cost, **more)


def planned(modules: dict, microbatches: dict, specs: dict | None = None) -> Case:
    """Modules on ranks with their microbatches."""
    spec, plan = make_plan(modules, specs)
    return Case(plan, make_step(microbatches), sync_groups(spec, plan))


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("backward_ms", [1.0, 2.0, 3.0])
def test_uniform_chain_takes_sum_plus_rest_times_max(num_stages, num_microbatches, backward_ms):
    simulation = run(chain(num_stages, num_microbatches), lambda task: 1.0 if task.kind == "fwd" else backward_ms)
    expected = (num_stages + num_microbatches - 1) * (1.0 + backward_ms)
    assert simulation.iteration_ms == expected
    assert simulation.bubble_fraction == pytest.approx(1 - num_microbatches * (1.0 + backward_ms) / expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_microbatches_in_flight(schedule):
    simulation = run(chain(4, 8, schedule))
    stages = [("vision", 0, 0), *((LANGUAGE_MODEL, 0, s) for s in range(3))]
    expected = [4, 3, 2, 1] if schedule == "1f1b" else [8] * 4
    assert [simulation.peak_in_flight[stage] for stage in stages] == expected


def test_messages_and_sums_take_time():
    case = chain(3, 4)
    assert run(case, comm_ms=0.5).iteration_ms >= run(case).iteration_ms + 4 * 0.5
    case = planned({LANGUAGE_MODEL: [[(0,)], [(1,)]]}, {LANGUAGE_MODEL: [[[0]], [[1], [2]]]})
    assert run(case).iteration_ms == 6
    assert run(case, sync_ms=2.5).iteration_ms == 8.5


def test_chunks_count_as_shares_of_a_microbatch():
    # Sample 1 is encoded in microbatch 0 and consumed in microbatch 1.
    step = {"vision": [[[0, 1], [2, 3]]], LANGUAGE_MODEL: [[[0], [1, 2, 3]]]}
    case = planned({"vision": [[(0,)]], LANGUAGE_MODEL: [[(1,)]]}, step)
    tasks = [task for task in build_graph(case.plan, case.step).tasks if task.module == "vision"]
    assert [(t.microbatch, t.chunk) for t in tasks if t.kind == "fwd"] == [(0, 0), (0, 1), (1, 0)]
    assert run(case).peak_in_flight["vision", 0, 0] == 2


def test_an_encoder_is_as_far_ahead_as_the_arrangement_needs():
    # The first microbatch of the language model needs all microbatches of the encoder.
    step = {"vision": [[[3], [2], [1], [0]]], LANGUAGE_MODEL: [[[], [], [], [0, 1, 2, 3]]]}
    case = planned({"vision": [[(0,)]], LANGUAGE_MODEL: [[(1,)]]}, step)
    assert in_flight_1f1b(case.plan, case.step)["vision", 0, 0] == 5
    assert run(case).peak_in_flight["vision", 0, 0] == 4


def test_replicas_of_a_shared_encoder_do_not_starve():
    # One encoder feeds two language models in turn: it needs twice the microbatches in flight.
    step = {"vision": [[[i] for i in range(16)]], LANGUAGE_MODEL: [[[2 * i + d] for i in range(8)] for d in range(2)]}
    case = planned({"vision": [[(0,)]], LANGUAGE_MODEL: [[(1,), (2,)], [(3,), (4,)]]}, step)
    assert in_flight_1f1b(case.plan, case.step)["vision", 0, 0] == 5
    # Each language-model rank is busy for 16 ms; filling and draining take the rest.
    assert run(case, lambda task: 0.25 if task.module == "vision" else 1.0).iteration_ms == 19.0


@pytest.mark.parametrize(
    ("vision", "language", "expected"),
    [
        ((), (), {"vision": [True, True], LANGUAGE_MODEL: [True, True]}),
        (range(-1, 5), range(-1, 5), {"vision": [False, False], LANGUAGE_MODEL: [False, False]}),
        (range(-1, 4), range(-1, 5), {"vision": [False, True], LANGUAGE_MODEL: [True, True]}),
        (range(-1, 5), range(-1, 2), {"vision": [False, False], LANGUAGE_MODEL: [False, True]}),
    ],
)
def test_backwards_exist_where_something_trainable_lies_before(vision, language, expected):
    specs = {
        "vision": module_spec("vision", 4, frozenset(vision), (0,)),
        LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL, 4, frozenset(language)),
    }
    _, plan = make_plan({"vision": [[(0,), (1,)]], LANGUAGE_MODEL: [[(2,), (3,)]]}, specs)
    flow = GradientFlow(plan)
    assert {name: [flow.has_backward(name, 0, s) for s in range(2)] for name in expected} == expected
    graph = build_graph(plan, make_step({"vision": [[[0]]], LANGUAGE_MODEL: [[[0]]]}))
    for name, stages in expected.items():
        for stage, has in enumerate(stages):
            assert (Task("bwd", name, 0, stage, 0) in graph.tasks) == has
    for message in graph.messages:
        if message.kind == "grad":
            assert flow.has_backward(*message.target.stage_key)


def test_samples_without_features_need_no_backward_through_a_frozen_language_model():
    specs = {
        "vision": module_spec("vision", feature_layers=(0,)),
        LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL, 4, frozenset(range(-1, 5))),
    }
    step = {"vision": [[[0], []]], LANGUAGE_MODEL: [[[0], [1]]]}
    case = planned({"vision": [[(0,)]], LANGUAGE_MODEL: [[(1,), (2,)]]}, step, specs)
    program = build_program(case.plan, case.step, case.sync_groups)
    assert program.has_backward(Task("fwd", LANGUAGE_MODEL, 0, 1, 0))
    assert not program.has_backward(Task("fwd", LANGUAGE_MODEL, 0, 1, 1))
    assert GradientFlow(case.plan).has_backward(LANGUAGE_MODEL, 0, 1)


def test_deepstack_features_enter_later_stages():
    specs = {"vision": module_spec("vision", 4, frozenset(), (0, 3)), LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL)}
    step = {"vision": [[[0]]], LANGUAGE_MODEL: [[[0]]]}
    case = planned({"vision": [[(0,)]], LANGUAGE_MODEL: [[(1,), (2,)]]}, step, specs)
    messages = build_graph(case.plan, case.step).messages
    assert {str(message) for message in messages if message.crosses_boundary} == {
        "act fwd vision.r0.s0 mb0.c0 -> fwd language_model.r0.s0 mb0.c0",
        "act fwd vision.r0.s0 mb0.c0 -> fwd language_model.r0.s1 mb0.c0",
        "grad bwd language_model.r0.s0 mb0.c0 -> bwd vision.r0.s0 mb0.c0",
        "grad bwd language_model.r0.s1 mb0.c0 -> bwd vision.r0.s0 mb0.c0",
    }


@pytest.mark.parametrize("replicas", [16, deep(256)])
def test_thousands_of_ranks_are_planned_in_seconds(replicas):
    stages = microbatches = 16
    spec = ModelSpec({LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL, stages)})
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=replicas, pp_size=stages)})
    rows = [[[d * microbatches + i] for i in range(microbatches)] for d in range(replicas)]
    start = time.process_time()
    program = build_program(plan, make_step({LANGUAGE_MODEL: rows}), sync_groups(spec, plan))
    simulation = simulate(plan, program)
    assert simulation.num_ranks == 16 * replicas
    assert simulation.iteration_ms == (stages + microbatches - 1) * 3
    assert time.process_time() - start < 20 * replicas / 256 + 1
