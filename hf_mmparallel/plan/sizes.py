"""Sizes of the samples of a global batch in each module, and their computation times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .model_spec import LANGUAGE_MODEL


@dataclass(frozen=True)
class SampleSizes:
    """Token counts of the samples of a global batch, known before the samples are read."""

    # module -> int64 (samples,) in its layers; 0 if a sample has no input for it, such as no images
    tokens: Mapping[str, np.ndarray]
    # module -> float64 (samples,) sum of the squared lengths of attention sequences, such as images
    squares: Mapping[str, np.ndarray]
    # whether sizes were measured; if not, all samples count the same, and any may have inputs for each module
    known: bool = True
    # module -> (samples,) number of attention sequences, equal ones, where `squares` are those of windows in them
    items: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.tokens.values())))

    def whole_squares(self, name: str) -> np.ndarray:
        """Squared lengths of the attention sequences of samples in a module, whatever windows its layers have."""
        if name not in self.items:
            return self.squares[name]
        return np.square(self.tokens[name], dtype=float) / np.maximum(self.items[name], 1)

    def take(self, batch_indices: Sequence[int] | np.ndarray) -> SampleSizes:
        """Sizes of the samples at `batch_indices`, in that order."""
        chosen = np.asarray(batch_indices, dtype=np.int64)
        return replace(
            self,
            tokens={name: values[chosen] for name, values in self.tokens.items()},
            squares={name: values[chosen] for name, values in self.squares.items()},
            items={name: values[chosen] for name, values in self.items.items()},
        )

    def like_the_mean(self, num_samples: int) -> SampleSizes:
        """`num_samples` samples of the mean size, whose token counts may be fractional."""
        return replace(
            self,
            tokens={name: np.full(num_samples, values.mean()) for name, values in self.tokens.items()},
            squares={name: np.full(num_samples, values.mean()) for name, values in self.squares.items()},
            items={name: np.full(num_samples, values.mean()) for name, values in self.items.items()},
        )

    @classmethod
    def of_sequences(cls, lengths: Mapping[str, Sequence[Sequence[int]]]) -> SampleSizes:
        """Sizes from the sequence lengths of each sample: one in the language model, one per image in encoders."""
        return cls(
            {name: np.array([sum(s) for s in samples], dtype=np.int64) for name, samples in lengths.items()},
            {name: np.array([sum(n * n for n in s) for s in samples], float) for name, samples in lengths.items()},
        )

    @classmethod
    def uniform(cls, tokens: Mapping[str, int], num_samples: int, known: bool = False) -> SampleSizes:
        """`num_samples` equal samples, each with one sequence of `tokens[module]` tokens in each module."""
        return cls(
            {name: np.full(num_samples, count, dtype=np.int64) for name, count in tokens.items()},
            {name: np.full(num_samples, float(count) ** 2) for name, count in tokens.items()},
            known,
        )


_NUM_BATCHES, _FEWER_BATCHES = 3, 2
_LARGE_BATCH = 4096  # batch size from which batches are so similar that fewer are enough


def typical_batches(sizes: SampleSizes, global_batch_size: int, seed: int) -> list[SampleSizes]:
    """
    The global batches that predictions are the mean of: a search, the commands and the Trainer have the same. Samples
    are drawn at random, each as often as the others where there are too few.
    """
    count, whole = sizes.num_samples, np.arange(sizes.num_samples)
    batches = []
    for number in range(_NUM_BATCHES if global_batch_size < _LARGE_BATCH else _FEWER_BATCHES):
        rest = np.random.default_rng((seed, number)).choice(count, global_batch_size % count, replace=False)
        batches.append(sizes.take(np.sort(np.concatenate([np.tile(whole, global_batch_size // count), rest]))))
    return batches


@dataclass(frozen=True)
class Workloads:
    """Computation times and token counts of a global batch, by which its samples are arranged into microbatches."""

    # module -> float64 (samples,) time through the whole module on one rank; 0 if a sample has no input for it, and
    # then it is in no microbatch of an encoder
    forward_ms: Mapping[str, np.ndarray]
    backward_ratio: Mapping[str, float]  # module -> backward time / forward time, 0 without a backward
    tokens: Mapping[str, np.ndarray]  # module -> int64 (samples,)
    # module -> maximum tokens per microbatch, from the user's setting or the memory limit; no limit for modules left
    # out; a sample with more tokens gets a microbatch of its own
    token_limits: Mapping[str, int]
    # (samples,) forward time in a padded microbatch of the language model, with a dense mask; `None` if samples are
    # packed or have equal lengths, where one in a microbatch takes as long as alone
    row_ms: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.forward_ms.values())))

    def tokens_of_limit(self, module: str) -> np.ndarray:
        """Tokens of each sample that count against `token_limits`, int64 `[samples]`."""
        # at most the limit, so that a larger sample fills a microbatch by itself
        return np.minimum(self.tokens[module], self.token_limits[module])

    def take(self, batch_indices: Sequence[int] | np.ndarray) -> Workloads:
        """Workloads of the samples at `batch_indices`, in that order."""
        chosen = np.asarray(batch_indices, dtype=np.int64)
        times = {name: values[chosen] for name, values in self.forward_ms.items()}
        tokens = {name: values[chosen] for name, values in self.tokens.items()}
        row_ms = None if self.row_ms is None else self.row_ms[chosen]
        return replace(self, forward_ms=times, tokens=tokens, row_ms=row_ms)

    def microbatch_ms(self, module: str, batch_indices: np.ndarray, microbatch: np.ndarray, count: int) -> np.ndarray:
        """
        Forward time in ms, float64 `[count]`, of microbatches through a whole module on one rank, from the microbatch
        of each of `batch_indices`; 0 for one without samples.
        """
        alone = np.bincount(microbatch, self.forward_ms[module][batch_indices], count).astype(float)
        if module != LANGUAGE_MODEL or self.row_ms is None:
            return alone
        longest, shortest = np.zeros(count), np.full(count, np.inf)
        np.maximum.at(longest, microbatch, self.row_ms[batch_indices])
        np.minimum.at(shortest, microbatch, self.row_ms[batch_indices])
        # all padded rows have the length of the longest one; rows of equal length need no dense mask
        return np.where(longest > shortest, longest * np.bincount(microbatch, minlength=count), alone)

    @classmethod
    def alike(cls, modules: Iterable[str], num_samples: int) -> Workloads:
        """Workloads of samples of unknown size: one token and one millisecond per sample in each of `modules`."""
        names = list(modules)
        return cls(
            {name: np.ones(num_samples) for name in names},
            dict.fromkeys(names, 2.0),
            {name: np.ones(num_samples, dtype=np.int64) for name in names},
            {},
        )
