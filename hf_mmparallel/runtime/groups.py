"""Process groups, derived from the plan and made by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..plan import ParallelPlan, SyncGroup
from ..world import World

# Meshes of the same ranks are equal to torch, which keeps the one that it has seen first, with its groups, in the
# layouts of results that it has computed. After a change of ranks that would be groups of others.
_mesh_numbers = count()


def talking_pairs(plan: ParallelPlan) -> list[tuple[int, int]]:
    """Lists directed pairs of ranks between which a message can travel, in order."""
    pairs: set[tuple[int, int]] = set()
    for module in plan.modules.values():
        for stages in module.replicas:
            for before, after in pairwise(stages):
                for sources, targets in zip(before.mesh, after.mesh, strict=True):
                    pairs.update(_pairs(sources, targets))
    for edge in plan.edges:
        for source in plan.modules[edge.source].replicas:
            for replica, stages in enumerate(plan.modules[edge.target].replicas):
                for index in plan.edge_stages(edge, replica):
                    for sources, targets in product(source[-1].mesh, stages[index].mesh):
                        pairs.update(_pairs(sources, targets))
    return sorted(pairs)


def _pairs(sources: Sequence[int], targets: Sequence[int]) -> set[tuple[int, int]]:
    """Pairs the ranks of two tp groups, both ways: slice `i` goes from source `i mod a` to target `i`."""
    result = set()
    for index, target in enumerate(targets):
        source = sources[index % len(sources)]
        if source != target:
            result.update({(source, target), (target, source)})
    return result


def context_groups(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """Lists the cp groups of several ranks, which share the tokens of a row and have the same shards."""
    groups = [
        ranks for module in plan.modules.values() for _, _, stage in module.stages() for ranks in stage.cp_groups
    ]
    return list(dict.fromkeys(ranks for ranks in groups if len(ranks) > 1))


def tp_groups(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """Lists the ranks of each tp group of several ranks, in the order of their shards."""
    groups = [ranks for module in plan.modules.values() for _, _, stage in module.stages() for ranks in stage.mesh]
    return list(dict.fromkeys(ranks for ranks in groups if len(ranks) > 1))


class ProcessGroups:
    """
    The groups that a rank uses. Creating one is collective: every rank of the world makes the same calls.

    The ranks of a group have the order in which the plan writes them, also where that is not ascending: the index of a
    rank in a tp group says which shard and which slice of a message it has.
    """

    def __init__(self, plan: ParallelPlan, sync: Sequence[SyncGroup], world: World):
        rank = world.rank
        self.tp_meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.by_ranks: dict[tuple[int, ...], Any] = {}
        of_tp = tp_groups(plan)
        summing = (ranks for group in sync for ranks in (group.ranks, *group.shard_groups, *group.replica_groups))
        for ranks in dict.fromkeys((*of_tp, *context_groups(plan), *summing)):
            group = world.new_group(ranks)
            if rank in ranks:
                self.by_ranks[ranks] = group
        for ranks in of_tp:
            if rank in ranks:
                self.tp_meshes[ranks] = DeviceMesh.from_group(
                    self.by_ranks[ranks],
                    world.device.type,
                    mesh=[world.processes[other] for other in ranks],
                    mesh_dim_names=(f"tp_{next(_mesh_numbers)}",),
                )
        self.channels: dict[tuple[int, int], Any] = {}
        if world.on_device:
            for pair in talking_pairs(plan):
                group = world.new_group(pair)
                if rank in pair:
                    self.channels[pair] = group
            self._connect(world)

    def _connect(self, world: World) -> None:
        """Uses every group once, in one order on all ranks."""
        # NCCL connects a group in its first call, which blocks the host until its peers have come
        token = torch.zeros(1, device=world.device)
        for ranks in sorted(self.by_ranks):
            dist.all_reduce(token, group=self.by_ranks[ranks])
        for source, target in sorted(self.channels):
            if world.rank == source:
                dist.send(token, world.processes[target], group=self.channels[source, target])
            else:
                dist.recv(token, world.processes[source], group=self.channels[source, target])

    def tp_mesh(self, ranks: tuple[int, ...]) -> DeviceMesh | None:
        """Returns the mesh of a tp group, `None` for a single rank."""
        return self.tp_meshes.get(ranks)
