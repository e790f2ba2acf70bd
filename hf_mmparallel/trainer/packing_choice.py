"""The choice between packed and padded rows, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..data.mask_rules import MaskRule
from ..data.packing import ATTENTION, PackingCollator
from ..data.position_rules import PositionRule
from ..plan import LANGUAGE_MODEL, ModelSpec


@dataclass(frozen=True)
class RowChoice:
    """
    The form of rows of the language model.

    Args:
        packed (`bool`): Whether a microbatch is one row without padding.
        reason (`str`): Why, in words.
    """

    packed: bool
    reason: str

    def __str__(self) -> str:
        form = "packed into one row" if self.packed else "padded to the longest of their microbatch"
        return f"Samples are {form}: {self.reason}."


def row_choice(packing: bool | None, model: Any, spec: ModelSpec, collator: Any) -> RowChoice:
    """
    Decides how rows are made under a plan.

    Args:
        packing (`bool`, *optional*): The user's choice; without it rows are packed wherever the model allows it.
        model ([`~transformers.PreTrainedModel`]): The whole model, with its attention functions set.
        spec (`ModelSpec`): Its description.
        collator (`Callable`): The data collator that the user gave, or that was chosen.
    """
    if isinstance(collator, PackingCollator):
        return RowChoice(True, "the data collator does")
    if packing is not None:
        return RowChoice(packing, f"`packing={packing}`")
    attention = spec.language_model.attention
    if attention != ATTENTION:
        return RowChoice(
            False,
            f"`{attention}` attention of `{LANGUAGE_MODEL}` can't keep samples of one row apart; `packing=True` packs "
            f"them, with `{ATTENTION}` attention",
        )
    try:
        _ = MaskRule(model), PositionRule(model)  # their checks
    except ValueError as error:
        return RowChoice(False, str(error).rstrip("."))
    return RowChoice(True, f"`{LANGUAGE_MODEL}` has `{ATTENTION}` attention, which keeps them apart")
