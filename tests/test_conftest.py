"""The deep tests take turns: every part leaves out what the others run."""

from types import SimpleNamespace

from tests import conftest


class _Item(SimpleNamespace):
    __hash__ = object.__hash__


def _kept(part: str) -> list[str]:
    """Names of what `--deep` leaves of 30 tests, of which 23 are deep."""
    deep = [_Item(name=f"deep {index}", get_closest_marker=lambda name: name == "deep") for index in range(23)]
    plain = [_Item(name=f"plain {index}", get_closest_marker=lambda name: None) for index in range(7)]
    items, deselected = [*plain, *deep], []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    conftest._leave_out_deep(SimpleNamespace(getoption=lambda name: part, hook=hook), items)  # type: ignore[arg-type]
    assert len(items) + len(deselected) == 30 and items[:7] == plain
    return [item.name for item in items[7:]]


def test_ten_parts_are_all_deep_tests():
    parts = [_kept(str(part)) for part in range(10)]
    assert sorted(name for part in parts for name in part) == sorted(_kept("all")) and len(_kept("all")) == 23
    assert {len(part) for part in parts} == {2, 3} and _kept("none") == []
