"""`hf-mmparallel plan`: the best plan on a number of GPUs, or what to expect of one whose sizes are given."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..drawing.timeline import chrome_trace, gantt_png
from ..planner.answer import Answer, Inputs, check_memory, solve
from ..planner.files import WhatIfs, figures, page_of, plan_line, save_plan
from ..planner.inputs import read_model, read_samples
from ..planner.settings import Settings, read_layout
from ..planner.stability_text import stability_lines
from ..planner.tables import layout_text
from ..planner.text import ms_text, new_console, print_gantt, print_runners_up, report

if TYPE_CHECKING:
    from ..search.compare import ComparedPlan


def run_plan(args: argparse.Namespace) -> None:
    """
    Runs `hf-mmparallel plan`.

    Args:
        args (`argparse.Namespace`): Its arguments.

    Raises:
        `ValueError`: For what does not fit, with a remedy.
    """
    settings = Settings.of(args, **read_layout(args))
    changed = [(text, settings.with_changes(text)) for text in args.what_if]
    source = read_model(args.model, settings.plugin.modules, args.generator)
    for text, own in [("", settings), *changed]:  # checked before anything takes time
        own.frozen_spec(source.spec)
        if args.profile is not None and (own.gpu_type, own.dtype) != (settings.gpu_type, settings.dtype):
            raise ValueError(
                f"`--what-if {text}`: the times of `{args.profile}` were measured on one device, in one type. Leave "
                "`--profile` out to compare others."
            )
    inputs = Inputs(source, read_samples(args, source), args.profile, args.seed, args.effort)
    answer, comparison = solve(settings, inputs), ()
    if args.compare:
        answer, comparison = compared(answer)
    console = new_console()
    report(console, answer, stability_lines(answer))
    warn_of_memory(console, answer)
    if answer.result is not None:
        print_runners_up(console, answer.result, args.explain)
    elif args.explain:
        console.print(
            "The sizes are given, so that there are no other plans to explain. Leave some out, with `--gpus`."
        )
    what_ifs = [(text, _solve_changed(text, own, inputs, answer)) for text, own in changed]
    if what_ifs:
        console.print(what_if_table(answer, what_ifs), highlight=False)
    if comparison:
        console.print(comparison_table(answer, comparison), highlight=False)
    print_gantt(console, answer.prediction.simulation)
    if args.output:
        save_plan(args.output, answer, args.command_line)
        console.print(f"Plan written to {args.output}", highlight=False, soft_wrap=True)
    write_files(console, args, answer, comparison, what_ifs)
    if args.dry_run:
        check_memory(answer)
        console.print(dry_run_text(answer), highlight=False, soft_wrap=True)


def _solve_changed(text: str, settings: Settings, inputs: Inputs, before: Answer) -> Answer:
    """The answer to a `--what-if`, with the same global batch unless that is changed."""
    if "global_batch_size=" not in text:
        settings = settings.with_changes(f"global_batch_size={before.global_batch_size}")
    try:
        return solve(settings, inputs)
    except ValueError as error:
        raise ValueError(f"`--what-if {text}`: {error}") from error


def what_if_table(before: Answer, what_ifs: WhatIfs) -> Table:
    """A column for the plan, and one for each change."""
    answers = [before, *(own for _, own in what_ifs)]
    table = Table(title="What if", title_justify="left")
    table.add_column("")
    table.add_column("now", justify="right")
    for text, _ in what_ifs:
        table.add_column(text.replace(",", "\n"), justify="right")
    rows = {
        "step": [ms_text(own.step_ms) for own in answers],
        "change": ["", *(f"{own.step_ms / before.step_ms - 1:+.1%}" for own in answers[1:])],
        "samples/s": [f"{own.samples_per_second:,.4g}" for own in answers],
        "samples/s a GPU": [f"{own.samples_per_second / own.plan.world_size:,.4g}" for own in answers],
        "tokens/s": [f"{own.tokens_per_second:,.0f}" for own in answers],
        "MFU": [f"{own.flops_utilisation:.1%}" for own in answers],
        "bubble": [f"{own.prediction.simulation.bubble_fraction:.1%}" for own in answers],
        "GiB, fullest rank": [f"{own.peak_gib:.3g}" for own in answers],
        "GPUs": [f"{own.plan.world_size:,}" for own in answers],
    }
    for name in before.plan.modules:
        rows[name] = [layout_text(own.plan, name).replace(", ", "\n") for own in answers]
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def compared(answer: Answer) -> tuple[Answer, tuple[ComparedPlan, ...]]:
    """
    What others would do, and the answer: that of the search, or what is faster of what others would do.

    Raises:
        `ValueError`: Where nothing was searched.
    """
    if answer.result is None:
        raise ValueError("`--compare` compares with the plan that a search finds. Leave sizes out, and give `--gpus`.")
    from ..search.compare import compare, with_faster

    others = compare(answer.result.problem, answer.result)
    return answer.with_result(with_faster(answer.result, others)), others


def comparison_table(answer: Answer, others: Sequence[ComparedPlan]) -> Table:
    """A row for the plan, and one for each of the others."""
    table = Table(title="Beside other methods", title_justify="left")
    for column in ("method", "step", "slower", "bubble", "GiB", "MFU"):
        right = column != "method"
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    bubble = answer.prediction.simulation.bubble_fraction
    numbers = [f"{bubble:.1%}", f"{answer.peak_gib:.3g}", f"{answer.flops_utilisation:.1%}"]
    layouts = plan_line(answer.plan).replace("; ", "\n")
    table.add_row(f"this plan\n{layouts}", ms_text(answer.step_ms), "", *numbers, end_section=True)
    for own in others:
        cells = [""] * 5
        if not math.isnan(own.step_ms):  # else there is no plan at all
            slower = f"{own.step_ms / answer.step_ms - 1:+.1%}"
            numbers = [f"{own.bubble_fraction:.1%}", f"{own.peak_memory_gib:.3g}", f"{own.flops_utilisation:.1%}"]
            cells = [ms_text(own.step_ms), slower, *numbers]
        text = "\n".join(part for part in (own.title, own.layout.replace("; ", "\n"), own.note) if part)
        table.add_row(text, *cells, end_section=True)
    return table


def warn_of_memory(console: Console, answer: Answer) -> None:
    """Prints that a plan does not fit, without failing."""
    try:
        check_memory(answer)
    except ValueError as error:
        console.print(f"Does not fit: {error}", highlight=False, markup=False)


def dry_run_text(answer: Answer) -> str:
    """What was checked."""
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
    args: argparse.Namespace,
    answer: Answer,
    comparison: Sequence[ComparedPlan] = (),
    what_ifs: WhatIfs = (),
) -> None:
    """
    Writes the pictures, the page and the figures that are asked for.

    Args:
        console (`Console`): Where it is said.
        args (`argparse.Namespace`): The names of the files.
        answer (`Answer`): The plan.
        comparison (`Sequence[ComparedPlan]`, *optional*): What others would do.
        what_ifs (`Sequence[tuple[str, Answer]]`, *optional*): What was changed, and the answers.
    """
    if args.picture:
        gantt_png(answer.prediction.simulation, args.picture)
        console.print(f"Picture written to {args.picture}", highlight=False, soft_wrap=True)
    if args.trace:
        chrome_trace(answer.prediction.simulation, args.trace)
        console.print(f"Trace written to {args.trace}", highlight=False, soft_wrap=True)
    if args.html:
        from ..page import write_page

        write_page(args.html, page_of(answer, args.command_line, comparison, what_ifs))
        console.print(f"Page written to {args.html}", highlight=False, soft_wrap=True)
    if args.json:
        import json
        from pathlib import Path

        data = figures(answer, args.command_line, comparison, what_ifs)
        Path(args.json).write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
        console.print(f"Figures written to {args.json}", highlight=False, soft_wrap=True)
