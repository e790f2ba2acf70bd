"""A file cache of measured sample sizes, for later runs."""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from transformers.utils import logging

from .. import __version__
from ..plan import SampleSizes

logger = logging.get_logger(__name__)

_LOCK_SECONDS = 10.0
_MAX_FILES = 8  # per folder; the most recently written ones are kept


class SizeCache:
    """Sizes of some samples of a `datasets.Dataset` in a file that many processes may read and write at once."""

    def __init__(
        self,
        folder: str | Path,  # of its Arrow files; the file takes 8 bytes for a sample and 16 for each of its modules
        key: str,  # identifies dataset, processor and settings
        num_samples: int,  # of the dataset
    ):
        self.folder = Path(folder)
        self.key = key
        self.num_samples = num_samples

    @classmethod
    def of(
        cls,
        view: Any,  # the columns that are read
        measure: Any,
    ) -> SizeCache | None:
        """The cache of a `datasets.Dataset`, `None` of one in memory, or where nothing can be written or hashed."""
        from datasets.fingerprint import Hasher

        folders = [os.path.dirname(file["filename"]) for file in view.cache_files]
        if not folders or not os.access(folders[0], os.W_OK):
            return None
        try:
            key = Hasher.hash([view._fingerprint, measure, __version__])
        except Exception as error:  # what a user's function refers to may be of any type
            logger.debug("Sizes of samples are not kept for later runs, since their measure has no hash: %s", error)
            return None
        return cls(folders[0], key, len(view))

    def with_layers(self, layers: Any) -> SizeCache:
        """The same of sizes in tokens of the encoders' layers."""
        text = repr(sorted(layers.items()))
        return SizeCache(self.folder, f"{self.key}-{zlib.crc32(text.encode()):08x}", self.num_samples)

    @property
    def path(self) -> Path:
        return self.folder / f"sizes-{self.key}.npz"

    def load(self, modules: list[str]) -> tuple[np.ndarray, SampleSizes] | None:
        """Dataset indices and the sizes of these samples; `None` without a file, or with one that can't be read."""
        try:
            with np.load(self.path) as file:
                indices = file["indices"]
                tokens = {name: file[f"tokens.{name}"] for name in modules}
                squares = {name: file[f"squares.{name}"] for name in modules}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.debug("%s can't be read, its samples are measured again: %s", self.path, error)
            return None
        lengths = {len(own) for own in (*tokens.values(), *squares.values())}
        is_whole = lengths == {len(indices)} and (len(indices) == 0 or 0 <= indices.min() <= indices.max())
        if not is_whole or indices.max(initial=0) >= self.num_samples:
            logger.debug("%s is of another dataset, its samples are measured again.", self.path)
            return None
        return indices, SampleSizes(tokens, squares)

    def add(self, indices: np.ndarray, sizes: SampleSizes) -> bool:
        """Adds samples to the file; returns false where others write for long, or the disk is full."""
        modules = list(sizes.tokens)
        try:
            with FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS):
                before = self.load(modules)
                if before is not None:  # what other processes have added meanwhile stays
                    indices = np.append(before[0], indices)
                    sizes = SampleSizes(
                        {name: np.append(before[1].tokens[name], sizes.tokens[name]) for name in modules},
                        {name: np.append(before[1].squares[name], sizes.squares[name]) for name in modules},
                    )
                single, first = np.unique(indices, return_index=True)
                self._write(single, sizes.take(first))
        except (OSError, Timeout) as error:
            logger.debug("Sizes of samples could not be written to %s: %s", self.path, error)
            return False
        return True

    def _write(self, indices: np.ndarray, sizes: SampleSizes) -> None:
        """Replaces the file atomically, and removes the least recently written files."""
        arrays = {f"tokens.{name}": own for name, own in sizes.tokens.items()}
        arrays |= {f"squares.{name}": own for name, own in sizes.squares.items()}
        handle, name = tempfile.mkstemp(".tmp", "sizes-", self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, indices=indices, **arrays)  # pyright: ignore[reportArgumentType]
            os.replace(name, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        files = sorted(self.folder.glob("sizes-*.npz"), key=_written, reverse=True)
        for old in files[_MAX_FILES:]:
            for path in (old, Path(f"{old}.lock")):
                path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    """When a file was written; another process may have removed it."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
