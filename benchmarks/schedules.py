"""
Schedules of the same plans and batches: step, bubble and peak memory in the simulator.

Batches of 256 samples with the sizes of four published datasets, an encoder of Qwen2.5-VL in front of a Llama 3 of 1B
or 3B, on A40s by operation counts: four replicas with the stages that Entrain's tables give them, 16 microbatches,
packed rows. 1F1B also with samples in the order of the dataset, without deferral; all others defer by `hierarchical`.
`interleaved` has two virtual stages on each rank of the pipelines, `zero_bubble` splits backwards, and the last row
does both. A row is relative to 1F1B with deferral on the same batch, the mean over batches, also without the sums of
gradients over the replicas; memory is the largest of any rank, with weights, gradients and optimizer state.

```bash
python benchmarks/schedules.py
python benchmarks/schedules.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from rich.table import Table

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.cost import StepCost, analytic_costs, batch_workloads, find_device, memory_timeline
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.plan.methods import Schedule
from hf_mmparallel.schedule import find_representatives, simulate

MICROBATCH = 4
GIB = 2**30
GOALS = {"zero_bubble": 0.92, "interleaved_bubble": 0.6}  # of the step of 1F1B, of the bubble of 1F1B


@dataclass(frozen=True)
class Variant:
    """A schedule of a step: the arrangement of its samples, and what stages have."""

    schedule: Schedule
    arrangement: str = "hierarchical"
    vp_size: int = 1
    splits: bool = False


VARIANTS = {
    "1f1b": Variant("1f1b"),
    "1f1b, no deferral": Variant("1f1b", "contiguous"),
    "gpipe": Variant("gpipe"),
    "eager": Variant("eager"),
    "encoders_first": Variant("encoders_first"),
    "interleaved": Variant("interleaved", vp_size=2),
    "zero_bubble": Variant("zero_bubble", splits=True),
    "zero_bubble, interleaved": Variant("zero_bubble", vp_size=2, splits=True),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the simulations."""

    batch: int = 256
    replicas: int = 4
    num_batches: int = 3


QUICK = Sizes(batch=32, replicas=1, num_batches=1)


def plan_of(model: str, stages: Sequence[int], replicas: int, variant: Variant) -> ParallelPlan:
    """Encoder and language model on ranks of their own, in pipelines of tp groups of two ranks."""
    spec = PUBLISHED_MODELS[model].spec
    sizes = {}
    for name, pp_size in zip((VISION, LANGUAGE_MODEL), stages, strict=True):
        rounds = variant.vp_size if pp_size > 1 and spec.modules[name].num_layers >= 2 * pp_size else 1
        sizes[name] = ModulePlugin(replicas, pp_size, 2, vp_size=rounds if rounds > 1 else None)
    return resolve_plan(spec, sizes, schedule=variant.schedule)


def simulated(model: str, plan: ParallelPlan, variant: Variant, sizes: SampleSizes) -> dict[str, float]:
    """A step of one batch."""
    spec = PUBLISHED_MODELS[model].spec
    costs = replace(analytic_costs(spec, find_device("a40")), packing=True)
    workloads = batch_workloads(costs, plan, sizes)
    step = arrange_step(plan, range(sizes.num_samples), workloads, MICROBATCH, variant.arrangement)
    groups = sync_groups(spec, plan)
    cost = StepCost(costs, plan, step, sizes, groups)
    layout = find_representatives(plan, groups)
    timeline = simulate(layout, step, cost, cost.messages_ms, cost.sync_ms)
    alone = simulate(layout, step, cost, cost.messages_ms)
    levels = memory_timeline(costs, plan, step, sizes, timeline.task_times)
    return {
        "step_ms": timeline.iteration_ms,
        "alone_ms": alone.iteration_ms,
        "bubble": timeline.bubble_fraction,
        "peak_gib": max(num_bytes.max() for _, num_bytes in levels.values()) / GIB,
    }


def compare(dataset: str, model: str, sizes: Sizes) -> dict[str, Any]:
    """All schedules on the batches of a dataset."""
    shape = PUBLISHED[dataset]
    stages = shape.stated.parallel_sizes[model]["entrain"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for seed in range(sizes.num_batches):
        batch = shape.draw(sizes.batch, seed)
        for name, variant in VARIANTS.items():
            found[name].append(simulated(model, plan_of(model, stages, sizes.replicas, variant), variant, batch))
    first = found["1f1b"]
    rows = {
        name: {
            "step": _mean([own["step_ms"] / base["step_ms"] for own, base in zip(rows, first, strict=True)]),
            "alone": _mean([own["alone_ms"] / base["alone_ms"] for own, base in zip(rows, first, strict=True)]),
            "bubble": _mean([own["bubble"] for own in rows]),
            "memory": _mean([own["peak_gib"] / base["peak_gib"] for own, base in zip(rows, first, strict=True)]),
            "step_ms": _mean([own["step_ms"] for own in rows]),
            "peak_gib": _mean([own["peak_gib"] for own in rows]),
        }
        for name, rows in found.items()
    }
    return {"dataset": dataset, "model": model, "stages": list(stages), "schedules": rows}


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)


def table_of(cases: Sequence[dict[str, Any]]) -> Table:
    """The printed table: step over that of 1F1B, bubble, and memory over that of 1F1B."""
    result = Table("dataset", "model", "stages", *VARIANTS, title="step / 1F1B, bubble, memory / 1F1B")
    for case in cases:
        cells = [
            f"{row['step']:.3f}, {row['bubble']:.0%}, {row['memory']:.2f}"
            for row in (case["schedules"][name] for name in VARIANTS)
        ]
        result.add_row(case["dataset"], case["model"], "+".join(map(str, case["stages"])), *cells)
    return result


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over the cases; of the bubble its share of that of 1F1B."""
    means = {}
    for name in VARIANTS:
        rows = [(case["schedules"][name], case["schedules"]["1f1b"]) for case in cases]
        means[name] = {
            "step": _mean([own["step"] for own, _ in rows]),
            "alone": _mean([own["alone"] for own, _ in rows]),
            "bubble_share": _mean([own["bubble"] / base["bubble"] for own, base in rows]),
            "memory": _mean([own["memory"] for own, _ in rows]),
        }
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches of one replica")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    load, sizes = os.getloadavg(), QUICK if options.quick else Sizes()
    cases = [compare(dataset, model, sizes) for dataset in PUBLISHED for model in PUBLISHED_MODELS]
    means = summary(cases)
    notes = [
        f"{name}: step {row['step']:.3f} ({row['alone']:.3f} without sums), bubble {row['bubble_share']:.2f} and "
        f"memory {row['memory']:.2f} of 1F1B's."
        for name, row in means.items()
    ]
    result = {"cases": cases, "means": means, "goals": GOALS, **common.machine(common.Shapes(), load)}
    common.report("schedules", [table_of(cases)], notes, result, options.out)


if __name__ == "__main__":
    main()
