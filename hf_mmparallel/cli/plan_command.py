"""`hf-mmparallel plan`: the best plan on a number of GPUs, or the prediction of a plan with given sizes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ..cost.stage_memory import gib_text
from ..plan import save_layout
from ..plan.methods import published_method
from ..planning.answer import Answer, Inputs, check_memory, solve
from ..planning.files import WhatIfs, figures, page_of, save_plan
from ..planning.gantt import chrome_trace, gantt_png
from ..planning.inputs import read_model
from ..planning.problem import ComparedPlan
from ..planning.progress import Phases
from ..planning.settings import Settings, read_layout
from ..planning.text import (
    compared_text,
    module_layout,
    ms_text,
    new_console,
    plan_text,
    plural,
    print_answer,
    print_gantt,
    print_labelled,
    print_runners_up,
    report,
)

NUM_BASELINES = 6
MOST_LOSSES = 24  # rows of losses one by one
# arguments for the plan of one number of ranks
ONE_PLAN_ONLY = ("effort", "explain", "compare", "what_if", "dry_run", "picture", "html", "json", "trace")


def run_plan(args: argparse.Namespace, phases: Phases) -> None:
    """Raises `ValueError`, with a remedy, for settings that contradict each other or do not fit."""
    if args.failures is None and args.nodes is not None:
        raise ValueError(f"`--nodes {args.nodes}` has no effect without `--failures`. Give both, or `--gpus`.")
    settings = Settings.of(args, **read_layout(args))
    if args.failures is not None:
        phases.begin("Planning for failures", is_short=True)
        print_surviving_plans(args, settings, phases)
        return
    changed = [(text, settings.with_changes(text)) for text in args.what_if]
    phases.begin(f"Reading {args.model}", is_short=True)
    source = read_model(args.model, settings.plugin.modules, args.generator)
    for text, changed_settings in [("", settings), *changed]:  # checked before anything takes time
        changed_settings.frozen_spec(source.spec)
        device = changed_settings.gpu_type, changed_settings.dtype
        if args.profile is not None and device != (settings.gpu_type, settings.dtype):
            raise ValueError(
                f"`--what-if {text}`: the times of `{args.profile}` were measured on one device, in one dtype. Leave "
                "`--profile` out to compare others."
            )
    if args.dataset:
        phases.begin(f"Measuring samples of {args.dataset}", is_short=True)
    inputs = Inputs.of(args, source)
    phases.begin(f"Planning for {settings.gpus or 'the given'} GPUs", is_short=settings.gpus is None)
    answer = solve(settings, inputs, phases.advance)
    comparison: list[ComparedPlan] = []
    if args.compare:
        phases.begin("Planning as other methods do")
        for other in baseline_plans(answer):
            comparison.append(other)
            phases.advance(1 / NUM_BASELINES)
    what_ifs = []
    for text, other in changed:
        phases.begin(f"Planning for {text}")
        what_ifs.append((text, _solve_changed(text, other, inputs, answer, phases.advance)))
    phases.done()
    console = new_console()
    stability = []
    if args.explain and answer.inputs.samples.measured is not None:
        sizes = answer.inputs.samples.sizes(source, answer.settings)
        stability = published_method("stable batch")(answer.costs, answer.plan, sizes, answer.global_batch_size)
    report(console, answer, args.explain, stability)
    if args.explain and answer.result is not None:
        print_runners_up(console, answer.result)
    elif args.explain:
        console.print(
            "The sizes are given, so that there are no other plans to explain. Leave some out, with `--gpus`."
        )
    if what_ifs:
        console.print(what_if_table(answer, what_ifs), highlight=False)
    if comparison:
        console.print(comparison_table(answer, comparison, args.explain), highlight=False)
    if args.explain:
        print_gantt(console, answer.drawn, len(answer.predictions))
    if args.output:
        save_plan(args.output, answer, args.command_line)
        console.print(f"Plan written to {args.output}", highlight=False, soft_wrap=True)
    write_files(console, phases, args, answer, comparison, what_ifs)
    if args.dry_run:
        check_memory(answer)
        console.print(dry_run_text(answer), highlight=False, soft_wrap=True)
    warn_of_memory(console, answer)
    print_answer(console, answer)


def print_surviving_plans(args: argparse.Namespace, settings: Settings, phases: Phases) -> None:
    """
    Prints the plans of a cluster that survives failures, and writes the one of all nodes; raises `ValueError` for
    arguments without effect on these plans, or if failures can't be guaranteed.
    """
    from ..planning.surviving_plans import guarantee_lines, surviving_plans, template_table, throughput_table

    for name in ONE_PLAN_ONLY:
        if getattr(args, name):
            raise ValueError(
                f"`--{name.replace('_', '-')}` has no effect with `--failures`, which plans for any number of nodes. "
                "Leave one of them out."
            )
    source = read_model(args.model, settings.plugin.modules, args.generator)
    inputs = Inputs.of(args, source)
    plans = surviving_plans(settings, inputs, args.nodes, args.failures)
    phases.done()
    console = new_console()
    planner, batch = plans.planner, plans.global_batch_size
    limit = plans.settings.memory_bytes
    memory = "with any memory" if limit is None else f"by predicted memory, {plans.settings.memory_text}"
    console.print(template_table(planner), highlight=False)
    print_labelled(console, [*guarantee_lines(planner, batch, memory), ("Samples", inputs.samples.origin)])
    console.print(throughput_table(planner, plans.first, batch, MOST_LOSSES), highlight=False)
    if args.output:
        save_layout(args.output, plans.first.plan, settings.plugin.modules, plans.planned_for)
        console.print(f"Plan of all nodes written to {args.output}", highlight=False, soft_wrap=True)


def _solve_changed(
    text: str, settings: Settings, inputs: Inputs, before: Answer, advance: Callable[[float], None]
) -> Answer:
    """Plans for a `--what-if`, with the same global batch unless that is changed."""
    if "global_batch_size=" not in text:
        settings = settings.with_changes(f"global_batch_size={before.global_batch_size}")
    try:
        return solve(settings, inputs, advance)
    except ValueError as error:
        raise ValueError(f"`--what-if {text}`: {error}") from error


def what_if_table(before: Answer, what_ifs: WhatIfs) -> Table:
    """Table with a column for the plan, and one for each change."""
    answers = [before, *(changed for _, changed in what_ifs)]
    table = Table(title="What if", title_justify="left")
    table.add_column("")
    table.add_column("now", justify="right")
    for text, _ in what_ifs:
        table.add_column(text.replace(",", "\n"), justify="right")
    rows = {
        "step": [ms_text(a.step_ms) for a in answers],
        "change": ["", *(f"{a.step_ms / before.step_ms - 1:+.1%}" for a in answers[1:])],
        "samples/s": [f"{a.samples_per_second:,.4g}" for a in answers],
        "samples/s a GPU": [f"{a.samples_per_second / a.plan.world_size:,.4g}" for a in answers],
        "tokens/s": [f"{a.tokens_per_second:,.0f}" for a in answers],
        "MFU": [f"{a.flops_utilisation:.1%}" for a in answers],
        "bubble": [f"{a.prediction.timeline.bubble_fraction:.1%}" for a in answers],
        "GiB, fullest rank": [gib_text(a.peak_bytes) for a in answers],
        "GPUs": [f"{a.plan.world_size:,}" for a in answers],
    }
    for name in before.plan.modules:
        rows[name] = [module_layout(a.plan, name).replace(", ", "\n") for a in answers]
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def baseline_plans(answer: Answer) -> Iterable[ComparedPlan]:
    """Returns the plans of the baselines one by one; raises `ValueError` if there was no search."""
    if answer.result is None:
        raise ValueError("`--compare` needs the plan of a search. Leave sizes out, and give `--gpus`.")
    return published_method("compare")(answer.result.problem, answer.result)


def comparison_table(answer: Answer, others: Sequence[ComparedPlan], explain: bool) -> Table:
    table = Table(title="Beside other methods", title_justify="left")
    for column in ("method", "step", "slower", "bubble", "GiB", "MFU"):
        right = column != "method"
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    bubble = answer.prediction.timeline.bubble_fraction
    numbers = [f"{bubble:.1%}", gib_text(answer.peak_bytes), f"{answer.flops_utilisation:.1%}"]
    layouts = "\n".join(["", *plan_text(answer.plan).split("; ")] if explain else [])
    table.add_row(f"this plan{layouts}", ms_text(answer.step_ms), "", *numbers, end_section=explain)
    limit = answer.settings.memory_bytes or math.inf
    for other in others:
        cells, parts = [""] * 5, [other.title]
        has_step = not math.isnan(other.step_ms)  # NaN without a plan
        if has_step:
            slower = f"{other.step_ms / answer.step_ms - 1:+.1%}"
            gib, mfu = gib_text(other.peak_memory_bytes), f"{other.flops_utilisation:.1%}"
            cells = [ms_text(other.step_ms), slower, f"{other.bubble_fraction:.1%}", gib, mfu]
            parts[0] += ", does not fit" if other.peak_memory_bytes > limit else ""
        if explain or not has_step:
            parts += [compared_text(other).replace("; ", "\n"), other.note]
        table.add_row("\n".join(filter(None, parts)), *cells, end_section=explain)
    return table


def warn_of_memory(console: Console, answer: Answer) -> None:
    try:
        check_memory(answer)
    except ValueError as error:
        console.print(f"Does not fit: {error}", highlight=False, markup=False)


def dry_run_text(answer: Answer) -> str:
    memory = f"memory was not checked, since {answer.settings.gpu_type} has no fixed size"
    if answer.settings.memory_gib is not None:
        memory = f"estimated memory fits the {answer.settings.memory_text}"
    return (
        f"Dry run passed. Checked: {len(answer.plan.modules)} modules fit {answer.plan.world_size} ranks; {memory}; "
        f"every task of a step of {answer.global_batch_size} samples runs once, sends match receives, no order of "
        "events deadlocks; the replay of the step ends. No weights were read and nothing was computed."
    )


def write_files(
    console: Console,
    phases: Phases,
    args: argparse.Namespace,
    answer: Answer,
    comparison: Sequence[ComparedPlan] = (),
    what_ifs: WhatIfs = (),
) -> None:
    if args.picture:
        gantt_png(answer.drawn, args.picture)
        console.print(f"Picture written to {args.picture}", highlight=False, soft_wrap=True)
    if args.trace:
        chrome_trace(answer.drawn, args.trace)
        console.print(f"Trace written to {args.trace}", highlight=False, soft_wrap=True)
    if args.html:
        from ..planning.page import write_page

        phases.begin(f"Writing {args.html}, the page of {plural(answer.plan.world_size, 'rank')}")
        write_page(args.html, page_of(answer, args.command_line, comparison, what_ifs))
        phases.done()
        console.print(f"Page written to {args.html}", highlight=False, soft_wrap=True)
    if args.json:
        import json
        from pathlib import Path

        data = figures(answer, args.command_line, comparison, what_ifs)
        Path(args.json).write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
        console.print(f"Figures written to {args.json}", highlight=False, soft_wrap=True)
