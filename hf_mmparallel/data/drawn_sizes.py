"""Sizes of samples that are measured when they are drawn: a part of each draw on each rank, for all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers.utils import logging

from ..plan import SampleSizes
from .bad_samples import BadSample, stored_row
from .draws import Draw, DrawSampler
from .image_sizes import UnknownSizeError
from .size_sources import KnownSizes, measure_samples

logger = logging.get_logger(__name__)

_WORKERS, _AHEAD = 2, 4  # processes of a rank that measure, and draws that each of them is ahead
_KEPT_FROM = 256  # samples that are worth writing to a file
_GROWTH = 8  # a file grows by an eighth of its samples or more at a time


class Exchange(Protocol):
    """Gives every rank the values of all ranks. Collective."""

    def __call__(self, value: MeasuredPart) -> list[MeasuredPart]: ...


@dataclass(frozen=True)
class DrawPart:
    """
    What one rank measures of a draw.

    Args:
        draw (`Draw`): The draw.
        indices (`tuple[int, ...]`): Dataset indices that this rank measures.
    """

    draw: Draw
    indices: tuple[int, ...]


@dataclass(frozen=True)
class MeasuredPart:
    """
    What one rank found out.

    Args:
        draw (`Draw`): The draw.
        indices (`tuple[int, ...]`): Dataset indices of the samples that were measured.
        sizes (`SampleSizes`, *optional*): Their sizes; `None` without any.
        unknown (`tuple[int, ...]`): Dataset indices of samples of which nothing says the size.
        bad (`dict[int, BadSample]`): Dataset index -> why a sample could not be measured.
        checksum (`int`, *optional*, defaults to 0): Of the samples of the draw, for other ranks to compare.
    """

    draw: Draw
    indices: tuple[int, ...]
    sizes: SampleSizes | None
    unknown: tuple[int, ...]
    bad: dict[int, BadSample]
    checksum: int = 0


class PartReader(Dataset):
    """
    Measures parts of draws.

    Args:
        source (`Callable[[Sequence[int]], SampleSizes]`): What measures samples.
        dataset: What they are in, for the names of files that can't be read.
    """

    def __init__(self, source: Any, dataset: Any):
        self.source = source
        self.dataset = dataset

    def __getitems__(self, part: DrawPart) -> MeasuredPart:
        unknown, bad = [], {}
        errors = measure_samples(self.source, part.indices)
        for index, error in errors.items():
            if isinstance(error, (UnknownSizeError, OSError)):
                logger.debug("Nothing says the size of sample %d: %s", index, error)
                unknown.append(index)
            else:
                bad[index] = BadSample.of(index, error, stored_row(self.dataset, index))
        measured = [index for index in part.indices if index not in errors]
        sizes = self.source(measured) if measured else None
        return MeasuredPart(part.draw, tuple(measured), sizes, tuple(unknown), bad)


class SizedDraws(DrawSampler):
    """
    Draws with the sizes of their samples, the same on all ranks.

    Each rank measures an equal part of the samples of a draw that are not known yet, ahead in processes of its own if
    the loader has some, and the parts are exchanged when the draw is taken. What was measured is kept for later
    epochs: 16 bytes for each sample and module.

    Args:
        draws ([`DrawSampler`]): The draws.
        source (`Callable[[Sequence[int]], SampleSizes]`): What measures samples, the same rule on all ranks.
        dataset: What they are in.
        unknown (`SampleSizes`): Of one sample, which stands for those of which nothing says the size.
        exchange ([`Exchange`]): Among all ranks.
        rank (`int`): This rank.
        world_size (`int`): Ranks.
        num_workers (`int`, *optional*, defaults to 0): Processes of the loader that takes the draws.
        context (*optional*): How processes are started, see `multiprocessing_context` of a `DataLoader`.
        keeps (`bool`, *optional*, defaults to `False`):
            Whether this rank writes what all have measured to the cache of `source`, for later runs.
    """

    def __init__(
        self,
        draws: DrawSampler,
        source: Any,
        dataset: Any,
        unknown: SampleSizes,
        exchange: Exchange,
        rank: int,
        world_size: int,
        num_workers: int = 0,
        context: Any = None,
        keeps: bool = False,
    ):
        super().__init__(draws.sampler, draws.batch_size, draws.drop_last)
        self.known = KnownSizes(len(source), list(unknown.tokens))
        self.unknown = unknown
        self.exchange = exchange
        self.rank = rank
        self.world_size = world_size
        self._source = source
        self._kept = 0
        self._unkept: list[np.ndarray] | None = [] if keeps and hasattr(source, "keep") else None
        self._loader: Any = DataLoader(
            PartReader(source, dataset),
            batch_sampler=_Parts(self),  # type: ignore[arg-type]
            collate_fn=_as_is,
            num_workers=min(num_workers, _WORKERS),
            prefetch_factor=_AHEAD if num_workers else None,
            multiprocessing_context=context if num_workers else None,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # torch's own would draw from that of the training
        )

    def __iter__(self) -> Iterator[Draw]:
        # Begins with the first draw: loaders make iterators that they do not use, and samplers count their epochs.
        try:
            for part in self._loader:
                yield self.with_limits(self._sized(part))
        finally:
            self._keep(1)

    def parts(self) -> Iterator[DrawPart]:
        """What this rank measures of each draw."""
        for draw in self.draws():
            mine = np.asarray(draw.samples, dtype=np.int64)[self.rank :: self.world_size]
            yield DrawPart(draw, tuple(np.unique(mine[~self.known.are_known(mine)]).tolist()))

    def _sized(self, part: MeasuredPart) -> Draw:
        """
        A draw with what all ranks found out about its samples.

        Raises:
            `RuntimeError`: On all ranks, if they drew different samples.
        """
        draw, bad = part.draw, {}
        if not draw.samples:  # that of a step which a resumed run skips
            return draw
        checksum = zlib.crc32(np.asarray(draw.samples, dtype=np.int64).tobytes())
        parts = self.exchange(replace(part, draw=Draw(()), checksum=checksum))
        if len({found.checksum for found in parts}) > 1:
            table = ", ".join(f"rank {rank}: {found.checksum:08x}" for rank, found in enumerate(parts))
            raise RuntimeError(
                f"The ranks drew different global batches ({table}). The dataset must have the same length and order "
                "on all ranks, and `data_seed` the same value."
            )
        for found in parts:
            if found.sizes is not None:
                self.known.put(found.indices, found.sizes)
                if self._unkept is not None:
                    self._unkept.append(np.array(found.indices, dtype=np.int64))
            if found.unknown:
                logger.warning_once(
                    "Samples of which nothing says the size count like the median one of those that were measured at "
                    "the start: their images have to be fetched or decoded, or their files can't be read."
                )
                self.known.put(found.unknown, self.unknown.take(np.zeros(len(found.unknown), np.int64)))
            bad |= found.bad
        self._keep(max(_KEPT_FROM, self._kept // _GROWTH))
        slots = {slot: bad[index] for slot, index in enumerate(draw.samples) if index in bad}
        return replace(draw, sizes=self.known.sizes.take(draw.samples), bad=slots)

    def _keep(self, at_least: int) -> None:
        """Writes what was measured since the last time, if that is of enough samples."""
        if self._unkept is None or sum(map(len, self._unkept)) < at_least:
            return
        indices = np.concatenate(self._unkept)
        self._kept += len(indices)
        done = self._source.keep(indices, self.known.sizes.take(indices))
        self._unkept = [] if done else None  # what could not be written once is not tried again and again


class _Parts:
    """The batch sampler of the loader that measures."""

    def __init__(self, draws: SizedDraws):
        self.draws = draws

    def __len__(self) -> int:
        return len(self.draws)

    def __iter__(self) -> Iterator[DrawPart]:
        return self.draws.parts()


def _as_is(part: Any) -> Any:
    return part


def median_of(sizes: SampleSizes, module: str) -> SampleSizes:
    """The one sample whose tokens in a module are the median, the larger of two."""
    order: Sequence[int] = np.argsort(sizes.tokens[module], kind="stable").tolist()
    return sizes.take([order[len(order) // 2]])
