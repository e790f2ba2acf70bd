"""Programs with modules behind the language model: complete, possible, as deep and as fast as they should be."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.drawing.timeline import chrome_trace, gantt_png, gantt_text
from hf_mmparallel.plan import LANGUAGE_MODEL, sync_groups
from hf_mmparallel.plan.parallel_plan import Schedule
from hf_mmparallel.schedule import (
    GradientFlow,
    Simulation,
    Task,
    TaskGraph,
    build_graph,
    build_program,
    check_program,
    in_flight_1f1b,
    in_flight_eager,
    simulate,
    stage_depths,
)
from tests.schedule.builders import Case, cases, make_plan, make_step, module_spec
from tests.schedule.test_program import uneven

IMAGE, AUDIO = "image_generator", "audio_generator"
ALL = frozenset(range(-1, 9))
SETTINGS = settings(max_examples=50)


def straight(
    stages: dict[str, int],
    count: int,
    schedule: Schedule = "1f1b",
    frozen: tuple[str, ...] = (),
    generated: frozenset[int] | None = None,
) -> Case:
    """
    One replica of each module, one sample a microbatch; `stages` are in the order of the model. Of the samples those
    in `generated` are generated, all when left out.
    """
    specs = {
        name: module_spec(name, 8, ALL if name in frozen else frozenset(), (0,) if name == "vision" else ())
        for name in stages
    }
    first, modules = 0, {}
    for name, num_stages in stages.items():
        modules[name] = [[(rank,) for rank in range(first, first + num_stages)]]
        first += num_stages
    spec, plan = make_plan(modules, specs, schedule)
    rows = [[batch_index] for batch_index in range(count)]
    taken = [[batch_index] if generated is None or batch_index in generated else [] for batch_index in range(count)]
    generators = tuple(name for name in stages if name not in ("vision", LANGUAGE_MODEL))
    step = make_step({name: [taken if name in generators else rows] for name in stages}, generators)
    return Case(plan, step, sync_groups(spec, plan))


def run(case: Case, cost=None) -> Simulation:
    return simulate(case.plan, build_program(case.plan, case.step, case.sync_groups, cost), cost)


def least_ms(case: Case, graph: TaskGraph, cost) -> float:
    """No order of the tasks is faster: the work of the busiest rank, and the longest way through the graph."""
    busy: Counter[int] = Counter()
    end: list[float] = []
    for task, sources in zip(graph.tasks, graph.predecessors, strict=True):
        for rank in case.plan.stage(*task.stage_key).all_ranks:
            busy[rank] += cost(task)
        end.append(cost(task) + max((end[source] for source in sources), default=0.0))
    return max([*busy.values(), *end], default=0.0)


@SETTINGS
@given(
    st.sampled_from([(IMAGE,), (IMAGE, AUDIO)]).flatmap(lambda names: cases(names)),
    st.booleans(),
)
def test_any_layout_has_a_program_that_loses_nothing(case, training):
    program = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    check_program(case.plan, case.step, case.sync_groups, program, training)
    simulation = simulate(case.plan, program, uneven)
    graph = build_graph(case.plan, case.step, training)
    assert {span.task for span in simulation.spans} == set(graph.tasks)
    assert simulation.iteration_ms >= least_ms(case, graph, uneven) - 1e-9
    for name, replicas in case.step.microbatches.items():
        for replica, microbatches in enumerate(replicas):
            forwards = {
                t.microbatch for t in graph.tasks if t.kind == "fwd" and (t.module, t.replica) == (name, replica)
            }
            assert forwards == {index for index, batch_indices in enumerate(microbatches) if batch_indices}


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
    program = build_program(case.plan, case.step, case.sync_groups)
    check_program(case.plan, case.step, case.sync_groups, program)
    if LANGUAGE_MODEL not in backwards:  # its forwards wait for nobody, as far ahead as they can
        assert run(case).peak_in_flight[LANGUAGE_MODEL, 0, 0] == 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager"])
def test_a_generator_on_the_ranks_of_the_language_model(schedule):
    ranks = [[(0,), (1,)]]
    specs = {name: module_spec(name, 4) for name in (LANGUAGE_MODEL, IMAGE)}
    spec, plan = make_plan({LANGUAGE_MODEL: ranks, IMAGE: ranks}, specs, schedule)
    rows = [[batch_index] for batch_index in range(6)]
    step = make_step({LANGUAGE_MODEL: [rows], IMAGE: [rows]}, (IMAGE,))
    program = build_program(plan, step, sync_groups(spec, plan))
    check_program(plan, step, sync_groups(spec, plan), program)
    simulation = simulate(plan, program)
    assert simulation.busy_ms == {0: 36.0, 1: 36.0}
    assert simulation.iteration_ms <= 36 + 6


def test_several_replicas_of_the_language_model_feed_one_generator():
    specs = {name: module_spec(name, 4) for name in (LANGUAGE_MODEL, IMAGE)}
    spec, plan = make_plan({LANGUAGE_MODEL: [[(0,)], [(1,)]], IMAGE: [[(2,)]]}, specs)
    step = make_step({LANGUAGE_MODEL: [[[0], [2]], [[1], [3]]], IMAGE: [[[0, 1], [2, 3]]]}, (IMAGE,))
    program = build_program(plan, step, sync_groups(spec, plan))
    check_program(plan, step, sync_groups(spec, plan), program)
    graph = build_graph(plan, step)
    place = graph.tasks.index(Task("fwd", IMAGE, 0, 0, 1))
    assert {str(graph.tasks[source]) for source in graph.predecessors[place]} == {
        "fwd language_model.r0.s0 mb1.c0",
        "fwd language_model.r1.s0 mb1.c0",
    }
    assert simulate(plan, program).iteration_ms == 9.0


def test_pictures_show_generators(tmp_path):
    simulation = run(straight({"vision": 1, LANGUAGE_MODEL: 1, IMAGE: 1}, 3))
    assert simulation.iteration_ms == 15
    assert gantt_text(simulation, width=15).splitlines()[1:] == [
        "rank 0  vision s0          |012....aa.bb.cc|",
        "rank 1  language_model s0  |.01..aa2bb.cc..|",
        "rank 2  image_generator s0 |..0aa1bb2cc....|",
    ]
    gantt_png(simulation, tmp_path / "generator.png")
    chrome_trace(simulation, tmp_path / "trace.json")
    assert f"fwd {IMAGE}.r0.s0 mb2.c0" in (tmp_path / "trace.json").read_text()


def test_a_language_model_that_feeds_no_generator_is_ahead_of_none():
    """Its replicas are alike; only what the first takes is generated, which is a part of the step by itself."""
    ranks = {LANGUAGE_MODEL: [[(0,), (1,)], [(2,), (3,)]], IMAGE: [[(4,), (5,), (6,)]]}
    spec, plan = make_plan(ranks, {name: module_spec(name, 8) for name in ranks})
    rows = [[[2 * batch_index + d] for batch_index in range(6)] for d in range(2)]
    step = make_step({LANGUAGE_MODEL: rows, IMAGE: [rows[0]]}, (IMAGE,))
    max_in_flight = in_flight_1f1b(plan, step)
    assert [max_in_flight[LANGUAGE_MODEL, d, 0] for d in range(2)] == [2 + 3, 2]
    program = build_program(plan, step, sync_groups(spec, plan))
    check_program(plan, step, sync_groups(spec, plan), program)
    peaks = simulate(plan, program).peak_in_flight
    assert [peaks[LANGUAGE_MODEL, d, 0] for d in range(2)] == [5, 2]
