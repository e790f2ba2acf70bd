"""The shards of a parameter that a rank has, of which those of a smaller tp group have several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..modeling.unowned import local
from ..plan import ParameterShards, ParameterSpec


@dataclass(frozen=True)
class Region:
    """Some of the rows or columns of a tensor."""

    dim: int
    start: int  # first index in each block
    stop: int  # one past the last index in each block
    size: int  # indices of each block
    num_blocks: int = 1  # equal blocks of the dimension

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns these elements of a tensor, in its memory; the blocks have a dimension of their own."""
        blocks = tensor.unflatten(self.dim, (self.num_blocks, self.size))
        return blocks.narrow(self.dim + 1, self.start, self.stop - self.start)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Returns the shape of these elements of a tensor on their own, blocks one after the other."""
        size = self.num_blocks * (self.stop - self.start)
        return torch.Size((*tensor.shape[: self.dim], size, *tensor.shape[self.dim + 1 :]))

    def blank(self, elements: torch.Tensor) -> torch.Tensor:
        """Makes a tensor without values, in which `elements` have their place here."""
        shape = (*elements.shape[: self.dim], self.num_blocks * self.size, *elements.shape[self.dim + 1 :])
        return elements.new_empty(shape)

    def write(self, tensor: torch.Tensor, elements: torch.Tensor) -> None:
        """Writes elements of [`~Region.shape`] to their place in a tensor."""
        self.of(tensor).copy_(elements.unflatten(self.dim, (self.num_blocks, -1)))


Regions = Mapping[tuple[str, tuple[int, ...]], Region]
"""Parameter and holders of a shard -> where it lies in a rank's part of the parameter, if it is not all of it."""


def local_regions(
    parameters: Mapping[str, ParameterSpec], shards: Mapping[str, ParameterShards], rank: int
) -> dict[tuple[str, tuple[int, ...]], Region]:
    """Finds where the shards lie of those parameters of which a rank has several, by parameter and holders."""
    result = {}
    for name, of_parameter in shards.items():
        held = [] if of_parameter.zero_stage else of_parameter.on_rank(rank)
        if len(held) < 2:
            continue
        (cut,) = held[0].cuts
        assert cut.dim is not None
        bounds = [shard.cuts[0].bounds(parameters[name].shape[cut.dim] // cut.num_blocks) for shard in held]
        first, end = bounds[0][0], bounds[-1][1]
        for shard, (start, stop) in zip(held, bounds, strict=True):
            place = start - first, stop - first, end - first
            result[name, shard.holders] = Region(cut.dim, *place, cut.num_blocks)
    return result


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A shard on this rank."""

    parameter: nn.Parameter
    region: Region | None = None  # where it lies in this rank's part of the parameter; `None` if it is all of that

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the shard of a tensor with the layout of the parameter, such as its gradient; in its memory."""
        return local(tensor) if self.region is None else self.region.of(local(tensor))

    def numel(self) -> int:
        """Counts its elements."""
        return self.of(self.parameter).numel()
