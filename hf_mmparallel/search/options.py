"""The layouts that one module can have, each with its bottleneck and memory by the closed form."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel, Polynomial, layer_table
from ..cost.collectives import all_reduce
from ..cost.kept import DTYPE_BYTES, FULL, grouped_copies
from ..cost.optimizer import update_bytes
from ..cost.stage_memory import RankMemory, StageMemory, stage_memory
from ..plan import LANGUAGE_MODEL, ModulePlan, ModuleSpec, ParallelPlan, Stage
from .mean_microbatch import MeanMicrobatches
from .partition import partition_all
from .problem import Layout, PlanningProblem

_MIN_ROW_TOKENS = 1024
"""Fewest tokens of a sample on each row of ranks for which context parallelism is tried."""


@dataclass(frozen=True)
class Kind:
    """
    How the layers of a module are shared and kept, whatever the number of copies and stages.

    Args:
        cp_size (`int`): Ranks that share the tokens of a microbatch.
        tp_size (`int`): Ranks that share each matrix.
        checkpointing (`bool`): Whether activations are recomputed.
        first_rank (`int`, *optional*, defaults to 0):
            Where in a node the ranks that share a matrix start, which is of interest when they cross to the next one.
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
        problem (`PlanningProblem`): The question.
        name (`str`): The module.
    """

    def __init__(self, problem: PlanningProblem, name: str):
        self.problem, self.name = problem, name
        self.part: ModuleSpec = problem.spec.modules[name]
        self.microbatches = MeanMicrobatches(problem, name)
        self.tokens, self.squares = self.microbatches.tokens, self.microbatches.squares
        self._bottlenecks: dict[tuple[Kind, float, bool], NDArray] = {}
        self._unevenness: dict[int, float] = {}
        self._memories: dict[tuple[int, int, bool, int, int], StageMemory] = {}
        self._sums: dict[tuple[int, int], Polynomial] = {}

    @property
    def max_stages(self) -> int:
        return 1 if self.part.inner_features else min(self.part.num_layers, self.problem.num_ranks)

    def allows(self, size: str, value: int) -> bool:
        """Whether the user has left this size open or set it so."""
        return self.problem.fixed.get(self.name, {}).get(size, value) == value

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Tensor-parallel sizes up to a node's that divide the model's, each with and without recomputation."""
        part, device = self.part, self.problem.costs.device
        largest = min(device.node_size, self.problem.num_ranks)
        counts = (part.num_heads, part.num_kv_heads, part.intermediate_size)
        tensor = [
            size
            for size in range(1, largest + 1)
            if self.allows("tp_size", size) and not any(count % size for count in counts)
        ]
        rows = self.problem.num_ranks if self.name == LANGUAGE_MODEL else 1
        context = [
            1 << power
            for power in range(max(1, rows).bit_length())
            if self.allows("cp_size", 1 << power) and (not power or self.tokens >= _MIN_ROW_TOKENS << power)
        ]
        given = self.problem.checkpointing.get(self.name)
        again = (False, True) if given is None and self._runs_back else (bool(given),)
        return tuple(
            Kind(cp, tp, recompute)
            for tp in tensor
            for cp in context
            if cp * tp <= self.problem.num_ranks
            for recompute in again
        )

    @cached_property
    def _runs_back(self) -> bool:
        """Whether a layer of the stack has a backward, before which it could compute again."""
        return bool(layer_table(self.problem.costs, self.name).backward[1:-1].any())

    def layer_ms(self, kind: Kind, num_samples: float, padded: bool = True) -> NDArray:
        """
        Forward and backward of a mean microbatch in each layer.

        Args:
            kind (`Kind`): How layers are shared.
            num_samples (`float`): Of the microbatch.
            padded (`bool`, *optional*, defaults to `True`):
                Whether rows are padded where the language model's are; without it, what no arrangement can be below.

        Returns:
            `np.ndarray` of shape `[num_layers]`: Milliseconds.
        """
        return self._layer_ms(self.problem.costs, kind, num_samples, padded)

    def _layer_ms(self, costs: CostModel, kind: Kind, num_samples: float, padded: bool) -> NDArray:
        """See [`~ModuleOptions.layer_ms`]."""
        table = layer_table(costs, self.name, kind.tp_size, kind.checkpointing, kind.first_rank)
        tokens, squares, _ = self._sizes(kind, num_samples, padded)
        return table.step_ms(tokens, squares, kind.cp_size)

    def _sizes(self, kind: Kind, num_samples: float, padded: bool = True) -> NDArray:
        """`[tokens, squared tokens, stored pairs]` of a mean microbatch."""
        return self.microbatches.sizes(kind.cp_size, num_samples, padded)

    def ranks_within_nodes(self, kind: Kind) -> float:
        """The most consecutive ranks of which none that share a matrix are on two nodes."""
        size, node_size = kind.tp_size, self.problem.costs.device.node_size
        return float("inf") if node_size % size == 0 else node_size // size * size

    def over_nodes(self, kind: Kind) -> Kind:
        """The kind where ranks that share a matrix are on two nodes, if they can be."""
        within = self.ranks_within_nodes(kind)
        return kind if within == float("inf") else replace(kind, first_rank=int(within))

    def bottlenecks_ms(self, kind: Kind, num_samples: float, padded: bool = True) -> NDArray:
        """float64 `[max_stages]`: a microbatch on the slowest of 1, 2, ... stages, see [`~ModuleOptions.layer_ms`]."""
        key = (kind, num_samples, padded and self.microbatches.grows(kind.cp_size))
        if key not in self._bottlenecks:
            costs = self.layer_ms(kind, num_samples, padded)
            self._bottlenecks[key] = partition_all(costs, self.max_stages).bottlenecks_ms
        return self._bottlenecks[key]

    def layout(self, kind: Kind, dp_size: int, pp_size: int, num_samples: float) -> Layout:
        """The layout with its stages cut for microbatches of `num_samples`."""
        layers = partition_all(self.layer_ms(kind, num_samples), pp_size).partition(pp_size).layers
        return Layout(layers, dp_size, kind.cp_size, kind.tp_size, kind.checkpointing)

    @cached_property
    def _sample_ms(self) -> tuple[list[float], list[float]]:
        """What the samples of a batch take in the whole module beside others and alone, the longest first."""
        table, layout = layer_table(self.problem.costs, self.name), self.microbatches.layout(1)
        found = (layout.of_samples(self.microbatches.batch, self.name, even) for even in (False, True))
        beside, alone = (np.add(*table.sample_ms(own[1], own[0])) for own in found)
        return sorted(beside.tolist(), reverse=True), sorted(alone.tolist(), reverse=True)

    def unevenness(self, num_parts: int) -> float:
        """The largest part over the mean when a batch is divided by the longest-processing-time rule."""
        if num_parts not in self._unevenness:
            loads = [0.0] * num_parts
            for time_ms in self._sample_ms[num_parts >= self.microbatches.batch.num_samples]:
                heapq.heapreplace(loads, loads[0] + time_ms)
            mean = sum(loads) / num_parts
            self._unevenness[num_parts] = max(loads) / mean if mean else 1.0
        return self._unevenness[num_parts]

    def _memory(self, kind: Kind, first: int, stop: int) -> StageMemory:
        """Of a stage with these layers."""
        key = (kind.cp_size, kind.tp_size, kind.checkpointing, first, stop)
        if key not in self._memories:
            rows = tuple(tuple(range(row, row + kind.tp_size)) for row in range(0, kind.num_ranks, kind.tp_size))
            stage = Stage((first, stop), rows)
            alone = ParallelPlan({self.name: ModulePlan(((stage,),), kind.checkpointing)})
            self._memories[key] = stage_memory(self.problem.costs, alone, self.name, stage)
        return self._memories[key]

    def state(self, cp_size: int, tp_size: int) -> RankMemory:
        """Weights, gradients and optimizer state of all layers on a rank."""
        return self._memory(Kind(cp_size, tp_size, False), 0, self.part.num_layers).state

    def state_bytes(self, kind: Kind, pp_size: Any, last: bool = False) -> Any:
        """
        What the first or the last stage holds beside activations, about.

        Args:
            kind (`Kind`): How layers are shared.
            pp_size (`int` or `np.ndarray`): Stages.
            last (`bool`, *optional*, defaults to `False`): Whether the last stage is meant.
        """
        num_layers = self.part.num_layers
        whole = self._memory(kind, 0, num_layers).state.total
        end, layer = (memory.state.total for memory in self._ends(kind)[-1 if last else 0])
        return np.where(pp_size == 1, whole, end + (num_layers / pp_size - 1) * layer)

    def _ends(self, kind: Kind) -> tuple[tuple[StageMemory, StageMemory], ...]:
        """For the first and the last layer, the memory of a stage of it alone, and of one of a layer beside it."""
        last = self.part.num_layers
        if last == 1:
            alone = self._memory(kind, 0, 1)
            return (alone, alone), (alone, alone)
        inner = self._memory(kind, 1, 2) if last > 2 else self._memory(kind, 0, 1)
        return (self._memory(kind, 0, 1), inner), (self._memory(kind, last - 1, last), inner)

    def running_bytes(self, kind: Kind, num_samples: float) -> tuple[float, float]:
        """What a task on the first and on the last stage needs beside activations that wait, about."""
        held = self._sizes_held(kind, num_samples) / np.array([kind.cp_size, kind.cp_size, 1.0])
        held[2] = 1.0
        first, last = (max(float((memory.extras @ held).max()) for memory in pair) for pair in self._ends(kind))
        return first, last

    def _sizes_held(self, kind: Kind, num_samples: float, padded: bool = True) -> NDArray:
        """`[stored pairs of tokens, tokens, 0]` of a mean microbatch, see [`held_sizes`]."""
        tokens, _, scores = self._sizes(kind, num_samples, padded)
        copies = grouped_copies(self.part) if scores else 0
        return np.array([scores + copies * tokens, tokens, 0.0])

    @cached_property
    def _trained_bytes(self) -> float:
        """Gradients of the whole module, in float32 at least."""
        trained = (p for p in self.part.parameters if p.trainable)
        return float(sum(p.num_elements * max(DTYPE_BYTES.get(p.dtype, FULL), FULL) for p in trained))

    @cached_property
    def _update_bytes(self) -> float:
        """What the optimizer's step reads and writes of the whole module."""
        return update_bytes(self.state(1, 1))

    def sync_ms(self, kind: Kind, dp_size: int, pp_size: int) -> float:
        """Time of the sum of a stage's gradients over its copies, and of the optimizer's step."""
        copies = dp_size * kind.cp_size
        key = copies, pp_size * kind.tp_size
        if key not in self._sums:
            self._sums[key] = all_reduce(self.problem.costs.device, 1.0, range(0, math.prod(key), key[1]))
        num_bytes = self._trained_bytes / pp_size / kind.tp_size
        device = self.problem.costs.device
        update_ms = self._update_bytes / pp_size / kind.tp_size / device.memory_bytes_per_ms
        sums = self._sums[key]
        return sums.token * num_bytes + sums.constant + update_ms

    def kept_bytes(self, kind: Kind, num_samples: float = 1.0, padded: bool = True) -> float:
        """What all layers keep of a mean microbatch on each rank."""
        held = self._sizes_held(kind, num_samples, padded)
        return self._memory(kind, 0, self.part.num_layers).kept_bytes(held)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return low + [number // value for value in reversed(low) if value * value != number]
