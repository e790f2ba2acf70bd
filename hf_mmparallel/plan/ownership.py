"""Which ranks hold which parameter: gradient sync, the global norm, saving and memory all read this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .model_spec import ModelSpec, ModuleSpec, ParameterSpec
from .parallel_plan import ParallelPlan, Stage


def uses(module: str, spec: ModelSpec, parameter: ParameterSpec) -> list[tuple[str, int]]:
    """(module, layer) of every place that reads the parameter; more than one when it is tied."""
    places = [(module, parameter.layer)]
    if parameter.name in spec.tied:
        places.append(spec.tied[parameter.name])
    return places


def stage_holds(layers: tuple[int, int], num_layers: int, layer: int) -> bool:
    """Whether a stage with `layers` holds what is used at `layer` (-1: before the first, `num_layers`: after)."""
    first = -1 if layers[0] == 0 else layers[0]
    stop = num_layers + 1 if layers[1] == num_layers else layers[1]
    return first <= layer < stop


def stage_parameters(spec: ModelSpec, module: str, stage: Stage) -> tuple[ParameterSpec, ...]:
    """The parameters that a stage holds; tied ones are held at both of their places, and once where these are one."""
    num_layers = spec.modules[module].num_layers
    found = {
        use.parameter.name: use.parameter
        for index in range(-1, num_layers + 1)
        if stage_holds(stage.layers, num_layers, index)
        for use in spec.uses.get((module, index), ())
    }
    return tuple(found.values())


def trainable_stages(
    module: ModuleSpec, tied: Mapping[str, tuple[str, int]], ranges: Sequence[tuple[int, int]]
) -> list[bool]:
    """Whether each stage of `module` holds a parameter that gets a gradient."""
    result = []
    for layers in ranges:
        held = False
        for parameter in module.parameters:
            places = [parameter.layer]
            if parameter.name in tied and tied[parameter.name][0] == module.name:
                places.append(tied[parameter.name][1])
            if parameter.trainable and any(stage_holds(layers, module.num_layers, layer) for layer in places):
                held = True
                break
        result.append(held)
    return result


@dataclass(frozen=True)
class Holding:
    """
    Where one parameter lives.

    Args:
        stages (`tuple[tuple[str, int, int], ...]`): (module, replica, stage) of each copy.
        ranks (`tuple[tuple[int, ...], ...]`):
            For each tensor-parallel rank `t`, the ranks whose copies (or `t`-th shards) are the same tensor.
    """

    stages: tuple[tuple[str, int, int], ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All ranks that have the parameter or a shard of it, in ascending order."""
        return tuple(sorted(set().union(*self.ranks)))

    @property
    def owner(self) -> int:
        """The rank that writes the parameter and counts its replicated copies."""
        return self.ranks[0][0]

    def peers(self, rank: int) -> tuple[int, ...] | None:
        """The ranks that sum their gradients with `rank`'s, `None` when it holds nothing of the parameter."""
        return next((group for group in self.ranks if rank in group), None)


def holdings(spec: ModelSpec, plan: ParallelPlan) -> dict[str, Holding]:
    """Parameter -> where it lives, in the order of the model."""
    result = {}
    by_place: dict[tuple[str, int], Holding] = {}
    for name, module in spec.modules.items():
        for parameter in module.parameters:
            places = uses(name, spec, parameter)
            key = (name, parameter.layer)
            if len(places) == 1 and key in by_place:
                result[parameter.name] = by_place[key]
                continue
            stages: list[tuple[str, int, int]] = []
            grids: list[Stage] = []
            for place, layer in places:
                for replica, index, stage in plan.modules[place].stages():
                    if (place, replica, index) not in stages and stage_holds(
                        stage.layers, spec.modules[place].num_layers, layer
                    ):
                        stages.append((place, replica, index))
                        grids.append(stage)
            tp_size = len(grids[0].ranks[0])
            ranks = tuple(tuple(sorted({row[t] for grid in grids for row in grid.ranks})) for t in range(tp_size))
            holding = Holding(tuple(stages), ranks)
            result[parameter.name] = holding
            if len(places) == 1:
                by_place[key] = holding
    return result


@dataclass(frozen=True)
class SyncGroup:
    """
    Parameters whose gradients the same ranks sum together.

    Args:
        ranks (`tuple[int, ...]`): The ranks.
        parameters (`tuple[str, ...]`): Names, in the order of the model.
        stages (`tuple[tuple[str, int, int], ...]`): (module, replica, stage) whose backwards must be done before.
    """

    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    stages: tuple[tuple[str, int, int], ...]


def sync_groups(spec: ModelSpec, plan: ParallelPlan) -> list[SyncGroup]:
    """
    The gradient sums of a step, in one order for all ranks; parameters held once and frozen ones are left out.

    Ranks with equal shards sum them. A parameter that tensor-parallel ranks hold whole is summed over all of its ranks
    at once, so that all apply the same bits.
    """
    grouped: dict[tuple[tuple[int, ...], tuple], list[str]] = {}
    table = holdings(spec, plan)
    for module in spec.modules.values():
        for parameter in module.parameters:
            if not parameter.trainable:
                continue
            holding = table[parameter.name]
            for ranks in (holding.all_ranks,) if parameter.replicated else holding.ranks:
                if len(ranks) > 1:
                    grouped.setdefault((ranks, holding.stages), []).append(parameter.name)
    return [SyncGroup(ranks, tuple(names), stages) for (ranks, stages), names in grouped.items()]
