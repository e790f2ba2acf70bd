"""The shards of a parameter that a rank has, of which those of a smaller tp group have several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..modeling.dtensors import local
from ..plan import ParameterShards, ParameterSpec


@dataclass(frozen=True)
class Region:
    """
    Some of the rows or columns of a tensor.

    Args:
        dim (`int`): The dimension.
        start (`int`): First index in each block.
        stop (`int`): One past the last index in each block.
        size (`int`): Indices of each block.
        num_blocks (`int`, *optional*, defaults to 1): Equal blocks of the dimension.
    """

    dim: int
    start: int
    stop: int
    size: int
    num_blocks: int = 1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor, in its memory; the blocks have a dimension of their own."""
        blocks = tensor.unflatten(self.dim, (self.num_blocks, self.size))
        return blocks.narrow(self.dim + 1, self.start, self.stop - self.start)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor in memory of their own, blocks one after the other."""
        return self.of(tensor).flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def blank(self, elements: torch.Tensor) -> torch.Tensor:
        """A tensor without values of which [`~Region.copied`] would give tensors like `elements`."""
        shape = (*elements.shape[: self.dim], self.num_blocks * self.size, *elements.shape[self.dim + 1 :])
        return elements.new_empty(shape)

    def write(self, tensor: torch.Tensor, elements: torch.Tensor) -> None:
        """Writes into a tensor what [`~Region.copied`] gave elsewhere."""
        self.of(tensor).copy_(elements.unflatten(self.dim, (self.num_blocks, -1)))


Regions = Mapping[tuple[str, tuple[int, ...]], Region]
"""Parameter and holders of a shard -> where it lies in a rank's part of the parameter, if it is not all of it."""


def local_regions(
    parameters: Mapping[str, ParameterSpec], shards: Mapping[str, ParameterShards], rank: int
) -> dict[tuple[str, tuple[int, ...]], Region]:
    """
    Where the shards lie of those parameters of which a rank has several.

    Args:
        parameters (`Mapping[str, ParameterSpec]`): The parameters of the whole model.
        shards (`Mapping[str, ParameterShards]`): Where each of them lives.
        rank (`int`): The rank.
    """
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
    """
    A shard on this rank.

    Args:
        parameter (`nn.Parameter`): The parameter.
        region ([`Region`], *optional*): Where it lies in this rank's part of it; `None` if it is all of that.
    """

    parameter: nn.Parameter
    region: Region | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shard of a tensor with the layout of the parameter, such as its gradient; in its memory."""
        return local(tensor) if self.region is None else self.region.of(local(tensor))

    def numel(self) -> int:
        """Number of its elements."""
        return self.of(self.parameter).numel()
