"""
Work of a rank to plan one step, for up to 10,240 ranks and 102,400 samples.

SynthChartNet's published sizes, Qwen2.5-VL's encoder with Llama 3b. Ranks: replicas of the language model on 8 ranks
each, with two encoder replicas beside each, 16 samples to a replica in 8 microbatches. Batch: 320 ranks. `arrange` is
from the sizes of samples to the `StepPlan` of the whole batch; `program` is the program of the rank, its costs and its
checks; `rest` the checksums that ranks compare, and the list of what the rank reads; `step` all of it. Once in a run
come `sync_groups` and, with the `first` program, the layout with one rank for all that run the same list. `deep`: 64
ranks to a replica of the language model, seven of which share 32 encoder replicas, 64 samples each in 32 microbatches.
`many`: 1,920 microbatches on 480 ranks. `unlike`: 2 n - 1 encoder replicas for n of the language model, so that
nothing is divided: every rank plans all.

```bash
python benchmarks/scale.py
python benchmarks/scale.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch
from paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from rich.table import Table

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.cost import CostModel, analytic_costs, batch_workloads, find_device
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data.fingerprint import fingerprint
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.step_dataset import RankInputs
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlugin,
    ParallelPlan,
    SampleSizes,
    StepPlan,
    resolve_plan,
    sync_groups,
)
from hf_mmparallel.schedule import Program

DATASET, MODEL, METHOD = "synthchartnet", "llama3-3b", "hierarchical"
REPLICA, DEEP = ModulePlugin(pp_size=2, tp_size=4), ModulePlugin(pp_size=8, tp_size=8)
SAMPLES, MICROBATCH = 16, 2  # of a replica of the language model
RANK = 5
GOAL_MS = {"step": 300.0, "sync_groups": 1000.0, "timeline": 300.0}


@dataclass(frozen=True)
class Sizes:
    """
    Sizes of the measurement.

    Args:
        replicas (`tuple[int, ...]`): Replicas of the language model; ten ranks for each.
        batches (`tuple[int, ...]`): Samples of a global batch on `batch_replicas` replicas.
        batch_replicas (`int`): Replicas of the language model.
        deep_groups (`int`): Times 7 replicas of a deeper language model with 32 of the encoder, on 512 ranks.
        repeats (`int`): Timed calls.
        many (`int`): Microbatches of each of `many_replicas` replicas.
        many_replicas (`int`): Replicas of the language model.
    """

    replicas: tuple[int, ...] = (4, 32, 128, 512, 1024)
    batches: tuple[int, ...] = (1024, 8192, 32768, 102400)
    batch_replicas: int = 32
    deep_groups: int = 20
    repeats: int = 11
    many: int = 40
    many_replicas: int = 48


QUICK = Sizes((2, 4), (64,), 2, 1, 1, 4, 2)


def make_plan(language: ModulePlugin, vision: ModulePlugin, num_microbatches: int) -> ParallelPlan:
    """The layout of two modules."""
    layouts = {VISION: vision, LANGUAGE_MODEL: language}
    return replace(resolve_plan(PUBLISHED_MODELS[MODEL].spec, layouts), num_microbatches=num_microbatches)


def arranged_step(plan: ParallelPlan, costs: CostModel, sizes: SampleSizes, microbatch: int) -> StepPlan:
    """The global batch of all samples of a table, arranged by their sizes."""
    samples = range(sizes.num_samples)
    return arrange_step(plan, samples, batch_workloads(costs, plan, sizes.take(samples)), microbatch, METHOD)


def once(function: Callable[[], Any]) -> float:
    """Milliseconds of processor time of one call."""
    begin = time.process_time()
    function()
    return round((time.process_time() - begin) * 1e3, 3)


def measure(
    kind: str, language: ModulePlugin, vision: ModulePlugin, batch: int, microbatch: int, repeats: int
) -> dict[str, Any]:
    """All times of one layout and batch."""
    spec = PUBLISHED_MODELS[MODEL].spec
    plan = make_plan(language, vision, batch // (language.dp_size * microbatch))
    groups = sync_groups(spec, plan)
    sizes, draw = PUBLISHED[DATASET].draw(batch, seed=0), GlobalBatch(tuple(range(batch)))
    costs = analytic_costs(spec, find_device("h100"), 2)
    planner = StepPlanner(costs, plan, groups, microbatch, METHOD, sizes.take)

    def arranged() -> StepPlan:
        return arranged_step(plan, costs, sizes, microbatch)

    step = arranged()

    def program() -> Any:
        return planner.program(replace(step), sizes, RANK)  # a copy, which remembers nothing

    def rest(step: StepPlan, program: Program) -> Any:
        return fingerprint(step, program, {}, {}, {}), RankInputs(plan, RANK).chunks(step)

    def whole() -> Any:
        planned = planner(draw, RANK)
        return rest(planned.step, planned.program)

    first_ms = once(program)
    found = program()
    parts = {
        "arrange": arranged,
        "program": program,
        "rest": lambda: rest(replace(step), found),
        "step": whole,
        "timeline": lambda: planner.timeline(replace(step), sizes),
    }
    return {
        "kind": kind,
        "ranks": plan.world_size,
        "samples": batch,
        "microbatches": plan.num_microbatches,
        "planned_ranks": len(found.actions),
        "planned_tasks": len({action.task for actions in found.actions.values() for action in actions if action.task}),
        "sync_groups_ms": common.measured(lambda: sync_groups(spec, plan), repeats),
        "first_ms": first_ms,
        **{f"{name}_ms": common.measured(function, repeats) for name, function in parts.items()},
    }


def measurements(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Every row."""
    for replicas in sizes.replicas:
        yield measure("ranks", *divided(replicas), SAMPLES * replicas, MICROBATCH, sizes.repeats)
    for batch in sizes.batches:
        microbatch = max(MICROBATCH, batch // sizes.batch_replicas // SAMPLES)
        yield measure("batch", *divided(sizes.batch_replicas), batch, microbatch, sizes.repeats)
    samples = sizes.many * sizes.many_replicas * MICROBATCH
    yield measure("many", *divided(sizes.many_replicas), samples, MICROBATCH, sizes.repeats)
    groups = sizes.deep_groups
    language, vision = replace(DEEP, dp_size=7 * groups), ModulePlugin(dp_size=32 * groups, tp_size=2)
    yield measure("deep", language, vision, 7 * groups * 4 * SAMPLES, MICROBATCH, sizes.repeats)
    language, vision = divided(sizes.replicas[-1])
    unlike = replace(vision, dp_size=vision.dp_size - 1)
    yield measure("unlike", language, unlike, SAMPLES * language.dp_size, MICROBATCH, min(3, sizes.repeats))


def divided(replicas: int) -> tuple[ModulePlugin, ModulePlugin]:
    """A language model with two encoder replicas for each of its replicas."""
    return replace(REPLICA, dp_size=replicas), ModulePlugin(dp_size=2 * replicas)


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """The printed table and notes."""
    times = ("arrange", "program", "rest", "step", "sync_groups", "timeline")
    table = Table("", "ranks", "samples", "microbatches", "ranks planned", "tasks", *times, "first")
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("ranks", "samples", "microbatches", "planned_ranks", "planned_tasks")]
        cells = [f"{row[f'{name}_ms']['processor']:.1f}" for name in times]
        table.add_row(row["kind"], *counts, *cells, f"{row['first_ms']:.1f}")
    return [table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few ranks and samples")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    load = os.getloadavg()
    torch.set_num_threads(1)
    rows = list(measurements(sizes))
    result = {"goals_ms": GOAL_MS, "rows": rows, **common.machine(common.QUICK, load), "shapes": asdict(sizes)}
    notes = ["Medians of processor time in ms; `step` is what a rank plans for a step, `timeline` predicts all ranks."]
    common.report("scale", tables(rows), notes, result, options.out)


if __name__ == "__main__":
    main()
