"""All layouts of one module, with closed-form estimates of the slowest stage and of memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..arrange.lengths import group_by_length
from ..cost import CostModel, layer_table
from ..cost.activations import DTYPE_BYTES, FULL, grouped_copies
from ..cost.collectives import Collective, CollectiveTime, all_gather, all_reduce
from ..cost.devices import host_step_ms
from ..cost.row_sizes import RowLayout
from ..cost.sharded_passes import GATHERS_IN_PASSES, REDUCES_IN_PASSES, streamed_transfers, transfers_among
from ..cost.stage_memory import StageMemory, stage_memory
from ..plan import LANGUAGE_MODEL, ModulePlan, ModuleSpec, ParallelPlan, Stage
from ..plan.checkpointing import SELECTIVE, Checkpointing
from ..plan.layout import ModuleLayout
from ..plan.parallel_plan import ShardingSettings
from ..plan.resolve import possible_ep_sizes
from .partition import partition_all
from .problem import PlanningProblem

_Method = TypeVar("_Method", bound=Callable[..., Any])


def once(method: _Method) -> _Method:
    """Computes a method of an object once for each of its arguments."""

    @wraps(method)
    def known(owner: Any, *arguments: Any) -> Any:
        values, key = owner.__dict__.setdefault("_known", {}), (method, *arguments)
        if key not in values:
            values[key] = method(owner, *arguments)
        return values[key]

    return cast(_Method, known)


# Mean size of the microbatches of a module, before any batch is arranged.

_LENGTH_ARRANGEMENTS = ("hierarchical", "tapered")  # arrangements that group samples of similar length


class MeanMicrobatches:
    """
    Mean size of a module's microbatches, including padding, see [`RowLayout`]. Padding is that of a batch split like
    the arrangement does: by length, or in the order of the sampler.
    """

    def __init__(self, problem: PlanningProblem, name: str):
        self.problem, self.name = problem, name
        sizes = problem.sizes
        self.tokens, self.squares = (float(values[name].mean()) for values in (sizes.tokens, sizes.squares))
        self.batch = problem.batches[0]

    def sizes(self, cp_size: int, num_samples: float, padded: bool = True) -> NDArray:
        """
        Mean tokens, squared sequence lengths and stored pairs `[3]`, see [`ChunkSize`]. Up to one sample has no
        padding; without padding of rows and rounding of packed rows, they are a lower bound for all arrangements.
        """
        layout, count = self.layout(cp_size), self.batch.num_samples
        if not padded:
            layout = replace(layout, block=1, sharing=1)
        grows = padded and self.grows(cp_size)
        shares = self._shares(layout, min(max(1, round(count / num_samples)), count) if grows else count)
        return num_samples * np.array([self.tokens, self.squares, self.squares]) * shares

    def grows(self, cp_size: int) -> bool:
        """Tells whether a microbatch of several samples computes more than its samples alone."""
        layout = self.layout(cp_size)
        return layout.padded or layout.block > 1 or layout.sharing > 1

    @once
    def layout(self, cp_size: int) -> RowLayout:
        """Memory layout of the samples of a microbatch."""
        return RowLayout.of(self.problem.costs, self.name, ModuleLayout((1,), cp_size=cp_size))

    @once
    def _shares(self, layout: RowLayout, num_microbatches: int) -> NDArray:
        """`[3]`: size of all microbatches of a batch, over the tokens and squared sequence lengths of its samples."""
        computed = layout.of_groups(self.batch, self.name, self._split(num_microbatches)).sum(axis=0)
        tokens, squares = float(self.batch.tokens[self.name].sum()), float(self.batch.squares[self.name].sum())
        whole = np.array([tokens, squares, squares])
        return np.divide(computed, whole, out=np.array([1.0, 1.0, 0.0]), where=whole > 0)

    @once
    def _split(self, num_microbatches: int) -> Sequence[NDArray]:
        """Splits the samples of a batch into microbatches."""
        count = self.batch.num_samples
        if num_microbatches == count or self.problem.first_arrangement not in _LENGTH_ARRANGEMENTS:
            return np.array_split(np.arange(count), num_microbatches)
        padded = self.layout(1).of_samples(self.batch, self.name, even=False)
        row_ms, _ = layer_table(self.problem.costs, self.name).sample_ms(padded[1], padded[0])
        parts = [np.ones(num_microbatches)]
        _, group = group_by_length(row_ms, self.batch.tokens[self.name], parts, np.zeros((count, 1)))
        order = np.argsort(group, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


MAX_MICROBATCHES = 256  # of a replica
# minimum mean tokens of a sample per cp rank; smaller samples exclude a context-parallel size
_MIN_TOKENS_PER_CP_RANK = 1024


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism within a stage of a module, independent of the numbers of replicas and stages."""

    cp_size: int
    tp_size: int
    activation_checkpointing: Checkpointing  # what is recomputed
    first_rank: int = 0  # position in its node of the first rank of a tp group, which matters if the group spans nodes
    sharding: ShardingSettings = ShardingSettings()  # what copies divide among them
    num_shards: int = 1  # copies that share weights or gradients, where the time of passes is wanted
    ep_size: int = 1  # ranks that share the experts of a layer

    @classmethod
    def of(cls, layout: ModuleLayout) -> ParallelConfig:
        """The configuration of a layout."""
        return cls(**{name: getattr(layout, name) for name in cls._in_layouts()})

    @property
    def settings(self) -> dict[str, Any]:
        """What layouts have of it."""
        return {name: getattr(self, name) for name in self._in_layouts()}

    @classmethod
    def _in_layouts(cls) -> set[str]:
        return {f.name for f in fields(cls)} & {f.name for f in fields(ModuleLayout)}

    @property
    def num_ranks(self) -> int:
        return self.cp_size * self.tp_size

    @property
    def shares_passes(self) -> bool:
        """Tells whether passes gather weights or reduce gradients."""
        return self.sharding.zero_stage >= REDUCES_IN_PASSES

    def shards_of(self, dp_size: int) -> int:
        """Number of copies that divide what the ZeRO stage divides, of those of `dp_size` replicas."""
        return (self.sharding.shard_size or dp_size * self.cp_size) if self.sharding.zero_stage else 1

    def with_shards(self, dp_size: int) -> ParallelConfig:
        """The configuration with the number of shards of `dp_size` replicas, where passes depend on it."""
        return replace(self, num_shards=self.shards_of(dp_size)) if self.shares_passes else self


class ModuleOptions:
    """All layouts of a module."""

    def __init__(self, problem: PlanningProblem, name: str):
        self.problem, self.name = problem, name
        self.module_spec: ModuleSpec = problem.spec.modules[name]
        self.microbatches = MeanMicrobatches(problem, name)
        self.storage = problem.storage_of(name)
        self.tokens, self.squares = self.microbatches.tokens, self.microbatches.squares

    @property
    def max_stages(self) -> int:
        return min(self.module_spec.num_layers, self.problem.num_ranks) if self.module_spec.is_chain else 1

    def allows(self, size: str, value: int) -> bool:
        """Checks that the user has left this size open or set it to this value."""
        return self.problem.fixed.get(self.name, {}).get(size, value) == value

    @cached_property
    def kinds(self) -> tuple[ParallelConfig, ...]:
        """
        Tensor-parallel sizes within a node that divide the model's sizes, with and without recomputation, each with
        the sharding of [`~ModuleOptions.shardings`].
        """
        module_spec, device = self.module_spec, self.problem.costs.device
        largest = min(device.node_size, self.problem.num_ranks)
        counts = (module_spec.num_heads, module_spec.num_kv_heads, module_spec.intermediate_size)
        tensor = [
            size
            for size in range(1, largest + 1)
            if self.allows("tp_size", size) and not any(count % size for count in counts)
        ]
        powers = [1 << power for power in range(self.problem.num_ranks.bit_length())]
        context = [size for size in powers if self.allows("cp_size", size) and size <= self._max_context]
        context = context or [self._given["cp_size"]]
        given = self.problem.checkpointing.get(self.name)
        checkpointing = (False, True) if given is None and self._has_backward else (given or False,)
        return tuple(
            ParallelConfig(cp, tp, recompute, sharding=sharding, ep_size=ep)
            for tp in tensor
            for cp in context
            if cp * tp <= self.problem.num_ranks
            for ep in self.expert_sizes(tp)
            for recompute in checkpointing
            if recompute != SELECTIVE or cp == 1
            for sharding in self.shardings(tp)
        )

    @property
    def _max_context(self) -> float:
        """The most cp ranks that a mean sample has work for: enough tokens each, or in an encoder whole images."""
        by_tokens = max(self.tokens / _MIN_TOKENS_PER_CP_RANK, 1)
        if self.name == LANGUAGE_MODEL:
            return by_tokens
        squares = float(self.problem.sizes.whole_squares(self.name).mean())
        images = max(self.tokens**2 / squares, 1) if self.module_spec.is_encoder and squares else 1
        return max(images, by_tokens) if self.module_spec.shares_tokens else images

    def expert_sizes(self, tp_size: int) -> list[int]:
        """Numbers of ranks that may share the experts of a layer, for some numbers of replicas and cp ranks."""
        count, num_ranks = self.module_spec.num_experts, self.problem.num_ranks
        sizes = [size for size in range(2, num_ranks + 1) if count and not (count % size or size % tp_size)]
        return [size for size in (1, *sizes) if self.allows("ep_size", size)]

    def shares_experts(self, kind: ParallelConfig, dp_size: int) -> bool:
        """Whether so many replicas can share experts as a configuration says."""
        sizes = (self.module_spec.num_experts, dp_size, kind.cp_size, kind.tp_size)
        return kind.ep_size == 1 or kind.ep_size in possible_ep_sizes(*sizes)

    def costs(self, kind: ParallelConfig) -> CostModel:
        """The costs of a configuration, whose tp groups with shared experts are next to each other."""
        ranks = tuple(range(kind.ep_size)) if kind.ep_size > 1 else ()
        return self.problem.costs.in_layout({self.name: (ranks, bool(self.storage.float8))})

    @cached_property
    def plain_kinds(self) -> tuple[ParallelConfig, ...]:
        """The kinds whose passes do not communicate, if there are any."""
        return tuple(kind for kind in self.kinds if not kind.shares_passes) or self.kinds

    @cached_property
    def zero_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that the user has left open; without trained parameters, only weights can be divided."""
        stages = self.problem.zero_stages_of(self.name)
        is_kept = self.storage.offload_params or self.module_spec.int8_weight is not None
        if is_kept and len(stages) > 1:  # copies do not divide what is in host memory
            stages = tuple(stage for stage in stages if stage < GATHERS_IN_PASSES)
        if len(stages) == 1 or any(p.trainable for p in self.module_spec.parameters):
            return stages
        return tuple(stage for stage in stages if stage in (0, GATHERS_IN_PASSES)) or stages

    def shardings(self, tp_size: int) -> list[ShardingSettings]:
        """
        The sharding of layouts in the closed form: the optimizer's state or nothing, whichever takes less time (see
        [`~ModuleOptions.sharding_helps`]), and everything, over all copies or those of a node. Others differ little
        from one of these and are tried once sizes are chosen.
        """
        plain = [stage for stage in self.zero_stages if stage < REDUCES_IN_PASSES][::-1]
        shared = [stage for stage in self.zero_stages if stage >= REDUCES_IN_PASSES][-1:]
        result = [self.sharding_of(stage, self._given.get("shard_size")) for stage in plain + shared]
        per_node = self.copies_per_node(tp_size)
        if shared and per_node > 1 and self.allows("shard_size", per_node):
            result.append(self.sharding_of(shared[0], per_node))
        return list(dict.fromkeys(result))

    @property
    def _given(self) -> Mapping[str, Any]:
        """The settings of the user."""
        return self.problem.fixed.get(self.name, {})

    def sharding_of(self, zero_stage: int, shard_size: int | None) -> ShardingSettings:
        """The settings of a ZeRO stage, with those of the user that apply to it."""
        reshards = zero_stage < GATHERS_IN_PASSES or self._given.get("reshard_after_forward", True)
        return ShardingSettings(zero_stage, shard_size if zero_stage else None, reshards)

    def all_shardings(self, sizes: Sequence[int | None]) -> list[ShardingSettings]:
        """All shardings that the user has left open, among these numbers of copies that divide something."""
        result = [self.sharding_of(stage, size) for stage in self.zero_stages for size in sizes]
        if "reshard_after_forward" not in self._given:
            kept = [own for own in result if own.zero_stage == GATHERS_IN_PASSES]
            result += [replace(own, reshard_after_forward=False) for own in kept]
        return list(dict.fromkeys(result))

    def copies_per_node(self, tp_size: int) -> int:
        """Copies of a module with one stage in a node; 0 if tp groups span nodes."""
        node_size = self.problem.costs.device.node_size
        return 0 if node_size % tp_size else node_size // tp_size

    def sharding_helps(self, kind: ParallelConfig, dp_size: int, pp_size: NDArray) -> NDArray:
        """
        bool `[layouts]`: where layouts can have the sharding of a configuration and may need it. Passes that
        communicate are for modules with a single stage, and for those whose state does not fit otherwise.
        """
        size, num_copies = kind.sharding.shard_size, dp_size * kind.cp_size
        if size is not None and num_copies % size:
            return np.zeros(len(pp_size), bool)
        plain = self.plain_kinds[0]
        if not kind.shares_passes:
            return self._is_faster_plain(kind, dp_size, pp_size)
        if plain.shares_passes:
            return np.ones(len(pp_size), bool)
        if num_copies == 1 or size == num_copies:
            return np.zeros(len(pp_size), bool)
        limit, kept = self.problem.memory_bytes, replace(kind, sharding=plain.sharding)
        if size is not None or limit is None:
            return pp_size == 1
        return (pp_size == 1) | (self.state_bytes(kept, pp_size, dp_size=dp_size) > limit)

    def _is_faster_plain(self, kind: ParallelConfig, dp_size: int, pp_size: NDArray) -> NDArray:
        """
        bool `[layouts]`: where sums and optimizer step take less time than with the other stage whose passes do not
        communicate. The optimizer's state is divided if that takes as long, or if it does not fit otherwise.
        """
        stages = [stage for stage in self.zero_stages if stage < REDUCES_IN_PASSES]
        if len(stages) == 1:
            return np.ones(len(pp_size), bool)
        divided, whole = (
            replace(kind, sharding=self.sharding_of(stage, self._given.get("shard_size"))) for stage in (1, 0)
        )
        divided_ms, whole_ms = (
            np.array([self.sync_ms(own, dp_size, int(stages)) for stages in pp_size]) for own in (divided, whole)
        )
        is_whole = whole_ms < divided_ms
        if self.problem.memory_bytes is not None:
            is_whole &= self.state_bytes(whole, pp_size, dp_size=dp_size) <= self.problem.memory_bytes
        return is_whole == (not kind.sharding.zero_stage)

    @cached_property
    def _has_backward(self) -> bool:
        """Checks that a repeated layer has a backward, so that recomputation has an effect."""
        return bool(layer_table(self.problem.costs, self.name).backward[1:-1].any())

    def layer_ms(self, kind: ParallelConfig, num_samples: float) -> NDArray:
        """Forward and backward time of a mean microbatch in each layer `[num_layers]`."""
        return self._layer_ms(self.costs(kind), *self._timed(kind, num_samples))

    def _timed(self, kind: ParallelConfig, num_samples: float) -> tuple[ParallelConfig, float]:
        """What times of layers depend on."""
        return kind if kind.shares_passes else replace(kind, sharding=ShardingSettings()), num_samples

    @once
    def _layer_ms(self, costs: CostModel, kind: ParallelConfig, num_samples: float) -> NDArray:
        table = layer_table(costs, self.name, kind.tp_size, kind.activation_checkpointing, kind.first_rank)
        tokens, squares, _ = self._sizes(kind, num_samples)
        transfers = None
        if kind.shares_passes and kind.num_shards > 1:
            ranks = tuple(range(0, kind.num_shards * kind.tp_size, kind.tp_size))
            layers = (0, self.module_spec.num_layers)
            transfers = transfers_among(ranks, costs, self.name, layers, kind.tp_size, kind.sharding, alternates=True)
        elif self.storage.offload_params:
            transfers = streamed_transfers(costs, self.name, (0, self.module_spec.num_layers), kind.tp_size)
        return table.step_ms(tokens, squares, kind.cp_size, transfers)

    def _sizes(self, kind: ParallelConfig, num_samples: float, padded: bool = True) -> NDArray:
        """`[tokens, squared sequence lengths, stored pairs]` of a mean microbatch."""
        return self.microbatches.sizes(kind.cp_size, num_samples, padded)

    def ranks_within_nodes(self, kind: ParallelConfig) -> float:
        """Maximum number of consecutive ranks such that no tp group spans nodes."""
        size, node_size = kind.tp_size, self.problem.costs.device.node_size
        return float("inf") if node_size % size == 0 else node_size // size * size

    def over_nodes(self, kind: ParallelConfig) -> ParallelConfig:
        """The configuration with a tp group that spans nodes, if that is possible."""
        within = self.ranks_within_nodes(kind)
        return kind if within == float("inf") else replace(kind, first_rank=int(within))

    def slowest_stages_ms(self, kind: ParallelConfig, num_samples: float) -> NDArray:
        """float64 `[max_stages]`: time on the slowest of 1, 2, ... stages, see [`~ModuleOptions.layer_ms`]."""
        return self._slowest_stages_ms(*self._timed(kind, num_samples))

    @once
    def _slowest_stages_ms(self, kind: ParallelConfig, num_samples: float) -> NDArray:
        return partition_all(self.layer_ms(kind, num_samples), self.max_stages).slowest_stages_ms

    def layout(self, kind: ParallelConfig, dp_size: int, pp_size: int, num_samples: float) -> ModuleLayout:
        """The layout with stages balanced for microbatches of `num_samples`."""
        layers = partition_all(self.layer_ms(kind, num_samples), pp_size).partition(pp_size).layers
        settings = {**kind.settings, "sharding": self.sharding(kind, dp_size)}
        return ModuleLayout(layers, dp_size, storage=self.storage, **settings)

    def sharding(self, kind: ParallelConfig, dp_size: int) -> ShardingSettings:
        """The sharding of a layout: a single copy divides nothing, unless the user says so."""
        given = self.problem.fixed.get(self.name, {})
        is_copied = dp_size * kind.cp_size > 1
        return kind.sharding if is_copied or "zero_stage" in given else ShardingSettings()

    @cached_property
    def _sample_ms(self) -> tuple[list[float], list[float]]:
        """Times of a batch's samples in the whole module, padded and alone, longest first."""
        table, layout = layer_table(self.problem.costs, self.name), self.microbatches.layout(1)
        sizes = (layout.of_samples(self.microbatches.batch, self.name, even) for even in (False, True))
        padded, alone = (np.add(*table.sample_ms(tokens, squares)) for squares, tokens in sizes)
        return sorted(padded.tolist(), reverse=True), sorted(alone.tolist(), reverse=True)

    @once
    def unevenness(self, count: int) -> float:
        """Largest over mean part of a batch, split by the longest-processing-time rule."""
        loads = [0.0] * count
        for time_ms in self._sample_ms[count >= self.microbatches.batch.num_samples]:
            heapq.heapreplace(loads, loads[0] + time_ms)
        mean = sum(loads) / count
        return max(loads) / mean if mean else 1.0

    @once
    def _memory(self, kind: ParallelConfig, first: int, stop: int, dp_size: int = 1) -> StageMemory:
        """Memory of a stage with layers `first` to `stop`, one of `dp_size` replicas."""
        firsts = range(0, kind.num_ranks, kind.tp_size)
        stage = Stage((first, stop), tuple(tuple(range(rank, rank + kind.tp_size)) for rank in firsts))
        module = ModulePlan(
            ((stage,),) * dp_size, kind.activation_checkpointing, sharding=kind.sharding, storage=self.storage
        )
        return stage_memory(self.costs(kind), ParallelPlan({self.name: module}), self.name, stage)

    def state_bytes(self, kind: ParallelConfig, pp_size: Any, last: bool = False, dp_size: int = 1) -> Any:
        """Estimated bytes of a first or last stage besides activations; `dp_size` replicas may divide them."""
        num_layers = self.module_spec.num_layers
        layers = ((0, num_layers), *self._end_layers[-1 if last else 0])
        memories = (self._memory(kind, *own, dp_size) for own in layers)
        whole, end, layer = (own.state.total + own.kept_bytes for own in memories)
        return np.where(pp_size == 1, whole, end + (num_layers / pp_size - 1) * layer)

    @cached_property
    def _end_layers(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """Layers of stages with the first layer only and with an inner layer only; the same for the last layer."""
        last = self.module_spec.num_layers
        inner = (1, 2) if last > 2 else (0, 1)
        return ((0, 1), inner), ((last - 1, last), inner)

    def running_bytes(self, kind: ParallelConfig, num_samples: float) -> tuple[float, float]:
        """Estimated transient bytes of a task on the first and on the last stage."""
        chunk = self._chunk_sizes(kind, num_samples)
        chunk[2] = 1.0
        copies = 1 + kind.shares_passes  # of several, tasks hold what passes gather
        first, last = (
            max(float(self._memory(kind, *layers, copies).most_running_bytes(chunk[None])[0]) for layers in ends)
            for ends in self._end_layers
        )
        return first, last

    def _chunk_sizes(self, kind: ParallelConfig, num_samples: float, padded: bool = True) -> NDArray:
        """`[stored token pairs, tokens, 0]` of a mean microbatch, see [`activation_sizes`]."""
        tokens, _, scores = self._sizes(kind, num_samples, padded)
        copies = grouped_copies(self.module_spec) if scores else 0
        return np.array([scores + copies * tokens, tokens, 0.0])

    @cached_property
    def _trained_bytes(self) -> tuple[float, float, float]:
        """
        Bytes of the trained weights of the whole module, of their gradients, in float32 at least, and of these that of
        experts that ranks can share.
        """
        trained = [p for p in self.module_spec.parameters if p.trainable]
        sizes = [(p.num_elements, DTYPE_BYTES.get(p.dtype, FULL), p.num_experts > 0) for p in trained]
        gradients = [(n * max(size, FULL), is_shared) for n, size, is_shared in sizes]
        experts = float(sum(num_bytes for num_bytes, is_shared in gradients if is_shared))
        return float(sum(n * size for n, size, _ in sizes)), float(sum(n for n, _ in gradients)), experts

    @cached_property
    def _update_ms(self) -> float:
        """Time of the optimizer step of the whole module on one rank."""
        device, memory = (
            self.problem.costs.device,
            self._memory(ParallelConfig(1, 1, False), 0, self.module_spec.num_layers),
        )
        return memory.update_bytes / device.memory_bytes_per_ms + host_step_ms(device, memory.host_step)

    def sync_ms(self, kind: ParallelConfig, dp_size: int, pp_size: int) -> float:
        """Time of a stage's gradient sums, of the optimizer step, and of gathering weights after it."""
        return sum(self.sums_and_update_ms(kind, dp_size, pp_size))

    @once
    def sums_and_update_ms(self, kind: ParallelConfig, dp_size: int, pp_size: int) -> tuple[float, float]:
        """Time of a stage's gradient sums, and of the optimizer step with the gathering of weights after it."""
        num_parts, num_shards = pp_size * kind.tp_size, kind.shards_of(dp_size)
        stride = num_parts  # from one copy to the next
        weights, gradients, experts = (num_bytes / num_parts for num_bytes in self._trained_bytes)
        update_ms = self._update_ms / num_parts / num_shards
        num_groups = dp_size * kind.cp_size // num_shards
        expert_ms = 0.0
        if kind.ep_size > 1:  # which have fewer copies, of fewer experts
            rows = kind.ep_size // kind.tp_size
            share, copies = experts / gradients if gradients else 0.0, dp_size * kind.cp_size // rows
            expert_ms = self._time_ms(all_reduce, experts / rows, copies, stride * rows)
            update_ms *= 1 - share + share * num_shards / (rows * min(num_shards, copies))
            gradients, weights = gradients - experts, weights * (1 - share)
        sums_ms = expert_ms + self._time_ms(all_reduce, gradients / num_shards, num_groups, stride * num_shards)
        if not kind.shares_passes:
            sums_ms += self._time_ms(all_gather, gradients, num_shards, stride)
        share = self._outer_share if kind.sharding.zero_stage >= GATHERS_IN_PASSES else 1.0
        return sums_ms, update_ms + self._time_ms(all_gather, share * weights, num_shards, stride)

    @cached_property
    def _outer_share(self) -> float:
        """Share of the weights that are outside of layers, which a step gathers once in any ZeRO stage."""
        layers = range(self.module_spec.num_layers)
        outer = sum(p.num_elements for p in self.module_spec.parameters if p.layer not in layers)
        return outer / sum(p.num_elements for p in self.module_spec.parameters)

    def _time_ms(self, collective: Collective, num_bytes: float, num_ranks: int, stride: int) -> float:
        """Time of a collective over ranks at a distance of `stride`."""
        return self._collective(collective, num_ranks, stride)(num_bytes)

    @once
    def _collective(self, collective: Collective, num_ranks: int, stride: int) -> CollectiveTime:
        return collective(self.problem.costs.device, range(0, num_ranks * stride, stride))

    def saved_bytes(self, kind: ParallelConfig, num_samples: float = 1.0, padded: bool = True) -> float:
        """Saved activations of all layers for a mean microbatch on each rank."""
        chunk = self._chunk_sizes(kind, num_samples, padded)
        return float(self._memory(kind, 0, self.module_spec.num_layers).saved_bytes(chunk))


def microbatch_counts(problem: PlanningProblem, dp_size: int) -> list[int]:
    """Numbers of microbatches to try for each of `dp_size` replicas of the language model."""
    replica = problem.global_batch_size // dp_size
    if problem.microbatch_size is not None:
        return [-(-replica // problem.microbatch_size)]
    return [count for count in divisors(replica) if count <= MAX_MICROBATCHES]


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return low + [number // value for value in reversed(low) if value * value != number]
