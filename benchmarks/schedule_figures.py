"""The charts and tables of `docs/schedules.md`, see `pages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from figures import result, table

from hf_mmparallel.drawing.gantt import gantt_text
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlan, ParallelPlan, Stage, StepPlan
from hf_mmparallel.plan.methods import Schedule
from hf_mmparallel.plan.model_spec import Edge
from hf_mmparallel.schedule import Timeline, find_representatives, simulate
from hf_mmparallel.schedule.actions import Task

RANKS, MICROBATCHES, WIDTH = 4, 8, 108
TITLES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "eager": "eager",
    "encoders_first": "encoders first",
    "interleaved": "interleaved",
    "zero_bubble": "zero bubble",
}


def example(schedule: Schedule) -> Timeline:
    """
    An encoder on one rank in front of a pipeline of four, eight microbatches: a forward of a rank takes 1 ms, as do
    the gradients of its inputs and those of its weights.
    """
    rounds, splits = (2 if schedule == "interleaved" else 1), schedule == "zero_bubble"
    count = RANKS * rounds
    stages = tuple(Stage((i, i + 1), ((1 + i % RANKS,),), splits_backward=splits) for i in range(count))
    modules = {"vision": ModulePlan(((Stage((0, 1), ((0,),)),),)), LANGUAGE_MODEL: ModulePlan((stages,))}
    plan = ParallelPlan(modules, (Edge("vision", LANGUAGE_MODEL),), schedule, MICROBATCHES)
    rows = (tuple((index,) for index in range(MICROBATCHES)),)
    step = StepPlan(tuple(range(MICROBATCHES)), dict.fromkeys(modules, rows), {"vision": (LANGUAGE_MODEL,)})

    def cost(task: Task) -> float:
        parts = sum(part in ("forward", "inputs", "weights") for part in task.row.work)
        return parts / (rounds if task.module == LANGUAGE_MODEL else 1)

    return simulate(find_representatives(plan, ()), step, cost)


def chart(schedule: Schedule) -> str:
    """The example as text."""
    return f"```text\n{gantt_text(example(schedule), WIDTH)}\n```"


def held(timeline: Timeline) -> float:
    """Most microbatches whose activations a rank of the pipeline has, in units of all of its layers."""
    rounds = timeline.layout.plan.modules[LANGUAGE_MODEL].vp_size
    on_rank = [0.0] * (1 + RANKS)
    for (module, _, stage), peak in timeline.peak_held.items():
        if module == LANGUAGE_MODEL:
            on_rank[1 + stage % RANKS] += peak / rounds
    return max(on_rank)


def examples() -> str:
    """Step, bubble and memory of the example under each schedule."""
    rows = []
    for schedule, title in TITLES.items():
        timeline = example(schedule)  # type: ignore[arg-type]
        rows.append(
            f"| `{schedule}` ({title}) | {timeline.iteration_ms:g} ms | {timeline.bubble_fraction:.1%} | "
            f"{held(timeline):.2g} |"
        )
    return table("| schedule | step | bubble | microbatches that a rank of the pipeline has at once |", rows)


def schedule_means() -> str:
    """Step, bubble and memory of all schedules over those of 1F1B, means over the cases."""
    rows = [
        f"| {name} | {row['step']:.3f} | {row['alone']:.3f} | {row['bubble_share']:.2f} | {row['memory']:.2f} |"
        for name, row in result("schedules")["means"].items()
    ]
    return table("| schedule | step | without gradient sums | bubble | largest memory of a rank |", rows)


def schedule_cases() -> str:
    """The same of each case, for split backwards and virtual stages."""
    rows = []
    for case in result("schedules")["cases"]:
        cells = [
            f"{row['step']:.3f}, {row['alone']:.3f}, {row['bubble']:.0%}, {row['memory']:.2f}"
            for row in (case["schedules"][name] for name in ("1f1b", "interleaved", "zero_bubble"))
        ]
        stages = " + ".join(map(str, case["stages"]))
        rows.append(f"| {case['dataset']} | {case['model']} | {stages} | {' | '.join(cells)} |")
    return table("| dataset | model | stages | `1f1b` | `interleaved` | `zero_bubble` |", rows)


BLOCKS: dict[str, Callable[[], str]] = {
    **{f"chart_{schedule}": partial(chart, schedule) for schedule in TITLES},  # type: ignore[arg-type]
    "schedule_examples": examples,
    "schedule_means": schedule_means,
    "schedule_cases": schedule_cases,
}
