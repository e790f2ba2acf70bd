"""Orders of tasks: encoders at both ends of a step, and stages that wait for a forward after each backward."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, StepPlan, resolve_plan, sync_groups
from hf_mmparallel.schedule import (
    build_graph,
    build_program,
    in_flight_1f1b,
    in_flight_limits,
    lower,
    schedule_tasks,
    simulate,
)
from hf_mmparallel.schedule.scheduler import Cost
from tests.schedule.builders import Case, make_plan, make_step, straight, task_times


def order_of(case: Case, rank: int) -> list[str]:
    """Module and kind of the tasks of a rank, repetitions left out."""
    actions = build_program(case.plan, case.step, case.sync_groups).actions[rank]
    tasks = [f"{action.task.module} {action.task.kind}" for action in actions if action.task is not None]
    return [task for index, task in enumerate(tasks) if index == 0 or tasks[index - 1] != task]


def first_order_ms(plan: ParallelPlan, step: StepPlan, cost: Cost) -> float:
    """What a step takes by the order in which no stage waits for a forward."""
    graph = build_graph(plan, step)
    return simulate(
        plan, lower(plan, graph, schedule_tasks(plan, graph, cost, in_flight_limits(plan, step)), []), cost
    ).iteration_ms


@pytest.mark.parametrize("shared", [False, True])
def test_encoders_first_runs_encoders_at_both_ends(shared):
    ranks = [[(0,), (1,)]]
    modules = {"vision": ranks, LANGUAGE_MODEL: ranks if shared else [[(2,), (3,)]]}
    spec, plan = make_plan(modules, schedule="encoders_first")
    rows = [[index] for index in range(6)]
    case = Case(plan, make_step({"vision": [rows], LANGUAGE_MODEL: [rows]}), sync_groups(spec, plan))
    encoder, language = ["vision fwd", "vision bwd"], [f"{LANGUAGE_MODEL} fwd", f"{LANGUAGE_MODEL} bwd"]
    last = order_of(case, 1 if shared else 3)
    assert [task for task in last if task in language] == language * 6  # one forward, one backward
    for rank in (0, 1):
        own = order_of(case, rank)
        assert [task for task in own if task in encoder] == encoder
        if shared:
            assert own[0] == encoder[0] and own[-1] == encoder[1]
    peaks = simulate(plan, build_program(plan, case.step, case.sync_groups)).peak_in_flight
    assert [peaks["vision", 0, stage] for stage in range(2)] == [6, 6]
    assert [peaks[LANGUAGE_MODEL, 0, stage] for stage in range(2)] == [2, 1]


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(4, 16), st.integers(0, 10**6))
def test_waiting_for_a_forward_after_each_backward_never_makes_a_step_longer(encoder, language, count, seed):
    case = straight({"vision": encoder, LANGUAGE_MODEL: language}, count)
    scale = np.random.default_rng(seed).uniform(0.5, 2, 2)
    times = {name: np.full(count, own) for name, own in zip(case.plan.modules, scale, strict=True)}
    cost = task_times(case.plan, case.step, times)
    found = simulate(case.plan, build_program(case.plan, case.step, [], cost), cost)
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
    after = simulate(plan, build_program(plan, step, [], cost), cost).iteration_ms
    assert after < 0.999 * before if schedule == "1f1b" else after <= before
