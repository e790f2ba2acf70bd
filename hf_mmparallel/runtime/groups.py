"""Process groups, derived from the plan and made by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..plan import ParallelPlan, SyncGroup


def talking_pairs(plan: ParallelPlan) -> list[tuple[int, int]]:
    """Directed pairs of ranks between which a message can travel, in order."""
    pairs: set[tuple[int, int]] = set()
    for module in plan.modules.values():
        for stages in module.replicas:
            for before, after in pairwise(stages):
                for sources, targets in zip(before.ranks, after.ranks, strict=True):
                    pairs.update(_pairs(sources, targets))
    for edge in plan.edges:
        for source in plan.modules[edge.source].replicas:
            for replica, stages in enumerate(plan.modules[edge.target].replicas):
                for index in plan.edge_stages(edge, replica):
                    for targets in stages[index].ranks:
                        pairs.update(_pairs(source[-1].all_ranks, targets))
    return sorted(pairs)


def _pairs(sources: Sequence[int], targets: Sequence[int]) -> set[tuple[int, int]]:
    """The pairs between two rows of ranks, both ways: part `i` joins source `i mod a` and target `i`."""
    result = set()
    for index, target in enumerate(targets):
        source = sources[index % len(sources)]
        if source != target:
            result.update({(source, target), (target, source)})
    return result


def context_groups(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """The groups of ranks that share a row of tokens and hold the same shards, in the order of their parts of it."""
    columns = [c for module in plan.modules.values() for _, _, stage in module.stages() for c in stage.columns]
    return list(dict.fromkeys(column for column in columns if len(column) > 1))


def tensor_parallel_rows(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """The rows of ranks that share the matrices of a stage, in the order of their shards."""
    rows = [row for module in plan.modules.values() for _, _, stage in module.stages() for row in stage.ranks]
    return list(dict.fromkeys(row for row in rows if len(row) > 1))


def _default_timeout(device_type: str) -> timedelta:
    """How long collectives of the default group wait for a rank, which `ddp_timeout` says."""
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    return backend.options._timeout


class ProcessGroups:
    """
    The groups that a rank uses. Creating one is collective: every rank of the world makes the same calls.

    The ranks of a group have the order in which the plan writes them, also where that is not ascending: the place of a
    rank in a row says which shard and which part of a message it has.

    Args:
        plan (`ParallelPlan`): The plan.
        sync (`Sequence[SyncGroup]`): The gradient sums.
        device_type (`str`): `"cpu"` or `"cuda"`.

    Attributes:
        control (`ProcessGroup`, *optional*):
            All ranks, for numbers in host memory, so that no rank waits for its device; `None` for the default group
            where that is such a group.
    """

    def __init__(self, plan: ParallelPlan, sync: Sequence[SyncGroup], device_type: str):
        rank = dist.get_rank()
        self.tp_meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.by_ranks: dict[tuple[int, ...], Any] = {}
        self._timeout = _default_timeout(device_type)
        rows = tensor_parallel_rows(plan)
        for ranks in dict.fromkeys((*rows, *context_groups(plan), *(group.ranks for group in sync))):
            made = self._new_group(ranks)
            if rank in ranks:
                self.by_ranks[ranks] = made
        for row in rows:
            if rank in row:
                self.tp_meshes[row] = DeviceMesh.from_group(
                    self.by_ranks[row], device_type, mesh=list(row), mesh_dim_names=("tp",)
                )
        self.channels: dict[tuple[int, int], Any] = {}
        self.control: Any = None
        if dist.get_backend() == "nccl":
            self.control = self._new_group(range(dist.get_world_size()), backend="gloo")
            for pair in talking_pairs(plan):
                made = self._new_group(pair)
                if rank in pair:
                    self.channels[pair] = made
            self._connect(rank, torch.device(device_type, torch.cuda.current_device()))

    def _new_group(self, ranks: Sequence[int], backend: str | None = None) -> Any:
        """A group of these ranks in this order, which waits as long as the default group."""
        # The mesh of a row would make a group of its own, of sorted ranks.
        return dist.new_group(list(ranks), timeout=self._timeout, backend=backend, sort_ranks=False)

    def _connect(self, rank: int, device: torch.device) -> None:
        """
        Uses every group once, in one order on all ranks: NCCL connects a group in its first call, which blocks the
        host until its peers have come.
        """
        token = torch.zeros(1, device=device)
        for ranks in sorted(self.by_ranks):
            dist.all_reduce(token, group=self.by_ranks[ranks])
        for source, target in sorted(self.channels):
            if rank == source:
                dist.send(token, target, group=self.channels[source, target])
            else:
                dist.recv(token, source, group=self.channels[source, target])

    def tp_mesh(self, ranks: tuple[int, ...]) -> DeviceMesh | None:
        """The mesh of a row of tensor-parallel ranks, `None` for a single rank."""
        return self.tp_meshes.get(ranks)
