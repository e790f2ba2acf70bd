"""Which ranks hold which parameter: gradient sync, the global norm, saving and memory all read this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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


def partly_frozen_stages(
    module: ModuleSpec, tied: Mapping[str, tuple[str, int]], ranges: Sequence[tuple[int, int]]
) -> list[bool]:
    """Whether each stage of `module` holds parameters that get a gradient, and others that get none."""
    if len({p.trainable for p in module.parameters}) < 2:
        return [False] * len(ranges)
    frozen = replace(module, parameters=tuple(replace(p, trainable=not p.trainable) for p in module.parameters))
    both = zip(trainable_stages(module, tied, ranges), trainable_stages(frozen, tied, ranges), strict=True)
    return [trains and freezes for trains, freezes in both]


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

    @cached_property
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
    """Parameter -> where it lives, in the order of the model; parameters that live alike share the object."""
    result: dict[str, Holding] = {}
    tables = {name: _stage_tables(spec, plan, name) for name in spec.modules}
    known: dict[tuple, Holding] = {}
    for name, module in spec.modules.items():
        for parameter in module.parameters:
            used = [(place, tables[place][layer]) for place, layer in uses(name, spec, parameter)]
            places = tuple(dict.fromkeys(used))
            if places not in known:
                known[places] = _holding(plan, places)
            result[parameter.name] = known[places]
    return result


def _stage_tables(spec: ModelSpec, plan: ParallelPlan, name: str) -> dict[int, tuple[int, ...]]:
    """Layer of a module -> which stage of each replica holds what is used there."""
    num_layers = spec.modules[name].num_layers
    known: dict[tuple, list[int]] = {}
    replicas = []
    for stages in plan.modules[name].replicas:
        cuts = tuple(stage.layers for stage in stages)
        if cuts not in known:
            known[cuts] = [
                next(index for index, layers in enumerate(cuts) if stage_holds(layers, num_layers, layer))
                for layer in range(-1, num_layers + 1)
            ]
        replicas.append(known[cuts])
    return dict(zip(range(-1, num_layers + 1), zip(*replicas, strict=True), strict=True))


def _holding(plan: ParallelPlan, places: Sequence[tuple[str, Sequence[int]]]) -> Holding:
    """Where something lives that is used at each of some places: modules, with a stage of each replica."""
    keys = dict.fromkeys((name, replica, index) for name, stages in places for replica, index in enumerate(stages))
    grids = [plan.stage(*key) for key in keys]
    tp_size = len(grids[0].ranks[0])
    ranks = tuple(tuple(sorted({row[t] for grid in grids for row in grid.ranks})) for t in range(tp_size))
    return Holding(tuple(keys), ranks)


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
    at once, so that all apply the same bits. Sums stand in the order in which backwards end: from the last module to
    the first and, in each, from the last stage to the first.
    """
    grouped: dict[tuple[int, tuple[int, ...]], tuple[Holding, list[str]]] = {}
    table = holdings(spec, plan)
    for module in spec.modules.values():
        for parameter in module.parameters:
            if not parameter.trainable:
                continue
            holding = table[parameter.name]
            for ranks in (holding.all_ranks,) if parameter.replicated else holding.ranks:
                if len(ranks) > 1:
                    grouped.setdefault((id(holding), ranks), (holding, []))[1].append(parameter.name)
    order = {name: number for number, name in enumerate(plan.modules)}

    def first_stage(group: SyncGroup) -> tuple[int, int]:
        return min((order[name], index) for name, _, index in group.stages)

    groups = [SyncGroup(ranks, tuple(names), own.stages) for (_, ranks), (own, names) in grouped.items()]
    return sorted(groups, key=first_stage, reverse=True)
