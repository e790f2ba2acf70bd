"""`ModuleLayout`: the sizes and the place of a module, from which a plan is built; plans in the files of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from .checkpointing import Checkpointing
from .methods import Schedule
from .model_spec import ModelSpec
from .ownership import partly_frozen_stages, trainable_stages, with_split_backwards
from .parallel_plan import (
    ContextSettings,
    ModulePlan,
    ParallelPlan,
    ShardingSettings,
    Stage,
    StorageSettings,
    fitting_virtual_stages,
    layout_text,
    settings_of,
    write_data,
)
from .planned_for import PlannedFor
from .plugin import ModulePlugin


@dataclass(frozen=True)
class ModuleLayout:
    """The layout of one module with equal replicas, as users name it and a search finds it."""

    layers: tuple[int, ...] = ()  # of each stage, in the order of the model; none in the settings of any stages
    dp_size: int = 1  # number of replicas
    cp_size: int = 1
    tp_size: int = 1
    activation_checkpointing: Checkpointing = False  # what it recomputes
    sharding: ShardingSettings = ShardingSettings()  # what its copies divide among them
    storage: StorageSettings = StorageSettings()  # precision, and what is in host memory
    context: ContextSettings = ContextSettings()  # how tokens are distributed over cp ranks
    vp_size: int = 1  # stages of each rank of a pipeline
    ep_size: int = 1  # ranks of its dp x cp x tp that share the experts of each layer
    host: str | None = None  # the module whose ranks it is on, in their order; ranks of its own by default

    @property
    def zero_stage(self) -> int:
        return self.sharding.zero_stage

    @property
    def shard_size(self) -> int | None:
        return self.sharding.shard_size

    @property
    def pp_size(self) -> int:
        return len(self.layers) // self.vp_size

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that a user can set, by their names."""
        return {name: getattr(self, name) for name in ("dp_size", "pp_size", "tp_size", "cp_size")}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    @classmethod
    def of(cls, plugin: ModulePlugin, layers: tuple[int, ...] = (), host: str | None = None) -> ModuleLayout:
        """The layout that a user asks for, with so many layers in each stage."""
        known = (f.name for f in fields(cls) if f.name not in ("layers", "host", "vp_size"))
        settings = {name: getattr(plugin, name) for name in known}
        return cls(layers, **settings, vp_size=plugin.vp_size or 1, host=host)

    @classmethod
    def of_plan(cls, module: ModulePlan) -> ModuleLayout:
        """The sizes and settings of a module of a plan, without its stages."""
        return cls((), module.dp_size, module.cp_size, module.tp_size, **settings_of(module))

    def setting(self, name: str) -> Any:
        """The value of a setting of [`ModulePlugin`] that a search keeps."""
        return next(getattr(own, name) for own in (self, self.sharding, self.storage) if hasattr(own, name))

    def with_virtual_stages(self, vp_size: int) -> ModuleLayout:
        """The layout with so many stages on each rank of a pipeline, which divide its layers, if it has enough."""
        vp_size = fitting_virtual_stages(vp_size, self.pp_size, sum(self.layers))
        if vp_size == 1 or min(self.layers) < vp_size:
            return self
        layers = (n // vp_size + (turn < n % vp_size) for turn in range(vp_size) for n in self.layers)
        return replace(self, layers=tuple(layers), vp_size=vp_size)

    def plan(self, replicas: tuple[tuple[Stage, ...], ...]) -> ModulePlan:
        """The module with stages on ranks."""
        return ModulePlan(replicas, **settings_of(self))

    def __str__(self) -> str:
        sizes = {"dp": self.dp_size, "pp": self.pp_size, "cp": self.cp_size, "tp": self.tp_size}
        return layout_text(sizes, self.ep_size, self.sharding, self.storage, self.activation_checkpointing)

    def stages(self, spec: ModelSpec, name: str, first_rank: int) -> tuple[tuple[Stage, ...], ...]:
        """The stages of each replica on consecutive ranks: the replica varies slowest, then the stage, the cp rank."""
        stops = list(accumulate(self.layers))
        ranges = [(stop - count, stop) for stop, count in zip(stops, self.layers, strict=True)]
        trainable = trainable_stages(spec.modules[name], spec.tied, ranges)
        partly = partly_frozen_stages(spec.modules[name], spec.tied, ranges)
        grid = self.cp_size * self.tp_size
        replicas = []
        for replica in range(self.dp_size):
            stages = []
            for index, layers in enumerate(ranges):
                start = first_rank + (replica * self.pp_size + index % self.pp_size) * grid
                firsts = range(start, start + grid, self.tp_size)
                mesh = tuple(tuple(range(rank, rank + self.tp_size)) for rank in firsts)
                stages.append(Stage(layers, mesh, trainable[index], partly[index]))
            replicas.append(tuple(stages))
        return tuple(replicas)


def plan_from(
    layouts: Mapping[str, ModuleLayout],
    spec: ModelSpec,
    schedule: Schedule = "1f1b",
    num_microbatches: int = 1,
    microbatch_assignment: str | None = None,
    split_backward: Mapping[str, bool | None] | None = None,
) -> ParallelPlan:
    """
    The plan of a layout for each module. Modules get consecutive ranks in the order of `layouts`, but for those with a
    `host`, whose ranks they share; `spec` has the frozen parameters marked.
    """
    first_ranks, first_rank = {}, 0
    for name, layout in layouts.items():
        if layout.host is None:
            first_ranks[name] = first_rank
            first_rank += layout.num_ranks
    modules = {}
    for name in spec.modules:
        layout = layouts[name]
        replicas = layout.stages(spec, name, first_ranks[layout.host or name])
        modules[name] = layout.plan(replicas)
    plan = ParallelPlan(modules, spec.edges, schedule, num_microbatches, microbatch_assignment=microbatch_assignment)
    return with_split_backwards(plan, spec.modules, spec.tied, split_backward)


def layout_data(
    plan: ParallelPlan, modules: Mapping[str, ModulePlugin], planned_for: PlannedFor | None = None
) -> dict[str, Any]:
    """
    The value of `parallel=` that repeats a run.

    Returns:
        `dict`: The plan and, under `modules`, the settings that a plan does not contain, such as `freeze`. The plan
        alone if there is nothing beside it.
    """
    settings = {name: module.beside_plan for name, module in modules.items() if module.beside_plan}
    beside: dict[str, Any] = {} if planned_for is None else {"planned_for": planned_for.to_dict()}
    if settings:
        beside["modules"] = settings
    return {**beside, "plan": plan.to_dict()} if beside else plan.to_dict()


def save_layout(
    path: str | Path,
    plan: ParallelPlan,
    modules: Mapping[str, ModulePlugin],
    planned_for: PlannedFor | None = None,
) -> None:
    """Writes [`layout_data`] as YAML, or as JSON if the file name ends in `.json`."""
    write_data(path, layout_data(plan, modules, planned_for))
