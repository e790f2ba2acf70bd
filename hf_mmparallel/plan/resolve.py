"""From a few sizes to a `ParallelPlan`, and every check that a plan can fail before a rank starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from .model_spec import LANGUAGE_MODEL, ModelSpec, ModuleSpec
from .ownership import partly_frozen_stages, stage_parameters, trainable_stages
from .parallel_plan import ModulePlan, ParallelPlan, Stage
from .plugin import ModulePlugin, MultimodalParallelPlugin
from .reading import reject_unknown_keys
from .schedules import Schedule


def split_layers(num_layers: int, plugin: ModulePlugin, name: str) -> list[tuple[int, int]]:
    """Layer ranges of each stage; extra layers go to the first stages. Raises `ValueError` when they can't be cut."""
    pp_size = plugin.pp_size
    if pp_size > num_layers:
        raise ValueError(
            f"`pp_size={pp_size}` needs at least {pp_size} layers; `{name}` has {num_layers}. "
            f"Use `pp_size<={num_layers}`."
        )
    counts = plugin.layers_per_stage or [
        num_layers // pp_size + (index < num_layers % pp_size) for index in range(pp_size)
    ]
    if sum(counts) != num_layers:
        raise ValueError(
            f"`layers_per_stage={counts}` adds up to {sum(counts)}; `{name}` has {num_layers} layers. "
            f"Make it add up to {num_layers}."
        )
    stops = [sum(counts[: index + 1]) for index in range(pp_size)]
    return [(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def _check_tp(spec: ModuleSpec, tp_size: int) -> None:
    for count, what in (
        (spec.num_heads, "attention heads"),
        (spec.num_kv_heads, "key and value heads"),
        (spec.intermediate_size, "feed-forward columns"),
    ):
        if count % tp_size:
            fits = [size for size in range(1, tp_size) if count % size == 0]
            raise ValueError(
                f"`tp_size={tp_size}` does not divide the {count} {what} of `{spec.name}`. "
                f"Use a `tp_size` that does, such as {fits[-1]}."
            )


def _check_uncut(spec: ModuleSpec, pp_size: int) -> None:
    if pp_size > 1 and spec.inner_features:
        raise ValueError(
            f"`pp_size={pp_size}`: features leave `{spec.name}` from inside its layers (DeepStack), so that it "
            f"can't be cut into stages. Use `pp_size=1`, with `dp_size` or `tp_size` above 1 for more ranks."
        )


def _check_cp(spec: ModuleSpec, cp_size: int) -> None:
    if cp_size > 1 and spec.name != LANGUAGE_MODEL:
        raise ValueError(
            f"`cp_size={cp_size}`: only the tokens of the language model are cut over ranks, the images and clips of "
            f"`{spec.name}` are not. Use `cp_size=1`, with `dp_size` or `tp_size` above 1 for more ranks."
        )


def resolve_plan(
    spec: ModelSpec,
    plugins: Mapping[str, ModulePlugin],
    world_size: int | None = None,
    schedule: Schedule = "1f1b",
    num_microbatches: int = 1,
) -> ParallelPlan:
    """
    Gives every stage its layers and ranks.

    Modules take consecutive ranks in the order of `spec`; within a module the replica varies slowest, then the stage,
    then the part of the row of tokens, then the tensor-parallel rank, so that ranks that talk most are neighbours.

    Args:
        spec (`ModelSpec`): The model.
        plugins (`Mapping[str, ModulePlugin]`): Settings by module; modules left out are on one rank.
        world_size (`int`, *optional*): Ranks that were launched; checked when given.
        schedule (`str`, *optional*, defaults to `"1f1b"`): The schedule's name.
        num_microbatches (`int`, *optional*, defaults to 1): Of each language-model replica.

    Raises:
        `ValueError`: For what does not fit, with a remedy.
    """
    reject_unknown_keys("The model", list(plugins), list(spec.modules))
    modules: dict[str, ModulePlan] = {}
    next_rank = 0
    for name, module in spec.modules.items():
        plugin = plugins.get(name, ModulePlugin())
        module = module.with_frozen(plugin.freeze)
        host = None
        if plugin.colocate_with is not None:
            host = modules.get(plugin.colocate_with)
            if host is None:
                earlier = ", ".join(f"`{other}`" for other in modules) or "none"
                raise ValueError(
                    f"`{name}` can't be colocated with `{plugin.colocate_with}`: it must stand before `{name}` in the "
                    f"model. Earlier modules: {earlier}."
                )
            sizes = _sizes(host)
            given = (plugin.dp_size, plugin.pp_size, plugin.tp_size, plugin.cp_size)
            if any(own not in (1, size) for own, size in zip(given, sizes, strict=True)):
                raise ValueError(
                    f"`{name}` shares the ranks of `{plugin.colocate_with}` (dp, pp, tp, cp = {sizes}) and can't have "
                    f"{given}. Leave its sizes out."
                )
            plugin = ModulePlugin(*sizes, layers_per_stage=plugin.layers_per_stage)
        _check_uncut(module, plugin.pp_size)
        _check_tp(module, plugin.tp_size)
        _check_cp(module, plugin.cp_size)
        ranges = split_layers(module.num_layers, plugin, name)
        trainable = trainable_stages(module, spec.tied, ranges)
        partly = partly_frozen_stages(module, spec.tied, ranges)
        replicas = []
        for replica in range(plugin.dp_size):
            stages = []
            for index, layers in enumerate(ranges):
                if host is not None:
                    ranks = host.replicas[replica][index].ranks
                else:
                    first = next_rank + (replica * plugin.pp_size + index) * plugin.cp_size * plugin.tp_size
                    starts = range(first, first + plugin.cp_size * plugin.tp_size, plugin.tp_size)
                    ranks = tuple(tuple(range(start, start + plugin.tp_size)) for start in starts)
                stages.append(Stage(layers, ranks, trainable[index], partly[index]))
            replicas.append(tuple(stages))
        if host is None:
            next_rank += plugin.num_ranks
        settings = plugins.get(name, plugin)
        modules[name] = ModulePlan(tuple(replicas), settings.activation_checkpointing, settings.context)
    plan = ParallelPlan(modules, spec.edges, schedule, num_microbatches)
    if world_size is not None:
        check_world_size(plan, world_size)
    return plan


def _sizes(module: ModulePlan) -> tuple[int, int, int, int]:
    """dp, pp, tp, cp."""
    return module.dp_size, len(module.replicas[0]), module.tp_size, module.cp_size


def check_world_size(plan: ParallelPlan, world_size: int) -> None:
    """Raises `ValueError` with each module's ranks unless exactly `world_size` ranks are planned."""
    if plan.world_size == world_size:
        return
    rows = []
    for name, module in plan.modules.items():
        rows.append(f"{name}: {module.layout} = {math.prod(_sizes(module))}")
    lost = (
        " One process is what a launch without a process group looks like: `accelerate launch --cpu` and plain "
        "`python` start one whatever `--num_processes` says; see the ready files in `examples/accelerate_configs`."
        if world_size == 1
        else ""
    )
    raise ValueError(
        f"The plan is for {plan.world_size} ranks ({'; '.join(rows)}), but {world_size} "
        f"{'was' if world_size == 1 else 'were'} launched. Launch {plan.world_size} processes or change the "
        f"sizes.{lost}"
    )


def check_plan(plan: ParallelPlan, spec: ModelSpec) -> None:
    """
    Checks a plan from a file against the model.

    Raises:
        `ValueError`: If modules, layers or ranks do not fit.
    """
    reject_unknown_keys("The model", list(plan.modules), list(spec.modules))
    missing = [name for name in spec.modules if name not in plan.modules]
    if missing:
        raise ValueError(f"The plan has no ranks for module `{missing[0]}` of the model. Add it under `modules`.")
    if set(plan.edges) != set(spec.edges):
        raise ValueError(f"The plan's edges are {list(plan.edges)}, the model's {list(spec.edges)}. Copy the model's.")
    used = set()
    for name, module in plan.modules.items():
        _check_grids(name, module)
        num_layers = spec.modules[name].num_layers
        for replica, stages in enumerate(module.replicas):
            bounds = [stage.layers for stage in stages]
            if [b[0] for b in bounds] + [num_layers] != [0] + [b[1] for b in bounds]:
                raise ValueError(
                    f"The stages of `{name}` replica {replica} hold layers {bounds}; they must follow each other from "
                    f"0 to {num_layers}, the layers of the model."
                )
            _check_uncut(spec.modules[name], len(stages))
            used.update(rank for stage in stages for rank in stage.all_ranks)
        _check_tp(spec.modules[name], module.tp_size)
        _check_cp(spec.modules[name], module.cp_size)
        cut = module.context
        ModulePlugin(cp_size=module.cp_size, cp_method=cut.method, cp_mode=cut.mode, cp_block=cut.block)  # its checks
    gaps = sorted(set(range(plan.world_size)) - used)
    if gaps:
        raise ValueError(f"The plan gives rank {gaps[0]} nothing to do. Number its ranks from 0 without gaps.")


def _check_grids(name: str, module: ModulePlan) -> None:
    """
    Raises `ValueError` unless all stages have grids of one size, in which no rank is twice, and each rank is at one
    place in its rows.
    """
    grids = [stage.ranks for _, _, stage in module.stages()]
    if not grids:
        raise ValueError(f"The plan gives module `{name}` no stages. Add at least one replica with one stage.")
    sizes = sorted({len(row) for grid in grids for row in grid})
    if len(sizes) != 1 or not sizes[0]:
        raise ValueError(
            f"The stages of `{name}` have rows of {' and '.join(map(str, sizes))} ranks. Give all of them the same "
            "`tp_size`."
        )
    counts = sorted({len(grid) for grid in grids})
    if len(counts) > 1:
        raise ValueError(
            f"The stages of `{name}` have {' and '.join(map(str, counts))} rows of ranks. Give all of them the same "
            "`cp_size`."
        )
    places: dict[int, int] = {}
    for grid in grids:
        ranks = [rank for row in grid for rank in row]
        twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
        if twice is not None:
            raise ValueError(f"The plan puts rank {twice} twice into a stage of `{name}`. Name each rank once.")
        for row in grid:
            for place, rank in enumerate(row):
                if places.setdefault(rank, place) != place:
                    raise ValueError(
                        f"The plan puts rank {rank} at places {places[rank]} and {place} of `{name}`, so that it "
                        "would hold two different shards. Give it the same place in each row."
                    )


def frozen_as_planned(spec: ModelSpec, plugin: MultimodalParallelPlugin) -> ModelSpec:
    """
    The model with what a finished plan freezes: a stage with `trainable: false` holds nothing that is trained, unless
    `freeze` of its module is set beside the plan.

    Args:
        spec (`ModelSpec`): The model.
        plugin (`MultimodalParallelPlugin`): The plan, if there is one, and the settings beside it.
    """
    if plugin.plan is None:
        return spec
    frozen: set[str] = set()
    for name, module in plugin.plan.modules.items():
        own = plugin.modules.get(name, ModulePlugin())
        if name in spec.modules and not own.freeze and "freeze" not in own.named:
            stages = [stage for _, _, stage in module.stages() if not stage.trainable]
            frozen.update(p.name for stage in stages for p in stage_parameters(spec, name, stage))
    modules = {
        name: replace(
            module,
            parameters=tuple(replace(p, trainable=p.trainable and p.name not in frozen) for p in module.parameters),
        )
        for name, module in spec.modules.items()
    }
    return replace(spec, modules=modules)


def check_trained(plan: ParallelPlan, spec: ModelSpec, settings: Mapping[str, ModulePlugin] | None = None) -> None:
    """
    Raises `ValueError` where a plan says that a stage trains nothing, and the model has parameters that it does; and
    where it says that a stage is partly frozen, and neither the model nor the settings say what of it is.
    """
    for name, module in plan.modules.items():
        own = (settings or {}).get(name, ModulePlugin())
        is_said = own.peft_config is not None or bool(own.freeze) or "freeze" in own.named
        for replica, index, stage in module.stages():
            parameters = stage_parameters(spec, name, stage)
            trained = sum(p.num_elements for p in parameters if p.trainable)
            if trained and not stage.trainable:
                raise ValueError(
                    f"The plan says that stage {index} of `{name}` replica {replica} trains nothing (`trainable: "
                    f"false`), but {trained:,} of its parameters are to be trained. Set `freeze: true` for `{name}`, "
                    "or remove `trainable: false` from its stages."
                )
            if stage.partly_frozen and not is_said and all(p.trainable for p in parameters):
                raise ValueError(
                    f"The plan says that stage {index} of `{name}` replica {replica} is partly frozen (`trainable: "
                    f"partly`), not what of it, and all of its {trained:,} parameters would be trained. Set `freeze` "
                    f"or `peft_config` of `{name}` under `modules` beside the plan, as in the `parallel_plan.json` of "
                    "the run, or `freeze: false` to train all."
                )


def _as_trained(plan: ParallelPlan, spec: ModelSpec) -> ParallelPlan:
    """The plan with its modules in the model's order, and the stages marked trainable that the model trains."""
    modules = {}
    for name in spec.modules:
        module, replicas = plan.modules[name], []
        for stages in module.replicas:
            ranges = [stage.layers for stage in stages]
            flags = zip(
                trainable_stages(spec.modules[name], spec.tied, ranges),
                partly_frozen_stages(spec.modules[name], spec.tied, ranges),
                strict=True,
            )
            replicas.append(
                tuple(
                    replace(stage, trainable=trains, partly_frozen=partly)
                    for stage, (trains, partly) in zip(stages, flags, strict=True)
                )
            )
        modules[name] = replace(module, replicas=tuple(replicas))
    return replace(plan, modules=modules)


def plan_for_model(
    plugin: MultimodalParallelPlugin, spec: ModelSpec, world_size: int | None, num_microbatches: int = 1
) -> ParallelPlan:
    """The plan of a plugin: the finished one that it carries, or one made from its sizes."""
    if plugin.plan is not None:
        plan = plugin.plan if plugin.plan.edges else replace(plugin.plan, edges=spec.edges)
        check_plan(plan, spec)
        if world_size is not None:
            check_world_size(plan, world_size)
        check_trained(plan, spec, plugin.modules)
        return _as_trained(plan, spec)
    count = plugin.num_microbatches or num_microbatches
    return resolve_plan(spec, plugin.modules, world_size, plugin.schedule or "1f1b", count)
