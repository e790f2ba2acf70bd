"""Sizes of the samples of a dataset without a Trainer: some of them, drawn at random, measured as a Trainer does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import default_data_collator
from transformers.utils import logging

from ..plan import ModelSpec, SampleSizes
from .chat_collator import ChatCollator
from .defaults import default_collator
from .image_rules import column_rules
from .layer_tokens import measure_layers
from .sample_formats import find_formats, known_formats
from .sample_sizes import size_source
from .size_sources import draw_samples

logger = logging.get_logger(__name__)

# Checks whether the Hub has a model or dataset, once and without the client's retries of half a minute.

_SECONDS = 10.0  # for an answer of a slow network


def check_hub(
    kind: str,  # "model" or "dataset"
    name: str,  # its id
    subject: str,  # start of the message, such as "Dataset `a/b`"
    remedy: str,  # if the Hub can't be reached
) -> None:
    """Raises `ValueError` unless the Hub has a model or a dataset, which may also be in its cache."""
    from huggingface_hub import HfApi, is_offline_mode, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if is_offline_mode():  # it may be in the cache
        return
    missing = f"{subject} is no file or folder here"
    try:
        if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        getattr(HfApi(), f"{kind}_info")(name, timeout=_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{missing}, and the Hub has none of this name: {reason}. Correct it.") from error
    except Exception as error:  # whatever the client raises without a network
        raise ValueError(
            f"{missing}, and the Hub, where it may be, can't be reached ({error}). {remedy}; for a {kind} that was "
            "downloaded before set `HF_HUB_OFFLINE=1`."
        ) from error


# ending of a file -> what `datasets` reads it with
FORMATS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".arrow": "arrow",
}

_SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` leaves in a folder
_LABELS = ("labels", "label", "label_ids")


@dataclass(frozen=True)
class MeasuredSamples:
    sizes: SampleSizes  # of the samples that were drawn, in tokens of the modules' layers
    num_samples: int  # of the whole split
    split: str  # name


def measure_dataset(
    source: str,  # a file, a folder, or an id on the Hub
    model: Any,  # a `PreTrainedModel`, which may be on the meta device
    spec: ModelSpec,  # of the same model
    columns: str | Mapping[str, str] | None = None,  # as the Trainer's `token_columns`
    # loads the model's processor; only called for conversations and sides of images; raises OSError or ValueError
    # without one
    processor: Callable[[], Any] | None = None,
    split: str | None = None,  # `train`, or the only one, when left out
    num_samples: int = 4096,
    seed: int = 0,
    image_folder: str | None = None,  # of relative paths of images, videos and audio
) -> MeasuredSamples:
    """
    Measures samples of a dataset, drawn at random if there are more than `num_samples`, see [`size_source`].

    Raises `ValueError` for a dataset that can't be read, or whose columns do not say how large samples are.
    """
    dataset, split = open_dataset(source, split)
    total = len(dataset)
    if total > num_samples:
        dataset = dataset.select(draw_samples(total, num_samples, seed))
    names = dataset.column_names
    loaded = collator = None
    if columns is None and find_formats(names) and "input_ids" not in names:
        loaded = _load_processor(source, processor)
        collator, _ = default_collator(dataset, loaded)
        if isinstance(collator, ChatCollator):
            collator.image_folder = image_folder
    elif "*" in str(columns):
        loaded = _limiting_processor(processor)
    rules = column_rules(columns, model, spec, loaded)
    sizes = size_source(dataset, collator, spec, columns, None, loaded, rules=rules)
    if sizes is None:
        raise ValueError(_nothing_says(source, names, loaded))
    if sizes.counts_rows:
        readable = dataset
        if collator is None:
            collator, _ = default_collator(dataset, None, model)
            known = {*inspect.signature(model.forward).parameters, *_LABELS}  # the Trainer leaves these
            readable = dataset.select_columns([name for name in names if name in known])
        layers = measure_layers(model, spec, readable, collator or default_data_collator, sizes)
        sizes = sizes.with_layers(layers)
    return MeasuredSamples(sizes(range(len(dataset))), total, split)


def open_dataset(source: str, split: str | None = None) -> tuple[Any, str]:
    """
    Opens a file, a folder (of files, or from `save_to_disk`) or an id of the Hub; returns a split and its name.

    Raises `ValueError` if there is no such dataset or split, it has no samples, or it can't be reached.
    """
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    path = Path(source)
    if not path.exists():
        check_hub("dataset", source, f"Dataset `{source}`", "Give a file or folder")
    elif path.is_file() and path.suffix not in FORMATS:
        raise ValueError(
            f"Dataset `{source}` ends in `{path.suffix}`; files end in {', '.join(FORMATS)}. Convert it, or give a "
            "folder that `save_to_disk` wrote."
        )
    try:
        if path.is_file():
            loaded: Any = load_dataset(FORMATS[path.suffix], data_files=str(path))
        elif any((path / name).is_file() for name in _SAVED):
            loaded = load_from_disk(str(path))
        else:
            loaded = load_dataset(str(path) if path.exists() else source)
    except (OSError, ValueError, IndexError, StopIteration, DatasetsError) as error:
        raise ValueError(_unreadable(source, path, error)) from error
    chosen, name = _split(source, loaded, split)
    if not len(chosen):
        raise ValueError(_no_samples(source))
    return chosen, name


def _split(source: str, loaded: Any, split: str | None) -> tuple[Any, str]:
    from datasets import Dataset

    if isinstance(loaded, Dataset):
        name = str(loaded.split or "train")
        if split not in (None, name):
            raise ValueError(f"Dataset `{source}` is one split, `{name}`, and has no `{split}`. Leave the split out.")
        return loaded, name
    if split is None and "train" not in loaded and len(loaded) > 1:
        raise ValueError(f"Dataset `{source}` has the splits {list(loaded)}. Choose one of them.")
    name = split or ("train" if "train" in loaded else next(iter(loaded)))
    if name not in loaded:
        raise ValueError(f"Dataset `{source}` has no split `{name}`; it has {list(loaded)}. Choose one of these.")
    return loaded[name], name


def _unreadable(source: str, path: Path, error: Exception) -> str:
    """Why a dataset was not read, in one sentence and a remedy."""
    reason = " ".join(str(error).split()).rstrip(".!")
    is_empty = path.is_file() and not path.stat().st_size or isinstance(error, IndexError | StopIteration)
    if path.exists() and (is_empty or "corresponds to no data" in reason):
        return _no_samples(source)
    if path.exists():
        return f"Dataset `{source}` can't be read: {reason}. Give what `datasets.load_dataset` reads."
    if isinstance(error, ConnectionError):
        return (
            f"Dataset `{source}` is no file or folder here nor in the cache, and the Hub, where it may be, can't be "
            f"reached: {reason}. Give a file or folder."
        )
    return f"Dataset `{source}` is neither a file or folder nor a dataset on the Hub: {reason}. Correct the name."


def _no_samples(source: str) -> str:
    return f"Dataset `{source}` has no samples. Give one with samples, or leave it out to plan for equal ones."


def _load_processor(source: str, processor: Callable[[], Any] | None) -> Any:
    reason = "none is given"
    if processor is not None:
        try:
            return processor()
        except (OSError, ValueError, ImportError) as error:  # some processors need torchvision
            reason = " ".join(str(error).split())
    raise ValueError(
        f"The samples of `{source}` are conversations or texts, whose tokens the model's processor counts, and it "
        f"can't be loaded: {reason}. Name its folder with `--processor`, or columns with the numbers of tokens "
        "with `--token-columns`."
    )


def _limiting_processor(processor: Callable[[], Any] | None) -> Any:
    """The processor that resizes images whose sides are known, if there is one."""
    try:
        return None if processor is None else processor()
    except (OSError, ValueError, ImportError) as error:
        logger.warning(
            f"Images are taken to be as large as their columns say, without the limits of a processor, which can't be "
            f"loaded: {' '.join(str(error).split())}"
        )
    return None


def _nothing_says(source: str, names: Sequence[str], processor: Any) -> str:
    if processor is not None and not hasattr(processor, "apply_chat_template"):
        return (
            f"The samples of `{source}` are conversations or texts, and `{type(processor).__name__}` has no chat "
            "template to count their tokens with. Name another with `--processor`."
        )
    if find_formats(names):
        return (
            f"Nothing says the sizes of the samples of `{source}`: their media have to be fetched or decoded. If "
            f"columns hold the numbers of tokens, name them with `--token-columns`; it has {list(names)}."
        )
    return (
        f"Dataset `{source}` has the columns {list(names)}. It lacks `input_ids` (token ids), those of "
        f"conversations or texts ({known_formats()}), or numbers of tokens; if some hold these, name them "
        "with `--token-columns`."
    )
