"""Streams: datasets that are read in order, through a window with the samples of one global batch."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker
from transformers.utils.import_utils import is_datasets_available

from .bad_samples import BadSampleError, without_decoding
from .fingerprint import row_digest
from .global_batches import GlobalBatch
from .randomness import OwnGenerators, stable_seed


class StreamWindow:
    """
    The samples of one global batch of a stream, by their positions in it.

    Every rank, and on it every worker of a data loader, goes through the whole stream by itself, which is not told
    that it runs in a worker, and keeps the rows of the global batch that it serves. Media of a
    `datasets.IterableDataset` stay undecoded until a sample is read.

    The global generators and a `generator` of the stream are seeded by epoch, for all ranks alike.
    """

    def __init__(
        self,
        stream: Any,  # an `IterableDataset` of torch or of `datasets`; each `iter` starts it anew
        seed: int = 0,  # base of the seeds
        drop_last: bool = False,  # a global batch that the stream can't fill is dropped
        # a worker hands the rows on with each batch, so that the main process can plan it again
        carries_rows: bool = False,
    ):
        self.features = _media_features(stream)
        self.stream = stream if self.features is None else stream.decode(False)
        self._stored_features = None if self.features is None else type(self.features)(without_decoding(self.features))
        self.seed = seed
        self.drop_last = drop_last
        self.carries_rows = carries_rows
        self.rows: dict[int, Any] = {}
        self.epoch: int | None = None
        self._next = 0
        self._iterator: Iterator[Any] | None = None
        self._generators = OwnGenerators(seed)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rows": {}, "epoch": None, "_iterator": None}

    def __len__(self) -> int:
        return len(self.stream)

    def __bool__(self) -> bool:
        return True  # also where the stream does not tell its length

    def __getitem__(self, position: int) -> Any:
        """The sample at a position of the window, with its media decoded."""
        return self.decode(self.rows[position], self.features)

    def stored(self, position: int) -> Any:
        """The sample at a position of the window, with its media as they are stored."""
        return self.decode(self.rows[position], self._stored_features)

    def decode(self, row: Any, features: Any) -> Any:
        """A row whose media are decoded as far as `features` says."""
        if features is None:
            return row
        return features.decode_example(dict(row), token_per_repo_id=getattr(self.stream, "_token_per_repo_id", None))

    def with_features(self, features: Mapping[str, Any]) -> StreamView:
        """The same window, decoded as `features` says."""
        return StreamView(self, features)

    def fetch(
        self,
        global_batch: GlobalBatch,  # its samples are positions in the stream, in order
    ) -> GlobalBatch:
        """Moves the window to a global batch; returns the part that the stream has, or raises [`BadSampleError`]."""
        wanted = global_batch.samples
        if global_batch.epoch == self.epoch and all(position in self.rows for position in wanted):
            return global_batch
        if self._iterator is None or global_batch.epoch != self.epoch or wanted[0] < self._next:
            self._start(global_batch.epoch, wanted[0])
        with _outside_worker(), self._generators():
            self.rows = dict(self._read(wanted[0], wanted[-1] + 1))
        available = tuple(position for position in wanted if position in self.rows)
        if not available or (self.drop_last and len(available) < len(wanted)):
            return replace(global_batch, samples=())
        return replace(global_batch, samples=available, position=available[-1] + 1)

    def _start(self, epoch: int, position: int) -> None:
        """Starts the stream of an epoch, at a position if it can skip there in the same order."""
        stream, self.epoch, self._next = self.stream, epoch, 0
        self._generators = OwnGenerators(stable_seed(self.seed, "stream", epoch))
        with _outside_worker(), self._generators():
            if hasattr(stream, "set_epoch"):
                stream.set_epoch(epoch)
            if isinstance(getattr(stream, "generator", None), torch.Generator):
                stream.generator.manual_seed(epoch)
            if position and epoch == 0 and is_of_datasets(stream, "IterableDataset"):
                stream, self._next = stream.skip(position), position  # in later epochs it would not shuffle shards
            self._iterator = iter(stream)

    def _read(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Place and row of the samples from `start` to `stop`, as far as the stream goes."""
        assert self._iterator is not None
        while self._next < stop:
            try:
                row = next(self._iterator)
            except StopIteration:
                return
            except Exception as error:
                raise BadSampleError(
                    f"Sample {self._next} of the stream can't be read: {type(error).__name__}: {error}. A stream does "
                    "not go on after an error: catch it inside the stream, or mend the sample."
                ) from error
            if self._next >= start:
                yield self._next, row
            self._next += 1

    def packed_rows(self) -> torch.Tensor | None:
        """The rows as bytes that go to another process through shared memory, if they are to be handed on."""
        if not self.carries_rows:
            return None
        return torch.frombuffer(bytearray(pickle.dumps(self.rows)), dtype=torch.uint8)

    def restore(self, global_batch: GlobalBatch, packed: torch.Tensor) -> None:
        """Restores the rows of a global batch from a worker."""
        self.rows, self.epoch, self._iterator = pickle.loads(packed.numpy().tobytes()), global_batch.epoch, None

    def digest(self) -> int:
        """A 31-bit checksum of the rows of the window."""
        return row_digest([self.rows[position] for position in sorted(self.rows)])


class StreamView:
    """A window as a module sees it, decoded as `features` (column -> feature) say."""

    def __init__(self, window: StreamWindow, features: Mapping[str, Any]):
        from datasets import Features

        self.window = window
        self.features = Features(features)

    def __getitem__(self, position: int) -> Any:
        row = self.window.stored(position)
        return self.window.decode({name: row[name] for name in row if name in self.features}, self.features)

    def stored(self, position: int) -> Any:
        return self.window.stored(position)


class StreamSampler:
    """The positions of a stream in order, without an end; its length is that of an epoch, if the stream tells it."""

    def __init__(self, window: StreamWindow):
        self.window = window

    def __len__(self) -> int:
        return len(self.window)

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset)


def is_of_datasets(dataset: Any, kind: str) -> bool:
    """Whether it is a `Dataset` or an `IterableDataset` of `datasets`, a package that is not needed otherwise."""
    if not is_datasets_available():
        return False
    import datasets

    return isinstance(dataset, getattr(datasets, kind))


def _media_features(stream: Any) -> Any:
    """The features of a stream whose media can be decoded later, `None` where nothing is decoded by them."""
    features = getattr(stream, "features", None) if is_of_datasets(stream, "IterableDataset") else None
    if not features or getattr(stream, "_formatting", None) is not None:
        return None
    from datasets.features.features import require_decoding

    return copy.deepcopy(features) if any(require_decoding(feature) for feature in features.values()) else None


@contextlib.contextmanager
def _outside_worker() -> Iterator[None]:
    """Hides the worker from `get_worker_info()` in a block, so that a stream does not split itself over workers."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info
