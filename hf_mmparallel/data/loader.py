"""From a dataset to the inputs of each task of this rank: the sampler of steps and the dataset that serves them."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..plan import ParallelPlan, StepPlan
from .context import BatchKey, ContextCut, ContextCutter


@dataclass
class StepBatch:
    """
    One global batch as this rank sees it.

    Args:
        step (`StepPlan`): Which sample is where.
        batches (`dict[BatchKey, dict[str, Any]]`):
            (module, replica, microbatch, chunk) -> the collated samples, for each chunk that this rank works on.
        cuts (`dict[BatchKey, ContextCut]`):
            How the tokens of the language model's microbatches are cut, as far as this rank needs to know.
    """

    step: StepPlan
    batches: dict[BatchKey, dict[str, Any]] = field(default_factory=dict)
    cuts: dict[BatchKey, ContextCut] = field(default_factory=dict)

    def pin_memory(self) -> StepBatch:
        """Called by the data loader's pinning thread."""
        for batch in self.batches.values():
            for name, value in batch.items():
                if torch.is_tensor(value):
                    batch[name] = value.pin_memory()
        return self


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that is the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds Python, NumPy and torch on the host inside the block, and gives them their states back after it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class StepSampler:
    """
    A batch sampler that yields a [`StepPlan`] for each global batch.

    Args:
        batches: A batch sampler of dataset indices, the same on all ranks.
        arrange (`Callable[[Sequence[int], int], StepPlan]`): (indices, epoch) -> arrangement.
    """

    def __init__(self, batches: Any, arrange: Callable[[Sequence[int], int], StepPlan]):
        self.batches = batches
        self.arrange = arrange
        self.epoch = 0

    @property
    def batch_sampler(self) -> StepSampler:
        """Where `Trainer._run_epoch` looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        sampler: Any = getattr(self.batches, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[StepPlan]:
        for indices in self.batches:
            yield self.arrange(indices, self.epoch)


def keys_of_rank(plan: ParallelPlan, step: StepPlan, rank: int) -> dict[BatchKey, tuple[int, ...]]:
    """(module, replica, microbatch, chunk) -> slots, of every chunk that `rank` works on."""
    mine = {(module, replica) for module, replica, _ in plan.stages_of_rank(rank)}
    return {
        (module, replica, index, chunk): slots
        for (module, replica, index), chunks in step.chunks.items()
        if (module, replica) in mine
        for chunk, slots in enumerate(chunks)
    }


class StepDataset(Dataset):
    """
    Serves [`StepBatch`]es: reads each sample of this rank once, and collates every chunk with the user's collator.

    Randomness inside a sample or a collation is seeded by epoch and dataset index, so that all ranks that read a
    sample get the same one, and a resumed run repeats what was.

    Args:
        dataset: A map-style dataset.
        collator (`Callable[[list], Mapping]`): Collates samples.
        keys (`Callable[[StepPlan], Mapping[BatchKey, Sequence[int]]]`): The chunks of this rank.
        seed (`int`): The base of all seeds.
        unused (`Mapping[str, frozenset[str]]`, *optional*):
            Module -> floating-point entries of a collated batch that it does not read, such as the pixels in the
            language model; they go no further.
        cutter ([`ContextCutter`], *optional*): Cuts the language model's microbatches.
    """

    def __init__(
        self,
        dataset: Any,
        collator: Callable[[list], Mapping[str, Any]],
        keys: Callable[[StepPlan], Mapping[BatchKey, Sequence[int]]],
        seed: int,
        unused: Mapping[str, frozenset[str]] | None = None,
        cutter: ContextCutter | None = None,
    ):
        self.unused = unused or {}
        self.cutter = cutter
        self.dataset = dataset
        self.collator = collator
        self.keys = keys
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, step: StepPlan) -> StepBatch:
        collated = _Collated(self, step)
        result = StepBatch(step)
        for key, slots in self.keys(step).items():
            unused = self.unused.get(key[0], frozenset())
            result.batches[key] = {
                name: value
                for name, value in collated[slots].items()
                if not (name in unused and torch.is_tensor(value) and value.is_floating_point())
            }
        if self.cutter is not None:
            result.cuts = {key: self.cutter(collated[slots]) for key, slots in self.cutter.keys(step).items()}
        return result

    def _read(self, index: int, epoch: int) -> Any:
        with seeded(stable_seed(self.seed, epoch, index)):
            return self.dataset[index]


class _Collated(dict):
    """Slots of a step -> their batch; modules that take the same samples share one, and each sample is read once."""

    def __init__(self, source: StepDataset, step: StepPlan):
        self.source = source
        self.step = step
        self.samples: dict[int, Any] = {}

    def __missing__(self, slots: tuple[int, ...]) -> Mapping[str, Any]:
        source, step = self.source, self.step
        for slot in slots:
            if slot not in self.samples:
                self.samples[slot] = source._read(step.samples[slot], step.epoch)
        with seeded(stable_seed(source.seed, step.epoch, [step.samples[slot] for slot in slots])):
            # Collators may change what they are given, and a sample can be in several chunks.
            self[slots] = source.collator([_copied(self.samples[slot]) for slot in slots])
        return self[slots]


def _copied(sample: Any) -> Any:
    return dict(sample) if isinstance(sample, Mapping) else sample


def as_is(batch: Any) -> Any:
    """The collate function of a loader whose dataset collates."""
    return batch
