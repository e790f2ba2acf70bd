"""`hf-mmparallel simulate`: one step of a saved plan, or what a run achieves under a trace of failures."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..arrange import contiguous_step, plan_for_batch
from ..plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin, ParallelPlan, check_plan, plan_for_model
from ..planning.answer import Inputs, batch_to_fill, predict_plan
from ..planning.gantt import chrome_trace, gantt_png
from ..planning.inputs import read_model
from ..planning.progress import Phases
from ..planning.recovery_chart import RecoveryMark, recovery_png
from ..planning.settings import Settings, complete, read_plugin
from ..planning.surviving_plans import SurvivingPlans, guarantee_lines, surviving_plans
from ..planning.text import (
    groups_text,
    microbatches_text,
    ms_text,
    new_console,
    plan_table,
    plural,
    print_answer,
    print_gantt,
    print_labelled,
    report,
)
from ..resilience.plan_choice import DAY_S
from ..resilience.trace_replay import CAUSES, EventCosts, Replay, Trace, read_trace, regular_losses, replay_trace
from ..schedule import find_representatives, simulate
from .plan_command import warn_of_memory, write_files


def run_simulate(args: argparse.Namespace, phases: Phases) -> None:
    """Raises `ValueError` for a file without a plan, and for a plan of another model."""
    if args.trace and args.trace.endswith(".csv"):
        raise ValueError(
            f"`--trace {args.trace}`: with a plan, the schedule is written to this file, as JSON. Leave the plan "
            "out to replay a trace of failures, or give a name without `.csv`."
        )
    plugin = read_plugin(args.plan)
    if plugin.plan is None:
        raise ValueError(
            f"`{args.plan}` has settings of modules, not a plan. Make one with `hf-mmparallel plan --output`."
        )
    complete(args, plugin.planned_for)
    settings = Settings.of(args, plugin=plugin)
    if args.model is None:
        phases.done()
        _simulate_in_units(args, settings, plugin.plan)
        return
    source = read_model(args.model, plugin.modules, args.generator)
    check_plan(plugin.plan, source.spec)
    inputs = Inputs.of(args, source)
    costs = inputs.costs(settings)
    answer = predict_plan(settings, inputs, costs, plan_for_model(settings.plugin, costs.spec, None))
    phases.done()
    console = new_console()
    report(console, answer, args.explain)
    print_gantt(console, answer.drawn, len(answer.predictions))
    write_files(console, phases, args, answer)
    warn_of_memory(console, answer)
    print_answer(console, answer)


def _simulate_in_units(args: argparse.Namespace, settings: Settings, plan: ParallelPlan) -> None:
    """Simulates a step with forwards of 1 ms and backwards of 2 ms on every stage."""
    for name in ("dataset", "profile", "html", "json", "freeze", "generator", "explain"):
        if getattr(args, name):
            raise ValueError(f"`--{name}` has no effect without `--model`. Give the model of the plan.")
    size = settings.microbatch_size or 1
    batch = settings.global_batch_size or batch_to_fill(plan, size, plan.num_microbatches)
    plan = replace(plan_for_batch(plan, batch, size), schedule=settings.schedule or plan.schedule)
    step = contiguous_step(plan, range(batch), size)
    simulation = simulate(find_representatives(plan, []), step)
    counts = [len(microbatches) for microbatches in step.microbatches[LANGUAGE_MODEL]]
    console = new_console()
    console.print(plan_table(plan, None, simulation, None))
    print_labelled(
        console,
        [
            (
                "Global batch",
                f"{batch:,} samples, {microbatches_text(counts)} of up to {size} on each language-model replica, "
                f"schedule {plan.schedule}",
            ),
            (
                "Predicted step",
                f"{ms_text(simulation.iteration_ms)}, bubble {simulation.bubble_fraction:.1%}, where a forward is "
                "1 ms and a backward 2 ms on every stage; give `--model` for times and memory",
            ),
            ("Groups", groups_text(plan, step, [])),
        ],
    )
    print_gantt(console, simulation)
    if args.picture:
        gantt_png(simulation, args.picture)
        console.print(f"Picture written to {args.picture}", highlight=False, soft_wrap=True)
    if args.trace:
        chrome_trace(simulation, args.trace)
        console.print(f"Trace written to {args.trace}", highlight=False, soft_wrap=True)


# `hf-mmparallel simulate --trace`: what a run that survives failures achieves under a trace of them.

WINDOWS = 144
MAX_STEPS = 3000  # in the picture
WITHOUT_PLAN = ("schedule", "microbatch_assignment", "html", "generator")


def run_replay(args: argparse.Namespace) -> None:
    """Raises `ValueError` for a trace that can't be read, and a cluster that can't survive as many failures."""
    if args.model is None:
        raise ValueError("A trace of failures is replayed on a model. Give `--model`, or a plan to simulate a step.")
    for name in WITHOUT_PLAN:
        if getattr(args, name):
            raise ValueError(f"`--{name.replace('_', '-')}` has no effect on a trace of failures. Leave it out.")
    complete(args)
    trace = _trace(args)
    source = read_model(args.model, {}, [])
    module = ModulePlugin(activation_checkpointing=args.activation_checkpointing)
    settings = Settings.of(args, plugin=MultimodalParallelPlugin(dict.fromkeys(source.spec.modules, module)))
    settings, inputs = replace(settings, gpus=trace.most_nodes * args.node_size), Inputs.of(args, source)
    between_s = trace.mean_time_between_losses_s or DAY_S
    plans = surviving_plans(settings, inputs, trace.most_nodes, args.failures, between_s)
    checkpoint_bytes = sum(plans.planner.plans.chain.state_bytes)
    costs = _event_costs(args, settings, checkpoint_bytes)
    replay = replay_trace(trace, plans.planner, costs, plans.global_batch_size)
    console = new_console()
    console.print(_table(replay))
    print_labelled(console, _texts(trace, plans, costs, checkpoint_bytes))
    _write_files(console, args, trace, replay)


def _trace(args: argparse.Namespace) -> Trace:
    """The trace of a file, or one with losses at equal distances."""
    if args.trace is not None:
        for name in ("nodes", "lose_every"):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"`--{name.replace('_', '-')}` has no effect beside `--trace`. Leave one of them out."
                )
        if not Path(args.trace).is_file():
            raise ValueError(f"`--trace {args.trace}` does not exist. Give a CSV file of milliseconds, action, node.")
        return read_trace(args.trace)
    if args.lose_every is None or args.nodes is None:
        raise ValueError("There is nothing to simulate. Give a plan, `--trace`, or `--nodes` with `--lose-every`.")
    return regular_losses(args.nodes, 60 * args.lose_every, args.nodes // 2, args.seed)


def _event_costs(args: argparse.Namespace, settings: Settings, checkpoint_bytes: float) -> EventCosts:
    device = settings.device
    if args.copy_gb_per_s is not None:
        rate = args.copy_gb_per_s / args.node_size
        device = replace(device, message_gb_per_s=rate, node_message_gb_per_s=rate)
    save_s = checkpoint_bytes / (1e9 * args.storage_gb_per_s)
    times_s = args.detect_seconds, args.regroup_seconds, args.start_seconds + save_s, save_s
    return EventCosts(device, *times_s, args.save_every)


def _table(replay: Replay) -> Table:
    table = Table(title="Throughput under failures, and the time of nodes by cause", title_justify="left")
    for name in ("samples/s", "samples", *CAUSES):
        table.add_column(name, justify="right", no_wrap=True)
    shares = (f"{replay.shares[cause]:.1%}" for cause in CAUSES)
    table.add_row(f"{replay.samples_per_second:,.2f}", f"{replay.samples:,}", *shares)
    return table


def _texts(trace: Trace, plans: SurvivingPlans, costs: EventCosts, checkpoint_bytes: float) -> list[tuple[str, str]]:
    planner, settings = plans.planner, plans.settings
    memory = "with any memory" if settings.memory_bytes is None else f"by predicted memory, {settings.memory_text}"
    rate = costs.device.message_bytes_per_ms(range(trace.most_nodes * planner.node_size)) / 1e6
    saves = f"every {plural(costs.save_every, 'step')}" if costs.save_every else "only when too few nodes are left"
    return [
        (
            "Trace",
            f"{trace.end_s / 3600:,.2f} hours, {plural(trace.num_losses, 'node')} lost, {trace.mean_nodes():.1f} "
            f"nodes on average and at most {trace.most_nodes}, of {plural(planner.node_size, 'rank')} each "
            f"({settings.gpu_type})",
        ),
        *guarantee_lines(planner, plans.global_batch_size, memory),
        (
            "Assumed",
            f"in place: {costs.detect_s:g} s to detect a loss, {costs.regroup_s:g} s for new groups, {rate:.3g} GB/s "
            f"for copies of each rank; otherwise {costs.restart_s:,.0f} s for a new start; checkpoints of "
            f"{checkpoint_bytes / 2**30:,.1f} GiB in {costs.save_s:,.1f} s, {saves}",
        ),
    ]


def _write_files(console: Console, args: argparse.Namespace, trace: Trace, replay: Replay) -> None:
    if args.picture:
        stride = -(-sum(run.count for run in replay.steps) // MAX_STEPS) or 1
        start_nodes = replay.changes[0].num_nodes if replay.changes else 0
        marks = [
            RecoveryMark(one.start_s, one.took_s, one.num_nodes * args.node_size, one.label)
            for one in replay.changes[1:]
        ]
        samples, title = stride * replay.samples_per_step, "Throughput under failures"
        ends_s = replay.step_ends_s(stride)
        recovery_png(ends_s, samples, start_nodes * args.node_size, marks, args.picture, title)
        console.print(f"Picture written to {args.picture}", highlight=False, soft_wrap=True)
    if args.json:
        found = {
            "samples": replay.samples,
            "samples_per_second": replay.samples_per_second,
            "shares": replay.shares,
            "rates": replay.rates(WINDOWS),
        }
        figures = {"length_s": trace.end_s, "nodes": list(trace.num_present()), "recoveries": {"templates": found}}
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
        console.print(f"Figures written to {args.json}", highlight=False, soft_wrap=True)
