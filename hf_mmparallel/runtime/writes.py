"""
What a rank writes, apart from what it has to collect with the others before.

Collecting needs the other ranks: file names, offsets, tensors that several ranks hold. Writing needs nobody, so that a
thread can do it beside the training.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..world import World
from .atomic import save_errors


class HostCopies:
    """Copies of tensors in host memory, pinned for tensors of a GPU, of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        # kept for the copies of the next save: to get memory from the system takes longer than to copy
        self._free: dict[tuple, deque[torch.Tensor]] = defaultdict(deque)
        self._used: list[tuple[tuple, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Makes a contiguous copy that stays what it is until [`~HostCopies.reuse`]; `None` above the limit."""
        key = (tuple(tensor.shape), tensor.dtype, tensor.is_cuda)
        if not self._free[key]:
            needed = tensor.numel() * tensor.element_size()
            if self.num_bytes + needed > self.limit_bytes:
                return None
            self.num_bytes += needed
            self._free[key].append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda))
        copy = self._free[key].pop()
        self._used.append((key, copy))
        return copy.copy_(tensor)

    def reuse(self) -> None:
        """Lets the next copies have the memory of all copies so far."""
        for key, copy in self._used:
            self._free[key].append(copy)
        self._used.clear()


class Writes:
    """
    The files that this rank writes into a folder. A write is a function that calls no other rank.

    Without `copies` a write runs when it is added, and its tensors are gone before the next ones are collected. With
    them it runs in [`~Writes.run`], on the values that tensors had when they were collected.
    """

    def __init__(self, folder: str | Path, path: Path | None = None, copies: HostCopies | None = None):
        self.folder = Path(folder)
        self.path = self.folder if path is None else path  # errors name it, where the folder gets another name later
        self.copies = copies
        self.error: Exception | None = None  # of the first write that failed; those after it are left out
        self.num_early = 0  # writes that ran at once although there are `copies`, for lack of memory
        self._later: deque[Callable[[], None]] = deque()
        self._has_live_values = copies is None

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the values of a tensor, contiguous in host memory, for the write that is added next."""
        tensor = tensor.detach()
        copy = None if self.copies is None else self.copies.of(tensor)
        if copy is not None:
            return copy
        self._has_live_values = True
        return tensor.cpu().contiguous()

    def add(self, write: Callable[..., Any], *args: Any) -> None:
        """Adds a write."""
        call = functools.partial(write, *args)
        if self.copies is None:
            self._try(call)
        elif self._has_live_values:  # they change with the next step
            self.num_early += 1
            self._has_live_values = False
            self._try(call)
        else:
            self._later.append(call)

    def run(self) -> None:
        """Runs the writes that were added, in their order."""
        with suppress(IndexError):  # of `popleft`: another thread may drop them
            while True:
                self._try(self._later.popleft())

    def drop(self) -> None:
        """Leaves out the writes that have not begun; any thread may call it."""
        self._later.clear()

    def finish(self, world: World) -> None:
        """Ends the writing of all ranks. Collective; raises on all ranks what any of them could not write."""
        self.run()
        world.raise_first(self.error, "writing files")

    def _try(self, call: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            with save_errors(self.path):
                call()
        except Exception as error:
            self.error = error
