"""Columns of datasets: those that a model reads, and errors where they are missing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from accelerate.logging import get_logger
from torch import nn
from transformers import TrainingArguments

from ..data.bad_samples import stored_row
from ..data.chat_collator import ChatCollator
from ..data.defaults import columns_of, default_collator
from ..data.media import innermost
from ..data.sample_formats import find_formats, known_formats, read_message
from ..data.streams import is_stream

Arguments = TypeVar("Arguments", bound=TrainingArguments)

logger = get_logger(__name__)


def choose_collator(args: Arguments, given: dict[str, Any], model: Any) -> Arguments:
    """
    Puts the collator that the datasets ask for into the arguments of a Trainer (`given`, in place), if there is none;
    returns `args`, in which columns are kept for a collator that reads raw ones. Says in which formats samples are.
    """
    if given.get("data_collator") is None:
        dataset = next(iter(_datasets(given).values()), None)
        given["data_collator"], _ = default_collator(dataset, given.get("processing_class"), model)
    collator = innermost(given["data_collator"])
    if not isinstance(collator, ChatCollator):
        return args
    for name, dataset in _datasets(given).items():
        if sentence := format_sentence(name, dataset, collator):
            logger.info(sentence)
    if args.remove_unused_columns:
        args = copy.copy(args)
        args.remove_unused_columns = False  # its columns are no arguments of the model
    return args


def format_sentence(name: str, dataset: Any, collator: Any) -> str | None:
    """In which formats a collator reads the samples of a dataset; `None` where it reads token ids."""
    collator, columns = innermost(collator), columns_of(dataset)
    formats = find_formats(columns, collator.formats) if isinstance(collator, ChatCollator) else []
    if not formats:
        return None
    first, *others = (f"{one.name} ({known_formats([one])})" for one in formats)
    rest = f", and where that is empty {' or '.join(others)}" if others else ""
    return f"`{name}` has the columns {columns}; its samples are read as {first}{rest}."


def check_columns(given: Mapping[str, Any], model: Any, is_planned: bool) -> None:
    """Raises `ValueError` for datasets without the columns that make samples."""
    collator, processor = innermost(given.get("data_collator")), given.get("processing_class")
    if collator is not None and not isinstance(collator, ChatCollator):
        return
    for name, dataset in _datasets(given).items():
        columns = columns_of(dataset)
        if not columns:
            continue
        if isinstance(collator, ChatCollator):
            _check_chat(name, dataset, columns, collator)
        # without a plan the stock Trainer may have uses for other columns
        elif "input_ids" not in columns:
            _check_untokenised(name, columns, processor, _inputs_of(model), is_planned)


def encoder_columns(model: Any) -> list[str]:
    """The columns that a composed model routes to its encoders and generators; none of any other model."""
    if not hasattr(model, "multimodal_parts"):
        return []
    return [name for part in model.multimodal_parts().values() for name in part.entries]


def missing_columns(columns: list[str]) -> str:
    """The end of an error for a dataset without columns for the model: its columns and the remedy."""
    return (
        f"it has the columns {columns}. Without a `data_collator`, samples have `input_ids` and `labels`, or the "
        f"columns of a conversation or text ({known_formats()}) and the Trainer a `processing_class`. Rename the "
        "columns that are meant, or pass a `data_collator` that reads these and `remove_unused_columns=False`."
    )


def _datasets(given: Mapping[str, Any]) -> dict[str, Any]:
    datasets = {}
    for name in ("train_dataset", "eval_dataset"):
        dataset = given.get(name)
        if isinstance(dataset, dict):
            datasets.update({f"{name}[{key!r}]": part for key, part in dataset.items()})
        elif dataset is not None:
            datasets[name] = dataset
    return datasets


def _check_chat(name: str, dataset: Any, columns: list[str], collator: ChatCollator) -> None:
    formats = find_formats(columns, collator.formats)
    if not formats:
        other = next((one.turns[0] for one in find_formats(columns)), "...")
        raise ValueError(
            f"`{name}` has not the columns of a format ({known_formats(collator.formats)}) that the "
            f"`{type(collator).__name__}` reads; it has {columns}. Rename those that are meant, or use "
            f"`messages_column={other!r}`."
        )
    row = None if is_stream(dataset) else stored_row(dataset, 0)
    turns = [row.get(column) for column in formats[0].turns] if isinstance(row, Mapping) else []
    for message in (message for own in turns if isinstance(own, list) for message in own):
        read_message(message, f"`{name}`")


def _check_untokenised(name: str, columns: list[str], processor: Any, known: set[str], is_planned: bool) -> None:
    formats = [one for one in find_formats(columns) if known.isdisjoint(one.turns)]
    if not formats:
        if is_planned and not find_formats(columns):
            raise ValueError(f"Nothing of `{name}` can be given to the model: {missing_columns(columns)}")
        return
    if not is_planned and formats[0].num_prompts is not None:
        return
    found = f"{formats[0].name} ({known_formats(formats[:1])})"
    if processor is None:
        raise ValueError(
            f"`{name}` has samples of the format {found}, but the Trainer has no `processing_class` to make tokens of "
            "them. Pass the model's processor: `processing_class=AutoProcessor.from_pretrained(...)`."
        )
    if not hasattr(processor, "apply_chat_template"):
        raise ValueError(
            f"`{name}` has samples of the format {found}, but a `{type(processor).__name__}` has no chat template to "
            "make tokens of them. Pass the model's processor as `processing_class`."
        )


def _inputs_of(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters) if isinstance(model, nn.Module) else set()
