"""Sizes of samples by dataset index, which are in memory or measured when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..plan import SampleSizes
from .image_sizes import UnknownSizeError
from .size_measures import Lengths, Ragged, SampleMeasure, ones_for_unknown

NUM_SPREAD = 1024  # samples of a large dataset that stand for all of it


@dataclass(frozen=True)
class LayerTokens:
    """Numbers of tokens in an encoder's layers, as a function of feature tokens and items."""

    per_row: float = 1.0  # tokens in the layers per feature token
    per_item: float = 0.0  # additional tokens per item
    # length of the sequences that attend to themselves, if all have the same: crops of an image, or windows of sound;
    # otherwise an item is one sequence. Costs know that layers attend within windows of it (`ModuleSpec.window`).
    sequence: int | None = None

    def sums(self, rows: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and sums of squares of each sample, from the feature tokens of its items."""
        lengths = self.per_row * rows.values.astype(float) + self.per_item
        owner, num_samples = rows.rows, len(rows.counts)
        tokens = np.bincount(owner, lengths, num_samples)
        squares = np.bincount(owner, lengths**2, num_samples) if self.sequence is None else tokens * self.sequence
        return np.rint(tokens).astype(np.int64), squares


def sizes_of(lengths: Mapping[str, Ragged], layers: Mapping[str, LayerTokens]) -> SampleSizes:
    """Sizes of samples from their lengths, and from what the encoders' layers see of them."""
    sums = {name: layers.get(name, LayerTokens()).sums(own) for name, own in lengths.items()}
    return SampleSizes(
        {name: tokens for name, (tokens, _) in sums.items()}, {name: squares for name, (_, squares) in sums.items()}
    )


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


class KnownSizes:
    """Sizes of some samples of a dataset: 16 bytes for each sample and module once they are written to."""

    def __init__(self, num_samples: int, modules: Sequence[str]):
        self.is_known = np.zeros(num_samples, dtype=bool)
        self.sizes = SampleSizes(
            {name: np.zeros(num_samples, dtype=np.int64) for name in modules},
            {name: np.zeros(num_samples) for name in modules},
        )

    def put(self, indices: Any, sizes: SampleSizes) -> None:
        for name in self.sizes.tokens:
            self.sizes.tokens[name][indices] = sizes.tokens[name]
            self.sizes.squares[name][indices] = sizes.squares[name]
        self.is_known[indices] = True


def measure_samples(sizes: Any, indices: Sequence[int]) -> dict[int, Exception]:
    """Measures samples by a function of dataset indices; dataset index -> why a sample can't be measured."""
    if isinstance(sizes, DatasetSizes):  # many at once
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


def measurable(
    sizes: Any,
    indices: Sequence[int],
    skip: bool = False,  # all that have no size, not only those that are reported when they are drawn
) -> list[int]:
    """The samples that can be measured; raises the error of one whose file is fine, and that says its size."""
    errors = measure_samples(sizes, indices)
    for error in errors.values():
        if not skip and not isinstance(error, (OSError, UnknownSizeError)):
            raise error
    return [index for index in indices if index not in errors]


@dataclass(frozen=True)
class Part:
    num_samples: int
    counts_rows: bool  # lengths in encoders are rows of features
    lengths: Mapping[str, Ragged] | None = None  # of all samples, if they were measured in advance
    # indices -> lengths of the samples, or why there are none
    read: Callable[[Sequence[int]], list[Lengths | Exception]] | None = None


class DatasetSizes:
    """
    Sizes of the samples of a dataset: dataset indices -> `SampleSizes`. Those that were not measured in advance are
    when they are first asked for. Can be pickled, for the workers of a data loader.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        modules: Sequence[str],
        order: np.ndarray | None = None,  # dataset index -> index in the parts in a row; by default the same
        layers: Mapping[str, LayerTokens] | None = None,  # tokens in the encoders' layers by feature tokens
    ):
        self.parts = list(parts)
        self.modules = list(modules)
        self.order = order
        self.layers = layers
        self.is_table = all(part.read is None for part in parts)
        # whether lengths in encoders are rows of features
        self.counts_rows = layers is None and any(part.counts_rows for part in parts)
        self.known = KnownSizes(sum(part.num_samples for part in parts), self.modules)
        self._measured: dict[int, Lengths] = {}  # what `with_layers` needs, of parts that count rows
        for part, start in self._starts():
            if part.lengths is not None:
                self.known.put(slice(start, start + part.num_samples), sizes_of(part.lengths, self._layers_of(part)))

    def _starts(self) -> list[tuple[Part, int]]:
        ends = np.cumsum([part.num_samples for part in self.parts]).tolist()
        return [(part, end - part.num_samples) for part, end in zip(self.parts, ends, strict=True)]

    def _layers_of(self, part: Part) -> Mapping[str, LayerTokens]:
        return (self.layers or {}) if part.counts_rows else {}

    def __len__(self) -> int:
        return len(self.known.is_known) if self.order is None else len(self.order)

    def _places(self, indices: Any) -> np.ndarray:
        chosen = np.asarray(indices, dtype=np.int64)
        return chosen if self.order is None else self.order[chosen]

    def __call__(self, indices: Sequence[int] | np.ndarray) -> SampleSizes:
        for error in self.measure(indices).values():
            raise error
        return self.known.sizes.take(self._places(indices))

    def measure(self, indices: Sequence[int] | np.ndarray) -> dict[int, Exception]:
        """Measures samples; dataset index -> why a sample can't be measured."""
        places = self._places(indices)
        new = np.unique(places[~self.known.is_known[places]])
        errors: dict[int, Exception] = {}
        for part, start in self._starts() if len(new) else ():
            own = new[(new >= start) & (new < start + part.num_samples)].tolist()
            if own and part.read is not None:
                found = dict(zip(own, part.read([place - start for place in own]), strict=True))
                errors |= {place: error for place, error in found.items() if isinstance(error, Exception)}
                self._put(part, {place: lengths for place, lengths in found.items() if place not in errors})
        if not errors:
            return {}
        pairs = zip(np.asarray(indices).tolist(), places.tolist(), strict=True)
        return {index: errors[place] for index, place in pairs if place in errors}

    def _put(self, part: Part, measured: Mapping[int, Any]) -> None:
        """Stores lengths of samples of a part, by their places."""
        if measured:
            lengths = {name: Ragged.of([sample[name] for sample in measured.values()]) for name in self.modules}
            self.known.put(list(measured), sizes_of(lengths, self._layers_of(part)))
            if self.counts_rows and part.counts_rows:
                self._measured |= measured

    def with_layers(self, layers: Mapping[str, LayerTokens]) -> DatasetSizes:
        """The same in tokens of the encoders' layers."""
        if not self.counts_rows:
            return self
        result = DatasetSizes(self.parts, self.modules, self.order, layers)
        for part, start in self._starts():
            own = range(start, start + part.num_samples)
            result._put(part, {place: lengths for place, lengths in self._measured.items() if place in own})
        result.parts = [replace(part, lengths=None) for part in self.parts]  # their sizes are enough
        return result


class StreamSizes:
    is_table = False

    def __init__(
        self,
        window: Any,  # a `StreamWindow`
        # names of a sample's fields -> how such samples are measured, `None` where nothing says it
        choose: Callable[[Sequence[str]], SampleMeasure | None],
        modules: Sequence[str],
        counts_rows: bool = True,  # lengths in encoders are rows of features
        layers: Mapping[str, LayerTokens] | None = None,  # tokens in the encoders' layers by feature tokens
    ):
        self.window = window
        self.choose = choose
        self.modules = tuple(modules)
        self.counts_rows = counts_rows
        self.layers = layers or {}
        self._measure: SampleMeasure | None = None

    def __len__(self) -> int:
        return len(self.window)

    def __bool__(self) -> bool:
        return True

    def __call__(self, indices: Sequence[int] | np.ndarray) -> SampleSizes:
        rows = [self.window.stored(position) for position in indices]
        if self._measure is None:
            self._measure = self.choose(list(rows[0]) if isinstance(rows[0], Mapping) else [])
        if self._measure is None:
            return SampleSizes.uniform(dict.fromkeys(self.modules, 1), len(rows))
        found: list[Any] = ones_for_unknown(self._measure.together(rows.__getitem__, range(len(rows))), self.modules)
        for error in found:
            if isinstance(error, Exception):
                raise error
        return sizes_of({name: Ragged.of([sample[name] for sample in found]) for name in self.modules}, self.layers)

    def of_window(self, window: Any) -> StreamSizes:
        """The same of the samples in another window of the stream."""
        return StreamSizes(window, self.choose, self.modules, self.counts_rows, self.layers)

    def with_layers(self, layers: Mapping[str, LayerTokens]) -> StreamSizes:
        return StreamSizes(self.window, self.choose, self.modules, True, layers) if self.counts_rows else self
