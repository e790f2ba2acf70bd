"""
Schedules of the same plans and batches: step, bubble and peak memory in the simulator.

Batches of 512 samples with the sizes of four published datasets, an encoder of Qwen2.5-VL in front of a Llama 3 of 1B
or 3B, on A40s by operation counts: four replicas with as many stages as Entrain's tables give them, of about equal
time, 32 microbatches, packed rows. 1F1B also with samples in the order of the dataset, without deferral; all others
defer by `hierarchical`. `interleaved` has two virtual stages on each rank of the pipelines, `zero_bubble` splits
backwards, `zero_bubble, interleaved` does both, and `zero_bubble_h2` has more microbatches in flight. A row is
relative to 1F1B with deferral on the same batch, the mean over batches, also without the sums of gradients over the
replicas; memory is the largest of any rank, with weights, gradients and optimizer state.

The same on shared ranks, eight stages of each module on the same eight tp groups, relative to DIP: two encoder
microbatches for each of the language model, all encoder forwards before and all encoder backwards after it, stages of
equally many layers; and beside DIP with the stages of all others.

```bash
python benchmarks/schedules.py
python benchmarks/schedules.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from rich.table import Table

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.cost import (
    CostModel,
    StepCost,
    analytic_costs,
    batch_workloads,
    find_device,
    layer_table,
    memory_timeline,
)
from hf_mmparallel.papers.baseline_layouts import even_layers
from hf_mmparallel.plan import LANGUAGE_MODEL, ParallelPlan, SampleSizes, sync_groups
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.plan.methods import Schedule
from hf_mmparallel.planning.partition import partition_all
from hf_mmparallel.planning.problem import Candidate
from hf_mmparallel.schedule import find_representatives, simulate

MICROBATCH, TP_SIZE = 4, 2
GIB = 2**30
# of the step of 1F1B, of its bubble, and in every case of the step of DIP
GOALS = {"zero_bubble": 0.92, "interleaved_bubble": 0.6, "shared": 0.97}


@dataclass(frozen=True)
class Variant:
    """A schedule of a step: the arrangement of its samples, and what stages have."""

    schedule: Schedule
    arrangement: str = "hierarchical"
    vp_size: int = 1
    even: bool = False  # stages have equally many layers, not about equal time


VARIANTS = {  # on ranks of their own; the others are relative to the first
    "1f1b": Variant("1f1b"),
    "1f1b, no deferral": Variant("1f1b", "contiguous"),
    "gpipe": Variant("gpipe"),
    "eager": Variant("eager"),
    "encoders_first": Variant("encoders_first"),
    "interleaved": Variant("interleaved", vp_size=2),
    "zero_bubble": Variant("zero_bubble"),
    "zero_bubble, interleaved": Variant("zero_bubble", vp_size=2),
    "zero_bubble_h2": Variant("zero_bubble_h2"),
}
SHARED = {
    "DIP": Variant("encoders_first", "sub_microbatches", even=True),
    "DIP, equal times": Variant("encoders_first", "sub_microbatches"),
    "1f1b": Variant("1f1b"),
    "zero_bubble": Variant("zero_bubble"),
    "zero_bubble, tapered": Variant("zero_bubble", "tapered"),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the simulations."""

    batch: int = 512
    replicas: int = 4
    num_batches: int = 3


QUICK = Sizes(batch=32, replicas=1, num_batches=1)


def plan_of(
    costs: CostModel, stages: Sequence[int], replicas: int, variant: Variant, sizes: SampleSizes, shares: bool = False
) -> ParallelPlan:
    """Encoder and language model on ranks of their own, or the same, in pipelines of tp groups of two ranks."""
    layouts = {}
    for name, pp_size in zip((VISION, LANGUAGE_MODEL), stages, strict=True):
        mean = [MICROBATCH * float(values[name].mean()) for values in (sizes.tokens, sizes.squares)]
        times = layer_table(costs, name, TP_SIZE).step_ms(*mean)
        layers = even_layers(len(times), pp_size)
        if not variant.even:
            layers = partition_all(times, pp_size).partition(pp_size).layers
        layouts[name] = ModuleLayout(layers, replicas, tp_size=TP_SIZE)
    hosts = {VISION: LANGUAGE_MODEL} if shares else {}
    return Candidate(layouts, hosts, 1, variant.schedule, vp_size=variant.vp_size).plan(costs.spec)


def simulated(costs: CostModel, plan: ParallelPlan, variant: Variant, sizes: SampleSizes) -> dict[str, float]:
    """A step of one batch."""
    workloads = batch_workloads(costs, plan, sizes)
    step = arrange_step(plan, range(sizes.num_samples), workloads, MICROBATCH, variant.arrangement)
    groups = sync_groups(costs.spec, plan)
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
    """All schedules on the batches of a dataset, on ranks of their own and on shared ones."""
    stated = PUBLISHED[dataset].stated.parallel_sizes[model]
    rows = {
        kind: _rows(dataset, model, sizes, stated[system], variants, kind == "shared")
        for kind, system, variants in (("schedules", "entrain", VARIANTS), ("shared", "dip", SHARED))
    }
    return {"dataset": dataset, "model": model, "stages": list(stated["entrain"]), **rows}


def _rows(
    dataset: str, model: str, sizes: Sizes, stages: Sequence[int], variants: Mapping[str, Variant], shares: bool
) -> dict[str, dict[str, float]]:
    """The means of each variant over the batches."""
    costs = replace(analytic_costs(PUBLISHED_MODELS[model].spec, find_device("a40")), packing=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for seed in range(sizes.num_batches):
        batch = PUBLISHED[dataset].draw(sizes.batch, seed)
        for name, variant in variants.items():
            plan = plan_of(costs, stages, sizes.replicas, variant, batch, shares)
            found[name].append(simulated(costs, plan, variant, batch))
    first = found[next(iter(variants))]
    return {
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


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)


def table_of(cases: Sequence[dict[str, Any]], kind: str, variants: Mapping[str, Variant]) -> Table:
    """The printed table: step over that of the first variant, bubble, and memory over that of the first one."""
    first = next(iter(variants))
    title = f"{kind}: step / {first}, bubble, memory / {first}"
    result = Table("dataset", "model", *variants, title=title)
    for case in cases:
        cells = [
            f"{row['step']:.3f}, {row['bubble']:.0%}, {row['memory']:.2f}"
            for row in (case[kind][name] for name in variants)
        ]
        result.add_row(case["dataset"], case["model"], *cells)
    return result


def summary(
    cases: Sequence[dict[str, Any]], kind: str, variants: Mapping[str, Variant]
) -> dict[str, dict[str, float]]:
    """Means over the cases, and the longest step; of the bubble its share of that of the first variant."""
    means = {}
    for name in variants:
        rows = [(case[kind][name], case[kind][next(iter(variants))]) for case in cases]
        means[name] = {
            "step": _mean([own["step"] for own, _ in rows]),
            "longest": max(own["step"] for own, _ in rows),
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
    kinds = {"schedules": VARIANTS, "shared": SHARED}
    means = {kind: summary(cases, kind, variants) for kind, variants in kinds.items()}
    notes = [
        f"{kind}, {name}: step {row['step']:.3f}, at most {row['longest']:.3f} ({row['alone']:.3f} without sums), "
        f"bubble {row['bubble_share']:.2f} and memory {row['memory']:.2f} of the first's."
        for kind, rows in means.items()
        for name, row in rows.items()
    ]
    result = {"cases": cases, "means": means, "goals": GOALS, **common.machine(common.Shapes(), load)}
    tables = [table_of(cases, kind, variants) for kind, variants in kinds.items()]
    common.report("schedules", tables, notes, result, options.out)


if __name__ == "__main__":
    main()
