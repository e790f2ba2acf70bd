"""Times of passes through a stage whose copies share weights and gradients layer by layer (ZeRO 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import ModulePlan, ParallelPlan
from .activations import DTYPE_BYTES, FULL, parameter_shares
from .collectives import all_gather
from .layers import CostModel

REDUCES_IN_PASSES = 2
"""First ZeRO stage that reduces the gradients of each layer in every backward."""
GATHERS_IN_PASSES = 3
"""First ZeRO stage that gathers the weights of each layer in every pass."""


@dataclass(frozen=True)
class PassTransfers:
    """
    Communication in the passes of a stage. While a layer computes, the weights of the next one are gathered and the
    gradients of the one before are reduced. The first gather and the last reduction are exposed, and so is what takes
    longer than the computation beside it.

    Args:
        gather_ms (`tuple[float, ...]`): Time to gather the weights of each layer of the stage, with the parts before
            and after all layers where the stage has them.
        reduce_ms (`tuple[float, ...]`): Time to reduce the gradients of each.
        overlap_efficiency (`float`): Relative compute speed beside communication.
    """

    gather_ms: tuple[float, ...]
    reduce_ms: tuple[float, ...]
    overlap_efficiency: float

    def of_pass(self, has_backward: NDArray | None = None) -> tuple[NDArray, float]:
        """
        Times of the communication beside the computation of each layer `[layers]`, and of the rest.

        Args:
            has_backward (`np.ndarray` of shape `[layers]`, *optional*):
                For a backward, which layers have one; without it a forward.
        """
        if has_backward is None:
            return np.array([*self.gather_ms[1:], 0.0]), self.gather_ms[0]
        gathers, reduces = (np.where(has_backward, values, 0.0) for values in (self.gather_ms, self.reduce_ms))
        beside = np.append(0.0, gathers[:-1]) + np.append(reduces[1:], 0.0)
        return beside, float(gathers[-1] + reduces[0])


def pass_transfers(costs: CostModel, plan: ParallelPlan, module: str, index: int) -> PassTransfers | None:
    """
    Communication in the passes of a stage; `None` if there is none.

    Args:
        costs (`CostModel`): The model and the device.
        plan (`ParallelPlan`): The layout.
        module (`str`): The module.
        index (`int`): Index of the stage in its replicas.
    """
    planned = plan.modules[module]
    if planned.sharding.zero_stage < REDUCES_IN_PASSES:
        return None
    groups = shard_groups(planned, index)
    if len(groups[0]) == 1:
        return None
    slowest = max(groups, key=lambda ranks: all_gather(costs.device, 1e6, ranks)(1.0, 0.0))
    layers = _stage_at(planned, index)[0]
    return transfers_among(slowest, costs, module, layers, planned.tp_size, planned.sharding.zero_stage)


@lru_cache(maxsize=4096)
def transfers_among(
    ranks: tuple[int, ...], costs: CostModel, module: str, layers: tuple[int, int], tp_size: int, zero_stage: int
) -> PassTransfers:
    """
    Communication in the passes of a stage.

    Args:
        ranks (`tuple[int, ...]`): The ranks that share its weights or gradients.
        costs (`CostModel`): The model and the device.
        module (`str`): The module.
        layers (`tuple[int, int]`): First layer of the stage, and one past the last layer.
        tp_size (`int`): Size of a tp group.
        zero_stage (`int`): 2 shares gradients, 3 also weights.
    """
    num_layers = costs.spec.modules[module].num_layers
    first = 0 if layers[0] == 0 else layers[0] + 1
    stop = num_layers + 2 if layers[1] == num_layers else layers[1] + 1
    one = all_gather(costs.device, 1.0, ranks)
    num_bytes = layer_bytes(costs, module, tp_size)[first:stop]
    times = np.where(num_bytes > 0, one.token * num_bytes + one.constant, 0.0)
    gather_ms, reduce_ms = times.T.tolist()
    none = [0.0] * len(gather_ms)
    return PassTransfers(
        tuple(gather_ms if zero_stage >= GATHERS_IN_PASSES else none),
        tuple(reduce_ms),
        costs.device.overlap_efficiency,
    )


def longer_ms(compute_ms: NDArray, beside_ms: NDArray, overlap_efficiency: float) -> NDArray:
    """Time that communication adds to the computation beside it."""
    return np.maximum((1 - overlap_efficiency) * beside_ms, beside_ms - compute_ms)


@lru_cache(maxsize=256)
def parameter_bytes(costs: CostModel, module: str, tp_size: int) -> dict[str, tuple[float, float]]:
    """
    Parameter -> bytes of its weights and of its gradient, in float32 at least, on each rank of a module's tp group.
    """
    result = {}
    for index in range(-1, costs.spec.modules[module].num_layers + 1):
        shares = parameter_shares(costs.spec, module, index, tp_size)
        for use in costs.spec.uses.get((module, index), ()):
            p = use.parameter
            num_values, value_bytes = shares[p.name] * p.num_elements, DTYPE_BYTES.get(p.dtype, FULL)
            result[p.name] = num_values * value_bytes, num_values * max(value_bytes, FULL)
    return result


@lru_cache(maxsize=256)
def layer_bytes(costs: CostModel, module: str, tp_size: int) -> NDArray:
    """
    `[num_layers + 2, 2]`: bytes of the weights of each layer on a rank of a tp group, and of what is sent of the
    gradients of trained ones; the first row is the part before all layers, the last the part after them.
    """
    known = parameter_bytes(costs, module, tp_size)
    result = np.zeros((costs.spec.modules[module].num_layers + 2, 2))
    for row in range(len(result)):
        for use in costs.spec.uses.get((module, row - 1), ()):
            weights, gradients = known[use.parameter.name]
            sent = gradients if costs.engine.wide_sums else weights
            result[row] += weights, sent * use.parameter.trainable
    return result


def num_shards(module: ModulePlan) -> int:
    """Number of copies that divide the parameters of a module; 1 where nothing is divided."""
    copies, sharding = module.dp_size * module.cp_size, module.sharding
    if not sharding.zero_stage:
        return 1
    size = sharding.shard_size
    return size if size is not None and copies % size == 0 else copies


def shard_groups(module: ModulePlan, index: int) -> list[tuple[int, ...]]:
    """The groups of ranks that divide stage `index` of all replicas, of the first rank of each tp group."""
    ranks = sorted(tp_group[0] for mesh in _stage_at(module, index)[1] for tp_group in mesh)
    size = min(num_shards(module), len(ranks))
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def _stage_at(module: ModulePlan, index: int) -> tuple[tuple[int, int], Sequence]:
    """The layers of a stage in the first replica, and its mesh in all of them."""
    stages = [replica[min(index, len(replica) - 1)] for replica in module.replicas if replica]
    return stages[0].layers, [stage.mesh for stage in stages]


def replicas_per_group(module: ModulePlan) -> int:
    """Number of consecutive replicas whose passes run together, since they share weights or gradients."""
    if module.sharding.zero_stage < REDUCES_IN_PASSES:
        return 1
    return max(1, num_shards(module) // module.cp_size)
