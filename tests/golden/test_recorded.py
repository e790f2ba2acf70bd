"""Orders, programs, times and memory are those that were recorded, see `recorded.py`."""

import json
import random
from collections import Counter

import pytest

from hf_mmparallel.schedule import Program, build_graph, find_representatives, in_flight_limits, lower, order_tasks
from hf_mmparallel.schedule.action_lists import ProgramActions
from hf_mmparallel.schedule.lowering import Proof, blocking_order
from tests.deep_cases import third
from tests.golden.recorded import (
    NUM_SPLIT,
    NUM_STEPS,
    SEARCHES,
    STEPS,
    Row,
    case_of,
    cost_of,
    questions,
    result_of,
    search_result,
)
from tests.schedule.builders import CHANGES, changed
from tests.schedule.checker import check

ROUNDING = 1e-9
PARTS = 6
SEARCHED = [json.loads(line) for line in SEARCHES.read_text(encoding="utf-8").splitlines()]


def assert_same(found: Row, recorded: Row) -> None:
    numbers = {name: value for name, value in recorded.items() if isinstance(value, float)}
    assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=ROUNDING, abs=ROUNDING)
    assert {name: found[name] for name in recorded if name not in numbers} == {
        name: value for name, value in recorded.items() if name not in numbers
    }


@pytest.mark.parametrize("part", third(range(PARTS)))
def test_random_steps(part: int):
    rows = [json.loads(line) for line in STEPS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == NUM_STEPS + NUM_SPLIT
    for number, row in enumerate(rows):
        if number % PARTS == part:
            assert_same(result_of(case_of(row), number), row["result"])


@pytest.mark.deep
@pytest.mark.parametrize("row", SEARCHED, ids=[row["question"] for row in SEARCHED])
def test_searches(row: Row):
    assert_same(search_result(questions()[row["question"]]), row)


EACH = 15  # of a step


@pytest.mark.deep
def test_what_is_proved_is_valid():
    proved, refused = Counter[str](), Counter[str]()
    for number, line in enumerate(STEPS.read_text(encoding="utf-8").splitlines()):
        case, generator = case_of(json.loads(line)), random.Random(number)
        parts = list(find_representatives(case.plan, case.sync_groups).parts(case.step))
        part = max(parts, key=lambda own: len(build_graph(own.plan, own.step).tasks))
        graph = build_graph(part.plan, part.step)
        times_ms = list(map(cost_of(number), graph.tasks))
        order = order_tasks(part.plan, graph, times_ms, in_flight_limits(part.plan, part.step))
        rows, places = lower(part.plan, graph, order, part.sync_groups), blocking_order(graph, order, part.sync_groups)
        assert Proof(part.plan, graph, part.sync_groups, rows).breach(places) is None
        for index in range(EACH if len(rows.codes) > 1 else 0):
            change = CHANGES[index % len(CHANGES)]
            mutant = changed(rows, change, rows.first_sum + len(part.sync_groups), generator)
            if Proof(part.plan, graph, part.sync_groups, mutant).breach(places) is None:
                check(part.plan, graph, part.sync_groups, Program(dict(ProgramActions([mutant]))), is_part=True)
                proved[change] += 1
            else:
                refused[change] += 1
    assert proved.total() + refused.total() >= 2900 and min(refused[change] for change in CHANGES) > 100
    assert proved.total() > 20  # harmless, such as one action that another rank has, too
