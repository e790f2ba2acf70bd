"""The files below folders that appear whole or not at all, and what is said when a disk does not take them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..cost.stage_memory import GIB

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
    """Makes the folder of [`unfinished_name`], without what unfinished saves have left. Raises [`SaveError`]."""
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
