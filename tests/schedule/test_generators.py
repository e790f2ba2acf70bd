"""Programs with modules behind the language model: as deep and as fast as they should be."""

import pytest

from hf_mmparallel.plan import LANGUAGE_MODEL, sync_groups
from hf_mmparallel.schedule import (
    GradientFlow,
    Simulation,
    Task,
    build_graph,
    build_program,
    in_flight_1f1b,
    in_flight_eager,
    simulate,
    stage_depths,
)
from tests.schedule.builders import Case, make_plan, make_step, module_spec, straight

IMAGE, AUDIO = "image_generator", "audio_generator"


def run(case: Case, cost=None) -> Simulation:
    return simulate(case.plan, build_program(case.plan, case.step, case.sync_groups, cost), cost)


def generating(
    language: list[list[tuple[int]]], image: list[list[tuple[int]]], taken: list, generated: list, **more
) -> Case:
    """A language model and a generator on these ranks, with these microbatches."""
    ranks = {LANGUAGE_MODEL: language, IMAGE: image}
    spec, plan = make_plan(ranks, {name: module_spec(name, 8) for name in ranks}, **more)
    return Case(plan, make_step({LANGUAGE_MODEL: taken, IMAGE: generated}, (IMAGE,)), sync_groups(spec, plan))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager"])
@pytest.mark.parametrize(
    "stages",
    [
        {LANGUAGE_MODEL: 2, IMAGE: 1},
        {"vision": 2, LANGUAGE_MODEL: 3, IMAGE: 2},
        {"vision": 1, LANGUAGE_MODEL: 1, IMAGE: 1, AUDIO: 4},
    ],
)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_equal_stages_take_the_closed_form(stages, count, schedule):
    longest = sum(stages.values()) - (stages[IMAGE] if AUDIO in stages else 0)
    assert run(straight(stages, count, schedule)).iteration_ms == pytest.approx(3 * longest + (count - 1) * 3)


@pytest.mark.parametrize(("slowest", "hidden_ms"), [("vision", 6.0), (LANGUAGE_MODEL, 3.0), (IMAGE, 0.0)])
def test_one_slow_module_sets_the_pace(slowest, hidden_ms):
    case = straight({"vision": 1, LANGUAGE_MODEL: 1, IMAGE: 1}, 10)

    def cost(task: Task) -> float:
        return (4.0 if task.module == slowest else 1.0) * (1 if task.kind == "fwd" else 2)

    # The sum of all stages and nine times the slowest, less what the modules behind do while it goes on.
    assert run(case, cost).iteration_ms == 3 + 3 + 12 + 9 * 12 - hidden_ms


def test_modules_in_front_are_as_deep_as_the_generator_is_long():
    case = straight({"vision": 2, LANGUAGE_MODEL: 2, IMAGE: 1, AUDIO: 3}, 12)
    depths = stage_depths(case.plan)
    expected = {"vision": [7, 6], LANGUAGE_MODEL: [5, 4], IMAGE: [1], AUDIO: [3, 2, 1]}
    assert depths == {(name, 0, stage): d for name, own in expected.items() for stage, d in enumerate(own)}
    assert in_flight_1f1b(case.plan, case.step) == depths
    assert run(case).peak_in_flight == depths
    assert {
        name for (name, _, _), limit in in_flight_eager(case.plan, case.step).items() if limit > depths[name, 0, 0]
    } == {"vision"}


def test_samples_that_are_not_generated_do_not_change_the_depth():
    some = frozenset({0, 5, 6, 11})
    case = straight({"vision": 1, LANGUAGE_MODEL: 2, IMAGE: 2}, 12, generated=some)
    assert in_flight_1f1b(case.plan, case.step) == stage_depths(case.plan)
    graph = build_graph(case.plan, case.step)
    assert {task.microbatch for task in graph.tasks if task.module == IMAGE} == some
    waits = {
        task.microbatch
        for task, sources in zip(graph.tasks, graph.predecessors, strict=True)
        if (task.kind, task.module, task.stage) == ("bwd", LANGUAGE_MODEL, 1)
        and any(graph.tasks[source].module == IMAGE for source in sources)
    }
    assert waits == some
    # What is generated takes the whole way, all else as long as without a generator.
    alone = run(straight({"vision": 1, LANGUAGE_MODEL: 2}, 12)).iteration_ms
    assert (
        alone <= run(case).iteration_ms <= run(straight({"vision": 1, LANGUAGE_MODEL: 2, IMAGE: 2}, 12)).iteration_ms
    )


@pytest.mark.parametrize(
    ("frozen", "backwards", "gradients"),
    [
        ((), {"vision", LANGUAGE_MODEL, IMAGE}, {(IMAGE, LANGUAGE_MODEL), (LANGUAGE_MODEL, "vision")}),
        (("vision", LANGUAGE_MODEL), {IMAGE}, set()),
        (("vision",), {LANGUAGE_MODEL, IMAGE}, {(IMAGE, LANGUAGE_MODEL)}),
        (("vision", IMAGE), {LANGUAGE_MODEL, IMAGE}, {(IMAGE, LANGUAGE_MODEL)}),
        (
            (LANGUAGE_MODEL, IMAGE),
            {"vision", LANGUAGE_MODEL, IMAGE},
            {(IMAGE, LANGUAGE_MODEL), (LANGUAGE_MODEL, "vision")},
        ),
        (("vision", LANGUAGE_MODEL, IMAGE), set(), set()),
    ],
)
def test_gradients_flow_where_something_trainable_lies_before(frozen, backwards, gradients):
    case = straight({"vision": 1, LANGUAGE_MODEL: 2, IMAGE: 2}, 3, frozen=frozen)
    flow, graph = GradientFlow(case.plan), build_graph(case.plan, case.step)
    assert {name for name, _, _ in stage_depths(case.plan) if flow.has_backward(name, 0, 0)} == backwards
    assert {task.module for task in graph.tasks if task.kind == "bwd"} == backwards
    crossing = [m for m in graph.messages if m.kind == "grad" and m.crosses_boundary]
    assert {(m.source.module, m.target.module) for m in crossing} == gradients
    if LANGUAGE_MODEL not in backwards:  # its forwards wait for nobody, as far ahead as they can
        assert run(case).peak_in_flight[LANGUAGE_MODEL, 0, 0] == 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager"])
def test_a_generator_on_the_ranks_of_the_language_model(schedule):
    ranks, rows = [[(0,), (1,)]], [[[batch_index] for batch_index in range(6)]]
    simulation = run(generating(ranks, ranks, rows, rows, schedule=schedule))
    assert simulation.busy_ms == {0: 36.0, 1: 36.0}
    assert simulation.iteration_ms <= 36 + 6


def test_several_replicas_of_the_language_model_feed_one_generator():
    case = generating([[(0,)], [(1,)]], [[(2,)]], [[[0], [2]], [[1], [3]]], [[[0, 1], [2, 3]]])
    graph = build_graph(case.plan, case.step)
    place = graph.tasks.index(Task("fwd", IMAGE, 0, 0, 1))
    assert {str(graph.tasks[source]) for source in graph.predecessors[place]} == {
        "fwd language_model.r0.s0 mb1.c0",
        "fwd language_model.r1.s0 mb1.c0",
    }
    assert run(case).iteration_ms == 9.0


def test_a_language_model_that_feeds_no_generator_is_ahead_of_none():
    """Its replicas are alike; only what the first takes is generated, which is a part of the step by itself."""
    rows = [[[2 * batch_index + d] for batch_index in range(6)] for d in range(2)]
    case = generating([[(0,), (1,)], [(2,), (3,)]], [[(4,), (5,), (6,)]], rows, [rows[0]])
    limits, peaks = in_flight_1f1b(case.plan, case.step), run(case).peak_in_flight
    assert [limits[LANGUAGE_MODEL, d, 0] for d in range(2)] == [2 + 3, 2]
    assert [peaks[LANGUAGE_MODEL, d, 0] for d in range(2)] == [5, 2]
