"""`hf-mmparallel simulate`: simulates one step of a saved plan."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..arrange import contiguous_step, plan_for_batch
from ..plan import LANGUAGE_MODEL, ParallelPlan, check_plan, plan_for_model
from ..planning.answer import Inputs, batch_to_fill, predict_plan
from ..planning.gantt import chrome_trace, gantt_png
from ..planning.inputs import read_model
from ..planning.progress import Phases
from ..planning.settings import Settings, complete, read_plugin
from ..planning.text import (
    groups_text,
    microbatches_text,
    ms_text,
    new_console,
    plan_table,
    print_answer,
    print_gantt,
    print_labelled,
    report,
)
from ..schedule import find_representatives, simulate
from .plan_command import warn_of_memory, write_files


def run_simulate(args: argparse.Namespace, phases: Phases) -> None:
    """
    Runs `hf-mmparallel simulate`; raises `ValueError` for a file without a plan, and for a plan of another model.
    """
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
