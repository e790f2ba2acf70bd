"""
The Triton backend: compiles masks in the blocks of the device, and runs the form that `tuning` chooses.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import mask_plan, triton, tuning
from .mask import BitfieldMask
from .mask_plan import MaskPlan
from .tuning import Capability, Tuning


def plan_blocks(query: Tensor) -> tuple[int, int]:
    """Queries and keys of a block of the plans for queries of this device, dtype and head dimension."""
    return tuning.plan_blocks(_capability(query), query.shape[-1], wide=query.element_size() > 2)


def compile_mask(query: Tensor, mask: BitfieldMask, window: int = 0) -> MaskPlan:
    """
    Compiles a mask for queries like these.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, query_length, head_dim]`): Queries; only their shape, dtype and
            device are read.
        mask (`BitfieldMask`): The words.
        window (`int`, *optional*, defaults to 0): The layer's sliding window in tokens; 0 for none.

    Returns:
        `MaskPlan`: For all layers of this shape and window.
    """
    return mask_plan.compile_mask(mask, window, *plan_blocks(query), num_heads=query.shape[1])


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: MaskPlan,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Attention under a compiled mask; arguments and results as in [`triton.forward`].

    `tuning` overrules the table, for benchmarks.
    """
    module, options = _form(query, plan, softcap, sinks, tuning)
    return module.forward(query, key, value, plan, scale, softcap, sinks, **options)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: MaskPlan,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """
    Gradients of [`forward`]; arguments and results as in [`triton.backward`].

    `tuning` overrules the table, for benchmarks.
    """
    module, options = _form(query, plan, softcap, sinks, tuning)
    return module.backward(grad_out, query, key, value, out, lse, plan, scale, softcap, sinks, **options)


def _form(
    query: Tensor, plan: MaskPlan, softcap: float, sinks: Tensor | None, chosen: Tuning | None
) -> tuple[ModuleType, dict[str, Any]]:
    """The module that computes, and its tiles; plans of other blocks than the table's keep those as tiles on a CPU."""
    if chosen is None and not query.is_cuda:
        return triton, {}
    chosen = chosen or tuning.choose_tuning(_capability(query), query, plan, softcap, sinks)
    if chosen.form == "portable":
        return triton, {"tuning": chosen}
    reason = tuning.hopper_refusal(query, plan, softcap, sinks, chosen)
    if reason is not None:
        raise ValueError(f"The Hopper form cannot take this call: {reason}. Use `tuning.portable_tuning`.")
    from . import triton_hopper

    return triton_hopper, {"tuning": chosen}


def _capability(query: Tensor) -> Capability | None:
    return torch.cuda.get_device_capability(query.device) if query.is_cuda else None
