"""A count of the ranks that have come to a point, which any thread may add to and read."""

from __future__ import annotations

from typing import Any


class Arrivals:
    """
    Counts ranks through the store of the process group, without a collective: two threads of a rank must not run
    collectives at the same time.

    Args:
        store (`Store`, *optional*): A clone of the store that no other thread uses; `None` for a single rank.
        key (`str`): The key of the count.
        size (`int`): Number of ranks.
    """

    def __init__(self, store: Any, key: str, size: int):
        self.store = store
        self.key = key
        self.size = size
        self._has_arrived = False

    def arrive(self) -> None:
        """Adds this rank."""
        self._has_arrived = True
        if self.store is not None:
            self.store.add(self.key, 1)

    def all_here(self) -> bool:
        """Whether all ranks have arrived."""
        return self._has_arrived and (self.store is None or self.store.add(self.key, 0) >= self.size)
