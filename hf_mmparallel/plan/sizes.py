"""How large the samples of a global batch are in each module, and what they cost there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .model_spec import LANGUAGE_MODEL


@dataclass(frozen=True)
class SampleSizes:
    """
    Tokens of the samples of a global batch, known before any of them is read.

    Args:
        tokens (`Mapping[str, np.ndarray]`):
            Module -> int64 `[samples]`: the tokens that its layers see of each sample; 0 where a sample has nothing
            for the module, such as a sample without images.
        squares (`Mapping[str, np.ndarray]`):
            Module -> float64 `[samples]`: the sum, over the sequences of a sample that attend to themselves (its
            images, say), of their squared lengths.
        known (`bool`, *optional*, defaults to `True`): Whether they were read off the samples; otherwise all samples
            count the same, and any of them may have something for each module.
    """

    tokens: Mapping[str, np.ndarray]
    squares: Mapping[str, np.ndarray]
    known: bool = True

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.tokens.values())))

    def take(self, slots: Sequence[int] | np.ndarray) -> SampleSizes:
        """The sizes of some of the samples, in their order."""
        chosen = np.asarray(slots, dtype=np.int64)
        return SampleSizes(
            {name: values[chosen] for name, values in self.tokens.items()},
            {name: values[chosen] for name, values in self.squares.items()},
            self.known,
        )

    def like_the_mean(self, num_samples: int) -> SampleSizes:
        """So many samples that are all like the mean of these, whose tokens need be no whole numbers."""
        return SampleSizes(
            {name: np.full(num_samples, values.mean()) for name, values in self.tokens.items()},
            {name: np.full(num_samples, values.mean()) for name, values in self.squares.items()},
            self.known,
        )

    @classmethod
    def of_sequences(cls, lengths: Mapping[str, Sequence[Sequence[int]]]) -> SampleSizes:
        """
        Sizes from the lengths of sequences.

        Args:
            lengths (`Mapping[str, Sequence[Sequence[int]]]`):
                Module -> for each sample, the lengths of its sequences (one for the language model, one for each
                image of an encoder).
        """
        return cls(
            {name: np.array([sum(own) for own in rows], dtype=np.int64) for name, rows in lengths.items()},
            {name: np.array([sum(n * n for n in own) for own in rows], dtype=float) for name, rows in lengths.items()},
        )

    @classmethod
    def uniform(cls, tokens: Mapping[str, int], num_samples: int, known: bool = False) -> SampleSizes:
        """Samples that are all alike, each with one sequence of `tokens[module]` in each module."""
        return cls(
            {name: np.full(num_samples, count, dtype=np.int64) for name, count in tokens.items()},
            {name: np.full(num_samples, float(count) ** 2) for name, count in tokens.items()},
            known,
        )


@dataclass(frozen=True)
class Workloads:
    """
    What a global batch is arranged by: numbers of its samples, in the order of their slots.

    Args:
        forward_ms (`Mapping[str, np.ndarray]`):
            Module -> float64 `[samples]`: the forward of each sample through the whole module on one rank. 0 where
            the module has nothing to do for it; such samples are in no microbatch of an encoder.
        backward_ratio (`Mapping[str, float]`): Module -> time of a backward over that of a forward, 0 without one.
        tokens (`Mapping[str, np.ndarray]`): Module -> int64 `[samples]`.
        max_tokens (`Mapping[str, int]`): Module -> most tokens of a microbatch; modules that are not in it have no
            limit. Both a budget of the user and a limit of memory become one of these. A sample that alone has more
            gets a microbatch of its own.
        row_ms (`np.ndarray` of shape `[samples]`, *optional*):
            Where rows of the language model are padded: the forward of each sample beside others of other lengths,
            under a dense mask. `None` where rows are packed or all equally long: samples cost in a microbatch what
            they cost alone.
    """

    forward_ms: Mapping[str, np.ndarray]
    backward_ratio: Mapping[str, float]
    tokens: Mapping[str, np.ndarray]
    max_tokens: Mapping[str, int]
    row_ms: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.forward_ms.values())))

    def tokens_of_limit(self, module: str) -> np.ndarray:
        """
        What each sample uses of the limit of a microbatch, int64 `[samples]`: its tokens, and all of the limit if it
        has more than that, so that it shares a microbatch with no other sample that has tokens in the module.
        """
        return np.minimum(self.tokens[module], self.max_tokens[module])

    def take(self, slots: Sequence[int] | np.ndarray) -> Workloads:
        """The workloads of some of the samples, in their order."""
        chosen = np.asarray(slots, dtype=np.int64)
        times = {name: values[chosen] for name, values in self.forward_ms.items()}
        tokens = {name: values[chosen] for name, values in self.tokens.items()}
        row_ms = None if self.row_ms is None else self.row_ms[chosen]
        return replace(self, forward_ms=times, tokens=tokens, row_ms=row_ms)

    def microbatch_ms(self, module: str, slots: np.ndarray, microbatch: np.ndarray, count: int) -> np.ndarray:
        """
        The forward of each microbatch through a whole module on one rank. Padded rows of the language model are all
        as long as the longest; rows of equal length need no dense mask.

        Args:
            module (`str`): The module.
            slots (`np.ndarray` of shape `[any]`): Samples.
            microbatch (`np.ndarray` of shape `[any]`): The microbatch of each.
            count (`int`): Microbatches.

        Returns:
            `np.ndarray`: Milliseconds, float64 `[count]`; 0 for a microbatch without samples.
        """
        alone = np.bincount(microbatch, self.forward_ms[module][slots], count).astype(float)
        if module != LANGUAGE_MODEL or self.row_ms is None:
            return alone
        longest, shortest = np.zeros(count), np.full(count, np.inf)
        np.maximum.at(longest, microbatch, self.row_ms[slots])
        np.minimum.at(shortest, microbatch, self.row_ms[slots])
        return np.where(longest > shortest, longest * np.bincount(microbatch, minlength=count), alone)

    @classmethod
    def alike(cls, modules: Iterable[str], num_samples: int) -> Workloads:
        """Samples of which nothing is known: each has one token and takes one millisecond in each of `modules`."""
        names = list(modules)
        return cls(
            {name: np.ones(num_samples) for name in names},
            dict.fromkeys(names, 2.0),
            {name: np.ones(num_samples, dtype=np.int64) for name in names},
            {},
        )
