"""The current activity of this process's main thread, which its watcher reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Activity:
    """
    The current activity of the main thread. Updating it is a few assignments; the text is only made when it is read.

    Args:
        step (`int`, *optional*): The current or last optimizer step; `None` before the first.
        doing: The activity: a phrase, or an action of a program.
        waits (`bool`): Whether the main thread is waiting for other ranks.
        count (`int`): Number of activities started so far.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.doing: Any = "starting"
        self.waits = False
        self.count = 0

    def now(self, doing: Any, waits: bool = False) -> None:
        """Sets the current activity."""
        self.doing, self.waits = doing, waits
        self.count += 1

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}: "
        return f"{step}{self.doing}{', waiting for other ranks' if self.waits else ''}"


ACTIVITY = Activity()
"""The activity of this process."""


@contextlib.contextmanager
def doing(activity: str, waits: bool = False) -> Iterator[None]:
    """Sets the activity for the duration of a block, and restores the previous one."""
    before = ACTIVITY.doing, ACTIVITY.waits
    ACTIVITY.now(activity, waits)
    yield
    ACTIVITY.now(*before)
