"""A rank plans the replicas that it exchanges tensors with; that gives the program that planning all of them gives."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, StepPlan, Workloads, resolve_plan, sync_groups
from hf_mmparallel.plan.methods import SCHEDULES
from hf_mmparallel.schedule import (
    Action,
    DeadlockError,
    Part,
    Program,
    Task,
    build_graph,
    build_program,
    check_program,
    find_representatives,
    in_flight_limits,
    lower,
    program_of_parts,
    schedule_tasks,
)
from hf_mmparallel.schedule import lowering as lowering_module
from hf_mmparallel.schedule.in_flight import may_alternate
from hf_mmparallel.schedule.program_checks import verify
from tests.plan.specs import model_spec
from tests.schedule.builders import cases, make_plan, make_step, task_times, uneven

SETTINGS = settings(max_examples=60, suppress_health_check=list(HealthCheck))
CASES = st.one_of(cases(), cases(generators=("image",)))
ALL_CASES = st.one_of(CASES, cases(("image",), joint=True))
LM = LANGUAGE_MODEL


def of_rank(case, rank: int, cost=uneven, training: bool = True) -> Program:
    representatives = find_representatives(case.plan, case.sync_groups)
    return representatives.expand(program_of_parts(representatives.parts(case.step, rank), cost, training))


def exchanging(case) -> dict[int, set[int]]:
    """Rank -> the ranks that it shares a task, a message or another rank with, by the tasks of the whole step."""
    root = list(range(case.plan.world_size))

    def find(rank: int) -> int:
        while root[rank] != rank:
            rank = root[rank]
        return rank

    def join(ranks) -> None:
        for rank in ranks:
            root[find(rank)] = find(ranks[0])

    for module in case.plan.modules.values():
        size = module.joint_replicas
        for first in range(0, module.dp_size, size):
            stages = itertools.chain.from_iterable(module.replicas[first : first + size])
            join([rank for stage in stages for rank in stage.all_ranks])
    for message in build_graph(case.plan, case.step).messages:
        join([r for task in (message.source, message.target) for r in case.plan.stage(*task.stage_key).all_ranks])
    roots = [find(rank) for rank in range(case.plan.world_size)]
    return {rank: {other for other, at in enumerate(roots) if at == roots[rank]} for rank in range(len(roots))}


@SETTINGS
@given(ALL_CASES, st.booleans())
def test_a_rank_gets_from_its_part_what_it_gets_from_the_program_of_all_ranks(case, training):
    whole = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    together = exchanging(case)
    used = {rank for module in case.plan.modules.values() for _, _, s in module.stages() for rank in s.all_ranks}
    for rank in sorted(used):
        part = of_rank(case, rank, training=training)
        assert set(part.actions) == together[rank] & used
        assert part.of_rank(rank) == whole.of_rank(rank)
        assert part.times_ms.items() <= whole.times_ms.items()
    assert all(whole.actions[rank] == () for rank in set(range(case.plan.world_size)) - used)


@SETTINGS
@given(CASES)
def test_parts_put_together_are_what_one_simulation_of_all_tasks_gives(case):
    """The plan as one part, without alternation, which each part chooses for itself, and without gradient sums."""
    graph = build_graph(case.plan, case.step)
    timeline = schedule_tasks(case.plan, graph, uneven, in_flight_limits(case.plan, case.step))
    expected = lower(case.plan, graph, timeline, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering_module, "may_alternate", lambda plan: False)
        found = build_program(case.plan, case.step, (), uneven)
    assert found == expected


@SETTINGS
@given(CASES)
def test_each_part_takes_the_better_of_two_orders(case):
    graph = build_graph(case.plan, case.step)
    alternate = may_alternate(case.plan)
    timeline = schedule_tasks(case.plan, graph, uneven, in_flight_limits(case.plan, case.step), alternate)
    found = build_program(case.plan, case.step, (), uneven)
    assert max((end for _, end in found.times_ms.values()), default=0.0) <= max(timeline.end_ms, default=0.0) + 1e-9


@SETTINGS
@given(CASES, st.randoms(use_true_random=False))
def test_gradient_sums_stand_in_one_order_on_all_ranks_whatever_it_is(case, random):
    groups = list(case.sync_groups)
    random.shuffle(groups)
    program = build_program(case.plan, case.step, groups, uneven)
    check_program(case.plan, case.step, groups, program)
    number = find_representatives(case.plan, groups).numbers
    keys = [(frozenset(number[rank] for rank in group.ranks), group.stages, group.parameters) for group in groups]
    for row in program.actions.values():
        # For each sum the index of the first with the same representatives.
        order = [(keys.index(keys[action.index]), action.index) for action in row if action.index is not None]
        assert order == sorted(order)


@SETTINGS
@given(CASES)
def test_sums_of_a_plan_come_in_the_order_in_which_backwards_end(case):
    order = {name: number for number, name in enumerate(case.plan.modules)}
    ends = [min((order[name], index) for name, _, index in group.stages) for group in case.sync_groups]
    assert ends == sorted(ends, reverse=True)


LAYOUTS = {
    "two encoders each": {"vision": ModulePlugin(dp_size=4), LM: ModulePlugin(dp_size=2, pp_size=2, tp_size=2)},
    "shared encoders": {"vision": ModulePlugin(dp_size=2, pp_size=2), LM: ModulePlugin(dp_size=4, tp_size=2)},
    "unlike numbers": {"vision": ModulePlugin(dp_size=3), LM: ModulePlugin(dp_size=2, cp_size=2)},
    "colocated": {
        "vision": ModulePlugin(dp_size=2, tp_size=2),
        LM: ModulePlugin(dp_size=2, tp_size=2, colocate_with="vision"),
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
def test_real_arrangements_with_deferral(arrangement, layout):
    """Each arrangement with each layout and with each schedule."""
    places = sorted(ARRANGEMENTS).index(arrangement) + list(LAYOUTS).index(layout)
    spec, schedule = model_spec(), SCHEDULES[places % len(SCHEDULES)]
    plan = replace(resolve_plan(spec, LAYOUTS[layout]), schedule=schedule)
    random = np.random.default_rng(0)
    times = {name: random.lognormal(0, 1, 64) for name in plan.modules}
    times["vision"][random.random(64) < 0.2] = 0.0
    tokens = {name: np.ceil(100 * own).astype(np.int64) for name, own in times.items()}
    step = arrange_step(plan, range(64), Workloads(times, dict.fromkeys(times, 2.0), tokens, {}), 4, arrangement)
    groups, cost = sync_groups(spec, plan), task_times(plan, step, times)
    whole = build_program(plan, step, groups, cost)
    check_program(plan, step, groups, whole)
    representatives = find_representatives(plan, groups)
    for rank in range(plan.world_size):
        part = representatives.expand(program_of_parts(representatives.parts(step, rank), cost))
        assert part.of_rank(rank) == whole.of_rank(rank)


def work(dp_size: int) -> tuple[int, int, int]:
    """(Tasks scheduled, costs asked for, ranks with a list) of one rank, with `dp_size` replicas that are alike."""
    spec = model_spec()
    layouts = {"vision": ModulePlugin(dp_size=2 * dp_size), LM: ModulePlugin(dp_size=dp_size, pp_size=2, tp_size=2)}
    plan = resolve_plan(spec, layouts)
    step = arrange_step(plan, range(16 * dp_size), Workloads.alike(plan.modules, 16 * dp_size), 4)
    asked = []

    def cost(task: Task) -> float:
        asked.append(task)
        return uneven(task)

    representatives = find_representatives(plan, sync_groups(spec, plan))
    (part,) = representatives.parts(step, 0)
    tasks = build_graph(part.plan, part.step).tasks
    program = representatives.expand(program_of_parts([part], cost))
    assert set(asked) <= set(tasks)
    return len(tasks), len(asked), len(program.actions)


def test_the_work_of_a_rank_does_not_grow_with_the_number_of_replicas():
    few = work(4)
    assert work(32) == few
    assert few[2] == 2 + 2 * 2  # of one replica of the language model and the two encoders that work for it


def test_an_encoder_that_all_share_makes_one_part():
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(), LM: ModulePlugin(dp_size=4)})
    step = arrange_step(plan, range(16), Workloads.alike(plan.modules, 16), 2)
    (part,) = find_representatives(plan, sync_groups(spec, plan)).parts(step)
    assert isinstance(part, Part) and part.plan.world_size == 5
    assert part.step == step


def test_a_part_whose_ranks_could_not_come_to_the_sums_in_order_is_refused():
    """Encoder and language model on the same rank, which sums the encoder's gradients first."""
    spec, plan = make_plan({"vision": [[(0,)], [(1,)]], LM: [[(0,)], [(1,)]]})
    rows = [[[0]], [[1]]]
    step = make_step({"vision": rows, LM: rows})
    groups = sync_groups(spec, plan)
    assert [group.stages[0][0] for group in groups] == [LM, "vision"]
    program = build_program(plan, step, groups, uneven)
    assert [a.index for a in program.actions[0] if a.index is not None] == [0, 1]
    part = next(find_representatives(plan, groups).parts(step))
    graph = build_graph(part.plan, part.step)
    tasks = [action for action in program.actions[0] if action.index is None]
    swapped = Program({0: (*tasks, Action("sync", index=1), Action("sync", index=0))})
    verify(part.plan, graph, part.sync_groups, swapped)  # alone it ends
    with pytest.raises(DeadlockError, match="waits at `sync"):
        verify(part.plan, graph, part.sync_groups, swapped, is_part=True)


def test_the_checksum_of_a_part_tells_of_its_order_and_its_replicas():
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(dp_size=2), LM: ModulePlugin(dp_size=2, pp_size=2)})
    step: StepPlan = arrange_step(plan, range(16), Workloads.alike(plan.modules, 16), 2)
    representatives = find_representatives(plan, sync_groups(spec, plan))
    programs = {r: representatives.expand(program_of_parts(representatives.parts(step, r), uneven)) for r in range(6)}
    replicas = {rank: program.replicas(LM) for rank, program in programs.items()}
    assert sorted(map(sorted, set(replicas.values()))) == [[0], [1]]
    for rank, other in itertools.combinations(programs, 2):
        same = programs[rank].checksum == programs[other].checksum
        assert same == (replicas[rank] == replicas[other])
