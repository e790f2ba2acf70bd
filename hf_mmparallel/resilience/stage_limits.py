"""How many microbatches a stage of any layers can have in flight within the memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .._portable import weighted_sum
from ..cost import CostModel, data_gradients
from ..cost.activations import grouped_copies
from ..cost.memory import sample_features
from ..cost.stage_memory import StageMemory, stage_memory
from ..plan import ParallelPlan
from .typical_microbatches import TypicalMicrobatches

NO_LIMIT = int(np.iinfo(np.int32).max)  # microbatches in flight where memory does not limit them


@dataclass(eq=False)
class _Bytes:
    """Memory of stages of a module or chain on a rank, by first layer and one past the last `[layers, layers + 1]`."""

    fixed: NDArray  # whatever is in flight: weights, gradients, optimizer state, inputs
    saved: NDArray  # of each microbatch in flight
    ahead: NDArray  # of the microbatches in flight beyond the stages behind a stage
    running: NDArray  # of the running task besides

    @classmethod
    def empty(cls, count: int) -> _Bytes:
        return cls(*np.zeros((4, count, count + 1)))

    def add_module(self, other: _Bytes, start: int) -> None:
        """Adds a module whose stages of this chain have the same layers, cut to those of the module."""
        count, size = len(self.fixed), len(other.fixed)
        first = np.clip(np.arange(count)[:, None] - start, 0, size)
        stop = np.clip(np.arange(count + 1)[None, :] - start, 0, size)
        first, stop = np.broadcast_arrays(first, stop)
        rows, columns = np.nonzero(first < stop)
        pieces = first[rows, columns], stop[rows, columns]
        self.fixed[rows, columns] += other.fixed[pieces]
        self.saved[rows, columns] += other.saved[pieces]
        self.ahead[rows, columns] += other.ahead[pieces]
        self.running[rows, columns] = np.maximum(self.running[rows, columns], other.running[pieces])

    def in_flight(self, memory_bytes: float) -> NDArray:
        """Microbatches that fit in flight `[layers, layers + 1]`; 0 where none does."""
        free = memory_bytes - self.fixed - self.ahead - self.running
        fits = np.divide(free, self.saved, out=np.full_like(free, NO_LIMIT), where=self.saved > 0)
        return np.where(free < 0, 0, np.minimum(fits, NO_LIMIT)).astype(np.int64)


def stage_limits(
    costs: CostModel,
    plan: ParallelPlan,  # whose modules have one stage for each unit of the chain
    microbatches: TypicalMicrobatches,
    memory_bytes: float,  # of a rank
    state_copies: int = 1,  # of a stage, that a rank has memory for
) -> NDArray:
    """
    How many microbatches stages of a chain can have in flight `[units, units + 1]`, by first unit and one past the
    last; 0 where there is no stage.

    All microbatches in flight count as the largest one, and the running task is the one with the largest transient
    memory, as in [`memory_per_rank`]. A rank with the end of a module and the start of the next has a stage of each,
    and so one more microbatch in flight in the former; an encoder has another one for deferred samples.
    """
    units = [len(module.replicas[0]) for module in plan.modules.values()]
    total = _Bytes.empty(sum(units))
    for index, name in enumerate(plan.modules):
        total.add_module(_module_bytes(costs, plan, name, microbatches, state_copies), sum(units[:index]))
    limits = total.in_flight(memory_bytes)
    return np.where(np.arange(sum(units) + 1)[None, :] > np.arange(sum(units))[:, None], limits, 0)


def _module_bytes(
    costs: CostModel, plan: ParallelPlan, name: str, microbatches: TypicalMicrobatches, state_copies: int
) -> _Bytes:
    """Memory of the stages of one module."""
    demand = _Demand.of(costs, plan, name, microbatches, state_copies)
    units = plan.modules[name].replicas[0]
    kinds = _layer_kinds(costs, name, units[0].tp_size)
    result, known = _Bytes.empty(len(units)), {}
    for first, start in enumerate(units):
        for stop, end in enumerate(units[first:], first + 1):
            layers = (start.layers[0], end.layers[1])
            # A stage depends on the layer behind it, too, which may need the gradient of its output.
            key = (first == 0, stop == len(units), kinds[layers[0] + 1 : layers[1] + 2])
            if key not in known:
                known[key] = demand.of_stage(stage_memory(costs, plan, name, replace(start, layers=layers)))
            fixed, saved, running = known[key]
            saved += demand.received_bytes(layers)
            result.fixed[first, stop], result.saved[first, stop] = fixed, saved
            result.ahead[first, stop], result.running[first, stop] = demand.num_ahead * saved, running
    return result


def _layer_kinds(costs: CostModel, name: str, tp_size: int) -> tuple[int, ...]:
    """A number for each layer from -1 to one past the last, equal where costs and parameters are alike."""
    numbers: dict[tuple, int] = {}
    result = []
    for index, is_needed in enumerate(data_gradients(costs.spec)[name], -1):
        uses = tuple(
            (replace(use.parameter, name=use.parameter.name.replace(f".{index}.", "."), layer=0), use.multiplies)
            for use in costs.spec.uses.get((name, index), ())
        )
        kind = (is_needed, costs.layers.layer(name, index, tp_size), uses)
        result.append(numbers.setdefault(kind, len(numbers)))
    return tuple(result)


@dataclass(frozen=True, eq=False)
class _Demand:
    """What microbatches need in a module."""

    sizes: NDArray  # [microbatches, 3]: of each on one rank, see `activation_sizes`
    num_tokens: float  # of all microbatches of a step
    # For each encoder whose features enter the module: the layers where they do, and the bytes of the features of the
    # largest microbatch.
    received: tuple[tuple[tuple[int, ...], float], ...]
    sent_bytes: float  # features of a step, of an encoder
    num_ahead: int  # microbatches in flight beyond the stages behind a stage
    state_copies: int

    @classmethod
    def of(
        cls, costs: CostModel, plan: ParallelPlan, name: str, microbatches: TypicalMicrobatches, state_copies: int
    ) -> _Demand:
        """The demand of the microbatches in a module."""
        spec, module = costs.spec, plan.modules[name]
        chunks = microbatches.chunks(costs, name, module)
        copies = grouped_copies(spec.modules[name], spec.uses.get((name, 0), ()), module.tp_size)
        pairs = chunks[:, 2] + np.where(chunks[:, 2] > 0, copies, 0) * chunks[:, 0]
        sizes = np.stack([pairs, chunks[:, 0], np.ones(len(chunks))], axis=1)
        received = tuple(
            (edge.layers, max(_feature_bytes(costs, edge.source, microbatches), default=0.0) / module.cp_size)
            for edge in plan.edges
            if edge.target == name and spec.modules[edge.source].is_encoder
        )
        sent = sum(_feature_bytes(costs, name, microbatches)) if spec.modules[name].is_encoder else 0.0
        share = microbatches.most / microbatches.count
        num_ahead = _num_behind(plan, name) + (name in plan.encoders)
        scale = np.array([module.cp_size, module.cp_size, 1.0])
        return cls(sizes / scale, share * float(chunks[:, 0].sum()), received, share * sent, num_ahead, state_copies)

    def of_stage(self, memory: StageMemory) -> tuple[float, float, float]:
        """Bytes of a stage whatever is in flight, of each microbatch in flight, and of the running task."""
        fixed = self.state_copies * memory.state.total + memory.bucket_bytes + memory.kept_bytes
        fixed += memory.input_bytes * self.num_tokens
        if memory.frees_features:
            fixed += self.sent_bytes
        saved = float(weighted_sum(self.sizes, memory.saved.sum(axis=0)).max(initial=0.0))
        running = weighted_sum(memory.transient, self.sizes.max(axis=0, initial=0.0))
        return fixed, saved, float(running.max(initial=0.0))

    def received_bytes(self, layers: tuple[int, int]) -> float:
        """Bytes of the features of a microbatch that enter a stage."""
        return sum(
            num_bytes
            for entries, num_bytes in self.received
            if any(layers[0] <= layer < layers[1] for layer in entries)
        )


def _feature_bytes(costs: CostModel, encoder: str, microbatches: TypicalMicrobatches) -> list[float]:
    """Bytes of the features of each microbatch."""
    values = sample_features(costs, microbatches.sizes, encoder)
    return [float(values[group].sum()) for group in microbatches.groups(encoder)]


def _num_behind(plan: ParallelPlan, name: str) -> int:
    """Modules on the longest path behind a module."""
    return max((1 + _num_behind(plan, edge.target) for edge in plan.edges if edge.source == name), default=0)
