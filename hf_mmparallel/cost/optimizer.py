"""Time of the optimizer step, after the last gradient sum, and of the gathering of weights after it."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import ParallelPlan, SyncGroup
from .collectives import all_gather, slowest
from .host_step import host_step_ms
from .layers import CostModel
from .sharded_passes import GATHERS_IN_PASSES, PassTransfers, parameter_bytes, pass_transfers
from .stage_memory import stage_memories


def optimizer_ms(costs: CostModel, plan: ParallelPlan, sync_groups: Sequence[SyncGroup] = ()) -> float:
    """Time of [`optimizer_times`] on the slowest rank."""
    return max(map(sum, optimizer_times(costs, plan, sync_groups).values()))


def optimizer_times(
    costs: CostModel, plan: ParallelPlan, sync_groups: Sequence[SyncGroup] = ()
) -> dict[int, tuple[float, float]]:
    """
    Rank -> time of clipping and of the optimizer step, on the device or the CPU, and, where ranks update slices, of
    the all-gather of the weights.
    """
    device = costs.device
    updates, gathers = (dict.fromkeys(range(plan.world_size), 0.0) for _ in range(2))
    transfers: dict[tuple[str, int], PassTransfers | None] = {}
    for key, memory in stage_memories(costs, plan).items():
        update_ms = memory.update_bytes / device.memory_bytes_per_ms + host_step_ms(device, memory.host_step)
        if (key[0], key[2]) not in transfers:
            transfers[key[0], key[2]] = pass_transfers(costs, plan, key[0], key[2])
        shared = transfers[key[0], key[2]]
        # where passes gather the weights of layers, those outside of layers are gathered here
        gather_ms = 0.0 if shared is None else shared.outer_gather_ms
        for rank in plan.stage(*key).all_ranks:
            updates[rank] += update_ms
            gathers[rank] += gather_ms
    for group in sync_groups:
        module = group.stages[0][0]
        if not group.shard_groups or group.zero_stage >= GATHERS_IN_PASSES:
            continue
        weights = parameter_bytes(costs, module, plan.modules[module].tp_size)
        num_bytes = sum(weights[name][0] for name in group.parameters)
        gather_ms = slowest(all_gather, device, num_bytes, group.shard_groups)
        for rank in group.ranks:
            gathers[rank] += gather_ms
    return {rank: (update_ms, gathers[rank]) for rank, update_ms in updates.items()}
