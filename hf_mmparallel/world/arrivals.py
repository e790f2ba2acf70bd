"""A count of the ranks that have come to a point, which any thread may add to and read."""

from __future__ import annotations

from typing import Any


class Arrivals:
    """Counts ranks through a store, without a collective: two threads of a rank must not run collectives at once."""

    def __init__(self, store: Any, key: str, size: int):
        self.store = store  # a clone that no other thread uses; `None` for a single rank
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
