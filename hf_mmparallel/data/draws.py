"""Which samples a step has: draws from the sampler, the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Draw:
    """
    The samples of one global batch.

    Args:
        samples (`tuple[int, ...]`): Dataset indices in the sampler's order.
        epoch (`int`, *optional*, defaults to 0): The epoch that they are drawn in.
        position (`int`, *optional*, defaults to 0): How many samples of the epoch are drawn when these are.
    """

    samples: tuple[int, ...]
    epoch: int = 0
    position: int = 0

    def without(self, slots: Collection[int]) -> Draw:
        """The same draw with the samples at some slots left out. They count as drawn."""
        return replace(self, samples=tuple(s for slot, s in enumerate(self.samples) if slot not in slots))


class DrawSampler:
    """
    A batch sampler that yields a [`Draw`] for each global batch.

    Args:
        batches: A batch sampler of dataset indices, the same on all ranks.
    """

    def __init__(self, batches: Any):
        self.batches = batches
        self.epoch = 0

    @property
    def batch_sampler(self) -> DrawSampler:
        """Where `Trainer._run_epoch` looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        sampler: Any = getattr(self.batches, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Draw]:
        position = 0
        for indices in self.batches:
            position += len(indices)
            yield Draw(tuple(indices), self.epoch, position)
