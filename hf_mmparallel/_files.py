"""What is said of a file that can't be read: which one, why, and what to use in its place."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turns any error of a block that only opens and parses one file into a `ValueError` with reason and remedy."""
    path = Path(path)
    try:
        yield
    except Exception as error:  # damaged files raise anything
        raise ValueError(f"`{path}` can't be read ({reason_of(error)}). {_remedy(path)}") from error


def reason_of(error: Exception) -> str:
    """Says in one line why a file can't be read."""
    if isinstance(error, pickle.UnpicklingError):
        # Torch's own advice, to read it without any restriction, would execute it.
        return "it holds other things than tensors and plain values"
    if isinstance(error, KeyError):
        return f"it has no entry {error}"
    text = getattr(error, "strerror", None) or str(error)
    first = (text.splitlines() or [""])[0].split(". ")[0].rstrip(".")
    return f"it is damaged or cut short: {first or type(error).__name__}"


def check_complete(folder: Path, name: str) -> None:
    """Raises `ValueError` for a checkpoint that lacks a file, with another one to resume from."""
    if not (folder / name).is_file():
        remedy = _remedy(folder / name, "Resume from a whole `checkpoint-N` folder.")
        raise ValueError(f"The checkpoint `{folder}` is incomplete: it has no `{name}`. {remedy}")


def _remedy(path: Path, otherwise: str = "Copy or download it again.") -> str:
    """What to do about a damaged or missing file; in a checkpoint, to use the one before by its name."""
    found = _CHECKPOINT.fullmatch(path.parent.name)
    if found is None:
        return otherwise
    number = int(found[1])
    matches = (_CHECKPOINT.fullmatch(other.name) for other in path.parent.parent.glob("checkpoint-*"))
    earlier = [int(match[1]) for match in matches if match is not None and int(match[1]) < number]
    if not earlier:
        return "Resume from another checkpoint."
    return f"Resume from the checkpoint before, `{path.parent.with_name(f'checkpoint-{max(earlier)}')}`."
