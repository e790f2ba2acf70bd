"""The batches of one data-parallel rank under DDP, FSDP or DeepSpeed, from arranged global batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .bad_samples import BadSampleError
from .global_batches import GlobalBatch, GlobalBatchSampler


class EvenOrder:
    """The samples of an epoch, as many for each rank, as accelerate's `BatchSamplerShard` gives them to ranks."""

    def __init__(
        self,
        sampler: Any,  # dataset indices of an epoch, the same on all ranks
        multiple: int,  # samples of a batch of all ranks
        # leave out the samples of an incomplete batch; otherwise the first ones of the epoch fill it up
        drop_last: bool,
        fills: bool = True,  # whether they do so: one process alone has a smaller last batch
    ):
        self.sampler = sampler
        self.multiple = multiple
        self.drop_last = drop_last
        self.fills = fills

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        count = len(self.sampler)
        if self.drop_last:
            return count // self.multiple * self.multiple
        return -(-count // self.multiple) * self.multiple if self.fills else count

    def __iter__(self) -> Iterator[int]:
        first: list[int] = []
        count = 0
        for index in itertools.islice(self.sampler, len(self) if self.drop_last else None):
            if len(first) < self.multiple:
                first.append(index)
            count += 1
            yield index
        missing = len(self) - count if first else 0
        yield from itertools.islice(itertools.cycle(first), missing)


class RankBatchSampler:
    """A batch sampler with the batches of one rank, which accelerate must not divide among ranks again."""

    def __init__(
        self,
        global_batches: GlobalBatchSampler,  # over an `EvenOrder`
        # global batch -> rank -> batch -> batch indices
        arrange: Callable[[GlobalBatch], Sequence[Sequence[Sequence[int]]]],
        rank: int,
        batch_size: int,  # mean samples of a batch of one rank
        num_ranks: int,
    ):
        self.global_batches = global_batches
        self.arrange = arrange
        self.rank = rank
        self.batch_size = batch_size
        self.num_ranks = num_ranks
        self.drop_last = False  # read by accelerate: the order has dropped what is to be dropped

    @property
    def batch_sampler(self) -> RankBatchSampler:
        """`self`, since `Trainer._run_epoch` calls `batch_sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.global_batches.set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.global_batches.sampler) // (self.batch_size * self.num_ranks))

    def __iter__(self) -> Iterator[list[int]]:
        for global_batch in self.global_batches:
            for bad in global_batch.bad.values():  # the same on every rank
                raise BadSampleError(f"{bad} Remove it from the dataset.")
            for batch_indices in self.arrange(global_batch)[self.rank]:
                yield [global_batch.samples[batch_index] for batch_index in batch_indices]
