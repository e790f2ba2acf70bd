"""The samples of each step, drawn from the sampler in the same way on every rank."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from .._files import readable
from ..plan import SampleSizes
from .bad_samples import BadSample, BadSampleError


@dataclass(frozen=True)
class GlobalBatch:
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
        start: tuple[int | None, str | None] = (None, None),  # of the epoch, as [`LengthGroups`] has it
    ) -> None:
        """Continues an epoch after some of its samples; the size of global batches may have changed."""
        self._resumed = epoch, position, num_batches
        batch_size, generator_state = start
        if isinstance(self.sampler, LengthGroups) and batch_size is not None and generator_state is not None:
            self.sampler.starts[epoch] = batch_size, generator_state

    def generator_state(self, epoch: int) -> str | None:
        """The state of the generator that has drawn the order of an epoch, if it is one by length."""
        return self.sampler.starts[epoch][1] if epoch in getattr(self.sampler, "starts", ()) else None

    def num_batches(self, num_samples: int) -> int:
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
    """The stock Trainer's order of samples in groups by length, drawn from torch's global generator."""

    def __init__(
        self,
        # a `LengthGroupedSampler`, which computes the order of an epoch from its `batch_size` and `generator`
        sampler: Any,
        global_batch_size: int,
        agreed: Callable[[Callable[[], str]], str],  # a function -> its result on rank 0, for all ranks
    ):
        self.sampler = sampler
        self.global_batch_size = global_batch_size
        self.agreed = agreed
        self.epoch = 0
        # epoch that was drawn -> global batch size and state of the generator, in hex, at its start
        self.starts: dict[int, tuple[int, str]] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        is_first = self.epoch not in self.starts
        if is_first:
            state = self.agreed(lambda: bytes(torch.get_rng_state().tolist()).hex())
            self.starts[self.epoch] = self.global_batch_size, state
        self.sampler.batch_size, state = self.starts[self.epoch]
        self.sampler.generator = torch.Generator()
        self.sampler.generator.set_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))
        order = list(self.sampler)
        if is_first:
            torch.set_rng_state(self.sampler.generator.get_state())  # as after the stock Trainer's draw
        return iter(order)


# The batches of one data-parallel rank under DDP, FSDP or DeepSpeed, from arranged global batches.


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
    """
    A batch sampler with the batches of one rank, which accelerate must not divide among ranks again, or with one of
    each rank in turn.
    """

    def __init__(
        self,
        global_batches: GlobalBatchSampler,  # over an `EvenOrder`
        # global batch -> rank -> batch -> batch indices
        arrange: Callable[[GlobalBatch], Sequence[Sequence[Sequence[int]]]],
        rank: int | None,  # `None` for one batch of each rank in turn
        batch_size: int,  # mean samples of a batch of one rank
        num_ranks: int,
    ):
        self.global_batches = global_batches
        self.arrange = arrange
        self.rank = rank
        self.mean_size = batch_size
        self.batch_size = None  # read by accelerate: the number of samples varies
        self.num_ranks = num_ranks
        self.drop_last = False  # read by accelerate: the order has dropped what is to be dropped

    @property
    def batch_sampler(self) -> RankBatchSampler:
        """`self`, since `Trainer._run_epoch` calls `batch_sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.global_batches.set_epoch(epoch)

    def __len__(self) -> int:
        of_rank = -(-len(self.global_batches.sampler) // (self.mean_size * self.num_ranks))
        return of_rank if self.rank is not None else of_rank * self.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for global_batch in self.global_batches:
            for bad in global_batch.bad.values():  # the same on every rank
                raise BadSampleError(f"{bad} Remove it from the dataset.")
            ranks = self.arrange(global_batch)
            in_turn = chain.from_iterable(zip(*ranks, strict=True)) if self.rank is None else ranks[self.rank]
            for batch_indices in in_turn:
                yield [global_batch.samples[batch_index] for batch_index in batch_indices]


# The position of a run in its training set, in samples, so that it can resume with another batch size.

FILE = "data_position.json"


@dataclass(frozen=True)
class DataPosition:
    """The position of a run in its training set; the fields are those of the file in a checkpoint."""

    epoch: int = 0
    num_samples: int = 0  # of the epoch, drawn so far, including skipped ones
    num_steps: int = 0  # that drew them
    global_step: int = 0  # steps of the run
    batch_size: int | None = None  # global batch size at the start of the epoch, on which the order may depend
    num_skipped: int = 0  # samples of the run that could not be read
    # what was learned of memory, and the last global batch that was planned without it
    memory_ratio: list | None = None
    generator_state: str | None = None  # at the start of an epoch in groups by length, see [`LengthGroups`]

    @classmethod
    def load(cls, folder: str | Path) -> DataPosition | None:
        """Reads the position from a checkpoint; `None` if it has none. Raises `ValueError` for a damaged file."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        with readable(path):
            return cls(**json.loads(path.read_text()))

    def save(self, folder: str | Path) -> None:
        (Path(folder) / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def after(self, global_batch: GlobalBatch, global_batch_size: int) -> DataPosition:
        """The position after one more step; `global_batch_size` is that of a full global batch."""
        goes_on = global_batch.epoch == self.epoch and self.num_steps > 0
        return dataclasses.replace(
            self,
            epoch=global_batch.epoch,
            num_samples=global_batch.position,
            num_steps=self.num_steps + 1 if goes_on else 1,
            batch_size=self.batch_size if goes_on else global_batch_size,
        )

    def resume(
        self,
        global_batches: GlobalBatchSampler,
        num_samples: int | None,  # per epoch, `None` for a stream of unknown length
    ) -> tuple[int, int]:
        """Continues global batches; returns the epoch and its number of finished steps at the current batch size."""
        num_steps = self.num_steps
        if num_samples is not None:
            left = global_batches.num_batches(max(0, num_samples - self.num_samples))
            if not left:
                return self.epoch + 1, 0
            num_steps = global_batches.num_batches(num_samples) - left
        global_batches.resume(self.epoch, self.num_samples, num_steps, (self.batch_size, self.generator_state))
        return self.epoch, num_steps
