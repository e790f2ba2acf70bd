"""
What a rank writes, apart from what it has to collect with the others before.

Collecting needs the other ranks: file names, offsets, tensors that several ranks hold. Writing needs nobody, so that a
thread can do it beside the training.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..cost.stage_memory import GIB
from ..world import World

# The files below folders that appear whole or not at all, and what is said when a disk does not take them.

_UNFINISHED = "_saving-"
_PREVIOUS = _UNFINISHED + "previous-"
_BY_WRITERS = ("model*.safetensors", "rng_state_*.pth")  # each rank syncs its own, on the host that has their pages
_OS_ERROR = re.compile(r"os error (\d+)|\[errno (\d+)\]", re.IGNORECASE)  # as safetensors, and other ranks, say it
_CUT_SHORT = re.compile(r"inline_container|PytorchStreamWriter", re.IGNORECASE)  # as `torch.save` says it
_REMEDIES = {
    errno.ENOSPC: "Free some space, or save less with `save_total_limit` or `save_only_model`",
    errno.EDQUOT: "Free some space, or save less with `save_total_limit` or `save_only_model`",
    errno.EFBIG: "Raise the limit of a file's size (`ulimit -f`)",
    errno.EROFS: "Give an `output_dir` that can be written to",
    errno.EACCES: "Give an `output_dir` that can be written to",
    errno.EPERM: "Give an `output_dir` that can be written to",
    errno.ENOTDIR: "Give an `output_dir` that is a folder",
}


class SaveError(OSError):
    """A folder could not be written; the message says which, why, and what was saved before."""


def unfinished_name(path: Path) -> Path:
    """Returns the folder in which the files of a folder are written before it gets its name."""
    return path.with_name(_UNFINISHED + path.name)


def start_unfinished(path: Path) -> None:
    with save_errors(path):
        _clear(path)
        unfinished_name(path).mkdir(parents=True)


def put_in_place(path: Path) -> None:
    """Waits until what this rank wrote is on the disk, and gives the folder its name. Raises [`SaveError`]."""
    with save_errors(path):
        _sync(unfinished_name(path))
        _replace(unfinished_name(path), path)


def _clear(path: Path) -> None:
    """Removes what unfinished saves have left; a folder whose replacement did not arrive gets its place back."""
    stem = re.escape(re.sub(r"\d+$", "", path.name))
    number = r"\d+" if path.name[-1:].isdigit() else ""
    ours = re.compile(rf"{_UNFINISHED}(previous-)?{stem}{number}")
    leftovers = [entry for entry in path.parent.glob(_UNFINISHED + "*") if ours.fullmatch(entry.name)]
    for leftover in leftovers:
        home = leftover.with_name(leftover.name.removeprefix(_PREVIOUS))
        if leftover.name.startswith(_PREVIOUS) and not home.exists():
            leftover.rename(home)  # a crash came between the two renames
        elif leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _replace(temporary: Path, path: Path) -> None:
    previous = path.with_name(f"{_PREVIOUS}{path.name}")
    if path.exists():
        path.rename(previous)
        temporary.rename(path)
        shutil.rmtree(previous)
    else:
        temporary.rename(path)
    sync_file(path.parent)


def _sync(folder: Path) -> None:
    """Waits until what this rank wrote, and which files there are, is on the disk."""
    for file in (*folder.rglob("*"), folder):
        if not any(file.match(pattern) for pattern in _BY_WRITERS):
            sync_file(file)


def sync_file(path: Path) -> None:
    """Waits until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def save_errors(path: Path) -> Iterator[None]:
    """Makes a sentence of what the file system, `torch.save` and safetensors say when they can't write."""
    try:
        yield
    except SaveError:
        raise
    except Exception as error:
        cause = _cause(error)
        if cause is None:
            raise
        number, reason = cause
        remedy = f" {_REMEDIES[number]}." if number in _REMEDIES else ""
        raise SaveError(
            f"`{path}` could not be saved: {reason}.{_free_space(path)}{remedy}{_last_whole(path)}"
        ) from error


def _cause(error: BaseException) -> tuple[int, str] | None:
    """Returns number and words of the error of the file system behind an exception, `None` without one."""
    said = _OS_ERROR.search(str(error))
    if isinstance(error, OSError) and error.errno is not None:
        where = f" (`{error.filename}`)" if error.filename else ""
        return error.errno, f"{os.strerror(error.errno)}{where}"
    if said is not None:
        number = int(said[1] or said[2])
        return number, os.strerror(number)
    if _CUT_SHORT.search(str(error)):
        # `torch.save` says this while it closes the file after another error.
        before = error.__cause__ or error.__context__
        known = None if before is None else _cause(before)
        return known or (errno.ENOSPC, "a file could not be written to its end, as on a full disk")
    return None if error.__cause__ is None else _cause(error.__cause__)


def _free_space(path: Path) -> str:
    """Says how much the disk still takes, if that can be told."""
    folder = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
    if folder is None:
        return ""
    return f" {shutil.disk_usage(folder).free / GIB:.2f} GiB are free there."


def _last_whole(path: Path) -> str:
    """Says what was saved before, in the folder or beside it."""
    from transformers.trainer_utils import get_last_checkpoint

    for folder in (path.parent, path):
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        if last is not None and Path(last) != path:
            return f" `{last}` is whole: training can resume from it."
    return ""


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


# Folders that appear whole or not at all, written at once or in a thread beside the training.

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
