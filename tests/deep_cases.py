"""
Deep tests, and deep cases inside of a launch: on each change a tenth of them runs, in turn.

The part of a test or a case is the checksum of its name: others that come or go move none to another part.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar
from zlib import crc32

import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import SearchStrategy

PARTS = 10
CHOSEN = "HF_MMPARALLEL_TEST_DEEP"
"""Environment variable with the part that `--deep` asks for; ranks read it, too."""
_SEED = 514  # of the checksums; deals the tests that take longest to different parts

T = TypeVar("T")


def deep(*values: Any, unless: bool = False, id: str | None = None) -> Any:
    """A case that is a deep test, unless it is one of those that always run."""
    return pytest.param(*values, id=id, marks=() if unless else pytest.mark.deep)


def third(cases: Iterable[Any]) -> list[Any]:
    """The cases of a test, each of one value: every third always runs, the others are deep."""
    return [deep(case, unless=not place % 3) for place, case in enumerate(cases)]


def is_in_part(name: str, part: str) -> bool:
    """Whether a name belongs to a part: a number, `"all"` or `"none"`."""
    return part == "all" or part == str(crc32(name.encode(), _SEED) % PARTS)


def in_turn(cases: Mapping[str, T], *core: str) -> dict[str, T]:
    """Those of a launch's cases that run: the core on each change, and of the others those of the chosen part."""
    assert {*core} <= {*cases}, core
    part = os.environ.get(CHOSEN, "all")
    return {name: case for name, case in cases.items() if name in core or is_in_part(name, part)}


def drawn_cases(strategy: SearchStrategy[T], count: int) -> list[T]:
    """So many examples at most for one launch of ranks: of a single example hypothesis draws the simplest alone."""
    result: list[T] = []

    @settings(max_examples=count, database=None, phases=[Phase.generate])
    @given(strategy)
    def keep(case: T) -> None:
        result.append(case)

    keep()
    return result
