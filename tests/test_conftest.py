"""The deep tests take turns: every part leaves out what the others run."""

from types import SimpleNamespace

import pytest

from tests import conftest, deep_cases


class _Item(SimpleNamespace):
    __hash__ = object.__hash__


def _kept(part: str, num_deep: int = 230) -> set[str]:
    """Names of the deep tests that `--deep` leaves, beside 7 plain ones."""
    deep = [_Item(nodeid=f"deep {index}", get_closest_marker=lambda name: name == "deep") for index in range(num_deep)]
    plain = [_Item(nodeid=f"plain {index}", get_closest_marker=lambda name: None) for index in range(7)]
    items, deselected = [*plain, *deep], []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    conftest._leave_out_deep(SimpleNamespace(getoption=lambda name: part, hook=hook), items)  # type: ignore[arg-type]
    assert len(items) + len(deselected) == num_deep + 7 and items[:7] == plain
    return {item.nodeid for item in items[7:]}


def test_every_deep_test_is_in_one_part_and_stays_there_when_others_come():
    parts = [_kept(str(part)) for part in range(10)]
    assert set.union(*parts) == _kept("all") and sum(map(len, parts)) == 230 and all(len(part) > 10 for part in parts)
    assert all(_kept(str(number), 240) >= part for number, part in enumerate(parts)) and _kept("none") == set()


def test_cases_of_a_launch_take_turns(monkeypatch: pytest.MonkeyPatch):
    cases, parts = {f"case {number}": number for number in range(100)}, []
    for part in (*map(str, range(10)), "none", "all"):
        monkeypatch.setenv(deep_cases.CHOSEN, part)
        parts.append(deep_cases.in_turn(cases, "case 7"))
    assert set().union(*parts[:10]) == {*cases} and sum(map(len, parts[:10])) == 109
    assert parts[10:] == [{"case 7": 7}, cases]
