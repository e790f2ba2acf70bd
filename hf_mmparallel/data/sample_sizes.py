"""Chooses how the sizes of a dataset's samples are measured, without decoding images or running a processor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset
from transformers.utils import logging

from .. import __version__
from ..plan import LANGUAGE_MODEL, ModelSpec
from .bad_samples import stored_rows
from .chat_collator import ChatCollator
from .defaults import default_collator
from .image_sizes import UnknownSizeError
from .size_measures import ChatMeasure, ColumnMeasure, FunctionMeasure, Lengths, OrOne, SampleMeasure, TokenMeasure
from .size_sources import ConcatSizes, LazySizes, Ragged, SubsetSizes, TableSizes
from .step_dataset import seeded
from .streams import StreamSizes, StreamWindow, is_stream

# Vectorised token counts of many rows of an Arrow table.


def token_lengths(
    table: Any,  # a `pyarrow.Table` with `input_ids`, and what else the measure reads
    measure: TokenMeasure,
) -> dict[str, Ragged] | None:
    """[`TokenMeasure`] of all rows together: module -> lengths; `None` where ids or mask are no lists of numbers."""
    ids, mask = _lists(table, "input_ids"), None
    if "attention_mask" in table.column_names:
        mask = _lists(table, "attention_mask")
        if mask is None or ids is None or (mask.counts != ids.counts).any():
            return None
    if ids is None:
        return None
    if mask is not None:
        ids = ids.where(mask.values != 0)
    found = {LANGUAGE_MODEL: Ragged(ids.counts, np.ones(len(ids.counts), np.int64))}
    for name, modalities in measure.placeholders.items():
        if name != LANGUAGE_MODEL:
            found[name] = _side_by_side(
                [_items(table, ids, modality, token) for modality, token in modalities], len(ids.counts)
            )
    return found


@dataclass(frozen=True)
class _Lists:
    """The values of all rows, and how many each row has."""

    values: np.ndarray
    counts: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    @property
    def rows(self) -> np.ndarray:
        """The row of each value."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def where(self, kept: np.ndarray) -> _Lists:
        """The values that are kept."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return _Lists(self.values[kept], np.diff(before[np.concatenate([[0], self.ends])]))


def _lists(table: Any, name: str) -> _Lists | None:
    """A column of lists of whole numbers; `None` for any other."""
    import pyarrow as pa

    array = table[name].combine_chunks()
    if not (_is_list(array.type) and pa.types.is_integer(array.type.value_type)) or array.null_count:
        return None
    values = array.flatten()
    return None if values.null_count else _Lists(np.asarray(values), _num_values(array))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _num_values(array: Any) -> np.ndarray:
    return np.asarray(array.value_lengths()).astype(np.int64)


def _items(table: Any, ids: _Lists, modality: str, token: int) -> _Lists:
    """Rows of features of each item of one modality: shared out by the items' extents, else runs of placeholders."""
    positions = np.flatnonzero(ids.values == token)
    num_rows = np.diff(np.searchsorted(positions, ids.ends), prepend=0)
    row_of = np.repeat(np.arange(len(num_rows)), num_rows)
    is_open = num_rows > 0
    parts = []
    for name in table.column_names:
        if name.startswith(f"{modality}_") and is_open.any():
            shares, fits = _shares(table[name].combine_chunks(), num_rows)
            fits &= is_open
            parts.append(shares.where(fits[shares.rows]))
            is_open &= ~fits
    is_new = np.ones(len(positions), dtype=bool)
    is_new[1:] = (np.diff(positions) != 1) | (np.diff(row_of) != 0)
    starts = np.flatnonzero(is_new)
    runs = _Lists(np.diff(np.append(starts, len(positions))), np.bincount(row_of[starts], minlength=len(ids.counts)))
    whole = _side_by_side([*parts, runs.where(is_open[runs.rows])], len(ids.counts))
    return _Lists(whole.lengths, whole.counts)


def _shares(
    array: Any,  # lists of two numbers or of three with the frames first
    num_rows: np.ndarray,
) -> tuple[_Lists, np.ndarray]:
    """Rows by the extents of items, and for which rows of the table they fit, bool `[rows]`."""
    import pyarrow as pa

    nothing = _Lists(np.zeros(0, np.int64), np.zeros(len(num_rows), np.int64)), np.zeros(len(num_rows), dtype=bool)
    if not _is_list(array.type) or not _is_list(array.type.value_type):
        return nothing
    items = array.flatten()
    values = items.flatten()
    if not pa.types.is_integer(values.type) or array.null_count or items.null_count or values.null_count:
        return nothing
    counts, dims, numbers = _num_values(array), _num_values(items), np.asarray(values).astype(np.int64)
    row_of = np.repeat(np.arange(len(counts)), counts)
    bad = (dims < 2) | (dims > 3)
    bad |= np.bincount(np.repeat(np.arange(len(dims)), dims), numbers < 1, len(dims)) > 0
    max_dims, min_dims = np.zeros(len(counts), np.int64), np.full(len(counts), 3)
    np.maximum.at(max_dims, row_of, dims)
    np.minimum.at(min_dims, row_of, dims)
    fits = (counts > 0) & (max_dims == min_dims) & (np.bincount(row_of, bad, len(counts)) == 0)
    ends = np.cumsum(dims)
    some = fits[row_of]
    last, first = ends[some] - 1, (ends - dims)[some]
    area = numbers[last] * numbers[last - 1]
    frames = np.where(dims[some] == 3, numbers[first], 1)
    row_of = row_of[some]
    total = np.zeros(len(counts), np.int64)
    np.add.at(total, row_of, area * frames)
    share, rest = np.divmod(num_rows[row_of] * area, np.maximum(total, 1)[row_of])
    fits &= np.bincount(row_of, rest, len(counts)) == 0
    return _Lists(np.repeat(share, frames), np.bincount(row_of, frames, len(counts)).astype(np.int64)), fits


def _side_by_side(parts: Sequence[_Lists], num_rows: int) -> Ragged:
    """The values of all parts, those of a row in the order of the parts."""
    if len(parts) == 1:
        return Ragged(parts[0].values, parts[0].counts)
    rows = np.concatenate([np.zeros(0, np.int64), *(part.rows for part in parts)])
    values = np.concatenate([np.zeros(0, np.int64), *(part.values for part in parts)])
    return Ragged(values[np.argsort(rows, kind="stable")], np.bincount(rows, minlength=num_rows))


logger = logging.get_logger(__name__)

# samples; fewer take less time than processes take to start, and are all measured before the first step
PARALLEL_FROM = 5_000

# dataset indices -> `SampleSizes`; can be pickled, for the workers of a data loader
SizeSource = TableSizes | LazySizes | SubsetSizes | ConcatSizes | StreamSizes


def size_source(
    dataset: Any,  # map-style, or the `StreamWindow` of a stream, whose samples are measured when they come
    # wrapped ones are found in `collator.collator`; by default what the Trainer would choose
    collator: Callable[[list], Mapping[str, Any]] | None,
    spec: ModelSpec,
    # the language model's column of lengths, or module -> column, with a number or a list of them (one for each
    # image); an encoder without a column counts one token for each sample
    columns: str | Mapping[str, str] | None = None,
    # sample -> module -> tokens, or a list of them (one for each image); an encoder that is left out has nothing to do
    # for the sample
    function: Callable[[Any], Mapping[str, Any]] | None = None,
    processor: Any = None,  # the Trainer's `processing_class`
    num_proc: int | None = None,  # processes that measure a `datasets.Dataset`, if it is large
) -> SizeSource | None:
    """
    Finds out how the samples of a dataset can be measured; `None` where all have to count the same.

    The first of these that there is:

    1. `columns` of the dataset that hold the lengths;
    2. `function`, called with a sample;
    3. the dataset's own `token_counts(index)`, which returns what `function` does;
    4. the token ids of a tokenised dataset: their number, and placeholders of each encoder;
    5. the conversations of a dataset for [`ChatCollator`], whose placeholders are expanded from the sizes of images in
       the headers of their files.

    Nothing is fetched or decoded. A conversation that does not say its size, with an image behind a URL say, or whose
    file can't be read, counts like the median one of its `datasets.Dataset`, which is unknown if all are such; of a
    large one it raises [`UnknownSizeError`] or `OSError` when it is asked for. Of a list it counts one token in each
    module, and an unreadable file raises `OSError`. Rows of features count as tokens of the encoder until
    [`~TableSizes.with_layers`] says what its layers see. Raises `ValueError` for a column that the dataset hasn't got,
    numbers that are no lengths, and two sources at once.
    """
    if columns is not None and function is not None:
        raise ValueError(
            f"Sizes of samples are given twice, by the columns {columns} and by a function. Give one of them."
        )
    modules = tuple(spec.modules)
    given: SampleMeasure | None = None
    if columns is not None:
        given = ColumnMeasure.of(columns, modules)
    elif function is not None:
        given = FunctionMeasure(function, modules)
    return _Choice(spec, collator, processor, given, num_proc).source(dataset)


@dataclass(frozen=True)
class _Choice:
    """How all parts of a dataset are measured; `given` is the user's setting."""

    spec: ModelSpec
    collator: Any
    processor: Any
    given: SampleMeasure | None
    num_proc: int | None

    def source(self, dataset: Any) -> SizeSource | None:
        """Sizes of a dataset, or of what it is made of."""
        if isinstance(dataset, Subset):
            base = self.source(dataset.dataset)
            return None if base is None else SubsetSizes(base, dataset.indices)
        if isinstance(dataset, ConcatDataset):
            parts = [part for part in map(self.source, dataset.datasets) if part is not None]
            return ConcatSizes(parts) if len(parts) == len(dataset.datasets) else None
        modules = tuple(self.spec.modules)
        if isinstance(dataset, StreamWindow):
            return StreamSizes(dataset, self._of_rows, modules, counts_rows=self.given is None)
        if is_stream(dataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            return None
        if self.given is None and hasattr(dataset, "token_counts"):
            counts = FunctionMeasure(dataset.token_counts, modules)
            return LazySizes(len(dataset), _Reader(range(len(dataset)), counts), modules, counts.counts_rows)
        if _is_datasets(dataset):
            measure = self.given or self.measure(dataset, dataset.column_names)
            has_transform = self.given is None and dataset.format["type"] == "custom"
            if measure is None or has_transform:  # with a transform, only the dataset's own code can make samples
                return None
            # Small or fast ones are measured at once, with sizes in memory and in the cache of the dataset on disk by
            # fingerprints of dataset and measure; others are measured when they are first asked for.
            if len(dataset) > PARALLEL_FROM and not isinstance(measure, (ColumnMeasure, TokenMeasure)):
                view = dataset.select_columns(measure.reads(dataset.column_names)).with_format("arrow")
                return LazySizes(len(dataset), _StoredReader(view, measure), modules, measure.counts_rows)
            return _measured_table(dataset, measure, modules, self.num_proc)
        measure = self.given
        if isinstance(dataset, Sequence) and len(dataset) and isinstance(dataset[0], Mapping):
            if isinstance(measure, ColumnMeasure):
                measure.check(list(dataset[0]))
            measure = self._of_rows(list(dataset[0]), dataset)
        if measure is None:
            return None
        return LazySizes(len(dataset), _Reader(dataset, measure), modules, measure.counts_rows)

    def _of_rows(self, names: Sequence[str], dataset: Any = None) -> SampleMeasure | None:
        """How samples with these fields can be measured one by one."""
        measure = self.given or self.measure(dataset, names)
        return None if measure is None else OrOne(measure, tuple(self.spec.modules))

    def measure(self, dataset: Any, names: Sequence[str]) -> SampleMeasure | None:
        """How samples with these fields can be measured without the user's help."""
        tokens = TokenMeasure.of(self.spec)
        if "input_ids" in names:
            return tokens
        collator: Any = self.collator or default_collator(dataset, self.processor)[0]
        while hasattr(collator, "collator"):
            collator = collator.collator
        if isinstance(collator, ChatCollator) and collator.messages_column in names:
            return ChatMeasure(collator, tokens)
        return None


@dataclass(frozen=True)
class _Reader:
    """Indices -> lengths of the samples, or the errors of measuring them."""

    dataset: Any
    measure: SampleMeasure

    def __call__(self, indices: Sequence[int]) -> list[Lengths | Exception]:
        return list(self.measure.together(self.sample, indices))

    def sample(self, index: int) -> Any:
        with seeded(index):  # reading may use random numbers, and must not change those of the training
            return self.dataset[index]


class _StoredReader(_Reader):
    """Measures samples of a view with Arrow rows, without decoding media."""

    def sample(self, index: int) -> Any:
        return stored_rows(self.dataset[index])[0]


@dataclass(frozen=True)
class _TableMeasure:
    """Rows of an Arrow table -> module -> lengths of each, for `Dataset.map`, which hashes all that it holds."""

    measure: SampleMeasure
    modules: tuple[str, ...]
    version: str = __version__

    def __call__(self, table: Any) -> Any:
        if isinstance(self.measure, TokenMeasure):
            together = token_lengths(table, self.measure)
            if together is not None:
                return _as_table({name: together[name] for name in self.modules})
        found = self.measure.together(lambda index: stored_rows(table.slice(index, 1))[0], range(len(table)))
        rows = [_known(lengths) for lengths in found]
        return {name: [lengths.get(name) for lengths in rows] for name in self.modules}


def _known(found: Lengths | Exception) -> Lengths:
    """Lengths of a row; `None` if they are unknown or a file can't be read."""
    if isinstance(found, (UnknownSizeError, OSError)):
        logger.debug("Nothing says the size of a sample: %s", found)
        return {}
    if isinstance(found, Exception):
        raise found
    return found


def _as_table(lengths: Mapping[str, Ragged]) -> Any:
    """Lengths as an Arrow table with a column for each module."""
    import pyarrow as pa

    columns = {}
    for name, ragged in lengths.items():
        offsets = np.concatenate([[0], np.cumsum(ragged.counts)]).astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ragged.lengths, pa.int64()))
    return pa.table(columns)


def _is_datasets(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset`; the package is not needed otherwise."""
    from transformers.utils.import_utils import is_datasets_available

    if not is_datasets_available():
        return False
    from datasets import Dataset

    return isinstance(dataset, Dataset)


def _measured_table(
    dataset: Any, measure: SampleMeasure, modules: tuple[str, ...], num_proc: int | None
) -> TableSizes | None:
    """Sizes of all rows of a `datasets.Dataset`, `None` if none is known; unknown rows get those of the median row."""
    # Arrow rows hold media as they are stored; no other format leaves media inside of lists and dicts undecoded.
    view = dataset.select_columns(measure.reads(dataset.column_names)).with_format("arrow")
    if isinstance(measure, ColumnMeasure):
        found = view[:]
        columns: Mapping[str, str] = measure.names
    else:
        found = _mapped(view, measure, modules, num_proc).with_format("arrow")[:]
        found = _completed(found, _StoredReader(view, measure))
        if found is None:
            return None
        columns = {name: name for name in modules}
    lengths = {
        name: Ragged.of_arrow(found[columns[name]], columns[name]) if name in columns else Ragged.ones(len(dataset))
        for name in modules
    }
    return TableSizes(lengths, measure.counts_rows)


def _mapped(view: Any, measure: SampleMeasure, modules: tuple[str, ...], num_proc: int | None) -> Any:
    """Lengths of all rows as a `datasets.Dataset`, from its cache if they were measured before."""
    from datasets import Features, List, Value

    # A dataset may lie where nothing can be written.
    in_memory = not all(os.access(os.path.dirname(file["filename"]), os.W_OK) for file in view.cache_files)
    return view.map(
        _TableMeasure(measure, modules),
        batched=True,
        remove_columns=view.column_names,
        features=Features({name: List(Value("int64")) for name in modules}),
        keep_in_memory=in_memory,
        num_proc=num_proc if len(view) >= PARALLEL_FROM else None,
        desc="Measuring samples",
    )


def _completed(found: Any, reader: _StoredReader) -> Any:
    """Fills in unknown lengths with those of the median row; `None` if all are unknown. Says why the first is."""
    column = found[LANGUAGE_MODEL].combine_chunks()
    is_known = np.asarray(column.is_valid())
    known = np.flatnonzero(is_known)
    if len(known) == len(found):
        return found
    first = int(np.flatnonzero(~is_known)[0])
    logger.warning(
        f"The sizes are unknown of {len(found) - len(known)} of {len(found)} samples, the first of which is {first}: "
        f"{reader([first])[0]}"
    )
    if not len(known):
        return None
    tokens, _ = Ragged.of_arrow(found[LANGUAGE_MODEL], LANGUAGE_MODEL).sums(None)
    median = known[np.argsort(tokens[known], kind="stable")[len(known) // 2]]
    return found.take(np.where(is_known, np.arange(len(found)), median))
