"""Programs that are written in arrays are those that the plain way gives, and what is proved of them holds."""

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
    Order,
    Part,
    Program,
    ProgramError,
    TaskGraph,
    build_graph,
    build_program,
    find_representatives,
    in_flight_1f1b,
    in_flight_limits,
    lower,
    order_tasks,
    program_of_parts,
    scheduler,
    windows,
)
from hf_mmparallel.schedule.action_lists import PartActions, ProgramActions
from hf_mmparallel.schedule.kinds import FILLS
from hf_mmparallel.schedule.lowering import Proof, blocking_order, prove
from tests.plan.specs import model_spec
from tests.schedule import checker, plain
from tests.schedule.builders import Case, cases, make_plan, make_step, timed, uneven
from tests.schedule.mutations import CHANGES, changed

SETTINGS = settings(max_examples=100, suppress_health_check=list(HealthCheck))
CASES = st.one_of(cases(), cases(generators=("image",)), cases(split=True))
LM = LANGUAGE_MODEL


def times_of(tasks, kind: str, seed: int) -> list[float]:
    """Times with many ties, few, or none."""
    generator = random.Random(seed)
    draw = {"even": lambda: 1.0, "thirds": lambda: generator.randrange(3) / 3, "uneven": generator.random}[kind]
    return [draw() for _ in tasks]


def events_of(order: Order) -> list[list[int]]:
    return [order.started.tolist(), order.finished.tolist()]


KINDS = st.sampled_from(["even", "thirds", "uneven"])


def check_chunks(case: Case) -> None:
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
    check_chunks(case)
    graph, expected = build_graph(case.plan, case.step, training), plain.build_graph(case.plan, case.step, training)
    assert graph.tasks == expected.tasks
    assert sorted(graph.messages) == sorted(expected.messages)
    assert list(map(sorted, plain.predecessors(graph))) == list(map(sorted, expected.predecessors))
    max_in_flight = in_flight_1f1b(case.plan, case.step)
    assert max_in_flight == plain.in_flight_1f1b(case.plan, case.step)
    times_ms, max_in_flight = times_of(graph.tasks, kind, seed), in_flight_limits(case.plan, case.step)
    order = order_tasks(case.plan, graph, times_ms, max_in_flight, alternate)
    plainly = plain.order_tasks(case.plan, expected, times_ms, max_in_flight, alternate)
    assert events_of(order) == plainly.events
    timeline = timed(case.plan, graph, order, times_ms)
    assert np.allclose(timeline.start_ms, plainly.start_ms) and np.allclose(timeline.end_ms, plainly.end_ms)
    groups = case.sync_groups if training else []
    program = Program(ProgramActions([lower(case.plan, graph, order, groups)]))
    same = plain.lower(case.plan, expected, plainly, groups)
    assert program == same
    assert program.checksum == same.checksum
    assert all(program.of_rank(rank) == same.of_rank(rank) for rank in range(case.plan.world_size))
    for name in case.plan.modules:
        assert program.replicas(name) == same.replicas(name)


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
def test_encoders_unlike_in_number_share_one_part(arrangement, monkeypatch):
    """2 n - 1 encoder replicas for n of the language model: a chain of replicas, planned as a whole."""
    schedule = ("1f1b", "gpipe", "encoders_first")[sorted(ARRANGEMENTS).index(arrangement) % 3]
    layouts = {"vision": ModulePlugin(dp_size=11), LM: ModulePlugin(dp_size=6, pp_size=2, tp_size=2)}
    plan = replace(resolve_plan(model_spec(), layouts), schedule=schedule)
    times = {name: np.random.default_rng(1).lognormal(0, 1, 96) for name in plan.modules}
    tokens = {name: np.ceil(100 * own).astype(np.int64) for name, own in times.items()}
    step = arrange_step(plan, range(96), Workloads(times, dict.fromkeys(times, 2.0), tokens, {}), 4, arrangement)
    part = next(iter(find_representatives(plan, sync_groups(model_spec(), plan)).parts(step, 0)))
    graph, expected = (make(part.plan, part.step) for make in (build_graph, plain.build_graph))
    order = (times_of(graph.tasks, "uneven", 0), in_flight_limits(part.plan, part.step), schedule == "1f1b")
    timeline = plain.order_tasks(part.plan, expected, *order)
    for many in (1, 10**9):  # windows, events
        monkeypatch.setattr(scheduler, "_MANY_TASKS", many)
        found = order_tasks(part.plan, graph, *order)
        assert events_of(found) == timeline.events
    rows = lower(part.plan, graph, found, part.sync_groups)
    assert Program(ProgramActions([rows])) == plain.lower(part.plan, expected, timeline, part.sync_groups)
    assert is_proved(part, graph, blocking_order(graph, found, part.sync_groups), rows)


def are_apart(case: Case) -> bool:
    """Whether no two stages share a rank."""
    ranks = [
        rank for module in case.plan.modules.values() for *_, stage in module.stages() for rank in stage.all_ranks
    ]
    return len(ranks) == len(set(ranks))


@SETTINGS
@given(CASES.filter(are_apart), st.booleans(), st.booleans(), KINDS, st.integers(0, 99))
def test_windows_give_the_order_that_the_events_one_by_one_give(case, training, alternate, kind, seed):
    graph = build_graph(case.plan, case.step, training)
    times_ms, max_in_flight = times_of(graph.tasks, kind, seed), in_flight_limits(case.plan, case.step)
    expected = order_tasks(case.plan, graph, times_ms, max_in_flight, alternate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_MIN_TASKS", 1)
        found = scheduler._in_windows(case.plan, graph, times_ms, max_in_flight, alternate)
    possible = case.plan.policy.is_one_phase and min(times_ms, default=0) > 0 and not FILLS[graph.kind].any()
    assert (found is not None) == possible if kind == "even" else True
    assert found is None or events_of(found) == events_of(expected)


@settings(SETTINGS, max_examples=50)
@given(CASES.filter(are_apart), KINDS, st.integers(0, 99))
def test_windows_of_all_parts_give_each_the_order_that_it_has_alone(case, kind, seed):
    graph = build_graph(case.plan, case.step)
    parts = find_representatives(case.plan, ()).parts_of_stages(case.step)
    row = (times_of(graph.tasks, kind, seed), in_flight_limits(case.plan, case.step), True, parts)
    expected = order_tasks(case.plan, graph, *row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_MIN_TASKS", 1)
        found = scheduler._in_windows(case.plan, graph, *row)
    for part in range(int(parts.max()) + 1 if found is not None else 0):
        own = parts[graph.columns[0]] == part
        events = (np.concatenate([order.started[own], order.finished[own]]) for order in (found, expected))
        assert np.array_equal(*map(np.argsort, events))


def test_times_that_count_as_one_instant_are_left_to_the_events_one_by_one():
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(dp_size=2), LM: ModulePlugin()})
    step = arrange_step(plan, range(8), Workloads.alike(plan.modules, 8), 2)
    graph, limits = build_graph(plan, step), in_flight_limits(plan, step)
    times_ms = [1.0 + 1e-10 * task.replica for task in graph.tasks]
    assert scheduler._in_windows(plan, graph, times_ms, {}, False) is None
    expected = plain.order_tasks(plan, plain.build_graph(plan, step), times_ms, limits)
    assert events_of(order_tasks(plan, graph, times_ms, limits)) == expected.events


def is_proved(part: Part, graph: TaskGraph, order: np.ndarray, rows: PartActions) -> bool:
    return Proof(part.plan, graph, part.sync_groups, rows).breach(order) is None


def check(part: Part, graph: TaskGraph, rows: PartActions) -> None:
    """Walks the lists."""
    checker.check(part.plan, graph, part.sync_groups, Program(dict(ProgramActions([rows]))), is_part=True)


def written(case: Case, seed: int):
    """The first part of a case with its graph, an order of all that blocks, and its rows."""
    part = next(iter(find_representatives(case.plan, case.sync_groups).parts(case.step)))
    graph = build_graph(part.plan, part.step)
    times_ms = times_of(graph.tasks, "uneven", seed)
    timeline = order_tasks(part.plan, graph, times_ms, in_flight_limits(part.plan, part.step))
    rows = lower(part.plan, graph, timeline, part.sync_groups)
    return part, graph, blocking_order(graph, timeline, part.sync_groups), rows


@SETTINGS
@given(CASES, st.data())
def test_what_is_proved_passes_the_checker(case, data):
    """Changed rows are proved only if the checker, which walks the lists, finds nothing; unchanged ones always are."""
    part, graph, order, rows = written(case, data.draw(st.integers(0, 9)))
    assert is_proved(part, graph, order, rows)
    if len(rows.codes) < 2:
        return
    shorter = replace(rows, codes=rows.codes[:-1], starts=np.minimum(rows.starts, len(rows.codes) - 1))
    with pytest.raises(ProgramError, match="never runs"):
        prove(part.plan, graph, part.sync_groups, shorter, order)
    generator = data.draw(st.randoms(use_true_random=False))
    for _ in range(8):
        change = data.draw(st.sampled_from(CHANGES))
        mutant = changed(rows, change, rows.first_sum + len(part.sync_groups), generator)
        shuffled = np.random.default_rng(0).permutation(order)
        if is_proved(part, graph, order, mutant) or is_proved(part, graph, shuffled, mutant):
            check(part, graph, mutant)


@pytest.mark.parametrize("ranks", [((0,), (1,), (2,)), ((0, 1), (0, 1), (1, 2)), ((0, 1), (0, 2), (0, 1))])
def test_no_exchange_of_two_actions_is_proved_that_the_checker_refuses(ranks):
    """All pairs of a row, among them receives that are wanted in another order than they are sent."""
    first, second, third = ranks
    spec, plan = make_plan({"vision": [[first]], LM: [[second, third]]})
    step = make_step({"vision": [[[2], [1], [0]]], LM: [[[0], [1], [2]]]})
    part, graph, order, rows = written(Case(plan, step, sync_groups(spec, plan)), 0)
    refusals = []
    for start, stop in itertools.pairwise(rows.starts.tolist()):
        for i, j in itertools.combinations(range(start, stop), 2):
            codes = rows.codes.copy()
            codes[[i, j]] = codes[[j, i]]
            changed = replace(rows, codes=codes, _known={})
            try:
                check(part, graph, changed)
            except ProgramError as error:
                assert not is_proved(part, graph, order, changed), error
                refusals.append(str(error))
    assert any("one order on both" in refusal for refusal in refusals)


@settings(SETTINGS, max_examples=25)
@given(CASES, st.booleans())
def test_checksums_tell_lists_apart_however_they_are_stored(case, training):
    representatives = find_representatives(case.plan, case.sync_groups)
    program = representatives.expand(program_of_parts(representatives.parts(case.step), uneven, training))
    lists = dict(program.actions)
    assert Program(lists).checksum == program.checksum
    whole = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    assert {**whole.actions, **lists} == whole.actions
    for rank, row in lists.items():
        for place in range(len(row) - 1):
            swapped = (*row[:place], row[place + 1], row[place], *row[place + 2 :])
            assert Program({**lists, rank: swapped}).checksum != program.checksum
        if row:
            assert Program({**lists, rank: row[:-1]}).checksum != program.checksum
