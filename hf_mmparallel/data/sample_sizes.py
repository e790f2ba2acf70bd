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
from ..cost.image_tokens import ImageRule
from ..plan import LANGUAGE_MODEL, ModelSpec
from .bad_samples import stored_rows
from .chat_collator import ChatCollator
from .defaults import default_collator
from .image_sizes import UnknownSizeError
from .media import innermost
from .sample_formats import find_formats
from .size_measures import (
    ChatMeasure,
    ColumnMeasure,
    FunctionMeasure,
    Lengths,
    Ragged,
    SampleMeasure,
    TokenMeasure,
    ones_for_unknown,
)
from .size_sources import DatasetSizes, Part, StreamSizes
from .streams import StreamWindow, is_of_datasets, is_stream

logger = logging.get_logger(__name__)

# samples; fewer take less time than processes take to start, and are all measured before the first step
PARALLEL_FROM = 5_000

SizeSource = DatasetSizes | StreamSizes  # dataset indices -> `SampleSizes`


def size_source(
    dataset: Any,  # map-style, or the `StreamWindow` of a stream, whose samples are measured when they come
    # wrapped ones are found in `collator.collator`; by default what the Trainer would choose
    collator: Callable[[list], Mapping[str, Any]] | None,
    spec: ModelSpec,
    # the language model's column of lengths, or module -> column, with a number or a list of them (one for each
    # image), or the two columns `WIDTH*HEIGHT`; an encoder without a column counts one token for each sample
    columns: str | Mapping[str, str] | None = None,
    # sample -> module -> tokens, or a list of them (one for each image); an encoder that is left out has nothing to do
    # for the sample
    function: Callable[[Any], Mapping[str, Any]] | None = None,
    processor: Any = None,  # the Trainer's `processing_class`
    num_proc: int | None = None,  # processes that measure a `datasets.Dataset`, if it is large
    rules: Mapping[str, ImageRule] | None = None,  # see `column_rules`
) -> SizeSource | None:
    """
    Finds out how the samples of a dataset can be measured; `None` where all have to count the same.

    By the first of these that there is: `columns`; `function`; the dataset's own `token_counts(index)`, which returns
    what `function` does; token ids, of which placeholders count for encoders; conversations for [`ChatCollator`]
    or TRL's collators, whose placeholders are expanded from the sizes of images in the headers of their files.

    Nothing is fetched or decoded. A conversation that does not say its size, with an image behind a URL say, or whose
    file can't be read, counts like the median one of its `datasets.Dataset`, which is unknown if all are such; of a
    large one it raises [`UnknownSizeError`] or `OSError` when it is asked for. Of a list it counts one token in each
    module, and an unreadable file raises `OSError`. Rows of features count as tokens of the encoder until
    [`~DatasetSizes.with_layers`] says what its layers see. Raises `ValueError` for a column that the dataset hasn't
    got, numbers that are no lengths, and two sources at once.
    """
    if columns is not None and function is not None:
        raise ValueError(
            f"Sizes of samples are given twice, by the columns {columns} and by a function. Give one of them."
        )
    modules = tuple(spec.modules)
    given: SampleMeasure | None = None
    if columns is not None:
        given = ColumnMeasure(columns, modules, rules)
    elif function is not None:
        given = FunctionMeasure(function, modules)
    choice = _Choice(spec, collator, processor, given, num_proc)
    if isinstance(dataset, StreamWindow):
        return StreamSizes(dataset, choice.measure, modules, counts_rows=given is None)
    parts, order = _parts(dataset)
    found = [choice.part(part) for part in parts]
    known = [part for part in found if part is not None]
    return DatasetSizes(known, modules, order) if len(known) == len(found) else None


def _parts(dataset: Any) -> tuple[list[Any], np.ndarray | None]:
    """The datasets that a dataset is made of, and its order: index -> index in them one after the other."""
    if isinstance(dataset, Subset):
        parts, order = _parts(dataset.dataset)
        indices = np.asarray(dataset.indices, dtype=np.int64)
        return parts, indices if order is None else order[indices]
    if not isinstance(dataset, ConcatDataset):
        return [dataset], None
    parts, orders, start = [], [], 0
    for own, order in map(_parts, dataset.datasets):
        count = sum(len(part) for part in own if hasattr(part, "__len__"))
        parts += own
        orders.append(start + (np.arange(count) if order is None else order))
        start += count
    return parts, np.concatenate(orders)


@dataclass(frozen=True)
class _Choice:
    """How all parts of a dataset are measured; `given` is the user's setting."""

    spec: ModelSpec
    collator: Any
    processor: Any
    given: SampleMeasure | None
    num_proc: int | None

    def part(self, dataset: Any) -> Part | None:
        """How one part of a dataset is measured, `None` if nothing says it."""
        if is_stream(dataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            return None
        modules = tuple(self.spec.modules)
        if self.given is None and hasattr(dataset, "token_counts"):
            counts = FunctionMeasure(dataset.token_counts, modules)
            return Part(len(dataset), False, read=_Reader(range(len(dataset)), counts))
        if is_of_datasets(dataset, "Dataset"):
            measure = self.measure(dataset.column_names, dataset)
            has_transform = self.given is None and dataset.format["type"] == "custom"
            if measure is None or has_transform:  # with a transform, only the dataset's own code can make samples
                return None
            # Arrow rows hold media as they are stored; no other format leaves media inside of lists undecoded.
            view = dataset.select_columns(measure.reads(dataset.column_names)).with_format("arrow")
            # Small or fast ones are measured at once, with sizes in memory and in the cache of the dataset on disk by
            # fingerprints of dataset and measure; others are measured when they are first asked for.
            if len(dataset) > PARALLEL_FROM and not isinstance(measure, (ColumnMeasure, TokenMeasure)):
                return Part(len(dataset), measure.counts_rows, read=_StoredReader(view, measure))
            lengths = _table_lengths(view, measure, modules, self.num_proc)
            return None if lengths is None else Part(len(dataset), measure.counts_rows, lengths)
        measure = self.given
        if isinstance(dataset, Sequence) and len(dataset) and isinstance(dataset[0], Mapping):
            measure = self.measure(list(dataset[0]), dataset)
            if isinstance(measure, ColumnMeasure):
                measure.reads(list(dataset[0]))
        if measure is None:
            return None
        return Part(len(dataset), measure.counts_rows, read=_Reader(dataset, measure, modules))

    def measure(self, names: Sequence[str], dataset: Any = None) -> SampleMeasure | None:
        """How samples with these fields are measured."""
        if self.given is not None:
            return self.given
        tokens = TokenMeasure.of(self.spec)
        if "input_ids" in names:
            return tokens
        collator = innermost(self.collator)
        if not isinstance(collator, ChatCollator):  # TRL's make the same tokens of conversations
            processor = self.processor if collator is None else getattr(collator, "processor", None)
            collator = default_collator(dataset, processor)[0]
        if isinstance(collator, ChatCollator) and find_formats(names, collator.formats):
            return ChatMeasure(collator, tokens)
        return None


@dataclass(frozen=True)
class _Reader:
    """Indices -> lengths of the samples, or the errors of measuring them."""

    dataset: Any
    measure: SampleMeasure
    ones: tuple[str, ...] = ()  # modules in which samples of unknown size count one token

    def __call__(self, indices: Sequence[int]) -> list[Lengths | Exception]:
        found = self.measure.together(self.sample, indices)
        return ones_for_unknown(found, self.ones) if self.ones else found

    def sample(self, index: int) -> Any:
        return self.dataset[index]


class _StoredReader(_Reader):
    def sample(self, index: int) -> Any:
        return stored_rows(self.dataset[index])[0]


@dataclass(frozen=True)
class _TableMeasure:
    """Rows of an Arrow table -> module -> lengths of each, for `Dataset.map`, which hashes all that it holds."""

    measure: SampleMeasure
    modules: tuple[str, ...]
    version: str = __version__

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa

        whole = self.measure.of_table(table) if isinstance(self.measure, TokenMeasure) else None
        if whole is not None:
            return pa.table({name: whole[name].to_arrow() for name in self.modules})
        found = self.measure.together(lambda index: stored_rows(table.slice(index, 1))[0], range(len(table)))
        for error in found:
            if isinstance(error, Exception) and not isinstance(error, (UnknownSizeError, OSError)):
                raise error
        known = [{} if isinstance(lengths, Exception) else lengths for lengths in found]
        return {name: [lengths.get(name) for lengths in known] for name in self.modules}


def _table_lengths(
    view: Any,  # a `datasets.Dataset` with Arrow rows
    measure: SampleMeasure,
    modules: tuple[str, ...],
    num_proc: int | None,
) -> dict[str, Ragged] | None:
    """Lengths of all rows, `None` if none is known; unknown rows get those of the median row."""
    if isinstance(measure, ColumnMeasure):
        return measure.of_table(view[:])
    from datasets import Features, List, Value

    # A dataset may lie where nothing can be written.
    in_memory = not all(os.access(os.path.dirname(file["filename"]), os.W_OK) for file in view.cache_files)
    measured = view.map(
        _TableMeasure(measure, modules),
        batched=True,
        remove_columns=view.column_names,
        features=Features({name: List(Value("int64")) for name in modules}),
        keep_in_memory=in_memory,
        num_proc=num_proc if len(view) >= PARALLEL_FROM else None,
        desc="Measuring samples",
    )
    found = _completed(measured.with_format("arrow")[:], _StoredReader(view, measure))
    return found and {name: Ragged.of_arrow(found[name].combine_chunks()) for name in modules}


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
    tokens = np.asarray(column.flatten())  # one number for each known row
    median = known[np.argsort(tokens, kind="stable")[len(known) // 2]]
    return found.take(np.where(is_known, np.arange(len(found)), median))
