"""Time of the optimizer step, after the last gradient sum, and of the gathering of weights after it."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import ParallelPlan, SyncGroup
from .collectives import all_gather, slowest
from .layers import CostModel
from .sharded_passes import GATHERS_IN_PASSES, parameter_bytes
from .stage_memory import stage_memories


def optimizer_ms(costs: CostModel, plan: ParallelPlan, sync_groups: Sequence[SyncGroup] = ()) -> float:
    """
    Time of clipping, of the optimizer step and, where ranks update slices, of the all-gather of the weights, on the
    slowest rank.

    Args:
        costs (`CostModel`): Costs of layers.
        plan (`ParallelPlan`): The layout.
        sync_groups (`Sequence[SyncGroup]`, *optional*): The gradient sums, which say who updates what.
    """
    device = costs.device
    times = dict.fromkeys(range(plan.world_size), 0.0)
    for key, memory in stage_memories(costs, plan).items():
        module = plan.modules[key[0]]
        update_ms = memory.update_bytes / device.memory_bytes_per_ms
        gather_ms = 0.0
        if costs.engine.sharded_optimizer:
            copies = [replica[0].all_ranks[0] for replica in module.replicas]
            update_ms /= len(copies)
            gather_ms = all_gather(device, memory.state.optimizer / 2, copies)(1.0, 0.0)
        for rank in plan.stage(*key).all_ranks:
            times[rank] += update_ms + gather_ms
    for group in sync_groups:
        module, shard_groups = group.stages[0][0], group.shard_groups
        if not shard_groups or plan.modules[module].sharding.zero_stage >= GATHERS_IN_PASSES:
            continue
        weights = parameter_bytes(costs, module, plan.modules[module].tp_size)
        num_bytes = sum(weights[name][0] for name in group.parameters)
        gather_ms = slowest(all_gather, device, num_bytes, shard_groups)
        for rank in group.ranks:
            times[rank] += gather_ms
    return max(times.values())
