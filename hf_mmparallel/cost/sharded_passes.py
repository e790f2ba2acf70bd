"""Communication in the passes of stages whose copies share weights or gradients layer by layer (ZeRO 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import ModulePlan, ParallelPlan, ShardingSettings, stage_holds
from ..schedule import pass_actions
from ..schedule.actions import Kind
from .activations import DTYPE_BYTES, FULL, parameter_shares
from .backwards import first_backward
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
    gradients of the one before are reduced. The first gather and the last reductions are exposed, and so is what takes
    longer than the computation beside it. Weights outside of layers stay gathered from the first pass of a step to its
    end; their gradients are reduced at the end of each backward.

    Args:
        gather_ms (`tuple[float, ...]`): Time to gather the weights of each layer of the stage.
        reduce_ms (`tuple[float, ...]`): Time to reduce the gradients of each.
        outer_gather_ms (`float`):
            Time to gather, once a step, the weights outside of layers, or all that stay gathered from pass to pass.
        outer_reduce_ms (`float`): Time to reduce their gradients.
        outer_rows (`tuple[int, int]`): Whether the stage has the part before all layers, and the part after them.
        alternates (`bool`):
            Whether a backward follows each forward and the reverse, so that the last layers of a pass stay gathered
            for the next pass.
        overlap_efficiency (`float`): Relative compute speed beside communication.
        first_backward (`int`, *optional*, defaults to 0): The first layer of the stage with a backward.
    """

    gather_ms: tuple[float, ...]
    reduce_ms: tuple[float, ...]
    outer_gather_ms: float
    outer_reduce_ms: float
    outer_rows: tuple[int, int]
    alternates: bool
    overlap_efficiency: float
    first_backward: int = 0

    def of_pass(self, num_rows: int, is_backward: bool) -> tuple[NDArray, float]:
        """
        Communication of a pass.

        Args:
            num_rows (`int`):
                Number of parts of the stage: the part before all layers, each layer, and the part after them, if the
                stage has these.
            is_backward (`bool`): Whether it is a backward.

        Returns:
            `tuple[np.ndarray, float]`: Time of the communication beside each part `[rows]`, and of the rest.
        """
        before, _ = self.outer_rows
        kind: Kind = "bwd" if is_backward else "fwd"
        beside: Kind = ("fwd" if is_backward else "bwd") if self.alternates else kind
        actions = pass_actions(
            kind,
            len(self.gather_ms),
            first_backward=self.first_backward,
            previous=beside,
            following=beside,
        )
        layers = [action.layer for action in actions if action.op == "compute"]
        gathered = {action.layer for action in actions if action.op == "gather"}
        beside_ms, exposed_ms = np.zeros(num_rows), self.outer_reduce_ms if is_backward else 0.0
        for position, layer in enumerate(layers):
            gather_ms = self.gather_ms[layer] if layer in gathered else 0.0
            if position:
                beside_ms[before + layers[position - 1]] += gather_ms
            elif self.outer_rows[is_backward]:
                beside_ms[-1 if is_backward else 0] += gather_ms
            else:
                exposed_ms += gather_ms
            if not is_backward:
                continue
            if position + 1 < len(layers):
                beside_ms[before + layers[position + 1]] += self.reduce_ms[layer]
            else:
                exposed_ms += self.reduce_ms[layer]
        return beside_ms, exposed_ms


def longer_ms(compute_ms: NDArray, beside_ms: NDArray, overlap_efficiency: float) -> NDArray:
    """Time that communication adds to the computation beside it."""
    return np.maximum((1 - overlap_efficiency) * beside_ms, beside_ms - compute_ms)


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
    if planned.sharding.zero_stage < REDUCES_IN_PASSES or num_shards(planned) == 1:
        return None
    stages = [replica[min(index, len(replica) - 1)] for replica in planned.replicas if replica]
    ranks = sorted(tp_group[0] for stage in stages for tp_group in stage.mesh)
    size = min(num_shards(planned), len(ranks))
    groups = [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    slowest = max(groups, key=lambda group: all_gather(costs.device, 1e6, group)(1.0, 0.0))
    alternates = plan.policy.is_one_phase and all(len(replica) <= 1 for replica in planned.replicas)
    return transfers_among(slowest, costs, module, stages[0].layers, planned.tp_size, planned.sharding, alternates)


@lru_cache(maxsize=4096)
def transfers_among(
    ranks: tuple[int, ...],
    costs: CostModel,
    module: str,
    layers: tuple[int, int],
    tp_size: int,
    sharding: ShardingSettings,
    alternates: bool,
) -> PassTransfers:
    """
    Communication in the passes of a stage.

    Args:
        ranks (`tuple[int, ...]`): The ranks that share its weights or gradients.
        costs (`CostModel`): The model and the device.
        module (`str`): The module.
        layers (`tuple[int, int]`): First layer of the stage, and one past the last layer.
        tp_size (`int`): Size of a tp group.
        sharding ([`ShardingSettings`]): What they share.
        alternates (`bool`): See [`PassTransfers`].
    """
    num_layers = costs.spec.modules[module].num_layers
    one = all_gather(costs.device, 1.0, ranks)

    def times_ms(num_bytes: Sequence[float]) -> tuple[float, float]:
        gather_ms, reduce_ms = (one(n, 0.0) if n else 0.0 for n in num_bytes)
        return (gather_ms if sharding.zero_stage >= GATHERS_IN_PASSES else 0.0), reduce_ms

    inner = [times_ms(held_bytes(costs, module, tp_size, (index,))) for index in range(*layers)]
    outer = tuple(index for index in (-1, num_layers) if stage_holds(layers, num_layers, index))
    gather_ms, reduce_ms = zip(*inner, strict=True)
    outer_gather_ms, outer_reduce_ms = times_ms(held_bytes(costs, module, tp_size, outer))
    if not sharding.reshard_after_forward:
        outer_gather_ms, gather_ms = outer_gather_ms + sum(gather_ms), (0.0,) * len(gather_ms)
    return PassTransfers(
        gather_ms,
        reduce_ms,
        outer_gather_ms,
        outer_reduce_ms,
        (int(-1 in outer), int(num_layers in outer)),
        alternates,
        costs.device.overlap_efficiency,
        min(max(first_backward(costs.spec, module), layers[0]), layers[1]) - layers[0],
    )


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


@lru_cache(maxsize=4096)
def held_bytes(costs: CostModel, module: str, tp_size: int, layers: tuple[int, ...]) -> tuple[float, float]:
    """
    Bytes of the weights of some layers (-1: the part before all, `num_layers`: after them) on a rank of a tp group,
    and of what is sent of their gradients.
    """
    known = parameter_bytes(costs, module, tp_size)
    uses = {use.parameter.name: use.parameter for index in layers for use in costs.spec.uses.get((module, index), ())}
    weights = sum(known[name][0] for name in uses)
    sent = sum(known[name][costs.engine.wide_sums] for name, parameter in uses.items() if parameter.trainable)
    return weights, sent


def num_shards(module: ModulePlan) -> int:
    """Number of copies that divide the parameters of a module; 1 where nothing is divided."""
    copies, sharding = module.dp_size * module.cp_size, module.sharding
    if not sharding.zero_stage:
        return 1
    size = sharding.shard_size
    return size if size is not None and copies % size == 0 else copies
