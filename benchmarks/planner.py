"""
The planner: what knowing the frozen modules gains, how far predictions are off, how long it takes, and what others do.

Five parts, each of which runs alone with `--only`; the results of the others are kept.

- `frozen`: the nine models of Cornstarch's table 2 (second version), stages by the frozen-aware and the unaware rule.
- `real`: random plans that compute on two gloo ranks, predicted from a profile of single layers.
- `slept`: random plans on four and eight gloo ranks whose tasks sleep for what the cost model says.
- `speed`: allocation, search and profiling batch size.
- `others`: frozen-unaware, single layout, FSDP-like and DistTrain against ours.

```bash
python benchmarks/planner.py
python benchmarks/planner.py --only real --only slept
python benchmarks/planner.py --quick --out out/bench  # the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import planner_plans as plans
import torch
import torch.distributed as dist
from paper_samples import PUBLISHED, PUBLISHED_MODELS
from paper_tables import ALLOCATION_MS
from planner_frozen import ROWS, SETTINGS, frozen_models
from planner_models import AUDIO, VISION, cornstarch_model
from rich.table import Table

from hf_mmparallel.cost import CostModel, analytic_costs, find_device
from hf_mmparallel.papers.allocation import allocate
from hf_mmparallel.papers.compare import all_trained, compare
from hf_mmparallel.papers.stable_batch import draw_from, minimum_stable_batch
from hf_mmparallel.papers.strategies import ModuleDemand
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from hf_mmparallel.planning.problem import PlanningProblem
from hf_mmparallel.planning.search import search_plans

GOALS = {
    "rank_correlation": 0.9,
    "median_error": 0.10,
    "allocation_ms": 100.0,
    "search_8_s": 10.0,
    "search_64_s": 5.0,
    "search_1024_s": 60.0,
    "profiling_batch_s": 2.0,
}
GIB = 2**30
USABLE = 0.9  # of a device's memory


# How long planning takes


def timed(run: Callable[[], Any], repeats: int) -> tuple[list[Any], dict[str, Any]]:
    """Result of some calls, and their seconds: wall time, and CPU time, which other programs disturb less."""
    found, clock, processor = [], [], []
    for _ in range(repeats):
        start, busy = time.perf_counter(), time.process_time()
        found.append(run())
        clock.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    return found, {**common.spread(clock), "processor": common.spread(processor)}


def large_model() -> dict[str, ModuleDemand]:
    """
    DistTrain's MLLM-72B: ViT-Huge, Llama 3 70B and Stable Diffusion 2.1 on A100, 8,192 tokens and 10 images of 1,024
    tokens in a sample, by 6 operations for each parameter and token at half of the peak.
    """
    sizes = {
        "vision": (0.63e9, 32, 16, 10_240, "encoder"),
        LANGUAGE_MODEL: (70e9, 80, 64, 8_192, "encoder"),
        "generator": (1.0e9, 16, 16, 10_240, "generator"),
    }
    flops_per_ms = find_device("a100").peak_tflops * 1e9 / 2
    result = {}
    for name, (parameters, layers, heads, tokens, role) in sizes.items():
        alone_ms = 6 * parameters * tokens / flops_per_ms
        sample_ms = {tp: alone_ms / tp * (1 + 0.06 * math.log2(tp)) for tp in (1, 2, 4, 8)}
        kept = 34 * tokens * math.sqrt(parameters / layers / 12) * layers
        result[name] = ModuleDemand(sample_ms, layers, heads, 4 * parameters, 12 * parameters, kept, role)  # type: ignore[arg-type]
    return result


def vlm(name: str) -> ModelSpec:
    """Qwen2's encoder and Llama 3 of Cornstarch's sizes, without the audio encoder, all trained."""
    spec = all_trained(cornstarch_model(f"{name[0]}S{name[1]}"))
    return replace(spec, modules={key: module for key, module in spec.modules.items() if key != AUDIO})


def search_problem(num_ranks: int) -> PlanningProblem:
    """A model of the 8B class with charts of SynthChartNet's shape on H100."""
    device = find_device("h100")
    sizes = PUBLISHED["synthchartnet"].draw(4096, 0)
    costs = analytic_costs(frozen(vlm("MM"), VISION), device)
    return PlanningProblem(costs, sizes, num_ranks, 8 * num_ranks, USABLE * 80 * GIB)


def mixed_problem(num_ranks: int, count: int) -> PlanningProblem:
    """
    A model of the 8B class, all trained, with text and images of all kinds: half of them photos, and documents at 150
    dots per inch, screens and thumbnails, a third of them turned, and a few samples without an image.
    """
    rng = np.random.default_rng(0)
    sides = np.array([(640, 480), (1240, 1754), (1920, 1080), (256, 256)])[
        rng.choice(4, count, p=(0.5, 0.2, 0.15, 0.15))
    ]
    sides = sides * np.exp(rng.normal(0, 0.35, (count, 1)) + rng.normal(0, 0.12, (count, 2)))
    turned = rng.random(count) < 0.3
    sides[turned] = sides[turned, ::-1]
    patches = (4 * np.rint(np.clip(sides, 56, 3000) / 28).prod(axis=1)).astype(int)
    patches[rng.random(count) < 0.08] = 0
    words = np.clip(np.exp(rng.normal(5.3, 0.9, count)), 8, 6000).astype(int)
    lengths = {
        VISION: [[own] if own else [] for own in patches],
        LANGUAGE_MODEL: [[own] for own in words + patches // 4],
    }
    costs = analytic_costs(vlm("SM"), find_device("h100"))
    return PlanningProblem(costs, SampleSizes.of_sequences(lengths), num_ranks, 4 * num_ranks, USABLE * 80 * GIB)


def frozen(spec: ModelSpec, module: str) -> ModelSpec:
    """The model with a module's tower frozen."""
    return replace(spec, modules={**spec.modules, module: spec.modules[module].with_frozen("tower")})


def speed(quick: bool) -> dict[str, Any]:
    """Times of planning on one core."""
    repeats = 1 if quick else 5
    demands, found = large_model(), {}
    for gpus, (batch, paper_ms) in list(ALLOCATION_MS.items())[-1 if quick else 0 :]:
        _, seconds = timed(lambda n=gpus, b=batch: allocate(demands, n, b, USABLE * 80 * GIB), repeats)
        found[str(gpus)] = {"s": seconds, "paper_ms": paper_ms}
    searches = {}
    for gpus in (8,) if quick else (8, 64, 1024, 4096):
        problem = mixed_problem(gpus, 20_000) if gpus in (8, 4096) else search_problem(gpus)
        problem = replace(problem, effort=16) if quick else problem
        results, seconds = timed(lambda own=problem: search_plans(own), 3 if gpus == 64 else 1)
        row = {"candidates": results[0].num_candidates, "plan": str(results[0].best.candidate)}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of the process, whose imports are a part
        searches[str(gpus)] = {"s": seconds, **row, "is_proven": results[0].is_proven, "gib": peak}
    sizes = PUBLISHED["synthchartnet"].draw(10_000 if quick else 1_000_000, 0)
    work = PUBLISHED_MODELS["llama3-1b"].workloads(sizes).forward_ms
    reports, seconds = timed(lambda: minimum_stable_batch(draw_from(work), None, 64, 4), repeats)
    return {
        "allocation": found,
        "search": searches,
        "profiling_batch": {"s": seconds, "batch_size": reports[0].batch_size},
    }


def speed_table(result: dict[str, Any]) -> Table:
    """A row for each call."""
    table = Table("planning", "median", "largest", "of a processor", "goal", "paper")
    table.title, table.title_justify = "Time of planning", "left"

    def row(name: str, seconds: dict[str, Any], goal: str, paper: str = "") -> None:
        times = (seconds["median"], seconds["max"], seconds["processor"]["median"])
        table.add_row(name, *(f"{1e3 * n:.0f} ms" if n < 1 else f"{n:.1f} s" for n in times), goal, paper)

    for gpus, own in result["allocation"].items():
        goal = f"{GOALS['allocation_ms']:.0f} ms" if gpus == "1296" else ""
        row(f"DistTrain's allocation, {gpus} GPUs", own["s"], goal, f"{own['paper_ms']} ms")
    for gpus, own in result["search"].items():
        goal = f"{GOALS[key]:.0f} s" if (key := f"search_{gpus}_s") in GOALS else ""
        row(f"search, {gpus} GPUs, {own['candidates']} candidates, {own['gib']:.2f} GiB", own["s"], goal)
    row("profiling batch size, 64 GPUs", result["profiling_batch"]["s"], f"{GOALS['profiling_batch_s']:.0f} s")
    return table


# Others


def cases(quick: bool) -> Iterator[tuple[str, CostModel, SampleSizes, int, int]]:
    """Models, samples, GPUs and batches."""
    names = list(PUBLISHED)[:1] if quick else list(PUBLISHED)
    for dataset in names:
        sizes = PUBLISHED[dataset].draw(256 if quick else 4096, 0)
        for model in list(PUBLISHED_MODELS)[: 1 if quick else None]:
            spec = PUBLISHED_MODELS[model].spec
            for gpus in (4,) if quick else (16, 64):
                name = f"{dataset}, {model}, {gpus} A40"
                yield name, analytic_costs(spec, find_device("a40")), sizes, gpus, (2 if quick else 8) * gpus
    if quick:
        return
    sizes = PUBLISHED["synthchartnet"].draw(4096, 0)
    for name, spec in (
        ("4B + 8B", vlm("MM")),
        ("4B frozen + 8B", frozen(vlm("MM"), VISION)),
        ("12B + 32B", vlm("LL")),
        ("12B frozen + 32B", frozen(vlm("LL"), VISION)),
    ):
        yield f"synthchartnet, {name}, 64 H100", analytic_costs(spec, find_device("h100")), sizes, 64, 512


def others(quick: bool) -> list[dict[str, Any]]:
    """Ours and what others would do."""
    rows = []
    for name, costs, sizes, gpus, batch in cases(quick):
        memory = USABLE * (costs.device.memory_gib or 0) * GIB
        problem = PlanningProblem(costs, sizes, gpus, batch, memory)
        result = search_plans(problem)
        best = result.best
        row = {"case": name, "step_ms": best.step_ms, "utilisation": best.prediction.flops_utilisation}
        row |= {
            "gib": best.prediction.peak_memory_bytes / GIB,
            "plan": str(best.candidate),
            "search_s": result.search_s,
        }
        row["others"] = {
            other.name: {
                "step_ms": other.step_ms,
                "times_slower": other.step_ms / best.step_ms,
                "gib": other.peak_memory_gib,
                "plan": other.layout,
                "note": other.note,
            }
            for other in compare(problem, result)
        }
        rows.append(row)
    return rows


def others_table(rows: list[dict[str, Any]]) -> Table:
    """A row for each case: our step, and how much slower others are."""
    names = list(rows[0]["others"])
    table = Table("model and GPUs", "ours s", "MFU", "GiB", *(f"{name}" for name in names))
    table.title, table.title_justify = "Steps of others over ours; in brackets what does not fit the memory", "left"
    for row in rows:
        figures = (f"{row['step_ms'] / 1000:.2f}", f"{row['utilisation']:.0%}", f"{row['gib']:.0f}")
        table.add_row(row["case"], *figures, *(_slower(row["others"][name]) for name in names))
    return table


def _slower(other: dict[str, Any]) -> str:
    text = f"{other['times_slower']:.2f}"
    return f"({text})" if "more than a rank has" in other["note"] else text


# Frozen modules


def frozen_table(result: dict[str, Any]) -> Table:
    """A row for each model: how much longer a step of the unaware rule is."""
    table = Table("model", "paper", *SETTINGS)
    table.title = (
        "Iteration time of the unaware rule over that of the aware one (stages of encoders and language model)"
    )
    table.title_justify = "left"
    for row in result["models"]:
        table.add_row(row["model"], f"{row['paper']['improvement']:.2f}", *(_gain(row[key]) for key in SETTINGS))
    means = (f"{result['mean_improvement'][key]:.2f}" for key in SETTINGS)
    table.add_row("mean", f"{result['goal']:.2f}", *means)
    return table


def _gain(row: dict[str, Any]) -> str:
    """The improvement, and what each rule chose."""
    chosen = [row[rule].get("stages") or row[rule]["gpus"] for rule in ("aware", "unaware")]
    words = " / ".join("-".join(map(str, counts)) for counts in chosen)
    return f"{row['improvement']:.2f} ({words})"


# Predictions


def plans_table(name: str, result: dict[str, Any]) -> Table:
    """A row for each plan."""
    table = Table("plan", "predicted ms", "measured ms", "error", title=name, title_justify="left")
    for row in result["plans"]:
        error = f"{row['predicted_ms'] / row['measured_ms'] - 1:+.1%}"
        table.add_row(row["plan"], f"{row['predicted_ms']:.0f}", f"{row['measured_ms']:.0f}", error)
    return table


def plans_note(name: str, result: dict[str, Any]) -> str:
    return (
        f"{name}: rank correlation {result['rank_correlation']:.3f} (goal {GOALS['rank_correlation']}), median error "
        f"{result['median_error']:.1%} (goal {GOALS['median_error']:.0%}), largest {result['largest_error']:.1%}."
    )


def profiled(shapes: common.Shapes, sizes: plans.Sizes, folder: str) -> Path:
    """A profile of the layers, made by two processes side by side, as two ranks compute."""
    paths = [Path(folder) / f"profile{number}.json" for number in range(2)]
    common.in_processes(plans.write_profile, [shapes] * 2, [sizes] * 2, paths)
    return paths[0]


def run_ranks(options: argparse.Namespace, sizes: plans.Sizes, shapes: common.Shapes) -> None:
    """The function of the ranks; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = plans.real_plans(shapes, sizes, options.profile) if options.profile else plans.slept_plans(sizes)
    if dist.get_rank() == 0:
        options.ranks.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# The script


def run_part(name: str, options: argparse.Namespace, sizes: plans.Sizes, shapes: common.Shapes) -> dict[str, Any]:
    """The result of a part."""
    arguments = ["--quick"] * options.quick
    if name == "frozen":
        return frozen_models(["SSS"], most=2) if options.quick else frozen_models(list(ROWS))
    if name == "real":
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            profile = profiled(shapes, sizes, folder)
            return common.launch(__file__, 2, ["--profile", str(profile), *arguments])
    if name == "slept":
        return {str(world): common.launch(__file__, world, arguments) for world in ((4,) if options.quick else (4, 8))}
    if name == "speed":
        return speed(options.quick)
    return {"cases": others(options.quick)}


PARTS = ("frozen", "real", "slept", "speed", "others")


def reported(parts: dict[str, dict[str, Any]]) -> tuple[list[Table], list[str]]:
    """The tables and notes of the parts that there are."""
    tables, notes = [], []
    if "frozen" in parts:
        tables.append(frozen_table(parts["frozen"]))
        means = parts["frozen"]["mean_improvement"]
        shown = ", ".join(f"{value:.2f} ({key})" for key, value in means.items())
        notes.append(f"Frozen-aware: mean improvement {shown}; the paper's table has {parts['frozen']['goal']:.2f}.")
    if "real" in parts:
        tables.append(plans_table("Real computation, 2 ranks", parts["real"]))
        notes.append(plans_note("Real computation", parts["real"]))
    for world, row in parts.get("slept", {}).items():
        if world.isdigit():
            tables.append(plans_table(f"Modelled durations, {world} ranks", row))
            notes.append(plans_note(f"Modelled durations, {world} ranks", row))
    if "speed" in parts:
        tables.append(speed_table(parts["speed"]))
    if "others" in parts:
        tables.append(others_table(parts["others"]["cases"]))
    return tables, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--only", action="append", choices=PARTS, help="run this part; repeat for others")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes, shapes = (plans.QUICK, plans.QUICK_SHAPES) if options.quick else (plans.Sizes(), plans.SHAPES)
    if options.ranks is not None:
        run_ranks(options, sizes, shapes)
        return
    kept = options.out / "planner.json"
    parts = json.loads(kept.read_text())["parts"] if options.only and kept.exists() else {}
    for name in options.only or PARTS:
        load = os.getloadavg()
        found = run_part(name, options, sizes, shapes)
        machine = common.machine(shapes, load)
        parts[name] = {**found, "run": {key: machine[key] for key in ("date", "commit", "load_before", "load_after")}}
    tables, notes = reported({name: parts[name] for name in PARTS if name in parts})
    result = {"parts": parts, "goals": GOALS, "sizes": asdict(sizes), **common.machine(shapes, os.getloadavg())}
    common.report("planner", tables, notes, result, options.out)


if __name__ == "__main__":
    main()
