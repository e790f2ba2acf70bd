"""Tile sizes of the kernels: a table by device and head dimension."""

from __future__ import annotations

from dataclasses import dataclass

Capability = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """The tile of one kernel and how it is compiled."""

    block_q: int  # queries of a tile; divides `block_q` of the plan
    block_k: int  # keys of a tile; divides `block_k` of the plan
    num_warps: int  # of a program
    num_stages: int  # tiles of the inner loop in flight


@dataclass(frozen=True)
class Tuning:
    """Tile sizes of one attention call."""

    block_q: int  # queries of a block of the plan's lists
    block_k: int  # keys of a block of the plan's lists
    forward: Tile
    dkdv: Tile  # of the kernel for the gradients of keys and values
    dq: Tile  # of the kernel for the gradient of queries


@dataclass(frozen=True)
class _Row:
    """The tiles on one class of devices, up to one head dimension."""

    blocks: tuple[int, int]
    forward: Tile
    dkdv: Tile
    dq: Tile
    forward_general: Tile | None = None
    dkdv_general: Tile | None = None
    dq_general: Tile | None = None


# The tiles are chosen by the machine code of each kernel (registers, shared memory, spills). Those of sm_90 for a head
# dimension of 128 are the fastest of a sweep that spill nothing.
# By class of devices: sm_90 multiplies from 227 KiB of shared memory, sm_80 has tensor cores that read registers,
# sm_86 is like sm_80 with only 99 KiB of shared memory. Then by the largest head dimension of the entry. The kernels
# of the general form need more registers.
_TABLE: dict[str, dict[int, _Row]] = {
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
            *(Tile(128, 128, 8, 3), Tile(32, 128, 8, 3), Tile(128, 64, 8, 3)),
            forward_general=Tile(128, 64, 8, 3),
            dkdv_general=Tile(32, 64, 8, 3),
            dq_general=Tile(128, 64, 8, 2),
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
    table = _TABLE[_device_class(capability)]
    return table[min(bound for bound in table if bound >= head_dim)]


def _device_class(capability: Capability | None) -> str:
    """The key in the table for a compute capability."""
    if capability is None or capability in ((8, 0), (8, 7)):
        return "sm_80"
    return "sm_90" if capability[0] in (9, 10) else "sm_86"


# A compute capability of `None` is the interpreter; head dimensions go up to 256.
def plan_blocks(capability: Capability | None, head_dim: int, wide: bool = False) -> tuple[int, int]:
    """Returns queries and keys of a plan's blocks, the same for all kernels of a call; `wide` is for float32."""
    return _row(capability, head_dim, wide).blocks


def choose_tuning(capability: Capability | None, head_dim: int, interval: bool, wide: bool = False) -> Tuning:
    """Chooses the tiles of a call, for plans of [`plan_blocks`]; `interval`: the plan is in its interval form."""
    row = _row(capability, head_dim, wide)
    tiles = (row.forward, row.dkdv, row.dq)
    if not interval:
        general = (row.forward_general, row.dkdv_general, row.dq_general)
        tiles = tuple(special or tile for special, tile in zip(general, tiles, strict=True))
    return Tuning(*row.blocks, *tiles)
