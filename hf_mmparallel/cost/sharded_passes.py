"""Communication in the passes of stages whose copies share weights or gradients layer by layer (ZeRO 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import ModulePlan, ParallelPlan, ShardingSettings, Stage, stage_holds
from ..schedule import REST, PassAction, pass_actions
from ..schedule.kinds import BACKWARD, FORWARD, Direction, TaskKind
from .activations import DTYPE_BYTES, FULL, parameter_shares
from .collectives import all_gather, longer_ms
from .layers import CostModel, first_backward

REDUCES_IN_PASSES = 2  # first ZeRO stage that reduces the gradients of each layer in every backward
GATHERS_IN_PASSES = 3  # first ZeRO stage that gathers the weights of each layer in every pass


@dataclass(frozen=True)
class PassTransfers:
    """
    Communication in the passes of a stage.

    While a layer computes, the weights of the next one are gathered and the gradients of the one before are reduced.
    The first gather and the last reductions are exposed, and so is what takes longer than the computation beside it.
    Weights outside of layers stay gathered from the first pass of a step to its end; their gradients are reduced at
    the end of each backward.
    """

    gather_ms: tuple[float, ...]  # of the weights of each layer of the stage
    reduce_ms: tuple[float, ...]  # of the gradients of each
    # once a step, of the weights outside of layers, or all that stay gathered from pass to pass
    outer_gather_ms: float
    outer_reduce_ms: float  # of their gradients
    outer_rows: tuple[int, int]  # whether the stage has the part before all layers, and the part after them
    # a backward follows each forward and the reverse, so that the last layers of a pass stay gathered for the next one
    alternates: bool
    overlap_efficiency: float  # relative compute speed beside communication
    first_backward: int = 0  # the first layer of the stage with a backward

    def of_pass(self, num_rows: int, kind: TaskKind) -> tuple[NDArray, float]:
        """Time of the communication beside each of the stage's parts `[num_rows]`, and of the rest."""
        transfer, row = _placed(*self._slots_of(kind))
        times_ms = np.array([*self.gather_ms, 0.0, *self.reduce_ms, self.outer_reduce_ms])
        row_ms = np.bincount(row, times_ms[transfer], num_rows + 1)
        return row_ms[:-1], float(row_ms[-1])

    def time_transfers(self, compute_ms: NDArray, kind: TaskKind) -> tuple[list[TimedTransfer], float]:
        """
        Returns the transfers that take time in a pass, in order, and the length of the pass, from the time of each
        part of the stage without communication `[rows]`.
        """
        result, now = [], 0.0
        for slot in pass_slots(*self._slots_of(kind)):
            own_ms = 0.0 if slot.row is None else float(compute_ms[slot.row])
            times_ms = [self._action_ms(action) for action in slot.beside]
            slot_ms = own_ms + float(longer_ms(np.array(own_ms), np.array(sum(times_ms)), self.overlap_efficiency))
            computed_ms, start_ms = now + min(slot_ms, own_ms / self.overlap_efficiency), now
            for action, transfer_ms in zip(slot.beside, times_ms, strict=True):
                if transfer_ms:
                    result.append(TimedTransfer(action, start_ms, start_ms + transfer_ms, computed_ms))
                start_ms += transfer_ms
            now += slot_ms
        return result, now

    def _slots_of(self, kind: TaskKind) -> tuple[TaskKind, int, tuple[int, int], bool, int]:
        """The arguments of [`pass_slots`]."""
        return kind, len(self.gather_ms), self.outer_rows, self.alternates, self.first_backward

    def _action_ms(self, action: PassAction) -> float:
        """Time of a transfer of a pass, but for the gathering of what stays gathered."""
        if action.op == "gather":
            return 0.0 if action.layer == REST else self.gather_ms[action.layer]
        return self.outer_reduce_ms if action.layer == REST else self.reduce_ms[action.layer]


@dataclass(frozen=True)
class TimedTransfer:
    """A transfer in a pass: a gather or a sum."""

    action: PassAction
    start_ms: float  # from the start of the pass, as are the others
    end_ms: float
    computed_ms: float  # end of the computation beside it

    def scale(self, factor: float) -> TimedTransfer:
        """The transfer in a pass that takes `factor` times as long."""
        return TimedTransfer(self.action, *(factor * ms for ms in (self.start_ms, self.end_ms, self.computed_ms)))


@dataclass(frozen=True)
class PassSlot:
    """A part of a pass, at whose end both its computation and its communication are done."""

    row: int | None  # the part of the stage that computes; `None` if none does
    beside: tuple[PassAction, ...]  # the transfers beside it, in order


@lru_cache(maxsize=4096)
def pass_slots(
    kind: TaskKind, num_layers: int, outer_rows: tuple[int, int], alternates: bool, first_backward: int = 0
) -> tuple[PassSlot, ...]:
    """The actions of a pass by the computation beside which they run: what was issued since the one before."""
    direction = kind.direction
    other: Direction = FORWARD if (direction == BACKWARD) == alternates else BACKWARD
    every = pass_actions(
        direction,
        num_layers,
        gathers=kind.runs_layers,
        sums=kind.adds_gradients,
        first_backward=first_backward,
        previous=other,
        following=other,
    )
    actions = [action for action in every if action.op != "free"]
    before, _ = outer_rows
    row_before, row_after = 0 if before else None, before + num_layers if outer_rows[1] else None
    first, last = (row_before, row_after) if direction == FORWARD else (row_after, row_before)
    result, issued = [], []
    for action in actions:
        if action.op != "compute":
            issued.append(action)
            continue
        # what a layer waits for itself is before it, beside the part before all layers if there is one
        own = max((n for n, a in enumerate(issued, 1) if (a.op, a.layer) == ("gather", action.layer)), default=0)
        if not result:
            result.append(PassSlot(first, tuple(issued[:own])))
        elif own:
            result.append(PassSlot(None, tuple(issued[:own])))
        result.append(PassSlot(before + action.layer, tuple(issued[own:])))
        issued = []
    result = result or [PassSlot(first, ())]
    result += [PassSlot(last, ()), PassSlot(None, tuple(issued))]
    return tuple(slot for slot in result if slot.row is not None or slot.beside)


@lru_cache(maxsize=4096)
def _placed(
    kind: TaskKind, num_layers: int, outer_rows: tuple[int, int], alternates: bool, first_backward: int
) -> tuple[NDArray, NDArray]:
    """For each transfer of a pass, its index and the row beside which it runs, or one past the last row."""
    num_rows = num_layers + sum(outer_rows)
    pairs = [
        (
            # gathers of `num_layers` layers and the rest, then their sums
            (action.op == "sum") * (num_layers + 1) + (num_layers if action.layer == REST else action.layer),
            num_rows if slot.row is None else slot.row,
        )
        for slot in pass_slots(kind, num_layers, outer_rows, alternates, first_backward)
        for action in slot.beside
    ]
    transfer, row = np.array(pairs, np.int64).reshape(-1, 2).T
    return transfer, row


def pass_transfers(costs: CostModel, plan: ParallelPlan, module: str, layers: tuple[int, int]) -> PassTransfers | None:
    """Communication in the passes of stages of some layers; `None` if there is none."""
    planned, costs = plan.modules[module], costs.of_plan(plan)
    if planned.sharding.zero_stage < REDUCES_IN_PASSES or num_shards(planned) == 1:
        return None
    stages = [stage for _, _, stage in planned.stages() if stage.layers == layers]
    ranks = sorted(tp_group[0] for stage in stages for tp_group in stage.mesh)
    size = min(num_shards(planned), len(ranks))
    groups = [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    slowest = max(groups, key=lambda group: all_gather(costs.device, group)(1e6))
    alternates = plan.policy.is_one_phase and all(len(replica) <= 1 for replica in planned.replicas)
    return transfers_among(slowest, costs, module, layers, planned.tp_size, planned.sharding, alternates)


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
    """Communication in the passes of a stage of some layers whose weights or gradients `ranks` share."""
    num_layers = costs.spec.modules[module].num_layers
    one = all_gather(costs.device, ranks)

    def times_ms(num_bytes: Sequence[float]) -> tuple[float, float]:
        gather_ms, reduce_ms = (one(n) if n else 0.0 for n in num_bytes)
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
    """Parameter -> bytes of its weights and of its gradient, in float32 at least, on each rank of a tp group."""
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
    """Bytes of the weights of layers on a rank of a tp group, and of what is sent of their gradients."""
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


# Frozen weights in host memory, which come to the device layer by layer.


def transfers_in_passes(costs: CostModel, plan: ParallelPlan, module: str, stage: Stage) -> PassTransfers | None:
    """What a stage moves beside its passes: [`pass_transfers`], and frozen weights that come from host memory."""
    shared = pass_transfers(costs, plan, module, stage.layers)
    if not plan.modules[module].storage.offload_params:
        return shared
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
