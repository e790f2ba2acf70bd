"""What the main thread of this process is doing, in words that a watcher can read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Activity:
    """
    What the main thread is doing. Noting it is a few assignments; words are made of it when somebody looks.

    Args:
        step (`int`, *optional*): The optimizer step that runs, or the last one; `None` before the first.
        doing: A phrase, or an action of a program.
        waits (`bool`): Whether that is waiting for other ranks.
        count (`int`): How many things have been begun.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.doing: Any = "starting"
        self.waits = False
        self.count = 0

    def now(self, doing: Any, waits: bool = False) -> None:
        """Notes what begins."""
        self.doing, self.waits = doing, waits
        self.count += 1

    def __str__(self) -> str:
        place = "" if self.step is None else f"step {self.step}: "
        return f"{place}{self.doing}{', waiting for other ranks' if self.waits else ''}"


ACTIVITY = Activity()
"""Of this process, whose main thread is the rank."""


@contextlib.contextmanager
def doing(what: str, waits: bool = False) -> Iterator[None]:
    """Notes what a block does; afterwards, what was done before."""
    before = ACTIVITY.doing, ACTIVITY.waits
    ACTIVITY.now(what, waits)
    yield
    ACTIVITY.now(*before)
