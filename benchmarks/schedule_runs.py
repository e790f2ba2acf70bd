"""
Steps of the engine under each schedule, on 4 and 8 gloo ranks whose tasks sleep as long as modelled, beside the
simulator's. Tasks take what those of Qwen2.5-VL's encoder and Llama 3b would for a batch of SynthChartNet's sizes.

```bash
python benchmarks/schedule_runs.py
python benchmarks/schedule_runs.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from microbatch_balance import MICROBATCH, TaskTimes
from modelled import collate, message_ms, sleep_instead, timed_step, tiny_model, tiny_samples
from paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from rich.table import Table

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from hf_mmparallel.plan.methods import Schedule
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.schedule import build_program, find_representatives, simulate
from hf_mmparallel.world import World

GOAL = 0.1  # difference of a measured step to the predicted one
DATASET, MODEL = "synthchartnet", "llama3-3b"
TWO_STAGES = {"pp_size": 2}
ROUNDS = {"pp_size": 2, "vp_size": 2}
SHARING = {"colocate_with": VISION}


@dataclass(frozen=True)
class Run:
    """A schedule with its layout, whose replicas take four ranks, or two on shared ranks."""

    schedule: Schedule
    vision: Mapping[str, Any]
    language_model: Mapping[str, Any]
    arrangement: str = "hierarchical"


RUNS = {
    "1f1b": Run("1f1b", TWO_STAGES, TWO_STAGES),
    "eager": Run("eager", TWO_STAGES, TWO_STAGES),
    "interleaved": Run("interleaved", TWO_STAGES, ROUNDS),
    "zero_bubble": Run("zero_bubble", TWO_STAGES, TWO_STAGES),
    "zero_bubble, interleaved": Run("zero_bubble", TWO_STAGES, ROUNDS),
    "DIP on shared ranks": Run("encoders_first", TWO_STAGES, SHARING, "sub_microbatches"),
    "1f1b on shared ranks": Run("1f1b", TWO_STAGES, SHARING),
    "zero_bubble on shared ranks": Run("zero_bubble", TWO_STAGES, SHARING),
}


@dataclass(frozen=True)
class Sizes:
    """Microbatches of a replica, milliseconds of a step under 1F1B, and steps of each schedule."""

    microbatches: int = 8
    step_ms: float = 1500.0
    repeats: int = 3


QUICK = Sizes(microbatches=2, step_ms=100.0, repeats=1)


def run(name: str, sizes: Sizes, message: float) -> dict[str, Any]:
    """Measured and predicted steps of one schedule."""
    own = RUNS[name]
    shares = "colocate_with" in own.language_model
    replicas = dist.get_world_size() // (2 if shares else 4)
    model = tiny_model([VISION]).train()
    spec = build_model_spec(model)
    copies = {} if shares else {"dp_size": replicas}
    layout = {
        VISION: ModulePlugin(dp_size=replicas, **own.vision),
        LANGUAGE_MODEL: ModulePlugin(**copies, **own.language_model),
    }
    plan = resolve_plan(spec, layout, dist.get_world_size(), own.schedule)
    engine = ParallelEngine(model, spec, plan, World())
    count = MICROBATCH * sizes.microbatches * replicas
    workloads = PUBLISHED_MODELS[MODEL].workloads(PUBLISHED[DATASET].draw(count, seed=0))
    step = arrange_step(plan, range(count), workloads, MICROBATCH, own.arrangement)
    times = TaskTimes(plan, step, workloads)
    # all work of a replica on four ranks, and a third more for the bubble
    forward = sum(float(workloads.forward_ms[module].sum()) for module in plan.modules) / replicas
    scale = sizes.step_ms / (4 / 3 * 3 * forward / 4)
    program = build_program(plan, step, engine.sync_groups, times)
    tasks = {action.task for actions in program.actions.values() for action in actions if action.task is not None}
    costs = {task: scale * times(task) for task in tasks}
    data = StepDataset(Reader(tiny_samples(count, [VISION]), collate), engine.inputs, 0).read(step)
    batch = StepBatch.of(data, program, engine.rank)
    sleep_instead(engine, costs)
    measured = [timed_step(engine, batch, index) for index in range(1 + sizes.repeats)][1:]
    predicted = simulate(find_representatives(plan, ()), step, costs.__getitem__, message)
    return {
        "schedule": name,
        "ranks": dist.get_world_size(),
        "predicted_ms": predicted.iteration_ms,
        "measured_ms": statistics.median(measured),
        "bubble": predicted.bubble_fraction,
    }


def run_ranks(options: argparse.Namespace, sizes: Sizes) -> None:
    """The function of the ranks; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    message = message_ms(16)
    result = [run(name, sizes, message) for name in RUNS]
    if dist.get_rank() == 0:
        options.ranks.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def table_of(rows: list[dict[str, Any]]) -> Table:
    """A row for each schedule and number of ranks."""
    table = Table("ranks", "schedule", "predicted ms", "measured ms", "measured / predicted", "bubble")
    for row in rows:
        ratio = row["measured_ms"] / row["predicted_ms"]
        cells = (f"{row['predicted_ms']:.0f}", f"{row['measured_ms']:.0f}", f"{ratio:.3f}", f"{row['bubble']:.0%}")
        table.add_row(str(row["ranks"]), row["schedule"], *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short steps with few microbatches")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.ranks is not None:
        run_ranks(options, sizes)
        return
    load = os.getloadavg()
    rows = [row for count in (4, 8) for row in common.launch(__file__, count, ["--quick"] * options.quick)]
    ratios = [row["measured_ms"] / row["predicted_ms"] for row in rows]
    notes = [f"Measured over predicted: {min(ratios):.3f} to {max(ratios):.3f}. Goal: within {GOAL:.0%}."]
    result = {"rows": rows, "goal": GOAL, **common.machine(common.Shapes(), load)}
    common.report("schedule_runs", [table_of(rows)], notes, result, options.out)


if __name__ == "__main__":
    main()
