"""What the layers of a module recompute in their backward: nothing, all, or what products and attention leave."""

from __future__ import annotations

from typing import Any, Literal

# `"selective"` keeps the outputs of matrix products and of attention, and recomputes the rest: norms, activation
# functions, rotary embeddings, and all scores where attention computes them (Korthikanti et al. 2022, section 5)
Checkpointing = bool | Literal["selective"]
SELECTIVE: Literal["selective"] = "selective"
# value -> words for it in the text of a layout
_WORDS: dict[Checkpointing, list[str]] = {False: [], True: ["recomputed"], SELECTIVE: ["recomputed selectively"]}


def read_checkpointing(value: Any, what: str) -> Checkpointing:
    """Returns a value of `activation_checkpointing`, raises `ValueError` for anything else."""
    if not isinstance(value, bool) and value != SELECTIVE:
        raise ValueError(f"{what} is `{value!r}`; it must be `true`, `false` or `{SELECTIVE}`.")
    return value


def checkpointing_words(value: Checkpointing) -> list[str]:
    """What a layout is called with it."""
    return _WORDS[value]


def why_not_selective(cp_size: int, offload_params: bool, offload_activations: bool) -> tuple[str, str] | None:
    """The setting beside which layers can't be recomputed selectively, and the reason; `None` if there is none."""
    if cp_size > 1:
        return f"cp_size={cp_size}", "attention over ranks is no single operation whose output can be kept"
    if offload_params:
        return "offload_params=True", "weights come to the device anew for what is recomputed"
    if offload_activations:
        return "offload_activations=True", "the outputs that are kept stay on the device"
    return None
