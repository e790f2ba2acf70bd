"""The default collator of a dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase, SequenceFeatureExtractor
from transformers import default_data_collator as stack

from ..modeling.spec import ModulePart, find_stack, module_parts
from .chat_collator import ChatCollator
from .global_batches import GlobalBatch
from .packing import PackingCollator
from .randomness import seeded
from .sample_formats import find_formats
from .skeleton import entered_shape, make_skeleton
from .streams import StreamWindow, is_stream
from .token_collator import TOKEN_FIELDS, PretokenizedCollator, as_array, is_left_out

# Determines, by running the model, whether images of samples are stacked or concatenated in a batch.


@dataclass(frozen=True)
class ItemForm:
    """How samples hold the inputs of encoders."""

    stacked: frozenset[str] = frozenset()  # entries of which the model takes a batch that is stacked
    listed: frozenset[str] = frozenset()  # entries of which it takes one that is concatenated


def item_form(
    model: Any,
    samples: Iterable[Mapping[str, Any]],  # looked at until there was one for each modality
) -> ItemForm:
    """
    Finds out in which form samples hold the inputs of a model's encoders, such as pixels and grids.

    The model may be on any device, `meta` too, and is not changed; the form is empty if its encoders are not known.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside of adapters
    parts = _encoders(model)
    # the entries that each encoder reads besides tokens, the required one first
    pending = {
        (name, modality): [entry for entry in part.input_names(modality) if entry not in TOKEN_FIELDS]
        for name, part in parts.items()
        for modality in part.modalities
    }
    skeleton, stacked, listed = None, set(), set()
    for sample in samples if pending else ():
        for (name, modality), names in list(pending.items()):
            found = {name: as_array(sample[name]) for name in names if name in sample}
            arrays = {name: array for name, array in found.items() if array is not None}
            if names[0] not in arrays:
                continue
            if skeleton is None:
                skeleton = make_skeleton(model, [find_stack(model, part.tower) for part in parts.values()])
            # A sample batched with itself: entries are stacked if the encoder, run on the CPU without its weights,
            # takes it up to its first layer, else concatenated.
            batch = {entry: torch.stack([value, value]) for entry, value in arrays.items()}
            try:
                entered_shape(skeleton, name, modality, batch)
                stacked.update(names)
            except Exception:  # a model may raise anything for a batch of another form
                listed.update(names)
            del pending[name, modality]
        if not pending:
            break
    listed.update(entry for names in pending.values() for entry in names)  # modalities that no sample has
    return ItemForm(frozenset(stacked), frozenset(listed - stacked))


def _encoders(model: Any) -> Mapping[str, ModulePart]:
    """Name -> encoder of a model, none where they can't be told."""
    if not isinstance(model, PreTrainedModel):
        return {}
    try:
        return {name: part for name, part in module_parts(model).items() if part.features}
    except Exception:  # an unsupported model may raise anything
        return {}


_NUM_FIRST, _NUM_SPREAD = 8, 24  # samples that are looked at until one has an image


class DefaultCollator(PretokenizedCollator):
    """
    What the stock Trainer makes of samples without a `data_collator`, where it can batch them and the model takes the
    batch; else, for fields or images of several sizes and images of some samples only, [`PretokenizedCollator`]'s.

    Images, `[channels, height, width]` in a sample, are stacked; lists of images are concatenated if the model takes
    them all in a row.
    """

    def __init__(
        self,
        processor: Any = None,  # the Trainer's `processing_class`: a tokenizer pads as `DataCollatorWithPadding` does
        form: ItemForm | None = None,  # how samples hold images, from `item_form`
    ):
        pad = getattr(getattr(processor, "tokenizer", processor), "pad_token_id", None)
        super().__init__(pad_token_id=0 if pad is None else pad)
        pads = isinstance(processor, (PreTrainedTokenizerBase, SequenceFeatureExtractor))
        self.stock: Callable[[list], Any] = DataCollatorWithPadding(processor) if pads else stack  # type: ignore[arg-type]
        self.form = form or ItemForm()
        self.stacked = self.form.stacked
        self.marks_tokens = False

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collates tokenised samples, with an `attention_mask` if `marks_tokens`."""
        given: list[Any] = list(samples)
        if self._left_out != ():
            given = [
                {name: v for name, v in sample.items() if not is_left_out(name, as_array(v), self._left_out)}
                for sample in samples
            ]
        names = [{name for name, value in sample.items() if value is not None} for sample in given]
        if any(as_array(sample.get(name)) is None for sample in given for name in ("input_ids", "labels")):
            return self.stock(given)  # its errors are passed on
        if all(own == names[0] for own in names) and not names[0] & self.form.listed:
            with contextlib.suppress(Exception):  # it says in many ways that samples differ in size
                batch = dict(self.stock(given))
                if self.marks_tokens and "attention_mask" not in batch:
                    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
                return batch
        return super().__call__(given)


def default_collator(
    dataset: Any,
    processor: Any,  # the Trainer's `processing_class`
    # decides whether images are stacked or concatenated where samples allow for both; without it they are stacked
    model: Any = None,
) -> tuple[Callable | None, bool]:
    """
    Chooses a collator by the columns of a dataset, and says whether it reads raw columns, which must not be removed
    for not being arguments of the model; `None` leaves the choice to the stock Trainer.
    """
    columns = columns_of(dataset)
    formats = find_formats(columns)
    if "messages" not in columns and not {"input_ids", "labels", "label"}.isdisjoint(columns):
        formats = []  # of texts that are tokenised already, or are inputs with another target
    if formats and hasattr(processor, "apply_chat_template"):
        return ChatCollator(processor), True
    if "input_ids" in columns and "labels" in columns:
        form = None if model is None else item_form(model, first_samples(dataset))
        return DefaultCollator(processor, form), False
    return None, False


def packing_collator(collator: Any, model: Any) -> PackingCollator:
    """A collator in one that packs, unless it does so already."""
    if isinstance(collator, DefaultCollator):
        collator.marks_tokens = True  # so that padding differs from tokens
    return collator if isinstance(collator, PackingCollator) else PackingCollator(collator, model)


def columns_of(dataset: Any) -> list[str]:
    """The names of a sample's fields, as far as they can be known."""
    formatted = getattr(dataset, "format", None)
    is_transformed = isinstance(formatted, Mapping) and formatted.get("type") == "custom"
    if getattr(dataset, "column_names", None) is not None and not is_transformed:
        return list(dataset.column_names)
    if is_stream(dataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return []
    first = next(first_samples(dataset), None)
    return [] if first is None else list(first)


def first_samples(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """The first samples of a dataset, and some spread over it, without those that can't be read or have no fields."""
    # `seeded` leaves the state of random generators as it is.
    if is_stream(dataset):
        dataset = StreamWindow(dataset)
        with seeded(0):
            indices = list(dataset.fetch(GlobalBatch(tuple(range(_NUM_FIRST)))).samples)
    else:
        spread = np.linspace(0, max(0, len(dataset) - 1), _NUM_SPREAD).astype(int).tolist()
        indices = list(dict.fromkeys([*range(min(_NUM_FIRST, len(dataset))), *(spread if len(dataset) else ())]))
    for index in indices:
        try:
            with seeded(index):
                sample = dataset[index]
        except Exception:  # the loader reports it later
            continue
        if hasattr(sample, "keys"):
            yield sample
