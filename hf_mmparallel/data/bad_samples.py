"""Samples that can't be read: which they are, where they lie, and why."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset

_FILE_KEYS = ("path", "file", "file_name", "filename", "file_path", "url")
_MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
_MAX_FILES = 3


class BadSampleError(ValueError):
    """A sample that can't be read. The message has its dataset index, its file and the reason."""


class _ReadingError(Exception):
    """Carries the traceback of another process."""


@dataclass(frozen=True)
class BadSample:
    """
    What a rank knows of a sample that it couldn't read.

    Args:
        index (`int`): The dataset index, or the place in a stream.
        file (`str`, *optional*): Its file or files, as far as the row or the exception name them.
        reason (`str`): The exception in words.
        details (`str`, *optional*, defaults to `""`): The traceback.
    """

    index: int
    file: str | None
    reason: str
    details: str = ""

    @classmethod
    def of(cls, index: int, error: Exception, row: Any = None) -> BadSample:
        """
        Describes a failure.

        Args:
            index (`int`): The dataset index.
            error (`Exception`): What reading or collating it raised.
            row: The sample, at best before its media are decoded; searched for files.
        """
        reason = f"{type(error).__name__}: {error}".rstrip(". ")
        return cls(
            index, _file_of_error(error) or _file_of_row(row), reason, "".join(traceback.format_exception(error))
        )

    def __str__(self) -> str:
        where = f" ({self.file})" if self.file else ""
        return f"Sample {self.index}{where} can't be read: {self.reason}."

    def error(self, rank: int | None = None) -> BadSampleError:
        """
        The error that ends a run because of it.

        Args:
            rank (`int`, *optional*): The rank that could not read it, where there are several.
        """
        who = "" if rank is None else f" Rank {rank} met it."
        result = BadSampleError(f'{self}{who} Remove it, or use `on_bad_sample="skip"`.')
        result.__cause__ = _ReadingError(f"\n{self.details}")
        return result


def stored_row(dataset: Any, index: int) -> Any:
    """
    The row of a sample without decoding its media, `None` where the dataset can't say.

    Args:
        dataset: A map-style dataset.
        index (`int`): The dataset index.
    """
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    try:
        if hasattr(dataset, "stored"):
            return dataset.stored(index)
        if hasattr(dataset, "with_format"):
            return dataset.with_format("arrow")[index].to_pylist()[0]
        return dataset[index] if isinstance(dataset, list) else None
    except Exception:  # the row is only read for the name of a file
        return None


def _file_of_error(error: BaseException) -> str | None:
    """The file that an exception, or what caused it, is about."""
    seen: BaseException | None = error
    while seen is not None:
        name = getattr(seen, "filename", None)
        if isinstance(seen, OSError) and isinstance(name, (str, bytes)):
            return name if isinstance(name, str) else name.decode(errors="replace")
        seen = seen.__cause__ or seen.__context__
    return None


def _file_of_row(row: Any) -> str | None:
    """The files that a row names, the first few of them."""
    files = list(dict.fromkeys(_files(row)))
    if not files:
        return None
    return ", ".join(files[:_MAX_FILES]) + (", ..." if len(files) > _MAX_FILES else "")


def _files(value: Any, named: bool = False) -> Iterator[str]:
    """Names of files in a row; `named` says that a string here is one."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _files(item, key in _FILE_KEYS or key in _MEDIA_KEYS)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _files(item, named)
    elif isinstance(value, str):
        if named and value and len(value) < 1024 and not value.startswith("data:"):
            yield value
    elif isinstance(filename := getattr(value, "filename", None), str) and filename:
        yield filename
