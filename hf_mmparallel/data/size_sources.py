"""
Sources of sample sizes by dataset index: tables in memory, or measurement on access.

Each has `counts_rows`, whether lengths in encoders are rows of features, and `is_table`, whether it is numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..plan import SampleSizes
from .size_measures import Lengths

NUM_SPREAD = 1024  # samples of a large dataset that stand for all of it


@dataclass(frozen=True)
class LayerTokens:
    """Numbers of tokens in an encoder's layers, as a function of feature tokens and items."""

    per_row: float = 1.0  # tokens in the layers per feature token
    per_item: float = 0.0  # additional tokens per item
    # length of the sequences that attend to themselves, if all have the same: crops of an image, or windows of sound;
    # otherwise an item is one sequence. Costs know that layers attend within windows of it (`ModuleSpec.window`).
    sequence: int | None = None


class Ragged:
    """Lengths of the sequences of many samples in one module."""

    def __init__(
        self,
        lengths: np.ndarray,  # of all sequences, in the order of the samples
        counts: np.ndarray,  # (samples,) sequences of each sample
    ):
        self.lengths = lengths
        self.counts = counts

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """From lists."""
        flat = [length for row in rows for length in row]
        return cls(np.array(flat, dtype=np.int64), np.array([len(row) for row in rows], dtype=np.int64))

    @classmethod
    def ones(cls, num_samples: int) -> Ragged:
        """One sequence of one token in each sample."""
        ones = np.ones(num_samples, dtype=np.int64)
        return cls(ones, ones)

    @classmethod
    def of_arrow(cls, column: Any, name: str) -> Ragged:
        """From an Arrow column of numbers or lists of them, nothing means none; `ValueError` for no lengths."""
        import pyarrow as pa

        array = column.combine_chunks()
        counts = np.asarray(array.is_valid()).astype(np.int64)
        try:
            if not pa.types.is_primitive(array.type):
                counts = np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)
                array = array.flatten()
            lengths = np.asarray(array.drop_null().cast(pa.int64()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, AttributeError):
            lengths = None
        if lengths is None or (lengths < 0).any() or len(lengths) != counts.sum():
            raise ValueError(
                f"Column `{name}` of type `{column.type}` holds values that are no lengths. Use numbers from 0, or "
                "lists with one for each image."
            )
        return cls(lengths, counts)

    def sums(self, layers: LayerTokens | None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and sums of squares of each sample."""
        lengths = self.lengths.astype(float)
        if layers is not None:
            lengths = layers.per_row * lengths + layers.per_item
        owner, num_samples = np.repeat(np.arange(len(self.counts)), self.counts), len(self.counts)
        tokens = np.bincount(owner, lengths, num_samples)
        if layers is not None and layers.sequence is not None:
            return np.rint(tokens).astype(np.int64), tokens * layers.sequence
        return np.rint(tokens).astype(np.int64), np.bincount(owner, lengths**2, num_samples)


def draw_samples(num_samples: int, most: int, seed: int) -> np.ndarray:
    """Indices of at most `most` samples of a dataset, drawn at random, ascending."""
    if num_samples <= most:
        return np.arange(num_samples)
    return np.sort(np.random.default_rng(seed).choice(num_samples, most, replace=False))


def evenly_spaced(num_samples: int, count: int) -> list[int]:
    """Dataset indices from all over a dataset, ascending, at most `count`."""
    few = np.arange(num_samples)
    # Of a large dataset all choices are among the same few samples: what is measured for one is known for another.
    if num_samples > NUM_SPREAD >= count:
        few = np.linspace(0, num_samples - 1, NUM_SPREAD).astype(np.int64)
    return few[np.linspace(0, len(few) - 1, min(count, len(few))).astype(np.int64)].tolist()


def sizes_of(lengths: Mapping[str, Ragged], layers: Mapping[str, LayerTokens]) -> SampleSizes:
    """Sizes of samples from their lengths, and from what the encoders' layers see of them."""
    sums = {name: ragged.sums(layers.get(name)) for name, ragged in lengths.items()}
    return SampleSizes(
        {name: tokens for name, (tokens, _) in sums.items()}, {name: squares for name, (_, squares) in sums.items()}
    )


class TableSizes:
    """Sizes of all samples of a dataset, in memory: 16 bytes for each sample and module."""

    is_table = True

    def __init__(
        self,
        lengths: Mapping[str, Ragged],  # module -> lengths of all samples
        counts_rows: bool,  # lengths in encoders are rows of features
    ):
        self.counts_rows = counts_rows
        self.lengths: Mapping[str, Ragged] | None = lengths if counts_rows else None
        self.sizes = sizes_of(lengths, {})

    def __len__(self) -> int:
        return self.sizes.num_samples

    def __call__(self, indices: Sequence[int]) -> SampleSizes:
        return self.sizes.take(indices)

    def with_layers(self, layers: Mapping[str, LayerTokens]) -> TableSizes:
        """The same in tokens of the encoders' layers."""
        if self.lengths is None:
            return self
        result = TableSizes(self.lengths, True)
        result.sizes, result.lengths = sizes_of(self.lengths, layers), None
        return result


class KnownSizes:
    """Sizes of some samples of a dataset: 16 bytes for each sample and module once they are written to."""

    def __init__(self, num_samples: int, modules: Sequence[str]):
        self.is_known = np.zeros(num_samples, dtype=bool)
        self.sizes = SampleSizes(
            {name: np.zeros(num_samples, dtype=np.int64) for name in modules},
            {name: np.zeros(num_samples) for name in modules},
        )

    def are_known(self, indices: np.ndarray) -> np.ndarray:
        """bool: whether the sizes of these samples are here."""
        return self.is_known[indices]

    def put(self, indices: Sequence[int] | np.ndarray, sizes: SampleSizes) -> None:
        """Stores sizes of samples."""
        chosen = np.asarray(indices, dtype=np.int64)
        for name in self.sizes.tokens:
            self.sizes.tokens[name][chosen] = sizes.tokens[name]
            self.sizes.squares[name][chosen] = sizes.squares[name]
        self.is_known[chosen] = True

    def __call__(self, indices: Sequence[int] | np.ndarray) -> SampleSizes:
        """The sizes of samples that are known."""
        assert self.is_known[np.asarray(indices, dtype=np.int64)].all()
        return self.sizes.take(indices)


def measure_samples(sizes: Callable[[Sequence[int]], SampleSizes], indices: Sequence[int]) -> dict[int, Exception]:
    """Measures samples, many at once where that is faster; dataset index -> why a sample can't be measured."""
    if isinstance(sizes, (LazySizes, SubsetSizes, ConcatSizes)):
        return sizes.measure(indices)
    errors: dict[int, Exception] = {}
    for index in indices:
        try:
            sizes([index])
        except MemoryError:
            raise
        except Exception as error:  # whatever a dataset or a user's function raises
            errors[index] = error
    return errors


class LazySizes:
    """Sizes that are measured on first access and stored."""

    is_table = False

    def __init__(
        self,
        num_samples: int,
        # indices -> lengths of the samples, or why there are none
        read: Callable[[Sequence[int]], list[Lengths | Exception]],
        modules: Sequence[str],
        counts_rows: bool,  # lengths in encoders are rows of features
    ):
        self.read = read
        self.counts_rows = counts_rows
        self.layers: Mapping[str, LayerTokens] = {}
        self.modules = list(modules)
        self.known = KnownSizes(num_samples, self.modules)
        self._lengths: dict[int, Lengths] | None = {} if counts_rows else None  # for `with_layers`

    def __len__(self) -> int:
        return len(self.known.is_known)

    def __call__(self, indices: Sequence[int]) -> SampleSizes:
        for error in self.measure(indices).values():
            raise error
        return self.known(indices)

    def measure(self, indices: Sequence[int] | np.ndarray) -> dict[int, Exception]:
        """Measures samples, see [`measure_samples`]."""
        chosen = np.asarray(indices, dtype=np.int64)
        new = np.unique(chosen[~self.known.are_known(chosen)]).tolist()
        found = dict(zip(new, self.read(new), strict=True)) if new else {}
        good = {index: lengths for index, lengths in found.items() if not isinstance(lengths, Exception)}
        self._put(good)
        if self._lengths is not None:
            self._lengths |= good
        return {index: error for index, error in found.items() if isinstance(error, Exception)}

    def _put(self, measured: Mapping[int, Lengths]) -> None:
        """Stores lengths of samples."""
        if measured:
            lengths = {name: Ragged.of([sample[name] for sample in measured.values()]) for name in self.modules}
            self.known.put(list(measured), sizes_of(lengths, self.layers))

    def with_layers(self, layers: Mapping[str, LayerTokens]) -> LazySizes:
        """The same in tokens of the encoders' layers."""
        if not self.counts_rows:
            return self
        result = LazySizes(len(self), self.read, self.modules, True)
        result.layers = layers
        result._put(self._lengths or {})
        result._lengths = None
        return result


class SubsetSizes:
    """Sizes of a `torch.utils.data.Subset`."""

    def __init__(self, source: Any, indices: Sequence[int] | np.ndarray):
        self.source = source
        self.indices = np.asarray(indices, dtype=np.int64)
        self.counts_rows: bool = source.counts_rows
        self.is_table: bool = source.is_table

    def __len__(self) -> int:
        return len(self.indices)

    def __call__(self, indices: Sequence[int]) -> SampleSizes:
        return self.source(self.indices[np.asarray(indices, dtype=np.int64)])

    def measure(self, indices: Sequence[int] | np.ndarray) -> dict[int, Exception]:
        """Measures samples, see [`measure_samples`]."""
        chosen = np.asarray(indices, dtype=np.int64)
        inner = self.indices[chosen].tolist()
        errors = measure_samples(self.source, inner)
        return {index: errors[own] for index, own in zip(chosen.tolist(), inner, strict=True) if own in errors}

    def with_layers(self, layers: Mapping[str, LayerTokens]) -> SubsetSizes:
        """The same in tokens of the encoders' layers."""
        return SubsetSizes(self.source.with_layers(layers), self.indices)


class ConcatSizes:
    """Sizes of a `torch.utils.data.ConcatDataset`."""

    def __init__(self, sources: Sequence[Any]):
        self.sources = list(sources)
        self.ends = np.cumsum([len(source) for source in self.sources])
        self.counts_rows: bool = any(source.counts_rows for source in self.sources)
        self.is_table: bool = all(source.is_table for source in self.sources)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __call__(self, indices: Sequence[int]) -> SampleSizes:
        chosen = np.asarray(indices, dtype=np.int64)
        part_of = np.searchsorted(self.ends, chosen, side="right")
        order = np.argsort(part_of, kind="stable")
        parts = [
            source(chosen[part_of == part] - (end - len(source)))
            for part, (source, end) in enumerate(zip(self.sources, self.ends, strict=True))
        ]
        back = np.argsort(order, kind="stable")
        return SampleSizes(
            {name: np.concatenate([part.tokens[name] for part in parts])[back] for name in parts[0].tokens},
            {name: np.concatenate([part.squares[name] for part in parts])[back] for name in parts[0].squares},
        )

    def measure(self, indices: Sequence[int] | np.ndarray) -> dict[int, Exception]:
        """Measures samples, see [`measure_samples`]."""
        chosen = np.asarray(indices, dtype=np.int64)
        part_of = np.searchsorted(self.ends, chosen, side="right")
        errors: dict[int, Exception] = {}
        for part, (source, end) in enumerate(zip(self.sources, self.ends.tolist(), strict=True)):
            start = end - len(source)
            found = measure_samples(source, (chosen[part_of == part] - start).tolist())
            errors |= {index + start: error for index, error in found.items()}
        return errors

    def with_layers(self, layers: Mapping[str, LayerTokens]) -> ConcatSizes:
        """The same in tokens of the encoders' layers."""
        return ConcatSizes([source.with_layers(layers) for source in self.sources])
