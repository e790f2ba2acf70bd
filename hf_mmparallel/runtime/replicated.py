"""Parameters that each rank of a tp group holds whole, and what that means for their gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..modeling.dtensors import local
from ..plan import StageKey
from .groups import ProcessGroups
from .sharded_model import ShardedModel


@dataclass(frozen=True)
class ReplicatedParameters:
    """The parameters that each rank of a tp group holds whole."""

    ranks: tuple[int, ...]
    group: Any
    parameters: Mapping[str, nn.Parameter]  # in one order on all ranks
    modules: Mapping[str, str]  # name -> module
    partial: frozenset[str]  # those with partial gradients, which add up to the gradient


def replicated_parameters(
    sharded: ShardedModel, stages: Collection[StageKey], groups: ProcessGroups, partial: Collection[str]
) -> list[ReplicatedParameters]:
    """Finds the parameters that each rank of a tp group holds whole, for the tp groups of this rank."""
    named = dict(sharded.model.named_parameters())
    result = []
    for ranks in groups.tp_meshes:
        # among `stages`, those of this rank
        own_stages = {key for key in stages if ranks in sharded.plan.stage(*key).mesh}
        modules = {}
        for name, shards in sharded.shards.items():
            module = next((key[0] for key in shards.stages if key in own_stages), None)
            if module is not None and any(all(map(shard.is_on, ranks)) for shard in shards.shards):
                modules[name] = module
        if modules:
            parameters = {name: named[name] for name in modules}
            result.append(ReplicatedParameters(ranks, groups.by_ranks[ranks], parameters, modules, frozenset(partial)))
    return result


class EqualGradients:
    """
    Gradients that each rank of a tp group has whole. They are divided by the number of ranks before the sum over all
    copies of the parameter, which then counts each microbatch once, and after which all copies have the same bits.
    """

    def __init__(self, replicated: Sequence[ReplicatedParameters]):
        self.sizes = {
            id(parameter): float(len(of_group.ranks))
            for of_group in replicated
            for name, parameter in of_group.parameters.items()
            if name not in of_group.partial
        }

    @torch.no_grad()
    def divide(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divides those among the gradients of `parameters`."""
        divided = [p for p in parameters if p.grad is not None and id(p) in self.sizes]
        if divided:
            gradients: Any = [local(p.grad) for p in divided if p.grad is not None]
            torch._foreach_div_(gradients, [self.sizes[id(p)] for p in divided])  # type: ignore[attr-defined]
