"""
Choice of kernels and tile sizes: a table by device and head dimension, and a predicate for the Hopper form.

The tiles were chosen by the machine code of each kernel (registers, shared memory, spills). If a form was also timed
on a device, `MEASURED` names the device; the Hopper form is chosen only where it was timed and was faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from .mask_plan import MaskPlan

Form = Literal["portable", "hopper"]
Capability = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """
    The tile of one kernel and how it is compiled.

    Args:
        block_q (`int`): Queries of a tile; divides `block_q` of the plan.
        block_k (`int`): Keys of a tile; divides `block_k` of the plan.
        num_warps (`int`): Warps of a program; the compiler adds more to a specialised program.
        num_stages (`int`): Tiles of the inner loop in flight.
        specialized (`bool`, *optional*, defaults to `False`): Whether warps are split into loaders and consumers.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    specialized: bool = False


@dataclass(frozen=True)
class Tuning:
    """
    Kernels and tile sizes of one attention call.

    Args:
        form (`str`): `"portable"` (any device) or `"hopper"` (tensor descriptors, persistent programs).
        block_q (`int`): Queries of a block of the plan's lists.
        block_k (`int`): Keys of a block of the plan's lists.
        forward (`Tile`): Tile of the forward kernel.
        dkdv (`Tile`): Tile of the kernel for the gradients of keys and values.
        dq (`Tile`): Tile of the kernel for the gradient of queries.
    """

    form: Form
    block_q: int
    block_k: int
    forward: Tile
    dkdv: Tile
    dq: Tile


# Devices on which the Hopper form was timed and was faster, by compute capability and head dimension: the entry is the
# device's name and whether specialised warps were faster, such as `((9, 0), 128): ("NVIDIA H200", True)`. No device
# was timed yet, so that the portable form runs everywhere.
MEASURED: dict[tuple[Capability, int], tuple[str, bool]] = {}

HOPPER_HEAD_DIMS = (64, 128)
# Both variants of the Hopper form: with specialised warps (the compiler makes 12 warps of 4), and without.
_HOPPER = {
    (64, True): (Tile(128, 128, 4, 2, True), Tile(64, 128, 4, 2, True), Tile(128, 64, 4, 2, True)),
    (64, False): (Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    # With specialised warps the second one spills in its loop where Triton 3.7 compiles it, that of torch 2.13.
    (128, True): (Tile(128, 128, 4, 2, True), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2, True)),
    (128, False): (Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
}


@dataclass(frozen=True)
class _Row:
    """The tiles of the portable form on one class of devices, up to one head dimension."""

    blocks: tuple[int, int]
    forward: Tile
    dkdv: Tile
    dq: Tile
    forward_general: Tile | None = None
    dkdv_general: Tile | None = None
    dq_general: Tile | None = None


# By class of devices: sm_90 multiplies from 227 KiB of shared memory, sm_80 has tensor cores that read registers,
# sm_86 is like sm_80 with only 99 KiB of shared memory. Then by the largest head dimension of the entry. The kernels
# of the general form need more registers.
_PORTABLE: dict[str, dict[int, _Row]] = {
    "sm_90": {
        64: _Row(
            (128, 128),
            *(Tile(128, 128, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
            forward_general=Tile(128, 64, 8, 3),
            dkdv_general=Tile(32, 128, 8, 3),
        ),
        96: _Row(
            (128, 128),
            *(Tile(128, 64, 8, 3), Tile(32, 128, 8, 3), Tile(128, 64, 8, 3)),
            dkdv_general=Tile(32, 128, 8, 2),
        ),
        128: _Row(
            (128, 128),
            *(Tile(128, 128, 8, 2), Tile(32, 128, 8, 3), Tile(128, 64, 8, 2)),
            forward_general=Tile(128, 64, 8, 3),
            dkdv_general=Tile(32, 64, 8, 3),
        ),
        256: _Row(
            (128, 64),
            *(Tile(128, 64, 8, 2), Tile(32, 32, 8, 3), Tile(64, 32, 8, 3)),
            forward_general=Tile(128, 32, 8, 3),
        ),
    },
    "sm_80": {
        64: _Row(
            (128, 64),
            *(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
            dkdv_general=Tile(32, 64, 4, 3),
        ),
        96: _Row(
            (128, 64),
            *(Tile(128, 64, 8, 3), Tile(32, 64, 4, 3), Tile(64, 64, 8, 3)),
            dkdv_general=Tile(32, 64, 8, 3),
        ),
        128: _Row((128, 64), Tile(128, 64, 8, 3), Tile(64, 64, 8, 3), Tile(64, 64, 8, 3)),
        256: _Row((64, 64), Tile(64, 32, 8, 3), Tile(32, 32, 8, 3), Tile(64, 32, 8, 3)),
    },
    "sm_86": {
        64: _Row((128, 64), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        96: _Row((128, 64), Tile(128, 64, 8, 2), Tile(32, 64, 4, 2), Tile(64, 64, 8, 2)),
        128: _Row((128, 64), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        256: _Row((64, 64), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    },
}
# float32 uses plain multiply-adds, whose operands need many registers.
_WIDE = _Row((64, 64), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def _row(capability: Capability | None, head_dim: int, wide: bool) -> _Row:
    """The table entry of a device; the entry of sm_80 for the interpreter."""
    if wide:
        return _WIDE
    table = _PORTABLE[_device_class(capability)]
    return table[min(bound for bound in table if bound >= head_dim)]


def _device_class(capability: Capability | None) -> str:
    """The key in the table for a compute capability."""
    if capability is None or capability in ((8, 0), (8, 7)):
        return "sm_80"
    return "sm_90" if capability[0] in (9, 10) else "sm_86"


def plan_blocks(capability: Capability | None, head_dim: int, wide: bool = False) -> tuple[int, int]:
    """
    Block sizes of the plan, which are the same for both forms and all kernels of a call.

    Args:
        capability (`tuple[int, int]`, *optional*): Compute capability; `None` for the interpreter.
        head_dim (`int`): Head dimension, up to 256.
        wide (`bool`, *optional*, defaults to `False`): Whether the inputs are float32.

    Returns:
        `tuple[int, int]`: Queries and keys of a block.
    """
    return _row(capability, head_dim, wide).blocks


def portable_tuning(capability: Capability | None, head_dim: int, interval: bool, wide: bool = False) -> Tuning:
    """
    The tiles of the portable form.

    Args:
        capability (`tuple[int, int]`, *optional*): Compute capability; `None` for the interpreter.
        head_dim (`int`): Head dimension, up to 256.
        interval (`bool`): Whether the plan is in its interval form.
        wide (`bool`, *optional*, defaults to `False`): Whether the inputs are float32.

    Returns:
        `Tuning`: For plans with the block sizes of [`plan_blocks`].
    """
    row = _row(capability, head_dim, wide)
    tiles = (row.forward, row.dkdv, row.dq)
    if not interval:
        general = (row.forward_general, row.dkdv_general, row.dq_general)
        tiles = tuple(special or tile for special, tile in zip(general, tiles, strict=True))
    return Tuning("portable", *row.blocks, *tiles)


def hopper_tuning(head_dim: int, specialized: bool) -> Tuning:
    """
    The tiles of the Hopper form, for plans of 128 queries by 128 keys.

    Args:
        head_dim (`int`): One of `HOPPER_HEAD_DIMS`.
        specialized (`bool`): Whether warps are split into loaders and consumers.

    Returns:
        `Tuning`: For both directions.
    """
    return Tuning("hopper", 128, 128, *_HOPPER[head_dim, specialized])


def hopper_refusal(
    query: Tensor,
    plan: MaskPlan,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tuning: Tuning | None = None,
) -> str | None:
    """
    The reason why the Hopper form does not support a call.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, query_length, head_dim]`): Queries.
        plan (`MaskPlan`): The compiled mask.
        softcap (`float`, *optional*, defaults to 0.0): Soft cap of the scores; 0 for none.
        sinks (`torch.Tensor`, *optional*): Extra logits.
        tuning (`Tuning`, *optional*): The tiles; by default those of [`hopper_tuning`].

    Returns:
        `str` or None: The reason; `None` if it is supported.
    """
    batch, _, _, head_dim = query.shape
    block_q, block_k = (128, 128) if tuning is None else (tuning.block_q, tuning.block_k)
    reasons = (
        (head_dim not in HOPPER_HEAD_DIMS, f"head dimension {head_dim} is none of {HOPPER_HEAD_DIMS}"),
        (query.element_size() != 2, f"{query.dtype} is not a 16-bit type"),
        (batch != 1, f"batch of {batch} rows; it takes one"),
        (softcap != 0, "scores are capped"),
        (sinks is not None, "there are sinks"),
        (not plan.interval, "the mask has rows whose keys are not one interval"),
        ((plan.block_q, plan.block_k) != (block_q, block_k), f"plan of {plan.block_q} x {plan.block_k} blocks"),
        (plan.num_queries % block_q != 0, f"{plan.num_queries} queries are not whole blocks of {block_q}"),
        (plan.num_keys % block_k != 0, f"{plan.num_keys} keys are not whole blocks of {block_k}"),
        (plan.split is not None, "so few tiles that some are cut over several programs"),
    )
    found = [reason for holds, reason in reasons if holds]
    if not found and not plan.consecutive_keys:
        return "keys of a block do not stand at consecutive places"
    return found[0] if found else None


def choose_tuning(
    capability: Capability | None,
    query: Tensor,
    plan: MaskPlan,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tuning:
    """
    Form and tiles of a call: the Hopper form if it supports the call and is faster according to measurements.

    Args:
        capability (`tuple[int, int]`, *optional*): Compute capability; `None` for the interpreter.
        query (`torch.Tensor` of shape `[batch, heads, query_length, head_dim]`): Queries.
        plan (`MaskPlan`): The compiled mask.
        softcap (`float`, *optional*, defaults to 0.0): Soft cap of the scores; 0 for none.
        sinks (`torch.Tensor`, *optional*): Extra logits.

    Returns:
        `Tuning`: The tuning, of a form that supports the call.
    """
    head_dim = query.shape[-1]
    measured = MEASURED.get((capability, head_dim)) if capability is not None else None
    if measured is not None and hopper_refusal(query, plan, softcap, sinks) is None:
        return hopper_tuning(head_dim, specialized=measured[1])
    return portable_tuning(capability, head_dim, plan.interval, wide=query.element_size() > 2)
