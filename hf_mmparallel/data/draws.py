"""Which samples a step has: draws from the sampler, the same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..plan import SampleSizes
from .bad_samples import BadSample


@dataclass(frozen=True)
class Draw:
    """
    The samples of one global batch.

    Args:
        samples (`tuple[int, ...]`): Dataset indices in the sampler's order.
        epoch (`int`, *optional*, defaults to 0): The epoch that they are drawn in.
        position (`int`, *optional*, defaults to 0): How many samples of the epoch are drawn when these are.
        sizes (`SampleSizes`, *optional*): Of the samples, if they were measured when they were drawn.
        bad (`Mapping[int, BadSample]`, *optional*): Slot -> why its sample could not be measured.
        limits (`Mapping[str, int]`, *optional*): Module -> most tokens of a microbatch, in place of the planner's.
    """

    samples: tuple[int, ...]
    epoch: int = 0
    position: int = 0
    sizes: SampleSizes | None = field(default=None, compare=False)
    bad: Mapping[int, BadSample] = field(default_factory=dict, compare=False)
    limits: Mapping[str, int] | None = field(default=None, compare=False)

    def without(self, slots: Collection[int]) -> Draw:
        """The same draw with the samples at some slots left out. They count as drawn."""
        kept = [slot for slot in range(len(self.samples)) if slot not in slots]
        return replace(
            self,
            samples=tuple(self.samples[slot] for slot in kept),
            sizes=None if self.sizes is None else self.sizes.take(kept),
            bad={new: self.bad[slot] for new, slot in enumerate(kept) if slot in self.bad},
        )


class DrawSampler:
    """
    A batch sampler that yields a [`Draw`] for each global batch of an epoch.

    Args:
        sampler (`Iterable[int]`):
            Dataset indices of an epoch, the same on all ranks. Its `set_epoch`, if it has one, says which.
        batch_size (`int`): Samples of a global batch.
        drop_last (`bool`, *optional*, defaults to `False`): Whether a last draw that is not full is dropped.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = False):
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = 0
        self.limits_of: Callable[[Draw], Mapping[str, int] | None] | None = None
        """Draw -> limits that are not those of the planner; asked when a draw is handed out."""
        self._resumed: tuple[int, int, int] | None = None

    @property
    def batch_sampler(self) -> DrawSampler:
        """Where `Trainer._run_epoch` looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def resume(self, epoch: int, position: int, num_draws: int, batch_size: int | None = None) -> None:
        """
        Lets an epoch go on behind some of its samples, in draws that may have another size than before.

        Args:
            epoch (`int`): The epoch.
            position (`int`): How many of its samples were drawn.
            num_draws (`int`): How many empty draws stand for them, which the Trainer skips.
            batch_size (`int`, *optional*): The size of draws when the epoch began, by which its order was made.
        """
        self._resumed = epoch, position, num_draws
        if batch_size is not None and isinstance(self.sampler, LengthGroups):
            self.sampler.batch_sizes[epoch] = batch_size

    def num_draws(self, num_samples: int) -> int:
        """Draws of a number of samples."""
        return num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)

    def __len__(self) -> int:
        return self.num_draws(len(self.sampler))

    def __iter__(self) -> Iterator[Draw]:
        return map(self.with_limits, self.draws())

    def with_limits(self, draw: Draw) -> Draw:
        """A draw with the limits of its microbatches, if there are others than those of the planner."""
        limits = None if self.limits_of is None else self.limits_of(draw)
        return draw if limits is None else replace(draw, limits=limits)

    def draws(self) -> Iterator[Draw]:
        """The draws of the epoch."""
        position = 0
        if self._resumed is not None and self._resumed[0] == self.epoch:
            _, position, num_draws = self._resumed
            yield from [Draw((), self.epoch, position)] * num_draws
        indices = itertools.islice(self.sampler, position, None)
        while samples := tuple(itertools.islice(indices, self.batch_size)):
            if self.drop_last and len(samples) < self.batch_size:
                return
            position += len(samples)
            yield Draw(samples, self.epoch, position)


class LengthGroups:
    """
    Orders in which samples of about the same length are neighbours, each epoch another one.

    Args:
        sampler (`LengthGroupedSampler`): Makes the order of one epoch by its `batch_size` and `generator`.
        batch_size (`int`): Samples of a global batch.
        seed (`int`): The order of an epoch depends on this and its number.
    """

    def __init__(self, sampler: Any, batch_size: int, seed: int):
        self.sampler = sampler
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.batch_sizes: dict[int, int] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.batch_size = self.batch_sizes.get(self.epoch, self.batch_size)
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(self.sampler)
