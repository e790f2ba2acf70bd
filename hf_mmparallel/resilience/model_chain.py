"""The layers of a model as one chain of units that templates cut into stages, with their times and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel, stage_costs
from ..plan import ModelSpec, ModulePlan, ModulePlugin, ParallelPlan, Stage, stage_parameters
from ..plan.resolve import check_tp_sizes
from .stage_limits import NO_LIMIT, stage_limits
from .state_copies import value_bytes
from .templates import LayerChain
from .typical_microbatches import TypicalMicrobatches


@dataclass(frozen=True)
class ChainUnit:
    """
    Consecutive layers of a module that are always on one stage: one layer where the model allows to cut before and
    after it.
    """

    module: str
    layers: tuple[int, int]  # first layer, and one past the last


@dataclass(frozen=True, eq=False)
class ModelChain:
    """The chain of one copy of a model: its encoders, one after the other, then the language model."""

    costs: CostModel
    modules: Mapping[str, ModulePlugin]
    tp_sizes: Mapping[str, tuple[int, ...]]  # of the stages of each module, in ascending order
    microbatches: TypicalMicrobatches  # what pipelines compute
    units: tuple[ChainUnit, ...]  # the layers that `chain` counts
    chain: LayerChain  # times and memory of stages

    @property
    def spec(self) -> ModelSpec:
        return self.costs.spec

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Parameters and optimizer state of each unit, in bytes, of one copy of it."""
        plan = _plan_of_units(self.spec, self.modules, self.units)
        return tuple(
            sum(
                parameter.num_elements * value_bytes(parameter, module.storage)
                for parameter in stage_parameters(self.spec, name, stage)
            )
            for name, module in plan.modules.items()
            for stage in module.replicas[0]
        )

    def with_own_ranks(self) -> ModelChain:
        """The same chain where no rank has layers of two modules."""
        return replace(self, chain=replace(self.chain, starts=self._starts))

    @property
    def _starts(self) -> list[int]:
        """First units of modules, but for the first one."""
        return [index for index, (before, unit) in enumerate(pairwise(self.units), 1) if before.module != unit.module]

    def pieces(self, units: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Module and layers of each part of a stage that is in one module."""
        chosen = self.units[slice(*units)]
        for name in dict.fromkeys(unit.module for unit in chosen):
            layers = [unit.layers for unit in chosen if unit.module == name]
            yield name, (layers[0][0], layers[-1][1])

    def stage_ms(self, plan: ParallelPlan) -> dict[tuple[str, int, int], float]:
        """(module, replica, stage) of a plan -> mean ms of a forward and a backward of a microbatch."""
        return mean_stage_ms(self.costs, plan, self.microbatches)


def mean_stage_ms(
    costs: CostModel, plan: ParallelPlan, microbatches: TypicalMicrobatches
) -> dict[tuple[str, int, int], float]:
    """See [`ModelChain.stage_ms`]; a microbatch without an input for a module takes no time there."""
    return {key: sum(passes_ms) for key, passes_ms in mean_pass_ms(costs, plan, microbatches).items()}


def mean_pass_ms(
    costs: CostModel, plan: ParallelPlan, microbatches: TypicalMicrobatches
) -> dict[tuple[str, int, int], tuple[float, float]]:
    """The two times that [`ModelChain.stage_ms`] adds: of a forward, and of a backward."""
    result, known = {}, {}
    chunks = {name: microbatches.chunks(costs, name, module) for name, module in plan.modules.items()}
    for key, cost in stage_costs(costs, plan).items():
        if (key[0], id(cost)) not in known:
            tokens, squares = chunks[key[0]][:, :2].T
            sums_ms = (cost.times_ms(tokens, squares, is_backward).sum() for is_backward in (False, True))
            # Processors round sums differently, and all ranks have to make the same plans.
            known[key[0], id(cost)] = tuple(float(np.float32(sum_ms / microbatches.count)) for sum_ms in sums_ms)
        result[key] = known[key[0], id(cost)]
    return result


def model_chain(
    costs: CostModel,
    # `dp_size`, `pp_size`, `layers_per_stage` and `colocate_with` have no effect
    modules: Mapping[str, ModulePlugin],
    microbatches: TypicalMicrobatches,
    memory_bytes: float | None = None,  # of a rank; no limit by default
    # encoder -> the first of its hidden states that the model's configuration selects, which its last stage must have;
    # see `earliest_selected_layer`
    selected_layers: Mapping[str, int] | None = None,
    # how many stages' weights, gradients and optimizer state a rank has memory for
    state_copies: int = 1,
    # that each stage of a module may have; those of its settings by default
    tp_sizes: Mapping[str, Sequence[int]] | None = None,
) -> ModelChain:
    """
    The chain of a model. Raises `ValueError` for settings with which a lost rank takes the only copy of something with
    it, and for sizes that stages of one module can't have.
    """
    spec = costs.spec
    settings = {name: modules.get(name, ModulePlugin()) for name in spec.modules}
    for name, plugin in settings.items():
        _check_copies(name, plugin)
    units = tuple(_units(spec, selected_layers or {}))
    sizes = {name: (plugin.tp_size,) for name, plugin in settings.items()}
    sizes |= {name: tuple(sorted(set(of_module))) for name, of_module in (tp_sizes or {}).items()}
    for name, module in _plan_of_units(spec, settings, units).modules.items():
        check_tp_sizes(spec.modules[name], module, sizes[name])
    counts = sorted({size * plugin.cp_size for name, plugin in settings.items() for size in sizes[name]})
    layer_ms, limits = [], np.full((len(counts), len(units), len(units) + 1), NO_LIMIT)
    for index, count in enumerate(counts):
        sized = {name: _on_ranks(plugin, sizes[name], count) for name, plugin in settings.items()}
        plan = _plan_of_units(spec, sized, units)
        times_ms = mean_stage_ms(costs, plan, microbatches)
        layer_ms.append([time_ms for (_, replica, _), time_ms in times_ms.items() if replica == 0])
        if memory_bytes is not None:
            limits[index] = stage_limits(costs, plan, microbatches, memory_bytes, state_copies)
        ranks = np.array([_num_ranks(sized[unit.module]) for unit in units])
        limits[index, _has_other(ranks != count)] = 0
    is_limited = len(counts) > 1 or memory_bytes is not None
    chain = LayerChain(counts, layer_ms, (), limits if is_limited else None)
    return ModelChain(costs, settings, sizes, microbatches, units, chain)


def _num_ranks(plugin: ModulePlugin) -> int:
    """Ranks of a stage."""
    return plugin.tp_size * plugin.cp_size


def _on_ranks(plugin: ModulePlugin, tp_sizes: Sequence[int], num_ranks: int) -> ModulePlugin:
    """The settings for stages of a number of ranks, or for the smallest ones if none can have this number."""
    fitting = [size for size in tp_sizes if size * plugin.cp_size == num_ranks]
    return replace(plugin, tp_size=fitting[0] if fitting else tp_sizes[0])


def _check_copies(name: str, plugin: ModulePlugin) -> None:
    """Raises `ValueError` unless each copy of a module has all of its parameters and optimizer state."""
    if plugin.zero_stage:
        raise ValueError(
            f"`zero_stage={plugin.zero_stage}` of `{name}` divides the optimizer's state among the copies of the "
            "model, so that each node has the only copy of its share, which a failure takes with it. Use "
            "`zero_stage=0`, with more pipeline stages or a larger `tp_size` for less memory on each rank."
        )


def _units(spec: ModelSpec, selected_layers: Mapping[str, int]) -> Iterator[ChainUnit]:
    for name, module in spec.modules.items():
        last = min(selected_layers.get(name, module.num_layers), module.num_layers - 1)
        cuts = [0] if module.inner_features else range(last + 1)
        for bounds in pairwise((*cuts, module.num_layers)):
            yield ChainUnit(name, bounds)


def _plan_of_units(spec: ModelSpec, modules: Mapping[str, ModulePlugin], units: Sequence[ChainUnit]) -> ParallelPlan:
    """A plan with a stage for each unit, in two copies, which sum gradients."""
    return ParallelPlan(
        {
            name: replace(
                settings_of(plugin),
                replicas=(
                    tuple(
                        Stage(unit.layers, mesh_of(plugin, range(_num_ranks(plugin))))
                        for unit in units
                        if unit.module == name
                    ),
                )
                * 2,
            )
            for name, plugin in modules.items()
        },
        spec.edges,
    )


def settings_of(plugin: ModulePlugin) -> ModulePlan:
    """The settings of a module without its stages."""
    return ModulePlan((), plugin.activation_checkpointing, plugin.context, plugin.sharding, plugin.storage)


def mesh_of(plugin: ModulePlugin, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The mesh of a stage of a module: `cp_size` tp groups that share the ranks equally."""
    tp_size = len(ranks) // plugin.cp_size
    return tuple(tuple(ranks[first : first + tp_size]) for first in range(0, len(ranks), tp_size))


def _has_other(wrong: NDArray) -> NDArray:
    """`[units, units + 1]`, by first unit and one past the last: true where one of the units is marked."""
    before = np.concatenate([[0], np.cumsum(wrong)])
    return before[None, :] > before[:-1, None]
