"""Time of the optimizer step, after the last gradient all-reduce."""

from __future__ import annotations

from ..plan import ParallelPlan
from .collectives import all_gather
from .layers import CostModel
from .memory import state_per_rank
from .stage_memory import RankMemory, stage_memories


def update_bytes(state: RankMemory) -> float:
    """
    Memory traffic in bytes of clipping and a fused AdamW step: weights and both moments are read and written;
    gradients are read for the norm, read and written by clipping, read by the step, and set to zero. Moments are twice
    the weights that the step updates; of master weights half as many bytes are written into the 16-bit weights.
    """
    return 3.0 * (state.optimizer - state.master) + 5.0 * state.gradients + 0.5 * state.master


def optimizer_ms(costs: CostModel, plan: ParallelPlan) -> float:
    """
    Time of clipping and of the optimizer step on the slowest rank, without what runs on the CPU.

    Args:
        costs (`CostModel`): Costs of layers.
        plan (`ParallelPlan`): The layout.
    """
    device = costs.device
    states = state_per_rank(plan, stage_memories(costs, plan))
    if not costs.engine.sharded_optimizer:
        return max(map(update_bytes, states.values())) / device.memory_bytes_per_ms
    longest = 0.0
    for module in plan.modules.values():
        for _, _, stage in module.stages():
            copies = [replica[0].all_ranks[0] for replica in module.replicas]
            for rank in stage.all_ranks[:1]:
                update_ms = update_bytes(states[rank]) / len(copies) / device.memory_bytes_per_ms
                gather = all_gather(device, states[rank].optimizer / 2 - states[rank].master, copies)
                longest = max(longest, update_ms + gather(1.0, 0.0))
    return longest
