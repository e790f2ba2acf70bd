"""Orders in windows are those of events one by one, what is proved of lists holds, and checksums tell them apart."""

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
from tests.schedule import checker
from tests.schedule.builders import CHANGES, Case, cases, changed, make_plan, make_step, uneven

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
    graph = build_graph(part.plan, part.step)
    found = []
    for many in (1, 10**9):  # windows, events
        monkeypatch.setattr(scheduler, "_MANY_TASKS", many)
        limits = in_flight_limits(part.plan, part.step)
        found.append(order_tasks(part.plan, graph, times_of(graph.tasks, "uneven", 0), limits, schedule == "1f1b"))
    assert events_of(found[0]) == events_of(found[1])
    rows = lower(part.plan, graph, found[0], part.sync_groups)
    assert is_proved(part, graph, blocking_order(graph, found[0], part.sync_groups), rows)
    check(part, graph, rows)


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
    graph = build_graph(plan, step)
    times_ms = [1.0 + 1e-10 * task.replica for task in graph.tasks]
    assert scheduler._in_windows(plan, graph, times_ms, {}, False) is None


def is_proved(part: Part, graph: TaskGraph, order: np.ndarray, rows: PartActions) -> bool:
    return Proof(part.plan, graph, part.sync_groups, rows).breach(order) is None


def check(part: Part, graph: TaskGraph, rows: PartActions) -> None:
    """Runs the lists."""
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
    """Changed rows are proved only if the checker, which runs the lists, finds nothing; unchanged ones always are."""
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
    proved = 0
    for start, stop in itertools.pairwise(rows.starts.tolist()):
        for i, j in itertools.combinations(range(start, stop), 2):
            codes = rows.codes.copy()
            codes[[i, j]] = codes[[j, i]]
            changed = replace(rows, codes=codes, _known={})
            if is_proved(part, graph, order, changed):
                check(part, graph, changed)
                proved += 1
    assert 0 < proved < 0.2 * len(rows.codes) ** 2 / 2


@settings(SETTINGS, max_examples=25)
@given(CASES, st.booleans())
def test_checksums_tell_lists_apart_however_they_are_stored(case, training):
    representatives = find_representatives(case.plan, case.sync_groups)
    program = representatives.expand(program_of_parts(representatives.parts(case.step), uneven, training))
    lists = dict(program.actions)
    assert Program(lists).checksum == program.checksum and Program(lists) == program
    assert all(Program(lists).replicas(name) == program.replicas(name) for name in case.plan.modules)
    assert all(Program(lists).of_rank(rank) == program.of_rank(rank) for rank in lists)
    whole = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    assert {**whole.actions, **lists} == whole.actions
    for rank, row in lists.items():
        for place in range(len(row) - 1):
            swapped = (*row[:place], row[place + 1], row[place], *row[place + 2 :])
            assert Program({**lists, rank: swapped}).checksum != program.checksum
        if row:
            assert Program({**lists, rank: row[:-1]}).checksum != program.checksum
