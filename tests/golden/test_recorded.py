"""Orders, programs, times and memory are those that were recorded, see `recorded.py`."""

import json

import pytest

from tests.deep_cases import third
from tests.golden.recorded import (
    NUM_SPLIT,
    NUM_STEPS,
    SEARCHES,
    STEPS,
    Row,
    case_of,
    questions,
    result_of,
    search_result,
)

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
