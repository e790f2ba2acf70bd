"""Sizes of samples, measured batch by batch: each rank measures a share of a global batch, and all exchange them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers.utils import logging

from ..plan import SampleSizes
from ..world import World
from .bad_samples import BadSample, stored_row
from .global_batches import GlobalBatch, GlobalBatchSampler
from .image_sizes import UnknownSizeError
from .size_sources import KnownSizes, measure_samples
from .step_dataset import as_is

logger = logging.get_logger(__name__)

_WORKERS, _AHEAD = 2, 4  # measuring processes per rank, and global batches that each of them prefetches


@dataclass(frozen=True)
class MeasuredShare:
    global_batch: GlobalBatch
    indices: tuple[int, ...]  # dataset indices of the samples that were measured
    sizes: SampleSizes | None  # `None` if there are none
    unknown: tuple[int, ...]  # dataset indices of samples of unknown size
    bad: dict[int, BadSample]  # dataset index -> a sample that could not be measured
    checksum: int = 0  # of the samples of the global batch, compared by the ranks


class _ShareReader(Dataset):
    def __init__(
        self,
        source: Any,
        dataset: Any,  # for the names of unreadable files
    ):
        self.source = source
        self.dataset = dataset

    def __getitems__(
        self,
        share: tuple[GlobalBatch, tuple[int, ...]],  # with the dataset indices that this rank measures
    ) -> MeasuredShare:
        global_batch, indices = share
        unknown, bad = [], {}
        errors = measure_samples(self.source, indices)
        for index, error in errors.items():
            if isinstance(error, (UnknownSizeError, OSError)):
                logger.debug("Nothing says the size of sample %d: %s", index, error)
                unknown.append(index)
            else:
                bad[index] = BadSample.of(index, error, stored_row(self.dataset, index))
        measured = tuple(index for index in indices if index not in errors)
        sizes = self.source(measured) if measured else None
        return MeasuredShare(global_batch, measured, sizes, tuple(unknown), bad)


class MeasuredBatchSampler(GlobalBatchSampler):
    """
    Global batches with the sizes of their samples, the same on all ranks.

    Each rank measures an equal share of the samples whose sizes are unknown, ahead in worker processes if the loader
    has some; the ranks exchange them when the global batch is yielded, and keep them for later epochs.
    """

    def __init__(
        self,
        global_batches: GlobalBatchSampler,
        source: Any,  # the size source, the same on all ranks
        dataset: Any,
        unknown: SampleSizes,  # the size of one sample, used for samples of unknown size
        world: World,  # the ranks that measure together
        num_workers: int = 0,  # of the loader of steps
        context: Any = None,  # start method of processes, see `multiprocessing_context` of a `DataLoader`
    ):
        super().__init__(
            global_batches.sampler,
            global_batches.global_batch_size,
            global_batches.drop_last,
            global_batches.limits_of,
        )
        self.unknown = unknown
        self._source = source
        self.measure_anew(world)
        self._loader: Any = DataLoader(
            _ShareReader(source, dataset),
            batch_sampler=_Shares(self),  # type: ignore[arg-type]
            collate_fn=as_is,
            num_workers=min(num_workers, _WORKERS),
            prefetch_factor=_AHEAD if num_workers else None,
            multiprocessing_context=context if num_workers else None,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # the default would draw from the global generator
        )

    def __iter__(self) -> Iterator[GlobalBatch]:
        # Lazy until the first global batch: loaders create iterators that they do not use, and samplers count epochs.
        for share in self._loader:
            yield self.with_limits(self._sized(share))

    def measure_anew(self, world: World) -> None:
        """Measures all samples again, with other ranks, which may not know the same ones."""
        self.world = world
        self.known = KnownSizes(len(self._source), list(self.unknown.tokens))

    def shares(self) -> Iterator[tuple[GlobalBatch, tuple[int, ...]]]:
        """Each global batch, and the dataset indices that this rank measures of it."""
        for global_batch in self.global_batches():
            mine = np.asarray(global_batch.samples, dtype=np.int64)[self.world.rank :: self.world.size]
            yield global_batch, tuple(np.unique(mine[~self.known.is_known[mine]]).tolist())

    def _sized(self, share: MeasuredShare) -> GlobalBatch:
        """Adds the exchanged sizes to a global batch; `RuntimeError` on all ranks if they drew different samples."""
        global_batch, bad = share.global_batch, {}
        if not global_batch.samples:  # a step that a resumed run skips
            return global_batch
        checksum = zlib.crc32(np.asarray(global_batch.samples, dtype=np.int64).tobytes())
        share = replace(share, global_batch=GlobalBatch(()), checksum=checksum)
        measured = self.world.all_gather(share, activity="exchanging the sizes of samples")
        if len({share.checksum for share in measured}) > 1:
            table = ", ".join(f"rank {rank}: {share.checksum:08x}" for rank, share in enumerate(measured))
            raise RuntimeError(
                f"The ranks drew different global batches ({table}). The dataset must have the same length and order "
                "on all ranks, and `data_seed` the same value."
            )
        for share in measured:
            if share.sizes is not None:
                self.known.put(list(share.indices), share.sizes)
            if share.unknown:
                logger.warning_once(
                    "Samples of unknown size count like the median of the samples measured at the start. Their images "
                    "have to be fetched or decoded, or their files can't be read."
                )
                self.known.put(list(share.unknown), self.unknown)  # the same for all
            bad |= share.bad
        batch_indices = {
            batch_index: bad[index] for batch_index, index in enumerate(global_batch.samples) if index in bad
        }
        return replace(global_batch, sizes=self.known.sizes.take(global_batch.samples), bad=batch_indices)


class _Shares:
    def __init__(self, global_batches: MeasuredBatchSampler):
        self.global_batches = global_batches

    def __len__(self) -> int:
        return len(self.global_batches)

    def __iter__(self) -> Iterator[Any]:
        return self.global_batches.shares()


def median_of(sizes: SampleSizes, module: str) -> SampleSizes:
    """Size of the sample with the median number of tokens in a module, the larger one of two."""
    order: Sequence[int] = np.argsort(sizes.tokens[module], kind="stable").tolist()
    return sizes.take([order[len(order) // 2]])
