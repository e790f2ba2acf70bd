"""Gradient sums of a step, which start in the last backwards of stages, and how much of them these backwards hide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, Stage, StageKey, SyncGroup
from ..plan.ownership import layer_numbers
from ..schedule import in_buckets, sum_buckets
from ..schedule.kinds import LAST_PASSES
from .activations import DTYPE_BYTES, FULL
from .collectives import CollectiveTime, all_gather, all_reduce, slowest
from .devices import host_step_ms
from .layer_table import layer_table
from .layers import CostModel
from .sharded_passes import GATHERS_IN_PASSES, REDUCES_IN_PASSES, PassTransfers, parameter_bytes, pass_transfers
from .stage_memory import GRADIENT_BUCKET_BYTES, stage_memories

# module and replicas -> tokens and squared lengths `[2, chunks]` of the chunks whose backwards are the last ones
LastChunks = Callable[[str, NDArray], NDArray]


@dataclass(frozen=True)
class SumTimes:
    """Times of the buckets of gradient sums, from the end of the last backward without communication beside it."""

    index: NDArray  # (buckets,) the sum of each
    start_ms: NDArray  # (buckets,) negative beside the backward
    end_ms: NDArray  # (buckets,)
    exposed_ms: NDArray  # (buckets,) what each adds to the step
    computed_ms: float  # end of the backward, which communication slows down


def times_beside(index: NDArray, rest_ms: NDArray, transfer_ms: NDArray, efficiency: float) -> SumTimes:
    """
    Transfers `[transfers]` one after the other beside a backward, each from when its gradients are complete: `rest_ms`
    of work are left then. `efficiency` is the relative compute speed beside communication.
    """
    # a transfer of `t` ms is beside `efficiency * t` ms of the backward's own work, in which transfers queue up and
    # which ends at 0
    before_ms = np.cumsum(transfer_ms) - transfer_ms
    start = np.maximum.accumulate(-rest_ms - efficiency * before_ms) + efficiency * before_ms
    after_ms = np.clip((start + efficiency * transfer_ms) / efficiency, 0.0, transfer_ms)
    slower_ms = (1 - efficiency) * (transfer_ms - after_ms)
    start_ms = start + (1 - efficiency) * before_ms
    return SumTimes(index, start_ms, start_ms + transfer_ms, after_ms + slower_ms, float(slower_ms.sum()))


@dataclass(frozen=True)
class _StageKind:
    """Stages of one layout: one of them, its place in its pipeline, their module and their replicas."""

    stage: Stage
    place: int
    module: str
    replicas: NDArray


@dataclass(frozen=True)
class _Lane:
    """The buckets that a rank sums for the same stages, in order."""

    kinds: tuple[_StageKind, ...]
    index: NDArray  # (buckets,) the sum of each
    layer: NDArray  # (buckets,) the first of its layers; -1 if there are some in no layer
    transfer_ms: NDArray  # (buckets,)


class GradientSumCosts:
    """What does not depend on the step of its gradient sums: buckets, their order and their times."""

    def __init__(self, costs: CostModel, plan: ParallelPlan, sync_groups: Sequence[SyncGroup]):
        self.costs, self.plan, self.sync_groups = costs.of_plan(plan), plan, tuple(sync_groups)
        self._lanes: dict[tuple[int, ...], _Lane] = {}
        self._after_ms: dict[int, float] = {}

    def times(self, index: int, last_chunks: LastChunks) -> SumTimes:
        """Times of the buckets that the first rank of a sum sums for the same stages."""
        lane = self._lane(index)
        efficiency = self.costs.device.overlap_efficiency
        return times_beside(lane.index, self._rest_ms(lane, last_chunks), lane.transfer_ms, efficiency)

    def after_ms(self, index: int) -> float:
        """Time of the all-reduce of the slices between the groups that divide a sum; 0 without slices."""
        if index not in self._after_ms:
            group, device = self.sync_groups[index], self.costs.device
            num_bytes = sum(self._bytes(group)[name] for name in group.parameters)
            self._after_ms[index] = slowest(all_reduce, device, num_bytes / group.shard_size, group.replica_groups)
        return self._after_ms[index]

    def _bytes(self, group: SyncGroup) -> Mapping[str, float]:
        module = group.stages[0][0]
        return self._gradient_bytes[module]

    @cached_property
    def _gradient_bytes(self) -> dict[str, dict[str, float]]:
        """Module -> parameter -> bytes of its gradient on a rank of the largest tp group."""
        tables = {name: parameter_bytes(self.costs, name, m.tp_size) for name, m in self.plan.modules.items()}
        return {name: {key: of[1] for key, of in table.items()} for name, table in tables.items()}

    @cached_property
    def _same_stages(self) -> dict[tuple[StageKey, ...], list[int]]:
        """Stages -> the sums of exactly these, but for those that backwards sum themselves."""
        result: dict[tuple[StageKey, ...], list[int]] = {}
        for index, group in enumerate(self.sync_groups):
            if group.zero_stage < REDUCES_IN_PASSES:
                result.setdefault(group.stages, []).append(index)
        return result

    def _lane(self, index: int) -> _Lane:
        group = self.sync_groups[index]
        alike = self._same_stages.get(group.stages, ()) if group.zero_stage < REDUCES_IN_PASSES else ()
        members = tuple(other for other in alike if group.ranks[0] in self.sync_groups[other].ranks)
        if members not in self._lanes:
            self._lanes[members] = self._made_lane(group, members)
        return self._lanes[members]

    def _made_lane(self, group: SyncGroup, members: Sequence[int]) -> _Lane:
        num_bytes, layers, early = self._bytes(group), self._layers, self.costs.engine.early_sums
        dtypes = {name: parameter.dtype for name, parameter in self.costs.spec.parameters.items()}

        def dtype_of(name: str) -> str | None:
            wide = DTYPE_BYTES.get(dtypes[name], FULL) >= FULL
            return dtypes[name] if wide else None  # narrower ones are summed in float32

        def divide(names: list[str]):
            size = GRADIENT_BUCKET_BYTES if early else np.inf
            return in_buckets(names, dtype_of, num_bytes.__getitem__, size)

        sums = {index: self.sync_groups[index].parameters for index in members}
        buckets = sum_buckets(sums, layers.__getitem__ if early else lambda _: -1, divide)
        sizes = [sum(map(num_bytes.__getitem__, bucket.parameters)) for bucket in buckets]
        rates = {index: self._rates(self.sync_groups[index]) for index in members}
        times = [max(one(size) for one in rates[bucket.index]) for bucket, size in zip(buckets, sizes, strict=True)]
        index, layer = (np.array([getattr(b, key) for b in buckets], np.int64) for key in ("index", "layer"))
        return _Lane(self._kinds(group), index, layer, np.array(times, float))

    @cached_property
    def _layers(self) -> dict[str, int]:
        """Parameter -> its layer."""
        return layer_numbers(self.costs.spec)

    def _rates(self, group: SyncGroup) -> set[CollectiveTime]:
        """Times of the collective of each group of ranks at the same time."""
        collective, groups = (all_gather, group.shard_groups) if group.shard_groups else (all_reduce, [group.ranks])
        return {collective(self.costs.device, ranks) for ranks in groups}

    def _kinds(self, group: SyncGroup) -> tuple[_StageKind, ...]:
        """The stages of a sum, by layout."""
        replicas: dict[tuple, list[int]] = {}
        first: dict[tuple, StageKey] = {}
        for key in group.stages:
            stage = self.plan.stage(*key)
            kind = key[0], stage.layers, stage.cp_size, stage.tp_size, stage.splits_backward
            first.setdefault(kind, key)
            replicas.setdefault(kind, []).append(key[1])
        return tuple(
            _StageKind(self.plan.stage(*key), key[2], key[0], np.array(replicas[kind])) for kind, key in first.items()
        )

    def _rest_ms(self, lane: _Lane, last_chunks: LastChunks) -> NDArray:
        """For each bucket, the time from the end of its layers to that of the last task, where it is shortest."""
        if not len(lane.layer) or lane.layer[0] < 0:
            return np.zeros(len(lane.layer))
        result = np.full(len(lane.layer), np.inf)
        for kind in lane.kinds:
            sizes = last_chunks(kind.module, kind.replicas)
            if not sizes.shape[1]:
                continue
            module = self.plan.modules[kind.module]
            table = layer_table(self.costs, kind.module, kind.stage.tp_size, module.activation_checkpointing)
            tokens, squares = sizes.min(axis=1).tolist()
            splits = kind.stage.splits_backward
            backward_ms = table.task_ms(tokens, squares, kind.stage.cp_size, LAST_PASSES[splits])
            # A stage ends with as many tasks for weights as there are stages up to it, each of which computes some
            # layers of all of their chunks.
            backward_ms = backward_ms * (1 + splits * kind.place)
            rows = table.rows(kind.stage)
            done_ms = np.concatenate([[0.0], np.cumsum(backward_ms[rows])])
            # Nothing tells that the first layer of the stage is complete but the end of the backward.
            is_told = lane.layer > kind.stage.layers[0]
            rest_ms = done_ms[np.where(is_told, lane.layer + 1 - rows.start, 0)]
            result = np.minimum(result, rest_ms)
        return np.where(np.isfinite(result), result, 0.0)


# Time of the optimizer step, after the last gradient sum, and of the gathering of weights after it.


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
    costs, device = costs.of_plan(plan), costs.device
    updates, gathers = (dict.fromkeys(range(plan.world_size), 0.0) for _ in range(2))
    transfers: dict[tuple[str, tuple[int, int]], PassTransfers | None] = {}
    for key, memory in stage_memories(costs, plan).items():
        update_ms = memory.update_bytes / device.memory_bytes_per_ms + host_step_ms(device, memory.host_step)
        alike = (key[0], plan.stage(*key).layers)
        if alike not in transfers:
            transfers[alike] = pass_transfers(costs, plan, *alike)
        shared = transfers[alike]
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
