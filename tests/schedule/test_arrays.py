"""Programs that are written in arrays are those that the plain way gives, and what is proved of them holds."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, Workloads, resolve_plan, sync_groups
from hf_mmparallel.schedule import (
    Program,
    ProgramError,
    Task,
    build_graph,
    build_program,
    find_representatives,
    in_flight_1f1b,
    in_flight_limits,
    lower,
    order_tasks,
    program_of_parts,
    scheduler,
    simulate,
    simulate_parts,
)
from hf_mmparallel.schedule.action_lists import PartActions, ProgramActions
from hf_mmparallel.schedule.lowering import blocking_order
from hf_mmparallel.schedule.program_checks import Proof, verify
from tests.plan.specs import model_spec
from tests.schedule import plain
from tests.schedule.builders import Case, cases, make_plan, make_step

SETTINGS = settings(max_examples=100, suppress_health_check=list(HealthCheck))
CASES = st.one_of(cases(), cases(generators=("image",)))
LM = LANGUAGE_MODEL


def times_of(tasks, kind: str, seed: int) -> list[float]:
    """Times with many ties, few, or none."""
    generator = random.Random(seed)
    draw = {"even": lambda: 1.0, "thirds": lambda: generator.randrange(3) / 3, "uneven": generator.random}[kind]
    return [draw() for _ in tasks]


KINDS = st.sampled_from(["even", "thirds", "uneven"])


@SETTINGS
@given(CASES)
def test_chunks_are_those_of_the_plain_way(case):
    for name, replicas in case.step.microbatches.items():
        for replica in range(len(replicas)):
            expected = plain.chunks_of_replica(case.step, name, replica)
            assert case.step.chunks.of_replica(name, replica) == tuple(tuple(map(tuple, own)) for own in expected)
            for target in case.step.targets.get(name, ()):
                turns = plain.consumer_turns(case.step, name, replica, target)
                assert list(case.step.consumer_turns(name, replica, target).items()) == list(turns.items())


@SETTINGS
@given(CASES, st.booleans(), st.booleans(), KINDS, st.integers(0, 99))
def test_the_lists_of_ranks_are_those_of_the_plain_way(case, training, alternate, kind, seed):
    graph, expected = build_graph(case.plan, case.step, training), plain.build_graph(case.plan, case.step, training)
    assert graph.tasks == expected.tasks
    assert sorted(graph.messages) == sorted(expected.messages)
    assert list(map(sorted, graph.predecessors)) == list(map(sorted, expected.predecessors))
    assert all(graph.index_of(task) == index for index, task in enumerate(graph.tasks))
    max_in_flight = in_flight_1f1b(case.plan, case.step)
    assert max_in_flight == plain.in_flight_1f1b(case.plan, case.step)
    times_ms, max_in_flight = times_of(graph.tasks, kind, seed), in_flight_limits(case.plan, case.step)
    timeline = order_tasks(case.plan, graph, times_ms, max_in_flight, alternate)
    assert timeline == plain.order_tasks(case.plan, expected, times_ms, max_in_flight, alternate)
    groups = case.sync_groups if training else []
    program, same = lower(case.plan, graph, timeline, groups), plain.lower(case.plan, expected, timeline, groups)
    assert program == same
    assert program.checksum == same.checksum
    assert all(program.of_rank(rank) == same.of_rank(rank) for rank in range(case.plan.world_size))
    for name in case.plan.modules:
        assert program.replicas(name) == same.replicas(name)


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "encoders_first"])
@pytest.mark.parametrize("many", [1, 10**9], ids=["windows", "events"])
def test_encoders_unlike_in_number_share_one_part(arrangement, schedule, many, monkeypatch):
    """2 n - 1 encoder replicas for n of the language model: a chain of replicas, planned as a whole."""
    monkeypatch.setattr(scheduler, "_MANY_TASKS", many)
    layouts = {"vision": ModulePlugin(dp_size=11), LM: ModulePlugin(dp_size=6, pp_size=2, tp_size=2)}
    plan = replace(resolve_plan(model_spec(), layouts), schedule=schedule)
    times = {name: np.random.default_rng(1).lognormal(0, 1, 96) for name in plan.modules}
    tokens = {name: np.ceil(100 * own).astype(np.int64) for name, own in times.items()}
    step = arrange_step(plan, range(96), Workloads(times, dict.fromkeys(times, 2.0), tokens, {}), 4, arrangement)
    representatives = find_representatives(plan, sync_groups(model_spec(), plan))
    parts = list(representatives.parts(step, 0))
    graph, expected = (make(parts[0].plan, parts[0].step) for make in (build_graph, plain.build_graph))
    times_ms = times_of(graph.tasks, "uneven", 0)
    max_in_flight = in_flight_limits(parts[0].plan, parts[0].step)
    timeline = order_tasks(parts[0].plan, graph, times_ms, max_in_flight, schedule == "1f1b")
    assert timeline == plain.order_tasks(parts[0].plan, expected, times_ms, max_in_flight, schedule == "1f1b")
    program = lower(parts[0].plan, graph, timeline, parts[0].sync_groups)
    assert program == plain.lower(parts[0].plan, expected, timeline, parts[0].sync_groups)
    order = blocking_order(graph, timeline, parts[0].sync_groups)
    assert Proof(parts[0].plan, graph, parts[0].sync_groups, rows_of(program)).holds(order, in_order=True)


APART = CASES.filter(lambda case: len({r for _, r in ranks_of(case)}) == len(ranks_of(case)))


def ranks_of(case: Case) -> list[tuple]:
    """(Stage, rank) of all stages."""
    stages = [(key, stage) for key, module in case.plan.modules.items() for *_, stage in module.stages()]
    return [(key, rank) for key, stage in stages for rank in stage.all_ranks]


@settings(SETTINGS, max_examples=200)
@given(APART, st.booleans(), st.booleans(), KINDS, st.integers(0, 99))
def test_windows_give_the_order_that_the_events_one_by_one_give(case, training, alternate, kind, seed):
    graph = build_graph(case.plan, case.step, training)
    times_ms, max_in_flight = times_of(graph.tasks, kind, seed), in_flight_limits(case.plan, case.step)
    expected = order_tasks(case.plan, graph, times_ms, max_in_flight, alternate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_MIN_TASKS", 1)
        found = scheduler._in_windows(case.plan, graph, times_ms, max_in_flight, alternate)
    possible = case.plan.schedule in ("1f1b", "eager") and min(times_ms, default=0) > 0
    assert (found is not None) == possible if kind == "even" else True
    assert found in (None, expected)


def test_times_that_count_as_one_instant_are_left_to_the_events_one_by_one():
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(dp_size=2), LM: ModulePlugin()})
    step = arrange_step(plan, range(8), Workloads.alike(plan.modules, 8), 2)
    graph = build_graph(plan, step)
    times_ms = [1.0 + 1e-10 * task.replica for task in graph.tasks]
    assert scheduler._in_windows(plan, graph, times_ms, {}, False) is None
    max_in_flight = in_flight_limits(plan, step)
    assert order_tasks(plan, graph, times_ms, max_in_flight) == plain.order_tasks(
        plan, plain.build_graph(plan, step), times_ms, max_in_flight
    )


def rows_of(program: Program) -> PartActions:
    assert isinstance(program.actions, ProgramActions)
    (rows,) = program.actions.parts
    return rows


def written(case: Case, seed: int):
    """The first part of a case with its graph, an order of all that blocks, and its rows."""
    part = next(iter(find_representatives(case.plan, case.sync_groups).parts(case.step)))
    graph = build_graph(part.plan, part.step)
    times_ms = times_of(graph.tasks, "uneven", seed)
    timeline = order_tasks(part.plan, graph, times_ms, in_flight_limits(part.plan, part.step))
    rows = rows_of(lower(part.plan, graph, timeline, part.sync_groups))
    return part, graph, blocking_order(graph, timeline, part.sync_groups), rows


@settings(SETTINGS, max_examples=200)
@given(CASES, st.data())
def test_what_is_proved_passes_the_checker(case, data):
    """Changed rows are proved only if the checker, which walks the lists, finds nothing; unchanged ones always are."""
    part, graph, order, rows = written(case, data.draw(st.integers(0, 9)))
    assert Proof(part.plan, graph, part.sync_groups, rows).holds(order, in_order=True)
    if not len(rows.codes):
        return
    for _ in range(8):
        codes, starts = rows.codes.copy(), rows.starts.copy()
        places = st.integers(0, len(codes) - 1)
        i, j = sorted((data.draw(places), data.draw(places)))
        change = data.draw(st.sampled_from(["swap", "move", "double", "drop", "other"]))
        if change == "swap":
            codes[[i, j]] = codes[[j, i]]
        elif change == "move":
            codes[i : j + 1] = np.roll(codes[i : j + 1], 1)
        elif change == "double":
            codes[i] = codes[j]
        elif change == "drop":
            codes = np.delete(codes, i)
            starts = starts - (starts > i)
        else:
            codes[i] = data.draw(st.integers(0, rows.first_sum + len(part.sync_groups) - 1))
        changed = replace(rows, codes=codes, starts=starts, _known={})
        is_proved = Proof(part.plan, graph, part.sync_groups, changed).holds(order, in_order=True)
        try:
            verify(part.plan, graph, part.sync_groups, Program(dict(ProgramActions([changed]))), is_part=True)
        except ProgramError:
            assert not is_proved
        shuffled = np.random.default_rng(0).permutation(order)
        if len(order) and Proof(part.plan, graph, part.sync_groups, changed).holds(shuffled, in_order=True):
            verify(part.plan, graph, part.sync_groups, Program(dict(ProgramActions([changed]))), is_part=True)


def test_no_exchange_of_two_actions_is_proved_that_the_checker_refuses():
    """All pairs of a row, among them receives that are wanted in another order than they are sent."""
    spec, plan = make_plan({"vision": [[(0,)]], LM: [[(1,), (2,)]]})
    step = make_step({"vision": [[[2], [1], [0]]], LM: [[[0], [1], [2]]]})
    part, graph, order, rows = written(Case(plan, step, sync_groups(spec, plan)), 0)
    results = set()
    for start, stop in itertools.pairwise(rows.starts.tolist()):
        for i, j in itertools.combinations(range(start, stop), 2):
            codes = rows.codes.copy()
            codes[[i, j]] = codes[[j, i]]
            changed = replace(rows, codes=codes, _known={})
            is_proved = Proof(part.plan, graph, part.sync_groups, changed).holds(order, in_order=True)
            try:
                verify(part.plan, graph, part.sync_groups, Program(dict(ProgramActions([changed]))), is_part=True)
                results.add("right")
            except ProgramError as error:
                assert not is_proved, error
                results.add(str(error).split(". ")[-1].split(" the ")[0])
    assert "Receive in" in results


@SETTINGS
@given(CASES, st.integers(0, 9))
def test_changed_rows_are_refused_by_name(case, seed):
    part, graph, order, rows = written(case, seed)
    if len(rows.codes) < 2:
        return
    changed = Program(
        ProgramActions([replace(rows, codes=rows.codes[:-1], starts=np.minimum(rows.starts, len(rows.codes) - 1))])
    )
    with pytest.raises(ProgramError, match="never runs"):
        verify(part.plan, graph, part.sync_groups, changed, is_part=True, order=order)


@SETTINGS
@given(CASES, st.booleans(), st.integers(0, 9))
def test_a_replay_of_all_parts_takes_what_their_program_takes(case, training, seed):
    graph = build_graph(case.plan, case.step, training)
    known = dict(zip(graph.tasks, times_of(graph.tasks, "uneven", seed), strict=True))
    representatives = find_representatives(case.plan, case.sync_groups)
    program = program_of_parts(representatives.parts(case.step), known.__getitem__, training)
    messages_ms, sums_ms = (lambda message: known[message.source] / 9), (lambda index: float(index % 3))
    expected = simulate(representatives.plan, program, known.__getitem__, messages_ms, sums_ms)
    found = simulate_parts(
        representatives,
        case.step,
        known.__getitem__,
        lambda graph: list(map(messages_ms, graph.messages)),
        sums_ms,
        training=training,
    ).simulation()
    assert found.iteration_ms == pytest.approx(expected.iteration_ms)
    assert [(s.rank, s.task) for s in sorted(found.spans)] == [(s.rank, s.task) for s in sorted(expected.spans)]
    assert found.peak_in_flight == pytest.approx(expected.peak_in_flight)


@SETTINGS
@given(CASES, st.booleans())
def test_checksums_tell_lists_apart_however_they_are_stored(case, training):
    representatives = find_representatives(case.plan, case.sync_groups)
    cost = lambda task: 1.0 + task.microbatch  # noqa: E731
    program = representatives.expand(program_of_parts(representatives.parts(case.step), cost, training))
    assert isinstance(program.actions, ProgramActions)
    lists = dict(program.actions)
    assert Program(lists).checksum == program.checksum
    assert {**build_program(case.plan, case.step, case.sync_groups, cost, training).actions, **lists} == build_program(
        case.plan, case.step, case.sync_groups, cost, training
    ).actions
    for rank, row in lists.items():
        for place in range(len(row) - 1):
            swapped = (*row[:place], row[place + 1], row[place], *row[place + 2 :])
            assert Program({**lists, rank: swapped}).checksum != program.checksum
        if row:
            assert Program({**lists, rank: row[:-1]}).checksum != program.checksum


def test_a_task_of_another_step_has_no_place():
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(), LM: ModulePlugin()})
    step = arrange_step(plan, range(4), Workloads.alike(plan.modules, 4), 2)
    graph = build_graph(plan, step)
    assert graph.index_of(Task("fwd", LM, 0, 0, 7)) is None and graph.index_of(Task("fwd", "audio", 0, 0, 0)) is None
