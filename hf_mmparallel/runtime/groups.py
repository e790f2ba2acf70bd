"""Process groups, derived from the plan and made by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..plan import ParallelPlan, StageKey, StepPlan, SyncGroup
from ..schedule.graph import build_graph
from ..schedule.kinds import Action
from ..world import World

# Meshes of the same ranks are equal to torch, which keeps the one that it has seen first, with its groups, in the
# layouts of results that it has computed. After a change of ranks that would be groups of others.
_mesh_numbers = count()


def channels_of_step(plan: ParallelPlan, step: StepPlan) -> list[tuple[int, int]]:
    """Lists the pairs of ranks that exchange messages in a step, in order."""
    graph = build_graph(plan, step, training=False)
    links = np.unique(graph.columns[0, graph.links], axis=1).T.tolist()
    stages = graph.stages
    return sorted({channel for link in links for channel in _channels(plan, *(stages[index] for index in link))})


def channels_of(plan: ParallelPlan, rank: int, actions: Iterable[Action]) -> Iterator[tuple[int, int]]:
    """Yields the pairs of a rank with others that its actions exchange messages with, in order."""
    messages = (action.message for action in actions if action.message is not None)
    links = {(m.source.stage_key, m.target.stage_key)[:: 1 if m.kind == "act" else -1] for m in messages}
    yield from sorted({channel for link in links for channel in _channels(plan, *link) if rank in channel})


def _channels(plan: ParallelPlan, source: StageKey, target: StageKey) -> set[tuple[int, int]]:
    """
    The pairs of ranks of two stages, the first of which passes activations to the second: slice `i` of a row goes from
    rank `i mod a` of its `a` ranks to rank `i`.
    """
    before, after = plan.stage(*source), plan.stage(*target)
    # hidden states stay on their cp rank, features go to any
    rows = zip(before.mesh, after.mesh, strict=True) if source[0] == target[0] else product(before.mesh, after.mesh)
    ends = ((producers[i % len(producers)], rank) for producers, row in rows for i, rank in enumerate(row))
    return {(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]}


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


def expert_groups(plan: ParallelPlan) -> list[tuple[tuple[int, ...], ...]]:
    """Lists the groups of ranks that share experts, each as its tp groups."""
    groups = [
        group
        for module in plan.modules.values()
        if module.ep_size > 1
        for stage in range(len(module.replicas[0]))
        for group in module.expert_groups(stage)
    ]
    return list(dict.fromkeys(groups))


def collective_groups(plan: ParallelPlan, sync: Sequence[SyncGroup]) -> list[tuple[int, ...]]:
    """Lists the groups of a plan beside the world, in the order in which they are made."""
    summing = (ranks for group in sync for ranks in (group.ranks, *group.shard_groups, *group.replica_groups))
    experts = expert_groups(plan)
    sharing = (ranks for group in experts for ranks in (tuple(chain(*group)), *zip(*group, strict=True)))
    every = dict.fromkeys((*tp_groups(plan), *context_groups(plan), *sharing, *summing))
    return [ranks for ranks in every if len(ranks) > 1]


class ProcessGroups:
    """
    The groups that a rank uses. Creating one is collective: every rank of the world makes the same calls.

    The ranks of a group have the order in which the plan writes them, also where that is not ascending: the index of a
    rank in a tp group says which shard and which slice of a message it has.
    """

    def __init__(self, plan: ParallelPlan, sync: Sequence[SyncGroup], world: World):
        rank = world.rank
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}  # of the ranks that cut parameters
        self.by_ranks: dict[tuple[int, ...], Any] = {}
        cutting = dict.fromkeys((*tp_groups(plan), *(tuple(chain(*group)) for group in expert_groups(plan))))
        for ranks in collective_groups(plan, sync):
            group = world.new_group(ranks)
            if rank in ranks:
                self.by_ranks[ranks] = group
        for ranks in cutting:
            if rank in ranks:
                self.meshes[ranks] = DeviceMesh.from_group(
                    self.by_ranks[ranks],
                    world.device.type,
                    mesh=[world.processes[other] for other in ranks],
                    mesh_dim_names=(f"cut_{next(_mesh_numbers)}",),
                )
        if world.on_device:
            # NCCL connects a group in its first call, which blocks the host until its peers have come: in one order
            token = torch.zeros(1, device=world.device)
            for ranks in sorted(self.by_ranks):
                dist.all_reduce(token, group=self.by_ranks[ranks])

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh | None:
        """Returns the mesh of ranks that cut parameters, `None` for a single rank."""
        return self.meshes.get(ranks)
