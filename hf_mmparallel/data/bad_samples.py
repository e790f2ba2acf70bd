"""Samples that can't be read, with their files and the reasons."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset

# Rows of `datasets` as they are stored: media are not decoded, but what else is encoded is.

MEDIA_FEATURES = frozenset({"Image", "Audio", "Video"})


def without_decoding(feature: Any, kinds: Collection[str] = MEDIA_FEATURES) -> Any:
    """A feature of `datasets`, or features by name, whose media of some classes stay as they are stored."""
    if isinstance(feature, dict):
        return {name: without_decoding(part, kinds) for name, part in feature.items()}
    if isinstance(feature, (list, tuple)):
        return [without_decoding(part, kinds) for part in feature]
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=without_decoding(feature.feature, kinds))
    return dataclasses.replace(feature, decode=False) if type(feature).__name__ in kinds else feature


def stored_rows(table: Any) -> list[dict[str, Any]]:
    """The rows of a `pyarrow.Table`, as `datasets` gives them in the format "arrow"."""
    # `datasets` stores parts of messages that have unlike keys as strings of JSON (its feature `Json`), which it
    # decodes in other formats, and in which media are decoded, too.
    kinds = {field.name: field.type for field in table.schema if "json" in str(field.type)}
    rows = table.to_pylist()
    for row in rows:
        row |= {name: _decoded(row[name], kind) for name, kind in kinds.items()}
    return rows


def _decoded(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, without strings of JSON."""
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_decoded(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    return value


_FILE_KEYS = ("path", "file", "file_name", "filename", "file_path", "url")
_MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
_MAX_FILES = 3


class BadSampleError(ValueError):
    """A sample that can't be read. The message has its dataset index, its file and the reason."""


class _ReadingError(Exception):
    """The traceback of another process, as the cause of an error."""


@dataclass(frozen=True)
class BadSample:
    """A sample that a rank couldn't read."""

    index: int  # dataset index, or position in a stream
    file: str | None  # its files, if the row or the exception names them
    reason: str  # type and message of the exception
    details: str = ""  # traceback

    @classmethod
    def of(
        cls,
        index: int,
        error: Exception,
        row: Any = None,  # if possible with undecoded media; searched for file names
    ) -> BadSample:
        """Describes the failure of reading or collating a sample."""
        reason = f"{type(error).__name__}: {error}".rstrip(". ")
        return cls(
            index, _file_of_error(error) or _file_of_row(row), reason, "".join(traceback.format_exception(error))
        )

    def __str__(self) -> str:
        where = f" ({self.file})" if self.file else ""
        return f"Sample {self.index}{where} can't be read: {self.reason}."

    def error(self, rank: int | None = None) -> BadSampleError:
        """The error that ends a run because of this sample; `rank` could not read it, if there are several ranks."""
        where = "" if rank is None else f" It failed on rank {rank}."
        result = BadSampleError(f'{self}{where} Remove it, or use `on_bad_sample="skip"`.')
        result.__cause__ = _ReadingError(f"\n{self.details}")
        return result


def stored_row(dataset: Any, index: int) -> Any:
    """Returns the row of a sample with undecoded media; `None` if the map-style dataset does not provide it."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    try:
        if hasattr(dataset, "stored"):
            return dataset.stored(index)
        if hasattr(dataset, "with_format"):
            return stored_rows(dataset.with_format("arrow")[index])[0]
        return dataset[index] if isinstance(dataset, list) else None
    except Exception:  # the row is only needed for a file name
        return None


def _file_of_error(error: BaseException) -> str | None:
    """The file of an `OSError` in the chain of an exception's causes."""
    cause: BaseException | None = error
    while cause is not None:
        name = getattr(cause, "filename", None)
        if isinstance(cause, OSError) and isinstance(name, (str, bytes)):
            return name if isinstance(name, str) else name.decode(errors="replace")
        cause = cause.__cause__ or cause.__context__
    return None


def _file_of_row(row: Any) -> str | None:
    files = list(dict.fromkeys(_files(row)))
    if not files:
        return None
    return ", ".join(files[:_MAX_FILES]) + (", ..." if len(files) > _MAX_FILES else "")


def _files(value: Any, named: bool = False) -> Iterator[str]:
    """File names in a row; `named` says that a string at this level is a file name."""
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
