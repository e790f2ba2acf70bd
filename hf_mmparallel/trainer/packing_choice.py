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
    """The form of rows of the language model."""

    packed: bool  # whether a microbatch is one row without padding
    reason: str  # why, in words

    def __str__(self) -> str:
        form = "packed into one row" if self.packed else "padded to the longest of their microbatch"
        return f"Samples are {form}: {self.reason}."


def row_choice(packing: bool | None, model: Any, spec: ModelSpec, collator: Any) -> RowChoice:
    """
    Decides how rows are made under a plan: packed by default wherever the model, with its attention set, allows it.
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
