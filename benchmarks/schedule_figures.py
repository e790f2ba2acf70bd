"""The charts and tables of `docs/schedules.md`, see `pages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from figures import result, table

from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlan, ParallelPlan, Stage, StepPlan
from hf_mmparallel.plan.methods import Schedule
from hf_mmparallel.plan.model_spec import Edge
from hf_mmparallel.planning.gantt import gantt_text
from hf_mmparallel.schedule import Timeline, find_representatives, simulate
from hf_mmparallel.schedule.kinds import Task

RANKS, MICROBATCHES, WIDTH = 4, 8, 108
TITLES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "eager": "eager",
    "encoders_first": "encoders first",
    "interleaved": "interleaved",
    "zero_bubble": "zero bubble",
    "zero_bubble_h2": "zero bubble, more memory",
}


def example(schedule: Schedule) -> Timeline:
    """
    An encoder on one rank in front of a pipeline of four, eight microbatches: a forward of a rank takes 1 ms, as do
    the gradients of its inputs and those of its weights.
    """
    rounds, splits = (2 if schedule == "interleaved" else 1), "zero_bubble" in schedule
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


def schedule_means(kind: str = "schedules") -> str:
    """Step, bubble and memory of all schedules over those of the first one, means over the cases."""
    rows = [
        f"| {name} | {row['step']:.3f} | {row['longest']:.3f} | {row['alone']:.3f} | {row['bubble_share']:.2f} | "
        f"{row['memory']:.2f} |"
        for name, row in result("schedules")["means"][kind].items()
    ]
    return table("| schedule | step | longest | without gradient sums | bubble | largest memory of a rank |", rows)


def schedule_cases() -> str:
    """The same of each case, for split backwards and virtual stages, and for shared ranks beside both kinds of DIP."""
    rows = []
    for case in result("schedules")["cases"]:
        found, shared = case["schedules"], case["shared"]
        cells = [
            *(f"{found[name]['step']:.3f}" for name in ("interleaved", "zero_bubble", "zero_bubble_h2")),
            *(
                f"{shared[name]['step']:.3f}, {shared[name]['step_ms'] / shared['DIP, equal times']['step_ms']:.3f}"
                for name in ("1f1b", "zero_bubble", "zero_bubble, tapered")
            ),
        ]
        stages = " + ".join(map(str, case["stages"]))
        rows.append(f"| {case['dataset']} | {case['model']} | {stages} | {' | '.join(cells)} |")
    head = "| dataset | model | stages | `interleaved` | `zero_bubble` | `zero_bubble_h2` | shared ranks: `1f1b` | "
    return table(head + "`zero_bubble` | `zero_bubble`, `tapered` |", rows)


def schedule_runs() -> str:
    """Steps of the engine with modelled durations beside the predicted ones."""
    rows = [
        f"| {row['ranks']} | {row['schedule']} | {row['predicted_ms']:,.0f} ms | {row['measured_ms']:,.0f} ms | "
        f"{row['measured_ms'] / row['predicted_ms']:.3f} |"
        for row in result("schedule_runs")["rows"]
    ]
    return table("| ranks | schedule | predicted | measured | measured over predicted |", rows)


BLOCKS: dict[str, Callable[[], str]] = {
    **{f"chart_{schedule}": partial(chart, schedule) for schedule in TITLES},  # type: ignore[arg-type]
    "schedule_examples": examples,
    "schedule_means": schedule_means,
    "shared_means": partial(schedule_means, "shared"),
    "schedule_cases": schedule_cases,
    "schedule_runs": schedule_runs,
}
