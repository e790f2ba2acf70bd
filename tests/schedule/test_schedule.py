"""What the policies promise: times, orders, memory in flight, deferral, where gradients flow, speed of planning."""

import itertools
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, StepPlan, resolve_plan, sync_groups
from hf_mmparallel.plan.parallel_plan import Schedule
from hf_mmparallel.schedule import (
    GradientFlow,
    Task,
    Timeline,
    build_graph,
    build_program,
    in_flight_1f1b,
    in_flight_eager,
    in_flight_limits,
    microbatch_forward_ms,
    order_tasks,
    stage_depths,
)
from hf_mmparallel.schedule.scheduler import Cost, default_cost
from tests.schedule.builders import (
    Case,
    chain,
    deferred,
    make_plan,
    make_step,
    module_spec,
    straight,
    task_times,
    timed,
    timeline_of,
)

IMAGE, AUDIO = "image_generator", "audio_generator"


def run(case: Case, cost=None, **more: float) -> Timeline:
    return timeline_of(case.plan, case.step, case.sync_groups, cost, **more)


def planned(modules: dict, microbatches: dict, specs: dict | None = None, **more) -> Case:
    """Modules on ranks with their microbatches; without `specs` they have eight layers."""
    features = {name: (0,) if name == "vision" else () for name in modules}
    specs = specs or {name: module_spec(name, 8, feature_layers=own) for name, own in features.items()}
    spec, plan = make_plan(modules, specs, **more)
    generators = tuple(name for name in modules if name in (IMAGE, AUDIO))
    return Case(plan, make_step(microbatches, generators), sync_groups(spec, plan))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager"])
@pytest.mark.parametrize(
    "stages",
    [
        {LANGUAGE_MODEL: 1},
        {"vision": 1, LANGUAGE_MODEL: 6},
        {LANGUAGE_MODEL: 2, IMAGE: 1},
        {"vision": 2, LANGUAGE_MODEL: 3, IMAGE: 2},
        {"vision": 1, LANGUAGE_MODEL: 1, IMAGE: 1, AUDIO: 4},
    ],
)
@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("backward_ms", [1.0, 2.0, 3.0])
def test_equal_stages_take_sum_plus_rest_times_max(backward_ms, count, stages, schedule):
    simulation = run(straight(stages, count, schedule), lambda task: 1.0 if task.kind == "fwd" else backward_ms)
    longest = sum(stages.values()) - (stages[IMAGE] if AUDIO in stages else 0)
    expected = (longest + count - 1) * (1.0 + backward_ms)
    assert simulation.iteration_ms == expected
    assert simulation.bubble_fraction == pytest.approx(1 - count * (1.0 + backward_ms) / expected)


def test_messages_and_sums_take_time():
    case = chain(3, 4)
    assert run(case, comm_ms=0.5).iteration_ms >= run(case).iteration_ms + 4 * 0.5
    case = planned({LANGUAGE_MODEL: [[(0,)], [(1,)]]}, {LANGUAGE_MODEL: [[[0]], [[1], [2]]]})
    assert run(case).iteration_ms == 6
    assert run(case, sync_ms=2.5).iteration_ms == 8.5


def test_replicas_of_a_shared_encoder_do_not_starve():
    # One encoder feeds two language models in turn: it needs twice the microbatches in flight.
    step = {"vision": [[[i] for i in range(16)]], LANGUAGE_MODEL: [[[2 * i + d] for i in range(8)] for d in range(2)]}
    case = planned({"vision": [[(0,)]], LANGUAGE_MODEL: [[(1,), (2,)], [(3,), (4,)]]}, step)
    assert in_flight_1f1b(case.plan, case.step)["vision", 0, 0] == 5
    # Each language-model rank is busy for 16 ms; filling and draining take the rest.
    assert run(case, lambda task: 0.25 if task.module == "vision" else 1.0).iteration_ms == 19.0


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
    case = straight({"vision": 1, LANGUAGE_MODEL: 2, IMAGE: 2}, 12, generated=frozenset({0, 5, 6, 11}))
    assert in_flight_1f1b(case.plan, case.step) == stage_depths(case.plan)
    # What is generated takes the whole way, all else as long as without a generator.
    none, every = ({"vision": 1, LANGUAGE_MODEL: 2, **more} for more in ({}, {IMAGE: 2}))
    assert run(straight(none, 12)).iteration_ms <= run(case).iteration_ms <= run(straight(every, 12)).iteration_ms


# The gradients that cross from module to module, in the order in which they do.
CROSSING = [(IMAGE, LANGUAGE_MODEL), (LANGUAGE_MODEL, "vision")]


@pytest.mark.parametrize(
    ("frozen", "backwards", "gradients"),
    [
        ((), {"vision", LANGUAGE_MODEL, IMAGE}, CROSSING),
        (("vision", LANGUAGE_MODEL), {IMAGE}, []),
        (("vision",), {LANGUAGE_MODEL, IMAGE}, CROSSING[:1]),
        (("vision", IMAGE), {LANGUAGE_MODEL, IMAGE}, CROSSING[:1]),
        ((LANGUAGE_MODEL, IMAGE), {"vision", LANGUAGE_MODEL, IMAGE}, CROSSING),
        (("vision", LANGUAGE_MODEL, IMAGE), set(), []),
    ],
)
def test_gradients_flow_where_something_trainable_lies_before(frozen, backwards, gradients):
    case = straight({"vision": 1, LANGUAGE_MODEL: 2, IMAGE: 2}, 3, frozen=frozen)
    flow, graph = GradientFlow(case.plan), build_graph(case.plan, case.step)
    stages = {key for key in stage_depths(case.plan) if flow.has_backward(*key)}
    assert stages == {task.stage_key for task in graph.tasks if task.kind == "bwd"}
    assert {name for name, _, _ in stages} == backwards
    crossing = [m for m in graph.messages if m.kind == "grad" and m.crosses_boundary]
    assert {(m.source.module, m.target.module) for m in crossing} == set(gradients)
    if LANGUAGE_MODEL not in backwards:  # its forwards wait for nobody, as far ahead as they can
        assert run(case).peak_in_flight[LANGUAGE_MODEL, 0, 0] == 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager"])
def test_a_generator_on_the_ranks_of_the_language_model(schedule):
    ranks, rows = [[(0,), (1,)]], [[[batch_index] for batch_index in range(6)]]
    simulation = run(
        planned({LANGUAGE_MODEL: ranks, IMAGE: ranks}, {LANGUAGE_MODEL: rows, IMAGE: rows}, schedule=schedule)
    )
    assert simulation.busy_ms == {0: 36.0, 1: 36.0}
    assert simulation.iteration_ms <= 36 + 6


def order_of(case: Case, rank: int) -> list[str]:
    """Module and kind of the tasks of a rank, repetitions left out."""
    actions = build_program(case.plan, case.step, case.sync_groups).actions[rank]
    tasks = (f"{action.task.module} {action.task.kind}" for action in actions if action.task is not None)
    return [task for task, _ in itertools.groupby(tasks)]


def first_order_ms(plan: ParallelPlan, step: StepPlan, cost: Cost) -> float:
    """What a step takes by the order in which no stage waits for a forward."""
    graph = build_graph(plan, step)
    order = order_tasks(plan, graph, list(map(cost, graph.tasks)), in_flight_limits(plan, step))
    return timed(plan, graph, order, list(map(cost, graph.tasks))).iteration_ms


@pytest.mark.parametrize("shared", [False, True])
def test_encoders_first_runs_encoders_at_both_ends(shared):
    ranks, rows = [[(0,), (1,)]], [[[index] for index in range(6)]]
    modules = {"vision": ranks, LANGUAGE_MODEL: ranks if shared else [[(2,), (3,)]]}
    case = planned(modules, {"vision": rows, LANGUAGE_MODEL: rows}, schedule="encoders_first")
    encoder, language = ["vision fwd", "vision bwd"], [f"{LANGUAGE_MODEL} fwd", f"{LANGUAGE_MODEL} bwd"]
    last = order_of(case, 1 if shared else 3)
    assert [task for task in last if task in language] == language * 6  # one forward, one backward
    for rank in (0, 1):
        own = order_of(case, rank)
        assert [task for task in own if task in encoder] == encoder
        assert not shared or [own[0], own[-1]] == encoder
    peaks = run(case).peak_in_flight
    assert [peaks[name, 0, stage] for name in ("vision", LANGUAGE_MODEL) for stage in range(2)] == [6, 6, 2, 1]


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 6), (4, 16)])
def test_on_shared_ranks_encoders_fill_what_the_language_model_leaves(num_ranks, count):
    """Equal stages take as long as in DIP's order, in which encoders hold all microbatches."""
    ranks, rows = [[(rank,) for rank in range(num_ranks)]], [[[index] for index in range(count)]]
    names = ("vision", LANGUAGE_MODEL)
    found = {}
    for schedule in ("1f1b", "encoders_first"):
        found[schedule] = run(planned(dict.fromkeys(names, ranks), dict.fromkeys(names, rows), schedule=schedule))
        assert found[schedule].iteration_ms == 3 * (2 * count + num_ranks - 1)
    in_flight = {schedule: own.peak_in_flight["vision", 0, 0] for schedule, own in found.items()}
    assert in_flight == {"1f1b": 2 * num_ranks, "encoders_first": count}


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(4, 16), st.integers(0, 10**6))
def test_waiting_for_a_forward_after_each_backward_never_makes_a_step_longer(encoder, language, count, seed):
    case = straight({"vision": encoder, LANGUAGE_MODEL: language}, count)
    scale = np.random.default_rng(seed).uniform(0.5, 2, 2)
    times = {name: np.full(count, own) for name, own in zip(case.plan.modules, scale, strict=True)}
    cost = task_times(case.plan, case.step, times)
    found = timeline_of(case.plan, case.step, [], cost)
    assert found.iteration_ms <= first_order_ms(case.plan, case.step, cost) * (1 + 1e-9)
    max_in_flight = in_flight_1f1b(case.plan, case.step)
    assert all(peak <= max_in_flight[key] for key, peak in found.peak_in_flight.items())


@pytest.mark.parametrize("schedule", ["1f1b", "eager"])
@pytest.mark.parametrize("arrangement", ["hierarchical", "entrain", "disttrain"])
@pytest.mark.parametrize(("dataset", "model"), [("llava-150k", "llama3-3b"), ("cocoqa", "llama3-3b")])
def test_stages_of_entrains_plans_are_faster_when_they_wait_for_a_forward(dataset, model, arrangement, schedule):
    shape, times = PUBLISHED[dataset], PUBLISHED_MODELS[model]
    stages = shape.stated.parallel_sizes[model]["entrain"]
    names = ("vision", LANGUAGE_MODEL)
    sizes = {name: ModulePlugin(pp_size=count) for name, count in zip(names, stages, strict=True)}
    plan = resolve_plan(times.spec, sizes, schedule=schedule)
    work = times.workloads(shape.draw(128, 3))
    step = arrange_step(plan, range(128), work, 4, arrangement)
    cost = task_times(plan, step, work.forward_ms)
    before = first_order_ms(plan, step, cost)
    after = timeline_of(plan, step, [], cost).iteration_ms
    assert after < 0.999 * before if schedule == "1f1b" else after <= before


def balanced(case: Case):
    """Microbatches of a module take equally long, a chunk its share of one; a backward takes two forwards."""

    def cost(task):
        batch_indices = case.step.chunks[task.module, task.replica, task.microbatch][task.chunk]
        whole = case.step.microbatches[task.module][task.replica][task.microbatch]
        return len(batch_indices) / len(whole) * default_cost(task)

    return cost


def last_end(case: Case, max_in_flight) -> float:
    graph, cost = build_graph(case.plan, case.step), balanced(case)
    order = order_tasks(case.plan, graph, list(map(cost, graph.tasks)), max_in_flight)
    return timed(case.plan, graph, order, list(map(cost, graph.tasks))).iteration_ms


def iteration_ms(case: Case, schedule: Schedule) -> float:
    return run(replace(case, plan=replace(case.plan, schedule=schedule)), balanced(case)).iteration_ms


def test_an_encoder_needs_one_more_in_flight_when_samples_are_deferred():
    plain, late = chain(4, 8), deferred(1, 3, 8)
    assert in_flight_1f1b(plain.plan, plain.step) == stage_depths(plain.plan)
    depths = stage_depths(late.plan)
    assert depths["vision", 0, 0] == 4
    assert in_flight_1f1b(late.plan, late.step) == {**depths, ("vision", 0, 0): 5}


def test_deferral_does_not_stall_1f1b():
    case = deferred(1, 3, 16)
    unlimited = last_end(case, {})
    assert last_end(case, in_flight_1f1b(case.plan, case.step)) == pytest.approx(unlimited)
    assert last_end(case, stage_depths(case.plan)) > unlimited + 2


@pytest.mark.parametrize(("stages", "loss"), [((1, 3), 1.0), ((3, 3), 1.04), ((5, 3), 1.06), ((8, 3), 1.07)])
def test_eager_is_as_fast_as_unlimited_memory_and_1f1b_nearly(stages, loss):
    case = deferred(stages[0], stages[1], 32)
    unlimited = last_end(case, {})
    assert iteration_ms(case, "eager") == pytest.approx(unlimited)
    assert unlimited <= iteration_ms(case, "1f1b") <= loss * unlimited * (1 + 1e-9)
    assert (iteration_ms(case, "1f1b") > unlimited) == (stages != (1, 3))


def test_eager_takes_the_caps_that_it_is_given_but_none_below_1f1b():
    case = deferred(2, 2, 16, "eager")
    least = in_flight_1f1b(case.plan, case.step)
    given = {("vision", 0, 0): 9.0, ("vision", 0, 1): 1.0, (LANGUAGE_MODEL, 0, 0): 2.0}
    assert in_flight_limits(case.plan, case.step, given) == {**least, ("vision", 0, 0): 9.0}
    peaks = timeline_of(case.plan, case.step, case.sync_groups, fitting_in_flight=given).peak_in_flight
    assert least["vision", 0, 0] < peaks["vision", 0, 0] < 10  # chunks of an admitted microbatch are not held back
    assert in_flight_limits(case.plan, case.step) == in_flight_eager(case.plan, case.step)
    assert list(in_flight_eager(case.plan, case.step).values()) == [2, 1, 7, 6]  # the language model, then the encoder


@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_an_encoder_never_waits_for_what_it_sent_to_be_taken(frozen):
    plan = straight({"vision": 1, LANGUAGE_MODEL: 2}, 8, "eager", frozen).plan
    step = deferred(1, 2, 8).step

    def cost(task):
        return 10.0 if task.module == LANGUAGE_MODEL else 1.0

    program = build_program(plan, step, [], cost, fitting_in_flight={("vision", 0, 0): math.inf})
    actions = program.actions[0]
    forwards = [index for index, action in enumerate(actions) if action.op == "fwd"]
    assert all(actions[index + 1].op == "send" for index in forwards)
    assert forwards == list(range(0, 2 * len(forwards), 2))
    timeline = timeline_of(plan, step, [], cost, 3.0, fitting_in_flight={("vision", 0, 0): math.inf})
    spans = [s for s in timeline.spans if s.rank == 0 and s.task.kind == "fwd"]
    assert [span.start_ms for span in spans] == list(range(12))
    # What is taken later is never asked for before what is taken earlier.
    received = [a.message for a in program.actions[1] if a.op == "recv" and a.message is not None]
    assert [m.source for m in received if m.crosses_boundary] == [span.task for span in spans]


def test_a_rank_needs_its_own_part_only():
    case = deferred(2, 2, 8, "eager")
    program = build_program(case.plan, case.step, case.sync_groups)
    for rank, actions in program.actions.items():
        own = pickle.loads(pickle.dumps(program.of_rank(rank)))
        assert own.actions == {rank: actions}
        tasks = [action.task for action in actions if action.task is not None]
        assert all(own.has_backward(task) == program.has_backward(task) for task in tasks)
    assert program.of_rank(99).actions == {99: ()}


def test_forward_times_of_microbatches():
    case = deferred(2, 2, 4)
    spans = timeline_of(case.plan, case.step, case.sync_groups, balanced(case)).spans
    found = microbatch_forward_ms(spans)
    assert list(found) == [(LANGUAGE_MODEL, 0), ("vision", 0)]
    assert all(np.allclose(times, [2.0] * 4) for times in found.values())  # two stages of one millisecond
    slower = [replace(span, end_ms=span.end_ms + 1, rank=7) for span in spans if span.task.kind == "fwd"]
    assert microbatch_forward_ms([*slower, *spans])[LANGUAGE_MODEL, 0] == pytest.approx([4.0] * 4)
    assert microbatch_forward_ms([]) == {}
