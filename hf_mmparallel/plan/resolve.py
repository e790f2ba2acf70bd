"""Builds a `ParallelPlan` from the sizes of the modules, and checks a plan against a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .layout import ModuleLayout, plan_from
from .methods import POLICIES, Schedule
from .model_spec import LANGUAGE_MODEL, ModelSpec, ModuleSpec
from .ownership import partly_frozen_stages, stage_parameters, trainable_stages
from .parallel_plan import ContextSettings, ModulePlan, ParallelPlan, fitting_virtual_stages
from .plugin import SIZES, ModulePlugin, MultimodalParallelPlugin
from .reading import reject_unknown_keys


def split_layers(num_layers: int, plugin: ModulePlugin, name: str) -> tuple[int, ...]:
    """Layers of each stage, more in the first ones by default; raises `ValueError` if they don't add up."""
    vp_size = plugin.vp_size or 1
    count = plugin.pp_size * vp_size
    if count > num_layers:
        sizes = f"`pp_size={plugin.pp_size}`" + f" with `vp_size={vp_size}`" * (vp_size > 1)
        raise ValueError(
            f"{sizes} needs at least {count} layers; `{name}` has {num_layers}. "
            f"Use `pp_size<={num_layers // vp_size}`."
        )
    counts = plugin.layers_per_stage or [num_layers // count + (index < num_layers % count) for index in range(count)]
    if sum(counts) != num_layers:
        raise ValueError(
            f"`layers_per_stage={counts}` adds up to {sum(counts)}; `{name}` has {num_layers} layers. "
            f"Make it add up to {num_layers}."
        )
    return tuple(counts)


def check_tp_size(spec: ModuleSpec, tp_size: int) -> None:
    """Raises `ValueError` for a tensor-parallel size that does not divide the heads and columns of a module."""
    _check_chain(spec, {"tp_size": (tp_size, tp_size > 1)})
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


def _check_chain(spec: ModuleSpec, settings: Mapping[str, tuple[Any, bool]]) -> None:
    """Raises `ValueError` for a setting that goes block by block through a module whose blocks are no chain."""
    for name, (value, is_asked) in settings.items():
        if is_asked and not spec.is_chain:
            raise ValueError(
                f"`{name}={value}` of `{spec.name}`: the blocks of its `{spec.stack}` are no chain of equal layers "
                "that it could be cut by. Use `dp_size` above 1 for more ranks, with `zero_stage=1` for less memory."
            )


def _check_stages(spec: ModuleSpec, module: ModulePlan) -> None:
    """Refuses stages and sharding of a module whose blocks are no chain."""
    num_stages, zero_stage = max(len(stages) for stages in module.replicas), module.sharding.zero_stage
    if num_stages > 1 and not spec.has_one_width:
        raise ValueError(
            f"`pp_size={num_stages}` of `{spec.name}`: the layers of its `{spec.stack}` have unlike widths, and what "
            "passes from stage to stage has one. Use `pp_size=1`, with `dp_size` or `tp_size` above 1 for more ranks."
        )
    offloads = module.storage.offload_params
    cuts = {"pp_size": (num_stages, num_stages > 1), "zero_stage": (zero_stage, zero_stage > 1)}
    _check_chain(spec, {**cuts, "offload_params": (offloads, offloads)})


def _check_cp(spec: ModuleSpec, cp_size: int, context: ContextSettings) -> None:
    if spec.name == LANGUAGE_MODEL:
        return
    if cp_size > 1 and not spec.is_encoder:
        raise ValueError(
            f"`cp_size={cp_size}` of `{spec.name}`: its tokens can't be divided, only those of the language model and "
            "the images of encoders. Use `cp_size=1`, with `dp_size` or `tp_size` above 1 for more ranks."
        )
    if context != ContextSettings():
        raise ValueError(
            f"`cp_method={context.method!r}`, `cp_mode={context.mode!r}`, `cp_block={context.block}` of `{spec.name}` "
            "say how the tokens of a row are divided, but an encoder's cp ranks share images, whole or in equal "
            "parts. Leave them out."
        )


def _check_sharding(name: str, module: ModulePlan) -> None:
    shard_size, copies = module.sharding.shard_size, module.dp_size * module.cp_size
    if shard_size is not None and copies % shard_size:
        fits = ", ".join(str(size) for size in range(2, copies + 1) if copies % size == 0)
        raise ValueError(
            f"`shard_size={shard_size}` does not divide {copies}, the number of copies of each parameter of `{name}` "
            f"(`dp_size={module.dp_size}` x `cp_size={module.cp_size}`). "
            + (f"Use one of {fits}, or leave it out for all copies." if fits else "Leave it out, or use more copies.")
        )
    stage, cp_size = module.sharding.zero_stage, module.cp_size
    if stage > 1 and shard_size is not None and shard_size % cp_size and cp_size % shard_size:
        raise ValueError(
            f"`shard_size={shard_size}` of `{name}`: with `zero_stage={stage}` it must divide `cp_size={cp_size}` or "
            "be a multiple of it, since all cp ranks compute a microbatch together. Use another, or `zero_stage=1`."
        )
    if stage > 1:
        _check_joint(name, module, "gradients", f"`zero_stage={stage}`", "`zero_stage=1`")


def _check_joint(name: str, module: ModulePlan, what: str, setting: str, remedy: str) -> None:
    """Raises `ValueError` unless replicas that exchange something layer by layer can run their tasks jointly."""
    size = module.joint_replicas
    for first in range(0, module.dp_size, size):
        joint = module.replicas[first : first + size]
        if len({tuple(stage.layers for stage in stages) for stages in joint}) > 1:
            raise ValueError(
                f"{setting} of `{name}`: its replicas, which exchange {what} layer by layer, have stages of "
                f"different layers. Give all of them the same, or use {remedy}."
            )
        for stages in zip(*joint, strict=True):
            ranks = [rank for stage in stages for rank in stage.all_ranks]
            if ranks != sorted(set(ranks)):
                raise ValueError(
                    f"{setting} of `{name}`: the ranks {ranks} of its replicas, which exchange {what} layer "
                    f"by layer, are not in ascending order. Sort them, or use {remedy}."
                )


def possible_ep_sizes(num_experts: int, dp_size: int, cp_size: int, tp_size: int) -> list[int]:
    """
    The numbers of ranks of a stage, above 1, that can share the experts of a layer: whole tp groups, either a divisor
    of those of a replica or all those of a divisor of the replicas.
    """
    rows = [*range(1, cp_size), *(replicas * cp_size for replicas in range(1, dp_size + 1))]
    sizes = [n * tp_size for n in rows if not (dp_size * cp_size % n or (n < cp_size and cp_size % n))]
    return [size for size in sizes if 1 < size <= num_experts and num_experts % size == 0]


def _check_experts(spec: ModuleSpec, module: ModulePlan) -> None:
    """Raises `ValueError` unless so many ranks can share the experts of a module as the plan says."""
    name, size = spec.name, module.ep_size
    if size == 1:
        return
    if not spec.num_experts:
        raise ValueError(
            f"`ep_size={size}` of `{name}`: none of its layers has experts that ranks can share, whose weights have a "
            "slice for each expert, and whose forward is that of transformers' `use_experts_implementation` or takes "
            "a block of rows for each expert. Leave `ep_size` out."
        )
    if len(module.tp_sizes) > 1:
        raise ValueError(
            f"`ep_size={size}` of `{name}` shares experts among whole tp groups, whose sizes "
            f"{' and '.join(map(str, module.tp_sizes))} differ. Use tp groups of one size, or `ep_size=1`."
        )
    fits = possible_ep_sizes(spec.num_experts, module.dp_size, module.cp_size, module.tp_size)
    if size not in fits:
        remedy = f"Use one of {', '.join(map(str, fits))}" if fits else "Leave `ep_size` out"
        sizes = " x ".join(f"`{key}={getattr(module, key)}`" for key in ("dp_size", "cp_size", "tp_size"))
        raise ValueError(
            f"`ep_size={size}` of `{name}` can't share {spec.num_experts} experts among the ranks of a stage "
            f"({sizes}): it has to divide the experts, and be whole tp groups: a divisor of those of a "
            f"replica, or all those of a divisor of the replicas. {remedy}."
        )
    if module.expert_replicas > 1:
        _check_joint(name, module, "tokens", f"`ep_size={size}`", "an `ep_size` within a replica")


def sharding_without_effect(modules: Mapping[str, ModulePlan] | Mapping[str, ModulePlugin]) -> Iterator[str]:
    """A sentence for each module whose ZeRO stage has no copies of parameters to divide anything among."""
    for name, module in modules.items():
        stage, size = module.sharding.zero_stage, module.sharding.shard_size
        copies = module.dp_size * module.cp_size
        if stage and copies == 1:
            yield (
                f"`zero_stage={stage}` of `{name}` has no effect: there is one copy of each of its parameters "
                "(`dp_size=1`, `cp_size=1`), and nothing to divide. Use more copies, or leave it out."
            )
        elif stage and size == 1:
            yield (
                f"`zero_stage={stage}` of `{name}` has no effect with `shard_size=1`, which divides nothing among its "
                f"{copies} copies. Leave `shard_size` out for all of them."
            )


def resolve_plan(
    spec: ModelSpec,
    plugins: Mapping[str, ModulePlugin],
    world_size: int | None = None,
    schedule: Schedule = "1f1b",
    num_microbatches: int = 1,
) -> ParallelPlan:
    """
    Builds a plan: assigns layers and ranks to every stage.

    Modules get consecutive ranks in the order of `spec`. Within a module the replica varies slowest, then the stage,
    the cp rank and the tp rank, so that the ranks that communicate most are neighbours. A module with `colocate_with`
    has the ranks of the other one in the same order, with sizes of its own or those of the other one.

    Raises:
        `ValueError`: For sizes that do not fit the model or the number of ranks.
    """
    reject_unknown_keys("The model", list(plugins), list(spec.modules))
    plugins = {name: plugins.get(name, ModulePlugin()) for name in spec.modules}
    spec = replace(spec, modules={name: m.with_frozen(plugins[name].freeze) for name, m in spec.modules.items()})
    layouts: dict[str, ModuleLayout] = {}
    for name in _hosts_first(plugins):
        plugin, module, host = plugins[name], spec.modules[name], plugins[name].colocate_with
        if host is not None:
            plugin = _on_ranks_of(layouts[host], plugin, name)
            host = layouts[host].host or host
        plugin = _with_virtual_stages(plugin, module, schedule)
        check_tp_size(module, plugin.tp_size)
        _check_cp(module, plugin.cp_size, plugin.context)
        plugin.check_deepspeed_stages(name, plugin.pp_size)
        layouts[name] = ModuleLayout.of(plugin, split_layers(module.num_layers, plugin, name), host)
    wanted = {name: plugin.split_backward for name, plugin in plugins.items()}
    in_order = {name: layouts[name] for name in spec.modules}
    plan = plan_from(in_order, spec, schedule, num_microbatches, split_backward=wanted)
    for name, planned in plan.modules.items():
        _check_experts(spec.modules[name], planned)
        _check_sharding(name, planned)
        _check_stages(spec.modules[name], planned)
    if world_size is not None:
        check_world_size(plan, world_size)
    return plan


def _hosts_first(plugins: Mapping[str, ModulePlugin]) -> list[str]:
    """The modules, each behind the one whose ranks it shares."""
    hosts = {name: plugin.colocate_with for name, plugin in plugins.items()}
    for name, host in hosts.items():
        reject_unknown_keys(f"`colocate_with` of `{name}` names a module, and the model", [host or name], list(hosts))
    ordered: list[str] = []
    while len(ordered) < len(hosts):
        found = [name for name in hosts if name not in ordered and (hosts[name] is None or hosts[name] in ordered)]
        if not found:
            left = ", ".join(f"`{name}`" for name in hosts if name not in ordered)
            raise ValueError(
                f"{left}: none has ranks of its own, since each is colocated with another of them. Leave "
                "`colocate_with` out for one of them."
            )
        ordered += found
    return ordered


def _on_ranks_of(host: ModuleLayout, plugin: ModulePlugin, name: str) -> ModulePlugin:
    """The settings of a colocated module with its sizes: its own if it names others than those of the host."""
    given = {key: getattr(plugin, key) for key in SIZES if getattr(plugin, key) != 1 or key in plugin.named}
    sizes = host.sizes
    if any(sizes[key] != size for key, size in given.items()):
        sizes = {**dict.fromkeys(SIZES, 1), **given}
        if "dp_size" not in given:  # as many copies as there are ranks for
            sizes["dp_size"] = max(1, host.num_ranks // math.prod(sizes.values()))
        if math.prod(sizes.values()) != host.num_ranks:
            named = " x ".join(f"`{key}={size}`" for key, size in given.items())
            raise ValueError(
                f"{named} of `{name}` does not fill the {host.num_ranks} ranks that it shares with "
                f"`{plugin.colocate_with}`. Use sizes whose product is {host.num_ranks}, or leave them out for those "
                f"of `{plugin.colocate_with}` ({host})."
            )
    return replace(plugin, **sizes, colocate_with=None)


def _with_virtual_stages(plugin: ModulePlugin, module: ModuleSpec, schedule: Schedule) -> ModulePlugin:
    """The settings with the number of virtual stages that the schedule has by default."""
    if plugin.vp_size is not None or plugin.layers_per_stage is not None:
        return plugin
    vp_size = fitting_virtual_stages(POLICIES[schedule].vp_size, plugin.pp_size, module.num_layers)
    return replace(plugin, vp_size=vp_size) if vp_size > 1 else plugin


def check_world_size(plan: ParallelPlan, world_size: int) -> None:
    """Raises `ValueError`, with the sizes of each module, unless the plan has exactly `world_size` ranks."""
    if plan.world_size == world_size:
        return
    layouts = [
        f"{name}: {module.layout} = {len({rank for _, _, stage in module.stages() for rank in stage.all_ranks})}"
        for name, module in plan.modules.items()
    ]
    hint = (
        " `accelerate launch --cpu` and plain `python` start one process without a process group, whatever "
        "`--num_processes` says; see the config files in `examples/accelerate_configs`."
        if world_size == 1
        else ""
    )
    raise ValueError(
        f"The plan is for {plan.world_size} ranks ({'; '.join(layouts)}), but {world_size} "
        f"{'was' if world_size == 1 else 'were'} launched. Launch {plan.world_size} processes or change the "
        f"sizes.{hint}"
    )


def check_plan(plan: ParallelPlan, spec: ModelSpec) -> None:
    """Raises `ValueError` unless modules, edges, layers and ranks of a finished plan match the model."""
    reject_unknown_keys("The model", list(plan.modules), list(spec.modules))
    missing = [name for name in spec.modules if name not in plan.modules]
    if missing:
        raise ValueError(f"The plan has no ranks for module `{missing[0]}` of the model. Add it under `modules`.")
    if set(plan.edges) != set(spec.edges):
        raise ValueError(f"The plan's edges are {list(plan.edges)}, the model's {list(spec.edges)}. Copy the model's.")
    _check_replica_microbatches(plan)
    used = set()
    for name, module in plan.modules.items():
        _check_meshes(name, module)
        num_layers = spec.modules[name].num_layers
        for replica, stages in enumerate(module.replicas):
            bounds = [stage.layers for stage in stages]
            if [b[0] for b in bounds] + [num_layers] != [0] + [b[1] for b in bounds]:
                raise ValueError(
                    f"The stages of `{name}` replica {replica} have layers {bounds}, which do not cover 0 to "
                    f"{num_layers} in order. Give them consecutive ranges of the model's {num_layers} layers."
                )
            used.update(rank for stage in stages for rank in stage.all_ranks)
        for tp_size in module.tp_sizes:
            check_tp_size(spec.modules[name], tp_size)
        check_tp_sizes(spec.modules[name], module, module.tp_sizes)
        _check_cp(spec.modules[name], module.cp_size, module.context)
        context = module.context  # validated by `ModulePlugin`, as are `sharding` and `storage`
        ModulePlugin(
            dp_size=module.dp_size,
            cp_size=module.cp_size,
            cp_method=context.method,
            cp_mode=context.mode,
            cp_block=context.block,
            activation_checkpointing=module.activation_checkpointing,
            **asdict(module.sharding),
            **asdict(module.storage),
        )
        _check_experts(spec.modules[name], module)
        _check_sharding(name, module)
        _check_stages(spec.modules[name], module)
    gaps = sorted(set(range(plan.world_size)) - used)
    if gaps:
        raise ValueError(f"The plan gives rank {gaps[0]} nothing to do. Number its ranks from 0 without gaps.")


def _check_replica_microbatches(plan: ParallelPlan) -> None:
    """Raises `ValueError` unless each language-model replica has microbatches."""
    counts, dp_size = plan.replica_microbatches, plan.modules[LANGUAGE_MODEL].dp_size
    if counts is not None and len(counts) != dp_size:
        raise ValueError(
            f"`replica_microbatches={list(counts)}` of the plan are {len(counts)} numbers, but `{LANGUAGE_MODEL}` has "
            f"{dp_size} replicas. Give one number for each, or leave it out."
        )
    if counts is not None and min(counts) < 1:
        raise ValueError(
            f"`replica_microbatches={list(counts)}` of the plan: each replica of `{LANGUAGE_MODEL}` needs at least "
            "one microbatch. Use larger numbers, or leave it out."
        )


def _check_meshes(name: str, module: ModulePlan) -> None:
    """Raises `ValueError` unless meshes have equally many rows, and each rank has one place in all of them."""
    meshes = [stage.mesh for _, _, stage in module.stages()]
    if not meshes:
        raise ValueError(f"The plan gives module `{name}` no stages. Add at least one replica with one stage.")
    places: dict[int, tuple[int, int]] = {}
    for mesh in meshes:
        sizes = sorted({len(tp_group) for tp_group in mesh})
        if len(sizes) != 1 or not sizes[0]:
            raise ValueError(
                f"A stage of `{name}` has tp groups of {' and '.join(map(str, sizes))} ranks. Give all tp groups of a "
                "stage the same size."
            )
        ranks = [rank for tp_group in mesh for rank in tp_group]
        duplicate = next((rank for rank in ranks if ranks.count(rank) > 1), None)
        if duplicate is not None:
            raise ValueError(f"The plan puts rank {duplicate} twice into a stage of `{name}`. Name each rank once.")
        for tp_group in mesh:
            for tp_rank, rank in enumerate(tp_group):
                place = places.setdefault(rank, (tp_rank, sizes[0]))
                if place != (tp_rank, sizes[0]):
                    raise ValueError(
                        f"The plan gives rank {rank} the tp ranks {place[0]} and {tp_rank} in `{name}`, of "
                        f"{place[1]} and {sizes[0]} ranks, so that it would need two different shards. Give it the "
                        "same position in tp groups of one size."
                    )
    counts = sorted({len(mesh) for mesh in meshes})
    if len(counts) > 1:
        raise ValueError(
            f"The stages of `{name}` have {' and '.join(map(str, counts))} tp groups. Give all of them the same "
            "`cp_size`."
        )


def check_tp_sizes(spec: ModuleSpec, module: ModulePlan, tp_sizes: Sequence[int]) -> None:
    """
    Raises `ValueError` for what stages with tp groups of unlike sizes, in one plan or in plans that follow each other,
    can't have: ZeRO, context parallelism, and a matrix of which not all borders are those of equal slices.
    """
    if len(tp_sizes) == 1:
        return
    sizes, finest = " and ".join(map(str, tp_sizes)), math.lcm(*tp_sizes)
    reason = f"the stages of `{spec.name}` have tp groups of {sizes} ranks, whose shards of a matrix differ."
    if module.sharding.zero_stage:
        raise ValueError(
            f"`zero_stage={module.sharding.zero_stage}` of `{spec.name}` divides equal shards among copies, and "
            f"{reason} Use `zero_stage=0`, or tp groups of one size."
        )
    if module.cp_size > 1:
        raise ValueError(
            f"`cp_size={module.cp_size}` of `{spec.name}` assigns tokens to ranks by the costs of one kind of stage, "
            f"and {reason} Use `cp_size=1`, or tp groups of one size."
        )
    for parameter in spec.parameters:
        size = 0 if parameter.tp_dim is None else parameter.shape[parameter.tp_dim] // parameter.tp_blocks
        if size % finest and set(tp_sizes) - {1, finest}:
            raise ValueError(
                f"The stages of `{spec.name}` have tp groups of {sizes} ranks, which can't all cut the {size} rows or "
                f"columns of `{parameter.name}`: {finest} does not divide them. Use tp groups of one size, or of one "
                "size and of single ranks."
            )


def check_trained(plan: ParallelPlan, spec: ModelSpec, settings: Mapping[str, ModulePlugin] | None = None) -> None:
    """
    Raises `ValueError` for a stage with `trainable: false` that has trainable parameters, and for a stage with
    `trainable: partly` if neither the model nor the settings say which parameters are frozen.
    """
    for name, module in plan.modules.items():
        plugin = (settings or {}).get(name, ModulePlugin())
        is_explicit = plugin.peft_config is not None or bool(plugin.freeze) or "freeze" in plugin.named
        for replica, index, stage in module.stages():
            parameters = stage_parameters(spec, name, stage)
            num_trained = sum(p.num_elements for p in parameters if p.trainable)
            if num_trained and not stage.trainable:
                raise ValueError(
                    f"The plan says that stage {index} of `{name}` replica {replica} trains nothing (`trainable: "
                    f"false`), but {num_trained:,} of its parameters are trainable. Set `freeze: true` for `{name}`, "
                    "or remove `trainable: false` from its stages."
                )
            if stage.partly_frozen and not is_explicit and all(p.trainable for p in parameters):
                raise ValueError(
                    f"The plan says that stage {index} of `{name}` replica {replica} is partly frozen (`trainable: "
                    f"partly`), but not which parameters, and all {num_trained:,} would be trained. Set `freeze` "
                    f"or `peft_config` of `{name}` under `modules` beside the plan, as in the `parallel_plan.json` of "
                    "the run, or `freeze: false` to train all."
                )


def as_trained(plan: ParallelPlan, spec: ModelSpec) -> ParallelPlan:
    """The plan with its modules in the model's order, and `trainable` of the stages as in the model."""
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
                    replace(
                        stage,
                        trainable=trains,
                        partly_frozen=partly,
                        splits_backward=stage.splits_backward and trains,
                    )
                    for stage, (trains, partly) in zip(stages, flags, strict=True)
                )
            )
        modules[name] = replace(module, replicas=tuple(replicas))
    return replace(plan, modules=modules)


def plan_for_model(
    plugin: MultimodalParallelPlugin, spec: ModelSpec, world_size: int | None, num_microbatches: int = 1
) -> ParallelPlan:
    """The plan of a plugin: its finished plan, or one built from its sizes."""
    if plugin.plan is not None:
        plan = plugin.plan if plugin.plan.edges else replace(plugin.plan, edges=spec.edges)
        check_plan(plan, spec)
        if world_size is not None:
            check_world_size(plan, world_size)
        check_trained(plan, spec, plugin.modules)
        return as_trained(plan, spec)
    count = plugin.num_microbatches or num_microbatches
    reject_unknown_keys("The model", list(plugin.modules), list(spec.modules))
    modules = {name: plugin.settings_of(name) for name in spec.modules}
    return resolve_plan(spec, modules, world_size, plugin.schedule or "1f1b", count)
