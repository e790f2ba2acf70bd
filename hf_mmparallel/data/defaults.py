"""The collator that a dataset gets when the user names none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from .chat_collator import ChatCollator, PretokenizedCollator


def default_collator(dataset: Any, processor: Any) -> tuple[Callable | None, bool]:
    """
    Chooses a collator by the columns of a dataset.

    Args:
        dataset: The training dataset, or `None`.
        processor: The Trainer's `processing_class`.

    Returns:
        The collator (`None` leaves the choice to the stock Trainer), and whether it reads raw columns, which must not
        be removed for not being arguments of the model.
    """
    columns = _columns(dataset)
    if "messages" in columns and hasattr(processor, "apply_chat_template"):
        return ChatCollator(processor), True
    if "input_ids" in columns and "labels" in columns:
        pad = getattr(getattr(processor, "tokenizer", processor), "pad_token_id", None)
        return PretokenizedCollator(pad_token_id=0 if pad is None else pad), False
    return None, False


def _columns(dataset: Any) -> list[str]:
    """The names of a sample's fields."""
    if getattr(dataset, "column_names", None) is not None:
        return list(dataset.column_names)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not len(dataset):
        return []
    first = dataset[0]
    return list(first) if hasattr(first, "keys") else []
