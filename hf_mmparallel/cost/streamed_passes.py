"""Frozen weights in host memory, which come to the device layer by layer."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..plan import ParallelPlan, stage_holds
from .layers import CostModel
from .sharded_passes import PassTransfers, held_bytes, pass_transfers


def transfers_in_passes(costs: CostModel, plan: ParallelPlan, module: str, index: int) -> PassTransfers | None:
    """What a stage moves beside its passes: [`pass_transfers`], and frozen weights that come from host memory."""
    planned, shared = plan.modules[module], pass_transfers(costs, plan, module, index)
    if not planned.storage.offload_params:
        return shared
    stage = next(replica[min(index, len(replica) - 1)] for replica in planned.replicas if replica)
    streamed = streamed_transfers(costs, module, stage.layers, stage.tp_size)
    return streamed if shared is None or streamed is None else replace(shared, gather_ms=streamed.gather_ms)


@lru_cache(maxsize=1024)
def streamed_transfers(costs: CostModel, module: str, layers: tuple[int, int], tp_size: int) -> PassTransfers | None:
    """Copies of frozen layers from host memory; `None` if the bandwidth of the link is unknown."""
    link, num_layers = costs.device.host_link_bytes_per_ms, costs.spec.modules[module].num_layers
    if link is None:
        return None
    gather_ms = tuple(held_bytes(costs, module, tp_size, (layer,))[0] / link for layer in range(*layers))
    outer = tuple(int(stage_holds(layers, num_layers, row)) for row in (-1, num_layers))
    # each comes while the layer before it in the pass computes, which it does not slow down
    return PassTransfers(gather_ms, (0.0,) * len(gather_ms), 0.0, 0.0, (outer[0], outer[1]), False, 1.0)
