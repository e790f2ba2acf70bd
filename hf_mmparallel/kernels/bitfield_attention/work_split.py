"""Splits the longest tiles of the forward pass over several programs, where so few run that the longest decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Longest first is nearly the ideal order if every program has several tiles to run (within 3 % on the masks of
# training). With few, as in generation, in short batches or with one very long row, the longest tile's list of blocks
# is split, each share writes its own softmax, and a second kernel combines the shares.
# Costs in tenths of a step over a full block: a partial block also evaluates the mask; every tile loads its queries
# and stores its output; a share of a tile stores float32, which is read again; the second kernel has to be launched.
FULL_COST, PARTIAL_COST = 10, 13
TILE_COST = 20
PART_COST = 30
COMBINE_COST = 30


@dataclass(frozen=True)
class SplitTiles:
    """Forward tiles, some of which are shares of a split tile."""

    # int32 [num_tiles, 6]: the five columns of `BlockLists`, and the index in the workspace to which the share is
    # written; -1 for a tile that is not split
    tiles: Tensor
    # int32 [num_rows, 4], for each block of queries that is split: row of the batch, block, first index in the
    # workspace, number of shares
    rows: Tensor
    num_slots: int  # size of the workspace in shares


def step_costs(partial: Tensor, seen: Tensor) -> Tensor:
    """Costs of the steps of tiles that visit `seen` blocks, `partial` of them partial; integers of the same shape."""
    return torch.add(seen * FULL_COST, partial, alpha=PARTIAL_COST - FULL_COST)


def split_tiles(tiles: Tensor, longest: int, total: int, num_heads: int, num_programs: int) -> SplitTiles | None:
    """
    Splits tiles `[num_tiles, 5]` if the kernel is then certain to end earlier, otherwise returns `None`.

    A tile is split only if the upper bound for any list schedule of the shares (their mean load plus the longest
    share) is below the lower bound without splitting (the mean load, or the longest tile), so that it cannot end
    later. `longest` and `total` are costs of the steps of a tile and of all tiles.
    """
    share = num_heads / num_programs
    mean = (total + tiles.shape[0] * TILE_COST) * share
    if longest + TILE_COST <= mean:
        return None
    on_host = tiles.cpu().to(torch.int64)
    begin, middle, end = on_host[:, 2:].unbind(dim=1)
    seen, steps = end - begin, step_costs(middle - begin, end - begin)
    best_bound, best_parts = float(longest + TILE_COST), None
    for limit in (2**power for power in range(int(seen.max()).bit_length())):
        parts = torch.where(seen > limit, (seen + limit - 1) // limit, 1)
        cost = int((steps + parts * TILE_COST + (parts > 1) * parts * PART_COST).sum())
        longest_part = int(torch.minimum(steps, (seen + parts - 1) // parts * PARTIAL_COST).max())
        bound = cost * share + longest_part + TILE_COST + PART_COST + COMBINE_COST
        if bound < best_bound:
            best_bound, best_parts = bound, parts
    return None if best_parts is None else _cut(on_host, best_parts, tiles.device)


def _cut(tiles: Tensor, parts: Tensor, device: torch.device) -> SplitTiles:
    """Splits each tile of a CPU tensor into `parts` shares, longest first; the result is on `device`."""
    tile = torch.repeat_interleave(parts)
    part = torch.arange(len(tile)) - (parts.cumsum(0) - parts)[tile]
    batch, block, begin, middle, end = tiles[tile].unbind(dim=1)
    seen = end - begin
    start, stop = begin + seen * part // parts[tile], begin + seen * (part + 1) // parts[tile]
    full_from = torch.minimum(torch.maximum(middle, start), stop)
    cut = parts[tile] > 1
    slot = torch.where(cut, cut.cumsum(0) - 1, -1)
    longest_first = step_costs(full_from - start, stop - start).argsort(descending=True, stable=True)
    cut_tiles = torch.stack([batch, block, start, full_from, stop, slot], dim=1)[longest_first]
    first = cut & (part == 0)
    rows = torch.stack([batch, block, slot, parts[tile]], dim=1)[first]
    to_device = {"device": device, "dtype": torch.int32}
    return SplitTiles(cut_tiles.to(**to_device), rows.to(**to_device), num_slots=int(cut.sum()))
