"""Folders that appear whole or not at all, written at once or in a thread beside the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ..world import World
from .atomic import put_in_place, start_unfinished, unfinished_name
from .writes import HostCopies, Writes

_POLL_S = 0.05  # of the store, by the thread of the first rank
_LEAVE_S = 20.0  # how long a process that ends by an error waits for its save


class FolderSave:
    """
    A folder that appears at `path` only when all ranks have written their files; the ranks share the file system.

    The block collects what this rank writes. Without `copies` the folder is there at its end; with them a thread
    writes it, and [`~FolderSave.finish`] waits for that. The thread calls no collective: the ranks tell the first one
    through the store that they have written, and it gives the folder its name. A failure in between leaves what was at
    `path` before, and a folder `_saving-*` beside it that the next save removes. The block and `finish` raise
    [`SaveError`] on the rank that can't write, and [`RemoteRankError`] on the others.
    """

    def __init__(
        self,
        path: str | Path,
        world: World,
        copies: HostCopies | None = None,
        then: Callable[[], None] | None = None,
    ):
        self.path = Path(path)
        self.world = world
        self.writes = Writes(unfinished_name(self.path), self.path, copies)
        self.then = then  # done by the first rank once the folder has its name
        self.is_there = False  # the folder has its name, on the first rank
        # duration of the block; time from its end until this rank had written, on the first rank until the folder had
        # its name
        self.blocked_s = self.write_s = 0.0
        self._error: Exception | None = None  # of the first rank, when all files were written
        self._thread: threading.Thread | None = None
        self._has_written = threading.Event()
        self._is_given_up = threading.Event()
        self._is_finished = False
        self._written = world.arrivals() if copies is not None else None

    def __enter__(self) -> Writes:
        self._begin_s = time.perf_counter()
        if self.world.is_first:
            start_unfinished(self.path)
        self.world.barrier()
        return self.writes

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            return
        if self._written is None:
            self.finish()
        else:
            self._thread = threading.Thread(target=self._write, name="hf_mmparallel-save", daemon=True)
            self._thread.start()
        self.blocked_s = time.perf_counter() - self._begin_s

    def _write(self) -> None:
        begin_s = time.perf_counter()
        assert self._written is not None
        try:
            self.writes.run()
            if self.writes.error is None:
                self._written.arrive()
            self._has_written.set()
            if self.world.is_first and self.writes.error is None:
                while not self._written.all_here():
                    if self._is_given_up.wait(_POLL_S):
                        return
                self._complete()
        except Exception as error:  # of the store; those of files are noted where they come from
            self._error = error
        finally:
            self.write_s = time.perf_counter() - begin_s
            self._has_written.set()

    def _complete(self) -> None:
        try:
            put_in_place(self.path)
            self.is_there = True
            if self.then is not None:
                self.then()
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Waits until the folder is there. Collective; does nothing the second time."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._thread is not None:
            self._has_written.wait()
        try:
            self.world.raise_first(self.writes.error, f"writing `{self.path.name}`")
        finally:
            self._is_given_up.set()
        if self._thread is not None:
            self._thread.join()
        if self.world.is_first and not self.is_there and self._error is None:
            self._complete()
        self.world.raise_first(self._error, f"writing `{self.path.name}`")

    def give_up(self) -> None:
        """Leaves the folder as it is, since ranks were lost that had to write into it. Not collective."""
        self._is_finished = True
        self.writes.drop()
        self._is_given_up.set()
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        """Waits a while for the thread, when an error ends this process."""
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
