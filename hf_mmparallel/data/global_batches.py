"""The samples of each step, drawn from the sampler in the same way on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..plan import SampleSizes
from .bad_samples import BadSample


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one global batch."""

    samples: tuple[int, ...]  # dataset indices in the sampler's order
    epoch: int = 0
    position: int = 0  # samples drawn in the epoch, including these
    sizes: SampleSizes | None = field(default=None, compare=False)  # if measured during drawing
    # batch index -> a sample that could not be measured
    bad: Mapping[int, BadSample] = field(default_factory=dict, compare=False)
    # module -> maximum tokens per microbatch; overrides the planner's
    token_limits: Mapping[str, int] | None = field(default=None, compare=False)

    def without(self, batch_indices: Collection[int]) -> GlobalBatch:
        """The global batch without the samples at some batch indices, which still count as drawn."""
        remaining = [batch_index for batch_index in range(len(self.samples)) if batch_index not in batch_indices]
        return replace(
            self,
            samples=tuple(self.samples[batch_index] for batch_index in remaining),
            sizes=None if self.sizes is None else self.sizes.take(remaining),
            bad={new: self.bad[batch_index] for new, batch_index in enumerate(remaining) if batch_index in self.bad},
        )


LimitFunction = Callable[[GlobalBatch], Mapping[str, int] | None]


class GlobalBatchSampler:
    """A batch sampler that yields a [`GlobalBatch`] for each global batch of an epoch."""

    def __init__(
        self,
        sampler: Any,  # dataset indices of an epoch, the same on all ranks; its `set_epoch`, if any, sets the epoch
        global_batch_size: int,
        drop_last: bool = False,  # an incomplete last global batch
        # limits that override the planner's; called when the global batch is yielded
        limits_of: LimitFunction | None = None,
    ):
        self.sampler = sampler
        self.global_batch_size = global_batch_size
        self.drop_last = drop_last
        self.epoch = 0
        self.limits_of = limits_of
        self._resumed: tuple[int, int, int] | None = None

    @property
    def batch_sampler(self) -> GlobalBatchSampler:
        """`self`, since `Trainer._run_epoch` calls `batch_sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def resume(
        self,
        epoch: int,
        position: int,  # number of the epoch's samples that were drawn
        num_batches: int,  # empty global batches in their place, which the Trainer skips
        global_batch_size: int | None = None,  # at the start of the epoch, on which its order depends
    ) -> None:
        """Continues an epoch after some of its samples; the size of global batches may have changed."""
        self._resumed = epoch, position, num_batches
        if global_batch_size is not None and isinstance(self.sampler, LengthGroups):
            self.sampler.global_batch_sizes[epoch] = global_batch_size

    def num_batches(self, num_samples: int) -> int:
        """Number of global batches for a number of samples."""
        return num_samples // self.global_batch_size if self.drop_last else -(-num_samples // self.global_batch_size)

    def __len__(self) -> int:
        return self.num_batches(len(self.sampler))

    def __iter__(self) -> Iterator[GlobalBatch]:
        return map(self.with_limits, self.global_batches())

    def with_limits(self, global_batch: GlobalBatch) -> GlobalBatch:
        """The global batch with the limits of its microbatches, if they override the planner's."""
        limits = None if self.limits_of is None else self.limits_of(global_batch)
        return global_batch if limits is None else replace(global_batch, token_limits=limits)

    def global_batches(self) -> Iterator[GlobalBatch]:
        """The global batches of the epoch."""
        position = 0
        if self._resumed is not None and self._resumed[0] == self.epoch:
            _, position, num_batches = self._resumed
            yield from [GlobalBatch((), self.epoch, position)] * num_batches
        indices = itertools.islice(self.sampler, position, None)
        while samples := tuple(itertools.islice(indices, self.global_batch_size)):
            if self.drop_last and len(samples) < self.global_batch_size:
                return
            position += len(samples)
            yield GlobalBatch(samples, self.epoch, position)


class LengthGroups:
    """An order of samples grouped by length, different in each epoch."""

    def __init__(
        self,
        # a `LengthGroupedSampler`, which computes the order of an epoch from its `batch_size` and `generator`
        sampler: Any,
        global_batch_size: int,
        seed: int,  # base of the seed of each epoch
    ):
        self.sampler = sampler
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.epoch = 0
        self.global_batch_sizes: dict[int, int] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.batch_size = self.global_batch_sizes.get(self.epoch, self.global_batch_size)
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(self.sampler)
