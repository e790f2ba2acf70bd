"""The current activity of this process's main thread, which its watcher reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Activity:
    """The current activity of the main thread; an update is a few assignments, text is only made when it is read."""

    def __init__(self) -> None:
        # the current or last optimizer step; `None` before the first
        self.step: int | None = None
        self.doing: Any = "starting"  # a phrase, or an action of a program
        self.waits = False  # for other ranks
        self.count = 0  # activities started so far

    def now(self, doing: Any, waits: bool = False) -> None:
        """Sets the current activity."""
        self.doing, self.waits = doing, waits
        self.count += 1

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}: "
        return f"{step}{self.doing}{', waiting for other ranks' if self.waits else ''}"


ACTIVITY = Activity()  # of this process


@contextlib.contextmanager
def doing(activity: str, waits: bool = False) -> Iterator[None]:
    """Sets the activity for the duration of a block, and restores the previous one."""
    before = ACTIVITY.doing, ACTIVITY.waits
    ACTIVITY.now(activity, waits)
    yield
    ACTIVITY.now(*before)
