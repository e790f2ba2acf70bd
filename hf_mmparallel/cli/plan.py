"""`hf-mmparallel plan` and `hf-mmparallel simulate`: from a configuration to a table, a time and pictures."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..arrange import contiguous_step, num_microbatches
from ..cost import Hardware, RankMemory, StepCost, analytic_costs, eager_caps, hardware, memory_per_rank
from ..cost.memory import GIB
from ..plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    SampleSizes,
    StepPlan,
    SyncGroup,
    check_plan,
    plan_for_model,
    sync_groups,
)
from ..schedule import Program, Simulation, build_program, simulate
from ..schedule.draw import chrome_trace, gantt_png, gantt_text, rank_ranges
from .table import plan_table

SHORT_NAMES = {
    "dp": "dp_size",
    "pp": "pp_size",
    "tp": "tp_size",
    "cp": "cp_size",
    "layers": "layers_per_stage",
    "colocate": "colocate_with",
    "checkpointing": "activation_checkpointing",
}


@dataclass(frozen=True)
class Prediction:
    """
    One step of a plan, worked out.

    Args:
        plan (`ParallelPlan`): The plan.
        step (`StepPlan`): The arrangement of a full global batch.
        groups (`list[SyncGroup]`): The gradient sums.
        program (`Program`): The checked program.
        simulation (`Simulation`): Its replay.
        memory (`dict[int, RankMemory]`, *optional*): Rank -> its memory, when the model is known.
    """

    plan: ParallelPlan
    step: StepPlan
    groups: list[SyncGroup]
    program: Program
    simulation: Simulation
    memory: dict[int, RankMemory] | None = None


def parse_module(text: str) -> tuple[str, ModulePlugin]:
    """
    Reads `vision:dp=2,freeze=tower`.

    Args:
        text (`str`): What follows `--module`.

    Raises:
        `ValueError`: If it has another form or an unknown setting.
    """
    name, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not name or not colon or not all(key and equals and value for key, equals, value in pairs):
        raise ValueError(f"`--module {text}` must look like `vision:dp=2,tp=2`: a name, a colon, `key=value` pairs.")
    settings = {SHORT_NAMES.get(key, key): _value(value) for key, _, value in pairs}
    layers = settings.get("layers_per_stage")
    if layers is not None:
        parts = str(layers).split("/")
        if not all(part.isdecimal() for part in parts):
            raise ValueError(
                f"`layers={layers}` must be numbers with slashes between them, such as `layers=10/12/12`."
            )
        settings["layers_per_stage"] = [int(part) for part in parts]
    return name, ModulePlugin.from_dict(settings)


def _value(text: str) -> Any:
    """A number, a truth value, or the text itself."""
    if text.isdecimal():
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def read_model(source: str, plugins: Mapping[str, ModulePlugin]) -> ModelSpec:
    """
    Builds the model of a configuration on the meta device and reads its modules, with frozen parameters marked.

    Args:
        source (`str`): A folder, the path of a `config.json`, or a model id.
        plugins (`Mapping[str, ModulePlugin]`): Settings of modules.

    Raises:
        `ValueError`: If `source` looks like a path and is not there, or is no model.
    """
    path = Path(source)
    if not path.exists() and (source.startswith((".", "/", "~")) or path.suffix or source.count("/") > 1):
        raise ValueError(f"`--model {source}` does not exist. Give a model folder, a config.json or a model id.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"`--model {source}` is a folder without a config.json. Give the folder of a saved model.")
    from ..modeling import build_model_spec
    from ..modeling.loading import build_on_meta

    spec = build_model_spec(build_on_meta(source))
    modules = {
        name: module.with_frozen(plugins[name].freeze) if name in plugins else module
        for name, module in spec.modules.items()
    }
    return replace(spec, modules=modules)


def run_plan(args: argparse.Namespace) -> None:
    """Runs `hf-mmparallel plan`."""
    device = hardware(args.gpu_type)
    if args.parallel is not None:
        plugin = MultimodalParallelPlugin.from_any(args.parallel)
    else:
        modules = [parse_module(text) for text in args.module]
        names = [name for name, _ in modules]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"`--module {twice}` is given twice. Put all of its settings into one.")
        plugin = MultimodalParallelPlugin(dict(modules))
    spec = read_model(args.model, plugin.modules)
    plan = plan_for_model(plugin, spec, None)
    if args.gpus is not None and args.gpus != plan.world_size:
        raise ValueError(
            f"`--gpus {args.gpus}`: the plan takes {plan.world_size} ranks ({_layouts(plan)}). "
            f"Change the sizes, or use `--gpus {plan.world_size}`."
        )
    batch = _global_batch_size(args, plan, plugin.num_microbatches)
    plan = _with_batch(args, plan, batch)
    prediction = predict(args, plan, spec, device, batch)
    console = Console(width=None if Console().is_terminal else 160)
    report(console, args, spec, prediction, batch)
    if args.schedule:
        console.print(
            gantt_text(prediction.simulation, _width(console)), markup=False, highlight=False, soft_wrap=True
        )
    if args.output:
        plan.save(args.output)
        console.print(f"Plan written to {args.output}", highlight=False)
    _write_pictures(console, args, prediction)
    if args.dry_run:
        check_memory(prediction, device)
        console.print(
            f"Dry run passed. Checked: {len(plan.modules)} modules fit {plan.world_size} ranks; "
            f"{_memory_claim(device)}; every task of a step of {batch} samples runs once, sends match receives, no "
            "order of events deadlocks; the replay of the step ends. No weights were read and nothing was computed.",
            highlight=False,
            soft_wrap=True,
        )


def run_simulate(args: argparse.Namespace) -> None:
    """Runs `hf-mmparallel simulate`."""
    device = hardware(args.gpu_type)
    loaded = MultimodalParallelPlugin.from_any(args.plan).plan
    if loaded is None:
        raise ValueError(
            f"`{args.plan}` holds settings of modules, no plan. Make one with `hf-mmparallel plan --output`."
        )
    spec = None
    if args.model:
        spec = read_model(args.model, {})
        check_plan(loaded, spec)
        spec = freeze_as_planned(spec, loaded)
    batch = _global_batch_size(args, loaded, loaded.num_microbatches)
    prediction = predict(args, _with_batch(args, loaded, batch), spec, device, batch)
    console = Console(width=None if Console().is_terminal else 160)
    report(console, args, spec, prediction, batch)
    console.print(gantt_text(prediction.simulation, _width(console)), markup=False, highlight=False, soft_wrap=True)
    _write_pictures(console, args, prediction)


def freeze_as_planned(spec: ModelSpec, plan: ParallelPlan) -> ModelSpec:
    """Marks the parameters of stages that the plan says have nothing trainable; a plan keeps no finer settings."""
    modules = {}
    for name, module in spec.modules.items():
        stages = [stage for _, _, stage in plan.modules[name].stages() if not stage.trainable]
        parameters = []
        for parameter in module.parameters:
            layer = min(max(parameter.layer, 0), module.num_layers - 1)
            frozen = any(stage.layers[0] <= layer < stage.layers[1] for stage in stages)
            parameters.append(replace(parameter, trainable=parameter.trainable and not frozen))
        modules[name] = replace(module, parameters=tuple(parameters))
    return replace(spec, modules=modules)


def _global_batch_size(args: argparse.Namespace, plan: ParallelPlan, wanted: int | None) -> int:
    """The size that was asked for, or that of enough microbatches to fill the pipelines twice."""
    if args.global_batch_size is not None:
        return args.global_batch_size
    dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    depth = max(len(stages) for stages in plan.modules[LANGUAGE_MODEL].replicas) + (len(plan.modules) > 1)
    return args.microbatch_size * dp_size * (wanted or 2 * depth)


def _with_batch(args: argparse.Namespace, plan: ParallelPlan, global_batch_size: int) -> ParallelPlan:
    """The plan with the number of microbatches of this batch."""
    count = num_microbatches(global_batch_size, args.microbatch_size, plan.modules[LANGUAGE_MODEL].dp_size)
    return replace(plan, num_microbatches=count)


def _layouts(plan: ParallelPlan) -> str:
    """`vision: dp 2 x pp 1 x tp 1; ...`."""
    return "; ".join(f"{name}: {module.layout}" for name, module in plan.modules.items())


def predict(
    args: argparse.Namespace, plan: ParallelPlan, spec: ModelSpec | None, device: Hardware, global_batch_size: int
) -> Prediction:
    """Builds, checks and replays the program of one full step; with a model by its sizes, else in units."""
    step = contiguous_step(plan, range(global_batch_size), args.microbatch_size)
    if spec is None:
        program = build_program(plan, step, [])
        return Prediction(plan, step, [], program, simulate(plan, program))
    tokens = {name: args.seq_len if name == LANGUAGE_MODEL else args.image_tokens for name in plan.modules}
    sizes = SampleSizes.uniform(tokens, global_batch_size)
    costs, groups = analytic_costs(spec, device), sync_groups(spec, plan)
    cost = StepCost(costs, plan, step, sizes, groups)
    memory_bytes = None if device.memory_gib is None else device.memory_gib * GIB
    caps = eager_caps(costs, plan, step, sizes, memory_bytes) if plan.schedule == "eager" else None
    program = build_program(plan, step, groups, cost, caps=caps)
    simulation = simulate(plan, program, cost, cost.message_ms, cost.sync_ms)
    memory = memory_per_rank(costs, plan, step, sizes, simulation.peak_in_flight)
    return Prediction(plan, step, groups, program, simulation, memory)


def report(
    console: Console, args: argparse.Namespace, spec: ModelSpec | None, prediction: Prediction, global_batch_size: int
) -> None:
    """Prints the table and what is predicted."""
    from ..runtime.groups import context_groups, talking_pairs

    plan, simulation = prediction.plan, prediction.simulation
    console.print(plan_table(plan, spec, simulation, prediction.memory))
    rows = {row for m in plan.modules.values() for _, _, s in m.stages() for row in s.ranks if len(row) > 1}
    groups = rows | set(context_groups(plan)) | {group.ranks for group in prediction.groups}
    time = (
        f"{simulation.iteration_ms:,.4g} ms" if simulation.iteration_ms < 1e3 else f"{simulation.iteration_ms:,.0f} ms"
    )
    lines = [
        f"Global batch: {global_batch_size} samples, {plan.num_microbatches} microbatches of up to "
        f"{args.microbatch_size} for each language-model replica, schedule {plan.schedule}",
        f"Predicted step: {time}, bubble {simulation.bubble_fraction:.1%}"
        + (
            f", {1e3 * global_batch_size / simulation.iteration_ms:,.1f} samples/s on {args.gpu_type} with "
            f"{args.seq_len} tokens a sample"
            if spec is not None and simulation.iteration_ms
            else " (a forward is 1 ms, a backward 2 ms on every stage)"
        ),
        f"Process groups: {len(groups)} besides the world; channels between ranks: {len(talking_pairs(plan))}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _width(console: Console) -> int:
    """Columns of the text chart: what the labels leave of the terminal."""
    return max(40, min(120, console.width - 36))


def _write_pictures(console: Console, args: argparse.Namespace, prediction: Prediction) -> None:
    """Writes the PNG and the trace that were asked for."""
    if args.picture:
        gantt_png(prediction.simulation, args.picture)
        console.print(f"Picture written to {args.picture}", highlight=False)
    if args.trace:
        chrome_trace(prediction.simulation, args.trace)
        console.print(f"Trace written to {args.trace}", highlight=False)


def check_memory(prediction: Prediction, device: Hardware) -> None:
    """
    Raises `ValueError` with the fullest rank if a rank needs more than the device has.

    Args:
        prediction (`Prediction`): The step.
        device (`Hardware`): What each rank is.
    """
    if device.memory_gib is None or prediction.memory is None:
        return
    over: Sequence[int] = [rank for rank, m in prediction.memory.items() if m.total_gib > device.memory_gib]
    if not over:
        return
    fullest = max(over, key=lambda rank: prediction.memory[rank].total if prediction.memory else 0.0)
    names = sorted({name for name, _, _ in prediction.plan.stages_of_rank(fullest)})
    needed = prediction.memory[fullest].total_gib
    raise ValueError(
        f"Rank {fullest} ({', '.join(names)}) needs about {needed:.1f} GiB, {device.name} "
        f"has {device.memory_gib:g} GiB; so for ranks {rank_ranges(over)}. Raise `pp` or `tp` of `{names[0]}`, lower "
        "`--microbatch-size`, or set `checkpointing=true`."
    )


def _memory_claim(device: Hardware) -> str:
    if device.memory_gib is None:
        return f"memory was not checked, since {device.name} has no fixed size"
    return f"estimated memory fits the {device.memory_gib:g} GiB of {device.name}"
