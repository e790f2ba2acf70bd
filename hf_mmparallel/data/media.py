"""Readers of the modules, which decode only the media that a module needs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers.trainer_utils import RemoveColumnsCollator
from transformers.utils import logging

from ..plan import ModelSpec
from .bad_samples import MEDIA_FEATURES, without_decoding
from .step_dataset import Reader
from .streams import StreamWindow, is_of_datasets

logger = logging.get_logger(__name__)


def readers(
    dataset: Any,  # map-style, or the window of a stream; a `Subset` or `ConcatDataset` is looked into
    collator: Callable[[list], Mapping[str, Any]],
    spec: ModelSpec,
    inputs: Mapping[str, frozenset[str]],  # encoder -> the entries of a batch that it reads
) -> dict[str, Reader]:
    """
    Makes a reader for each module (one for modules that read the same), which decodes and collates only what it needs.

    A collator's `without_media(entries)` returns one that leaves entries out; without it, it gets whole samples for
    every module. Of a `datasets.Dataset`, media of kinds that are not in `collator.decodes` then stay undecoded, and
    columns of floating-point arrays that the module does not read are not read. Any other dataset may have a method
    `without_media(index)`, which serves the language model, with whatever collator.
    """
    every = frozenset().union(*inputs.values())
    made: dict[frozenset[str], Reader] = {}
    found = {}
    for module in spec.modules:
        unused = every - frozenset(inputs.get(module, ()))
        if unused not in made:
            made[unused] = _reader(dataset, collator, unused, reads_media=bool(every - unused) or not every)
        found[module] = made[unused]
    return found


def _reader(dataset: Any, collator: Any, unused: frozenset[str], reads_media: bool) -> Reader:
    """Reader for a module that ignores the batch entries `unused`."""
    lean = collator_without(collator, unused) if unused else collator
    view = _View(
        frozenset(getattr(innermost(lean), "decodes", MEDIA_FEATURES)),
        unused if lean is not collator else frozenset(),
        reads_media,
    )
    return Reader(view.of(dataset), lean)


def collator_without(collator: Any, entries: frozenset[str]) -> Any:
    """Leaves floating-point entries out by the collator's `without_media`, if any, also in the Trainer's wrapper."""
    if isinstance(collator, RemoveColumnsCollator):
        inner = collator_without(collator.data_collator, entries)
        if inner is collator.data_collator:
            return collator
        collator = copy.copy(collator)
        collator.data_collator = inner
        return collator
    return collator.without_media(entries) if hasattr(collator, "without_media") else collator


def innermost(collator: Any) -> Any:
    """The collator inside of those that wrap it, such as [`PackingCollator`]."""
    for name in ("collator", "data_collator"):
        if hasattr(collator, name):
            return innermost(getattr(collator, name))
    return collator


@dataclasses.dataclass(frozen=True)
class _View:
    decodes: frozenset[str]  # the kinds of media columns that are decoded
    unused: frozenset[str]  # columns that are left out if they hold floating-point arrays
    reads_media: bool

    def of(self, dataset: Any) -> Any:
        if isinstance(dataset, Subset):
            base = self.of(dataset.dataset)
            return dataset if base is dataset.dataset else Subset(base, dataset.indices)
        if isinstance(dataset, ConcatDataset):
            parts = [self.of(part) for part in dataset.datasets]
            same = all(part is given for part, given in zip(parts, dataset.datasets, strict=True))
            return dataset if same else ConcatDataset(parts)
        if isinstance(dataset, StreamWindow):
            return self._of_window(dataset)
        if is_of_datasets(dataset, "Dataset"):
            return self._of_columns(dataset)
        if not self.reads_media and hasattr(dataset, "without_media"):
            return _WithoutMedia(dataset)
        return dataset

    def _of_columns(self, dataset: Any) -> Any:
        columns = [name for name in sorted(self.unused) if _is_floating(dataset.features.get(name))]
        features = without_decoding(dict(dataset.features), MEDIA_FEATURES - self.decodes)
        changed = features != dict(dataset.features)
        if (changed or columns) and dataset.format["type"] == "custom":
            logger.warning_once(
                "The dataset has a transform (`set_transform`), which may need every column, so media are decoded "
                "for each module, also where only text is needed. Use `map`, or a collator of your own."
            )
            return dataset
        if changed:
            dataset = _with_features(dataset, features)
        return dataset.remove_columns(columns) if columns else dataset

    def _of_window(self, window: StreamWindow) -> Any:
        known = dict(window.features or {})
        left = {name: part for name, part in known.items() if name not in self.unused or not _is_floating(part)}
        kept = without_decoding(left, MEDIA_FEATURES - self.decodes)
        return window if kept == known else window.with_features(kept)


class _WithoutMedia(Dataset):
    """The samples of a dataset as its `without_media` gives them."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset.without_media(index)


def _is_floating(feature: Any) -> bool:
    """Whether a column holds arrays of floating-point numbers."""
    if isinstance(feature, (list, tuple)):
        return all(_is_floating(part) or _is_number(part) for part in feature)
    if hasattr(feature, "shape"):
        return _is_number(feature)
    inner = getattr(feature, "feature", None)
    return inner is not None and (_is_floating(inner) or _is_number(inner))


def _is_number(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith("float")


def _with_features(dataset: Any, features: Mapping[str, Any]) -> Any:
    """The same table with other features of the same storage; `Dataset.cast` would write a nested column anew."""
    from datasets import Features
    from datasets.fingerprint import update_fingerprint

    cast = copy.copy(dataset)
    cast._info = dataset.info.copy()
    cast._info.features = Features(features)
    cast._fingerprint = update_fingerprint(dataset._fingerprint, "features", {"features": repr(features)})
    return cast
