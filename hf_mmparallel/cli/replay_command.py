"""`hf-mmparallel simulate --trace`: replays a trace of failures on a job, and compares ways to recover."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..drawing.throughput_chart import ThroughputRow, throughput_png
from ..plan import ModulePlugin
from ..planner.answer import SAMPLES_PER_GPU, Inputs
from ..planner.inputs import read_model
from ..planner.possible_sizes import stage_tp_sizes
from ..planner.settings import Settings, complete
from ..planner.surviving_plans import drawn_microbatches, selected_layers
from ..planner.text import new_console, plural, print_labelled
from ..resilience.model_chain import model_chain
from ..resilience.recovery_policies import GridRestart, RedundantStages, TemplateRecovery
from ..resilience.replay_job import EventCosts, ReplayJob
from ..resilience.trace_replay import CAUSES, Replay, replay_trace
from ..resilience.traces import Trace, read_trace, regular_losses

WINDOWS = 144
WITHOUT_PLAN = ("schedule", "microbatch_assignment", "html", "generator")
TEMPLATES, GRID, REDUNDANT = "templates", "grid, checkpoints", "redundant stages"


def run_replay(args: argparse.Namespace) -> None:
    """
    Runs `hf-mmparallel simulate` without a plan; raises `ValueError` for a trace that can't be read, and for a cluster
    that can't survive as many failures.
    """
    if args.model is None:
        raise ValueError("A trace of failures is replayed on a model. Give `--model`, or a plan to simulate a step.")
    for name in WITHOUT_PLAN:
        if getattr(args, name):
            raise ValueError(f"`--{name.replace('_', '-')}` has no effect on a trace of failures. Leave it out.")
    complete(args)
    trace = _trace(args)
    settings = Settings.of(args)
    source = read_model(args.model, {}, [])
    inputs = Inputs.of(args, source)
    batch = settings.global_batch_size or SAMPLES_PER_GPU * trace.most_nodes * args.node_size
    job = _job(args, settings, inputs, trace.most_nodes, batch)
    # A node holds the state of two stages.
    doubled = _job(args, settings, inputs, trace.most_nodes, batch, state_copies=2)
    event_costs = _event_costs(args, settings, job)
    templates = TemplateRecovery(job, event_costs, args.failures, trace.mean_time_between_losses_s)
    replays = {
        TEMPLATES: replay_trace(trace, templates, batch),
        GRID: replay_trace(trace, GridRestart(job, event_costs), batch),
    }
    if doubled.fewest_nodes is not None:
        replays[REDUNDANT] = replay_trace(trace, RedundantStages(doubled, event_costs), batch)
    console = new_console()
    console.print(_table(replays))
    print_labelled(console, _texts(trace, templates, event_costs, settings))
    if doubled.fewest_nodes is None:
        console.print(f"{REDUNDANT}: the state of two stages does not fit a rank", highlight=False)
    _write_files(console, args, trace, replays)


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


def _job(
    args: argparse.Namespace, settings: Settings, inputs: Inputs, most_nodes: int, batch: int, state_copies: int = 1
) -> ReplayJob:
    """The job on a number of nodes with a global batch, on nodes with memory for the state of some stages."""
    costs = inputs.costs(settings)
    plugin = ModulePlugin(activation_checkpointing=args.activation_checkpointing)
    microbatches = drawn_microbatches(settings, inputs, batch, args.failures + 1)
    largest = min(args.node_size, settings.device.node_size)
    chain = model_chain(
        costs,
        dict.fromkeys(costs.spec.modules, plugin),
        microbatches,
        settings.memory_bytes,
        selected_layers(inputs),
        state_copies,
        stage_tp_sizes(inputs.source.model, costs.spec, settings.plugin, largest),
    ).with_own_ranks()
    return ReplayJob(chain.chain, chain.state_bytes, args.node_size, microbatches.count, batch, most_nodes)


def _event_costs(args: argparse.Namespace, settings: Settings, job: ReplayJob) -> EventCosts:
    """What events cost, by the arguments and the device's network."""
    node_gb_per_s = args.copy_gb_per_s or settings.device.network_gb_per_s * args.node_size
    costs = EventCosts.of_bandwidths(
        job, 1e9 * node_gb_per_s, 1e9 * args.storage_gb_per_s, args.start_seconds, args.save_every
    )
    return replace(costs, detect_s=args.detect_seconds, regroup_s=args.regroup_seconds)


def _table(replays: Mapping[str, Replay]) -> Table:
    """A row for each way to recover."""
    table = Table(title="Throughput under failures, and the time of nodes by cause", title_justify="left")
    table.add_column("recovery", no_wrap=True)
    for name in ("samples/s", "samples", *CAUSES):
        table.add_column(name, justify="right", no_wrap=True)
    for name, replay in replays.items():
        shares = (f"{replay.shares[cause]:.1%}" for cause in CAUSES)
        table.add_row(name, f"{replay.samples_per_second:,.2f}", f"{replay.samples:,.0f}", *shares)
    return table


def _texts(trace: Trace, templates: TemplateRecovery, costs: EventCosts, settings: Settings) -> list[tuple[str, str]]:
    """What was replayed, and what was assumed."""
    counts, job = templates.counts, templates.job
    return [
        (
            "Trace",
            f"{trace.end_s / 3600:,.2f} hours, {trace.num_losses} nodes lost, {trace.mean_nodes():.1f} nodes on "
            f"average and at most {trace.most_nodes}, of {plural(job.node_size, 'rank')} each ({settings.gpu_type})",
        ),
        (
            "Templates",
            f"one copy fits on {plural(counts[0], 'node')}; pipelines of {counts[0]} to {counts[-1]} nodes; "
            f"{plural(templates.failures, 'simultaneous failure')} survived for certain while "
            f"{(templates.failures + 1) * counts[0]} nodes are left",
        ),
        (
            "Step",
            f"{job.samples_per_step:,} samples, {plural(job.num_microbatches, 'microbatch')}; "
            f"{job.total_bytes / 2**30:,.1f} GiB of weights and optimizer state",
        ),
        (
            "Assumed",
            f"in place: {costs.detect_s:g} s to detect a loss, {costs.regroup_s:g} s for new groups, "
            f"{costs.copy_bytes_per_s / 1e9:g} GB/s for copies of each node; otherwise {costs.restart_s:,.0f} s for a "
            f"new start, and checkpoints of {costs.save_s:,.1f} s every {plural(costs.save_every, 'step')}",
        ),
    ]


def _write_files(console: Console, args: argparse.Namespace, trace: Trace, replays: Mapping[str, Replay]) -> None:
    """Writes the requested picture and figures."""
    if args.picture:
        rows = [
            ThroughputRow(name, replay.rates(WINDOWS), replay.samples_per_second, replay.shares)
            for name, replay in replays.items()
        ]
        nodes = [(time_s, len(present)) for time_s, present in trace.present()]
        losses_s = [event.time_s for event in trace.events if event.lost]
        throughput_png(rows, nodes, losses_s, trace.end_s, args.picture)
        console.print(f"Picture written to {args.picture}", highlight=False, soft_wrap=True)
    if args.json:
        Path(args.json).write_text(json.dumps(_figures(trace, replays), indent=2) + "\n")
        console.print(f"Figures written to {args.json}", highlight=False, soft_wrap=True)


def _figures(trace: Trace, replays: Mapping[str, Replay]) -> dict:
    nodes: Sequence[tuple[float, int]] = [(time_s, len(present)) for time_s, present in trace.present()]
    return {
        "length_s": trace.end_s,
        "nodes": nodes,
        "recoveries": {
            name: {
                "samples": replay.samples,
                "samples_per_second": replay.samples_per_second,
                "shares": replay.shares,
                "rates": replay.rates(WINDOWS),
            }
            for name, replay in replays.items()
        },
    }
