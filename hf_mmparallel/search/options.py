"""All layouts of one module, with closed-form estimates of the slowest stage and of memory."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel, Polynomial, layer_table
from ..cost.activations import DTYPE_BYTES, FULL, grouped_copies
from ..cost.collectives import all_reduce
from ..cost.optimizer import update_bytes
from ..cost.stage_memory import RankMemory, StageMemory, stage_memory
from ..plan import LANGUAGE_MODEL, ModulePlan, ModuleSpec, ParallelPlan, Stage
from .mean_microbatch import MeanMicrobatches
from .partition import partition_all
from .problem import Layout, PlanningProblem

_MIN_TOKENS_PER_CP_RANK = 1024
"""Minimum mean tokens of a sample per cp rank; smaller samples exclude a context-parallel size."""


@dataclass(frozen=True)
class ParallelConfig:
    """
    Parallelism within a stage of a module, independent of the numbers of replicas and stages.

    Args:
        cp_size (`int`): Context-parallel size.
        tp_size (`int`): Tensor-parallel size.
        checkpointing (`bool`): Whether activations are recomputed.
        first_rank (`int`, *optional*, defaults to 0):
            Position in its node of the first rank of a tp group, which matters if the group spans nodes.
    """

    cp_size: int
    tp_size: int
    checkpointing: bool
    first_rank: int = 0

    @property
    def num_ranks(self) -> int:
        return self.cp_size * self.tp_size


class ModuleOptions:
    """
    All layouts of a module.

    Args:
        problem (`PlanningProblem`): The planning problem.
        name (`str`): The module.
    """

    def __init__(self, problem: PlanningProblem, name: str):
        self.problem, self.name = problem, name
        self.module_spec: ModuleSpec = problem.spec.modules[name]
        self.microbatches = MeanMicrobatches(problem, name)
        self.tokens, self.squares = self.microbatches.tokens, self.microbatches.squares
        self._slowest_stages: dict[tuple[ParallelConfig, float, bool], NDArray] = {}
        self._unevenness: dict[int, float] = {}
        self._memories: dict[tuple[int, int, bool, int, int], StageMemory] = {}
        self._sums: dict[tuple[int, int], Polynomial] = {}

    @property
    def max_stages(self) -> int:
        return 1 if self.module_spec.inner_features else min(self.module_spec.num_layers, self.problem.num_ranks)

    def allows(self, size: str, value: int) -> bool:
        """Whether the user has left this size open or set it to this value."""
        return self.problem.fixed.get(self.name, {}).get(size, value) == value

    @cached_property
    def kinds(self) -> tuple[ParallelConfig, ...]:
        """Tensor-parallel sizes within a node that divide the model's sizes, with and without recomputation."""
        module_spec, device = self.module_spec, self.problem.costs.device
        largest = min(device.node_size, self.problem.num_ranks)
        counts = (module_spec.num_heads, module_spec.num_kv_heads, module_spec.intermediate_size)
        tensor = [
            size
            for size in range(1, largest + 1)
            if self.allows("tp_size", size) and not any(count % size for count in counts)
        ]
        max_cp_size = self.problem.num_ranks if self.name == LANGUAGE_MODEL else 1
        context = [
            1 << power
            for power in range(max(1, max_cp_size).bit_length())
            if self.allows("cp_size", 1 << power) and (not power or self.tokens >= _MIN_TOKENS_PER_CP_RANK << power)
        ]
        given = self.problem.checkpointing.get(self.name)
        checkpointing = (False, True) if given is None and self._has_backward else (bool(given),)
        return tuple(
            ParallelConfig(cp, tp, recompute)
            for tp in tensor
            for cp in context
            if cp * tp <= self.problem.num_ranks
            for recompute in checkpointing
        )

    @cached_property
    def _has_backward(self) -> bool:
        """Whether any of the repeated layers has a backward, so that recomputation has an effect."""
        return bool(layer_table(self.problem.costs, self.name).backward[1:-1].any())

    def layer_ms(self, kind: ParallelConfig, num_samples: float, padded: bool = True) -> NDArray:
        """
        Forward and backward time of a mean microbatch in each layer.

        Args:
            kind (`ParallelConfig`): The configuration.
            num_samples (`float`): Samples of the microbatch.
            padded (`bool`, *optional*, defaults to `True`):
                Whether to include padding of the language model's rows; without it, a lower bound for all
                arrangements.

        Returns:
            `np.ndarray` of shape `[num_layers]`: Milliseconds.
        """
        return self._layer_ms(self.problem.costs, kind, num_samples, padded)

    def _layer_ms(self, costs: CostModel, kind: ParallelConfig, num_samples: float, padded: bool) -> NDArray:
        """See [`~ModuleOptions.layer_ms`]."""
        table = layer_table(costs, self.name, kind.tp_size, kind.checkpointing, kind.first_rank)
        tokens, squares, _ = self._sizes(kind, num_samples, padded)
        return table.step_ms(tokens, squares, kind.cp_size)

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

    def slowest_stages_ms(self, kind: ParallelConfig, num_samples: float, padded: bool = True) -> NDArray:
        """float64 `[max_stages]`: time on the slowest of 1, 2, ... stages, see [`~ModuleOptions.layer_ms`]."""
        key = (kind, num_samples, padded and self.microbatches.grows(kind.cp_size))
        if key not in self._slowest_stages:
            costs = self.layer_ms(kind, num_samples, padded)
            self._slowest_stages[key] = partition_all(costs, self.max_stages).slowest_stages_ms
        return self._slowest_stages[key]

    def layout(self, kind: ParallelConfig, dp_size: int, pp_size: int, num_samples: float) -> Layout:
        """The layout with stages balanced for microbatches of `num_samples`."""
        layers = partition_all(self.layer_ms(kind, num_samples), pp_size).partition(pp_size).layers
        return Layout(layers, dp_size, kind.cp_size, kind.tp_size, kind.checkpointing)

    @cached_property
    def _sample_ms(self) -> tuple[list[float], list[float]]:
        """Times of a batch's samples in the whole module, padded and alone, longest first."""
        table, layout = layer_table(self.problem.costs, self.name), self.microbatches.layout(1)
        sizes = (layout.of_samples(self.microbatches.batch, self.name, even) for even in (False, True))
        padded, alone = (np.add(*table.sample_ms(tokens, squares)) for squares, tokens in sizes)
        return sorted(padded.tolist(), reverse=True), sorted(alone.tolist(), reverse=True)

    def unevenness(self, count: int) -> float:
        """Largest over mean part of a batch, split by the longest-processing-time rule."""
        if count not in self._unevenness:
            loads = [0.0] * count
            for time_ms in self._sample_ms[count >= self.microbatches.batch.num_samples]:
                heapq.heapreplace(loads, loads[0] + time_ms)
            mean = sum(loads) / count
            self._unevenness[count] = max(loads) / mean if mean else 1.0
        return self._unevenness[count]

    def _memory(self, kind: ParallelConfig, first: int, stop: int) -> StageMemory:
        """Memory of a stage with layers `first` to `stop`."""
        key = (kind.cp_size, kind.tp_size, kind.checkpointing, first, stop)
        if key not in self._memories:
            firsts = range(0, kind.num_ranks, kind.tp_size)
            mesh = tuple(tuple(range(rank, rank + kind.tp_size)) for rank in firsts)
            stage = Stage((first, stop), mesh)
            alone = ParallelPlan({self.name: ModulePlan(((stage,),), kind.checkpointing)})
            self._memories[key] = stage_memory(self.problem.costs, alone, self.name, stage)
        return self._memories[key]

    def state(self, cp_size: int, tp_size: int) -> RankMemory:
        """Weights, gradients and optimizer state of all layers on a rank."""
        return self._memory(ParallelConfig(cp_size, tp_size, False), 0, self.module_spec.num_layers).state

    def state_bytes(self, kind: ParallelConfig, pp_size: Any, last: bool = False) -> Any:
        """
        Estimated bytes of the first or the last stage besides activations.

        Args:
            kind (`ParallelConfig`): The configuration.
            pp_size (`int` or `np.ndarray`): Number of stages.
            last (`bool`, *optional*, defaults to `False`): Whether to estimate the last stage.
        """
        num_layers = self.module_spec.num_layers
        whole = self._memory(kind, 0, num_layers).state.total
        end, layer = (memory.state.total for memory in self._ends(kind)[-1 if last else 0])
        return np.where(pp_size == 1, whole, end + (num_layers / pp_size - 1) * layer)

    def _ends(self, kind: ParallelConfig) -> tuple[tuple[StageMemory, StageMemory], ...]:
        """Memory of a stage with the first layer only and with an inner layer only; the same for the last layer."""
        last = self.module_spec.num_layers
        if last == 1:
            alone = self._memory(kind, 0, 1)
            return (alone, alone), (alone, alone)
        inner = self._memory(kind, 1, 2) if last > 2 else self._memory(kind, 0, 1)
        return (self._memory(kind, 0, 1), inner), (self._memory(kind, last - 1, last), inner)

    def running_bytes(self, kind: ParallelConfig, num_samples: float) -> tuple[float, float]:
        """Estimated transient bytes of a task on the first and on the last stage."""
        chunk = self._chunk_sizes(kind, num_samples) / np.array([kind.cp_size, kind.cp_size, 1.0])
        chunk[2] = 1.0
        first, last = (max(float((memory.transient @ chunk).max()) for memory in pair) for pair in self._ends(kind))
        return first, last

    def _chunk_sizes(self, kind: ParallelConfig, num_samples: float, padded: bool = True) -> NDArray:
        """`[stored token pairs, tokens, 0]` of a mean microbatch, see [`activation_sizes`]."""
        tokens, _, scores = self._sizes(kind, num_samples, padded)
        copies = grouped_copies(self.module_spec) if scores else 0
        return np.array([scores + copies * tokens, tokens, 0.0])

    @cached_property
    def _trained_bytes(self) -> float:
        """Bytes of the gradients of the whole module, in float32 at least."""
        trained = (p for p in self.module_spec.parameters if p.trainable)
        return float(sum(p.num_elements * max(DTYPE_BYTES.get(p.dtype, FULL), FULL) for p in trained))

    @cached_property
    def _update_bytes(self) -> float:
        """Memory traffic of the optimizer step of the whole module."""
        return update_bytes(self.state(1, 1))

    def sync_ms(self, kind: ParallelConfig, dp_size: int, pp_size: int) -> float:
        """Time of the gradient all-reduce of a stage over its replicas, and of the optimizer step."""
        copies = dp_size * kind.cp_size
        key = copies, pp_size * kind.tp_size
        if key not in self._sums:
            self._sums[key] = all_reduce(self.problem.costs.device, 1.0, range(0, math.prod(key), key[1]))
        num_bytes = self._trained_bytes / pp_size / kind.tp_size
        device = self.problem.costs.device
        update_ms = self._update_bytes / pp_size / kind.tp_size / device.memory_bytes_per_ms
        sums = self._sums[key]
        return sums.token * num_bytes + sums.constant + update_ms

    def saved_bytes(self, kind: ParallelConfig, num_samples: float = 1.0, padded: bool = True) -> float:
        """Saved activations of all layers for a mean microbatch on each rank."""
        chunk = self._chunk_sizes(kind, num_samples, padded)
        return self._memory(kind, 0, self.module_spec.num_layers).saved_bytes(chunk)


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return low + [number // value for value in reversed(low) if value * value != number]
