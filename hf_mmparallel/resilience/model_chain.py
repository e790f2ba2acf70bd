"""The layers of a model as one chain of units that templates cut into stages, with their times and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel, stage_costs
from ..cost.activations import grouped_copies
from ..cost.memory import replica_uses, sample_features
from ..cost.row_sizes import RowLayout
from ..cost.stage_memory import COPY_WINDOW_BYTES, StageMemory, layer_kinds, stage_memory
from ..plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlan,
    ParallelPlan,
    SampleSizes,
    Stage,
    stage_parameters,
)
from ..plan.layout import ModuleLayout
from ..plan.resolve import check_tp_sizes
from ..schedule.kinds import WHOLE_PASSES
from .state_copies import recovery_bytes, value_bytes
from .templates import LayerChain

NO_LIMIT = int(np.iinfo(np.int32).max)  # microbatches in flight where memory does not limit them


@dataclass(frozen=True, eq=False)
class TypicalMicrobatches:
    """What pipelines compute in a step."""

    sizes: SampleSizes  # every `microbatch_size` samples in a row are a microbatch
    microbatch_size: int = 1  # samples
    most: int = 1  # the most microbatches of a pipeline in a step

    @property
    def count(self) -> int:
        return -(-self.sizes.num_samples // self.microbatch_size)

    def groups(self, module: str) -> list[NDArray]:
        """Samples of each microbatch that have an input for a module, without microbatches that have none."""
        num_samples, tokens = self.sizes.num_samples, self.sizes.tokens[module]
        whole = np.split(np.arange(num_samples), range(self.microbatch_size, num_samples, self.microbatch_size))
        used = whole if module == LANGUAGE_MODEL else [group[tokens[group] > 0] for group in whole]
        return [group for group in used if len(group)]

    def chunks(self, costs: CostModel, module: str, planned: ModulePlan) -> NDArray:
        """Sizes `[microbatches, 3]` of those with an input for a module: the columns of [`ChunkSize`]."""
        groups = self.groups(module)
        if not groups:
            return np.zeros((0, 3))
        return RowLayout.of(costs, module, planned).of_groups(self.sizes, module, groups)


@dataclass(frozen=True)
class ChainUnit:
    """Consecutive layers of a module that are always on one stage; one layer where the model may be cut around it."""

    module: str
    layers: tuple[int, int]  # first layer, and one past the last


@dataclass(frozen=True, eq=False)
class ModelChain:
    """The chain of one copy of a model: its encoders, one after the other, then the language model."""

    costs: CostModel
    layouts: Mapping[str, ModuleLayout]  # what all stages of a module have in common
    tp_sizes: Mapping[str, tuple[int, ...]]  # of the stages of each module, in ascending order
    microbatches: TypicalMicrobatches  # what pipelines compute
    units: tuple[ChainUnit, ...]  # the layers that `chain` counts
    chain: LayerChain  # times and memory of stages

    @property
    def spec(self) -> ModelSpec:
        return self.costs.spec

    @property
    def copies(self) -> int:
        """Copies of the model in a pipeline, each stage of which has those of a stage on one node."""
        return copies_of(self.layouts)

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Parameters and optimizer state of each unit, in bytes, of one copy of it."""
        plan = _plan_of_units(self.spec, self.layouts, self.units)
        return tuple(
            sum(
                parameter.num_elements * value_bytes(parameter, module.storage)
                for parameter in stage_parameters(self.spec, name, stage)
            )
            for name, module in plan.modules.items()
            for stage in module.replicas[0]
        )

    def pieces(self, units: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Module and layers of each part of a stage that is in one module."""
        chosen = self.units[slice(*units)]
        for name in dict.fromkeys(unit.module for unit in chosen):
            layers = [unit.layers for unit in chosen if unit.module == name]
            yield name, (layers[0][0], layers[-1][1])


def mean_stage_ms(
    costs: CostModel, plan: ParallelPlan, microbatches: TypicalMicrobatches
) -> dict[tuple[str, int, int], float]:
    """(module, replica, stage) -> mean ms of a forward and a backward over microbatches, 0 for those without input."""
    return {key: sum(passes_ms) for key, passes_ms in mean_pass_ms(costs, plan, microbatches).items()}


def mean_pass_ms(
    costs: CostModel, plan: ParallelPlan, microbatches: TypicalMicrobatches
) -> dict[tuple[str, int, int], tuple[float, float]]:
    """The two times that [`mean_stage_ms`] adds: of a forward, and of a backward."""
    result, known = {}, {}
    chunks = {name: microbatches.chunks(costs, name, module) for name, module in plan.modules.items()}
    for key, cost in stage_costs(costs, plan).items():
        if (key[0], id(cost)) not in known:
            tokens, squares = chunks[key[0]][:, :2].T
            sums_ms = (cost.times_ms(tokens, squares, kind).sum() for kind in WHOLE_PASSES)
            # Processors round sums differently, and all ranks have to make the same plans.
            known[key[0], id(cost)] = tuple(float(np.float32(sum_ms / microbatches.count)) for sum_ms in sums_ms)
        result[key] = known[key[0], id(cost)]
    return result


def model_chain(
    costs: CostModel,
    # of the stages of each module; `dp_size` is that of a pipeline, the same of all modules
    layouts: Mapping[str, ModuleLayout],
    microbatches: TypicalMicrobatches,
    memory_bytes: float | None = None,  # of a rank; no limit by default
    # how many stages' weights, gradients and optimizer state a rank has memory for
    state_copies: int = 1,
    # that each stage of a module may have; that of its layout by default
    tp_sizes: Mapping[str, Sequence[int]] | None = None,
) -> ModelChain:
    """
    The chain of a model. Raises `ValueError` for settings with which a lost node takes the only copy of something with
    it, and for sizes that stages of one module can't have.
    """
    spec = costs.spec
    layouts = {name: layouts.get(name, ModuleLayout(dp_size=copies_of(layouts))) for name in spec.modules}
    for name, layout in layouts.items():
        _check_copies(name, layout)
    units = tuple(_units(spec))
    sizes = {name: (layout.tp_size,) for name, layout in layouts.items()}
    sizes |= {name: tuple(sorted(set(of_module))) for name, of_module in (tp_sizes or {}).items()}
    for name, module in _plan_of_units(spec, layouts, units).modules.items():
        check_tp_sizes(spec.modules[name], module, sizes[name])
    counts = sorted(
        {_num_ranks(layout) // layout.tp_size * n for name, layout in layouts.items() for n in sizes[name]}
    )
    layer_ms, limits = [], np.full((len(counts), len(units), len(units) + 1), NO_LIMIT)
    for index, count in enumerate(counts):
        sized = {name: _on_ranks(layout, sizes[name], count) for name, layout in layouts.items()}
        plan = _plan_of_units(spec, sized, units)
        times_ms = mean_stage_ms(costs, plan, microbatches)
        layer_ms.append([time_ms for (_, replica, _), time_ms in times_ms.items() if replica == 0])
        if memory_bytes is not None:
            limits[index] = stage_limits(costs, plan, microbatches, memory_bytes, state_copies)
        ranks = np.array([_num_ranks(sized[unit.module]) for unit in units])
        limits[index, _has_other(ranks != count)] = 0
    is_limited = len(counts) > 1 or memory_bytes is not None
    chain = LayerChain(counts, layer_ms, limits if is_limited else None)
    return ModelChain(costs, layouts, sizes, microbatches, units, chain)


def copies_of(layouts: Mapping[str, ModuleLayout]) -> int:
    return max((layout.dp_size for layout in layouts.values()), default=1)


def _num_ranks(layout: ModuleLayout) -> int:
    """Ranks of a stage, with those of all copies in a pipeline."""
    return layout.dp_size * layout.tp_size * layout.cp_size


def _on_ranks(layout: ModuleLayout, tp_sizes: Sequence[int], num_ranks: int) -> ModuleLayout:
    """The layout of stages of a number of ranks, or of the smallest ones if none can have this number."""
    sized = [replace(layout, tp_size=size) for size in tp_sizes]
    return next((one for one in sized if _num_ranks(one) == num_ranks), sized[0])


def _check_copies(name: str, layout: ModuleLayout) -> None:
    own, size = layout.dp_size * layout.cp_size, layout.shard_size
    if layout.zero_stage and (size is None or own % size):
        remedy = f"Use `shard_size={own}`" if own > 1 else "Use `shard_size`, the copies on one node"
        raise ValueError(
            f"`zero_stage={layout.zero_stage}` of `{name}` divides the optimizer's state among "
            f"{'all copies' if size is None else f'{size} copies'} of the model, so that a failure of a node takes "
            f"the only copy of its share with it. {remedy}, or `zero_stage=0`."
        )
    if layout.ep_size > 1:
        raise ValueError(
            f"`ep_size={layout.ep_size}` of `{name}` shares experts among ranks that a failure may take with the "
            "only copy of theirs. Use `ep_size=1`."
        )


def _units(spec: ModelSpec) -> Iterator[ChainUnit]:
    for name, module in spec.modules.items():
        # a unit's edge has one hidden state
        ends = range(1, module.num_layers + 1 - max(1, module.num_unread))
        cuts = [0, *(layer for layer in ends if module.states_before(layer) == 1)]
        for bounds in pairwise((*cuts, module.num_layers)):
            yield ChainUnit(name, bounds)


def _plan_of_units(spec: ModelSpec, layouts: Mapping[str, ModuleLayout], units: Sequence[ChainUnit]) -> ParallelPlan:
    """A plan with a stage for each unit, in two pipelines, which sum gradients."""
    modules = {}
    for name, layout in layouts.items():
        layers, ranks = [unit.layers for unit in units if unit.module == name], range(_num_ranks(layout))
        modules[name] = layout.plan(tuple(zip(*(stages_on(layout, own, ranks) for own in layers), strict=True)) * 2)
    return ParallelPlan(modules, spec.edges)


def stages_on(layout: ModuleLayout, layers: tuple[int, int], ranks: Sequence[int]) -> tuple[Stage, ...]:
    """A stage of a module in each copy of a pipeline, which share the ranks equally, as do the tp groups of each."""
    tp_size = len(ranks) // (layout.dp_size * layout.cp_size)
    tp_groups = [tuple(ranks[first : first + tp_size]) for first in range(0, len(ranks), tp_size)]
    firsts = range(0, len(tp_groups), layout.cp_size)
    return tuple(Stage(layers, tuple(tp_groups[first : first + layout.cp_size])) for first in firsts)


def _has_other(wrong: NDArray) -> NDArray:
    """`[units, units + 1]`, by first unit and one past the last: true where one of the units is marked."""
    before = np.concatenate([[0], np.cumsum(wrong)])
    return before[None, :] > before[:-1, None]


@dataclass(eq=False)
class _Bytes:
    """Memory of stages of a module or chain on a rank, by first layer and one past the last `[layers, layers + 1]`."""

    fixed: NDArray  # whatever is in flight: weights, gradients, optimizer state, inputs
    saved: NDArray  # of each microbatch in flight
    ahead: NDArray  # of the microbatches in flight beyond the stages behind a stage
    running: NDArray  # of the running task besides
    held: NDArray  # without a step: weights and optimizer state, while the plan of a run changes

    @classmethod
    def empty(cls, count: int) -> _Bytes:
        return cls(*np.zeros((5, count, count + 1)))

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
        self.held[rows, columns] += other.held[pieces]
        self.running[rows, columns] = np.maximum(self.running[rows, columns], other.running[pieces])

    def in_flight(self, memory_bytes: float, model_bytes: float, is_host: bool) -> NDArray:
        """
        Microbatches that fit in flight `[layers, layers + 1]`; 0 where none does, or where a recovery does not fit in
        which a rank goes on from the stage, or to it, and at most `model_bytes` move. In host memory there is all that
        it receives: no more than the largest stage that fits, so that each has room for two of its size.
        """
        free = memory_bytes - self.fixed - self.ahead - self.running
        fits = np.divide(free, self.saved, out=np.full_like(free, NO_LIMIT), where=self.saved > 0)
        # a stage that is laid out takes no more than in a step, whose gradients are as large as copies in float32
        if is_host:
            moved, window_bytes = self.held, np.inf
        else:
            moved, window_bytes = model_bytes, COPY_WINDOW_BYTES
        free = np.minimum(free, memory_bytes - recovery_bytes(self.held, moved, self.held, window_bytes))
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
    parameters = costs.spec.parameters.values()
    storages = [plan.modules[costs.spec.used_at[parameter.name][0][0]].storage for parameter in parameters]
    model_bytes = sum(p.num_elements * value_bytes(p, s) for p, s in zip(parameters, storages, strict=True))
    limits = total.in_flight(memory_bytes, model_bytes, costs.device.name == "cpu")
    return np.where(np.arange(sum(units) + 1)[None, :] > np.arange(sum(units))[:, None], limits, 0)


def _module_bytes(
    costs: CostModel, plan: ParallelPlan, name: str, microbatches: TypicalMicrobatches, state_copies: int
) -> _Bytes:
    """Memory of the stages of one module."""
    demand = _Demand.of(costs, plan, name, microbatches, state_copies)
    units = plan.modules[name].replicas[0]
    kinds = tuple(layer_kinds(costs, name, units[0].tp_size, plan.modules[name].activation_checkpointing))
    result, known = _Bytes.empty(len(units)), {}
    for first, start in enumerate(units):
        for stop, end in enumerate(units[first:], first + 1):
            layers = (start.layers[0], end.layers[1])
            # A stage depends on the layer behind it, too, which may need the gradient of its output.
            key = (first == 0, stop == len(units), kinds[layers[0] + 1 : layers[1] + 2])
            if key not in known:
                known[key] = demand.of_stage(stage_memory(costs, plan, name, replace(start, layers=layers)))
            fixed, saved, running, held = known[key]
            saved += demand.received_bytes(layers)
            result.fixed[first, stop], result.saved[first, stop] = fixed, saved
            result.ahead[first, stop], result.running[first, stop] = demand.num_ahead * saved, running
            result.held[first, stop] = held
    return result


@dataclass(frozen=True, eq=False)
class _Demand:
    """What microbatches need in a module."""

    sizes: NDArray  # [microbatches, 3]: of each, see `activation_sizes`
    share: float  # microbatches of a step, of these
    # For each encoder whose features enter the module: the layers where they do, and the bytes of the features of the
    # largest microbatch.
    received: tuple[tuple[tuple[int, ...], float], ...]
    sent_bytes: float  # their features, of an encoder
    num_ahead: int  # microbatches in flight beyond the stages behind a stage
    state_copies: int

    @classmethod
    def of(
        cls, costs: CostModel, plan: ParallelPlan, name: str, microbatches: TypicalMicrobatches, state_copies: int
    ) -> _Demand:
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
        return cls(sizes, share, received, sent, num_ahead, state_copies)

    def of_stage(self, memory: StageMemory) -> tuple[float, float, float, float]:
        """Bytes of a stage: always, of each microbatch in flight, of the running task, and without a step."""
        count, none = len(self.sizes), np.zeros(1)
        (use,) = replica_uses(memory, np.zeros(count, int), np.arange(count), self.sizes, none, none + self.sent_bytes)
        fixed = self.state_copies * memory.state.total + memory.bucket_bytes + memory.kept_bytes
        fixed += self.share * (use.fixed - memory.kept_bytes)
        held = self.state_copies * (memory.state.weights + memory.state.optimizer)
        return fixed, use.per_microbatch, use.running, held

    def received_bytes(self, layers: tuple[int, int]) -> float:
        """Bytes of the features of a microbatch that enter a stage."""
        return sum(
            num_bytes
            for entries, num_bytes in self.received
            if any(layers[0] <= layer < layers[1] for layer in entries)
        )


def _feature_bytes(costs: CostModel, encoder: str, microbatches: TypicalMicrobatches) -> list[float]:
    values = sample_features(costs, microbatches.sizes, encoder)
    return [float(values[group].sum()) for group in microbatches.groups(encoder)]


def _num_behind(plan: ParallelPlan, name: str) -> int:
    """Modules on the longest path behind a module."""
    return max((1 + _num_behind(plan, edge.target) for edge in plan.edges if edge.source == name), default=0)
