"""Closed-form estimate of an FSDP step: every rank is data-parallel, and all parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cost import layer_table, model_flops
from ..cost.analytic import DTYPE_BYTES
from ..cost.collectives import all_gather, all_reduce
from ..cost.optimizer import update_bytes
from ..cost.row_sizes import group_sizes
from ..plan import ParameterSpec, SampleSizes
from .options import ModuleOptions, ParallelConfig
from .problem import PlanningProblem

_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class FullySharded:
    """
    Estimate of an FSDP configuration, which the engine does not run.

    Args:
        num_shards (`int`): Ranks that share the parameters: all ranks, or those of a node.
        microbatch_size (`int`): Samples of a rank between two gathers of a layer.
        checkpointing (`bool`): Whether activations are recomputed.
        step_ms (`float`): Step time, averaged over the batches.
        bubble_fraction (`float`): Share of all ranks' time without computation.
        memory_bytes (`float`): Peak memory of the fullest rank.
        flops_utilisation (`float`): Model FLOPs per second over the peak of all ranks.
    """

    num_shards: int
    microbatch_size: int
    checkpointing: bool
    step_ms: float
    bubble_fraction: float
    memory_bytes: float
    flops_utilisation: float

    def __str__(self) -> str:
        recomputed = ", recomputed" if self.checkpointing else ""
        return f"parameters over {self.num_shards} ranks, {self.microbatch_size} samples a rank at once{recomputed}"


def fully_sharded(problem: PlanningProblem, batches: Sequence[SampleSizes]) -> list[FullySharded]:
    """
    Estimates all FSDP configurations.

    A layer's parameters are gathered while the layer before it computes, for the forward and again for the backward if
    there is one; gradients are reduce-scattered meanwhile. Every layer waits for the rank with the largest samples. If
    parameters are sharded within nodes, their gradients are all-reduced over nodes at the end.

    Args:
        problem ([`PlanningProblem`]): The planning problem.
        batches (`Sequence[SampleSizes]`): Global batches, whose samples are split over ranks in order.
    """
    nodes = {problem.num_ranks, min(problem.costs.device.node_size, problem.num_ranks)}
    share = -(-problem.global_batch_size // problem.num_ranks)
    sizes = sorted({size for power in range(share.bit_length()) for size in [1 << power] if size < share} | {share})
    sizes = sizes if problem.microbatch_size is None else [min(share, problem.microbatch_size)]
    given = {problem.checkpointing.get(name) for name in problem.spec.modules}
    recomputed = [True] if given == {True} else [False] if given == {False} else [False, True]
    return [
        _Estimate(problem, num_shards, size, recompute).of(batches)
        for num_shards in sorted(nodes)
        for size in sizes
        for recompute in recomputed
    ]


class _Estimate:
    """Estimate of one configuration."""

    def __init__(self, problem: PlanningProblem, num_shards: int, microbatch_size: int, checkpointing: bool):
        self.problem, self.costs = problem, problem.costs
        self.num_shards, self.microbatch_size, self.checkpointing = num_shards, microbatch_size, checkpointing

    def of(self, batches: Sequence[SampleSizes]) -> FullySharded:
        times = np.array([self._step(batch) for batch in batches])
        step_ms, computed_ms = times.mean(axis=0)
        flops = np.mean([model_flops(self.costs.spec, batch) for batch in batches])
        ranks = self.problem.num_ranks
        return FullySharded(
            self.num_shards,
            self.microbatch_size,
            self.checkpointing,
            float(step_ms),
            float(1 - computed_ms / step_ms),
            max(self._memory_bytes(batch) for batch in batches),
            float(flops / (1e9 * self.costs.device.peak_tflops * ranks * step_ms)),
        )

    def _rounds(self, batch: SampleSizes) -> Iterator[list[NDArray]]:
        """The samples of each rank, microbatch by microbatch."""
        shares = np.array_split(np.arange(batch.num_samples), self.problem.num_ranks)
        for start in range(0, max(map(len, shares)), self.microbatch_size):
            yield [share[start : start + self.microbatch_size] for share in shares]

    def _step(self, batch: SampleSizes) -> tuple[float, float]:
        """Time of a step, and compute time averaged over ranks."""
        step_ms = self._sums_over_nodes_ms() + self._optimizer_ms()
        computed_ms = 0.0
        for batch_indices in self._rounds(batch):
            modules = [self._module(name, batch, batch_indices) for name in self.problem.spec.modules]
            forward, backward, gathers, regathers, mean_ms = map(np.concatenate, zip(*modules, strict=True))
            efficiency = self.costs.device.overlap_efficiency
            backward_ms = _overlapped(backward[::-1], regathers[::-1], efficiency)
            step_ms += _overlapped(forward, gathers, efficiency) + backward_ms
            computed_ms += float(mean_ms.sum())
        return step_ms, computed_ms

    def _module(self, name: str, batch: SampleSizes, batch_indices: list[NDArray]) -> tuple[NDArray, ...]:
        """
        Forward and backward times of the slowest rank, communication times of both, and their mean compute time, each
        per layer.
        """
        table = layer_table(self.costs, name, 1, self.checkpointing)
        tokens, squares = group_sizes(self.costs, name, batch, batch_indices)
        forward, backward = table.times(tokens, squares)
        weights, gradients = self._layer_bytes(name)
        gathers = self._gather_ms(weights)
        regathers = np.where(table.backward.any(axis=1), gathers, 0.0) + self._gather_ms(gradients)
        return forward.max(axis=1), backward.max(axis=1), gathers, regathers, (forward + backward).mean(axis=1)

    def _gather_ms(self, num_bytes: NDArray) -> NDArray:
        """Time of an all-gather or reduce-scatter of `num_bytes`."""
        one = all_gather(self.costs.device, 1.0, range(self.num_shards))
        return np.where(num_bytes > 0, one.token * num_bytes + one.constant, 0.0)

    def _layer_bytes(self, name: str) -> tuple[NDArray, NDArray]:
        """Bytes of the parameters of each layer, and of the gradients of trainable ones."""
        count = self.problem.spec.modules[name].num_layers + 2
        weights, gradients = np.zeros(count), np.zeros(count)
        for parameter in self.problem.spec.modules[name].parameters:
            weights[parameter.layer + 1] += _bytes(parameter)
            if parameter.trainable:
                num_bytes = _bytes(parameter)
                if self.costs.engine.wide_sums:
                    num_bytes = max(num_bytes, _GRADIENT_BYTES * parameter.num_elements)
                gradients[parameter.layer + 1] += num_bytes
        return weights, gradients

    def _sums_over_nodes_ms(self) -> float:
        """All-reduce over nodes of a rank's gradient shards, if each node has all parameters."""
        count = self.problem.num_ranks // self.num_shards
        if count < 2:
            return 0.0
        trained = [p for p in self.problem.spec.parameters.values() if p.trainable]
        ranks = range(0, self.problem.num_ranks, self.num_shards)
        return all_reduce(self.costs.device, sum(map(_bytes, trained)) / self.num_shards, ranks)(1.0, 0.0)

    def _optimizer_ms(self) -> float:
        """Time of the optimizer step on a rank's shards."""
        states = (ModuleOptions(self.problem, name).state(1, 1) for name in self.problem.spec.modules)
        return sum(map(update_bytes, states)) / self.num_shards / self.costs.device.memory_bytes_per_ms

    def _memory_bytes(self, batch: SampleSizes) -> float:
        """Shards of the state, two layers in full, and the activations of a microbatch."""
        state = layers = saved = 0.0
        kind = ParallelConfig(1, 1, self.checkpointing)
        for name in self.problem.spec.modules:
            options = ModuleOptions(self.problem, name)
            state += options.state_bytes(kind, 1)
            layers = max(layers, float(self._layer_bytes(name)[0].max()))
            largest = max(
                batch.tokens[name][chunk].sum() for batch_indices in self._rounds(batch) for chunk in batch_indices
            )
            saved += options.saved_bytes(kind) * float(largest) / max(options.tokens, 1.0)
        return state / self.num_shards + 2 * layers + saved


def _overlapped(compute_ms: NDArray, gather_ms: NDArray, efficiency: float) -> float:
    """
    Time of layers in sequence, each overlapped with the gather of the next one, which reduces its compute speed to
    `efficiency` while it runs.
    """
    next_ms = np.append(gather_ms[1:], 0.0)
    return float(gather_ms[0] + np.maximum(next_ms, compute_ms + (1 - efficiency) * next_ms).sum())


def _bytes(parameter: ParameterSpec) -> float:
    return float(parameter.num_elements * DTYPE_BYTES.get(parameter.dtype, _GRADIENT_BYTES))
