"""Determines, by running the model, whether images of samples are stacked or concatenated in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..modeling.spec import ModulePart, find_stack, module_parts
from .skeleton import entered_shape, make_skeleton
from .token_collator import TOKEN_FIELDS, as_array


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
    parts = _encoders(model)
    pending = {
        (name, modality): _names(part, modality) for name, part in parts.items() for modality in part.modalities
    }
    skeleton, stacked, listed = None, set(), set()
    for sample in samples if pending else ():
        for (name, modality), names in list(pending.items()):
            arrays = _arrays(sample, names)
            if names[0] not in arrays:
                continue
            if skeleton is None:
                whole = _whole(model)
                skeleton = make_skeleton(whole, [find_stack(whole, part.tower) for part in parts.values()])
            # A sample batched with itself: entries are stacked if the encoder, run on the CPU without its weights,
            # takes it up to its first layer, else concatenated.
            batch = {entry: torch.stack([value, value]) for entry, value in arrays.items()}
            (stacked if _takes(skeleton, name, modality, batch) else listed).update(names)
            del pending[name, modality]
        if not pending:
            break
    listed.update(entry for names in pending.values() for entry in names)  # modalities that no sample has
    return ItemForm(frozenset(stacked), frozenset(listed - stacked))


def _whole(model: Any) -> Any:
    """The model inside of adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _names(part: ModulePart, modality: str) -> list[str]:
    """Batch entries that an encoder reads besides tokens, the required one first."""
    return [entry for entry in part.input_names(modality) if entry not in TOKEN_FIELDS]


def _encoders(model: Any) -> Mapping[str, ModulePart]:
    """Name -> encoder of a model, none where they can't be told."""
    whole = _whole(model)
    if not isinstance(whole, PreTrainedModel):
        return {}
    try:
        return {name: part for name, part in module_parts(whole).items() if part.features}
    except Exception:  # an unsupported model may raise anything
        return {}


def _arrays(sample: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """The entries of a sample that are arrays, by their names."""
    arrays = {name: as_array(sample[name]) for name in names if name in sample}
    return {name: array for name, array in arrays.items() if array is not None}


def _takes(skeleton: Any, module: str, modality: str, batch: Mapping[str, Tensor]) -> bool:
    """Whether an encoder takes a batch."""
    try:
        entered_shape(skeleton, module, modality, batch)
    except Exception:  # a model may raise anything for a batch of another form
        return False
    return True
