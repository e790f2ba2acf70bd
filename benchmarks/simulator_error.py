"""
The simulator's iteration time against the measured one.

Real computation: an encoder and a language model on two ranks. The cost of a task is a line over its rows for each
stage and kind, fitted to the tasks of the few steps before the one that is predicted. Modelled durations: on four and
eight ranks the tasks sleep for the time that a table says, over the same engine, executor and messages; the simulator
gets the table. In both it also gets the time of a message, measured between two ranks beforehand.

```bash
python benchmarks/simulator_error.py
python benchmarks/simulator_error.py --only modelled
python benchmarks/simulator_error.py --quick --out out/bench  # seconds; the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
from modelled import collate, gathered, message_ms, sleep_instead, timed_step, tiny_model, tiny_samples
from rich.table import Table

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import MultimodalParallelPlugin, StepPlan, plan_for_model
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.schedule import Task, build_program, default_cost, find_representatives, simulate
from hf_mmparallel.world import World

REAL, MODELLED = "real", "modelled"
GOALS = {REAL: 0.15, MODELLED: 0.10}
MICROBATCH = 4
NUM_MICROBATCHES = 8


@dataclass(frozen=True)
class Case:
    """
    Tasks that sleep.

    Args:
        name (`str`): What it is.
        world_size (`int`): Ranks.
        modules (`dict`): Sizes of each module.
        schedule (`str`, *optional*, defaults to `"1f1b"`): The schedule.
        uneven (`float`, *optional*, defaults to 0.0): How far durations of tasks of one stage differ, as a share.
        forward_ms (`Mapping[str, float]`, *optional*):
            Of a forward of each module's stages, 40 when left out. A backward takes twice as long.
        others (`tuple[str, ...]`, *optional*, defaults to `("audio",)`):
            The modules of the model beside `vision` and the language model.
        num_experts (`int`, *optional*, defaults to 0): Experts in each layer of the language model.
    """

    name: str
    world_size: int
    modules: dict[str, dict[str, Any]]
    schedule: str = "1f1b"
    uneven: float = 0.0
    forward_ms: Mapping[str, float] = field(default_factory=dict)
    others: tuple[str, ...] = ("audio",)
    num_experts: int = 0

    def costs(self, tasks: Iterable[Task]) -> dict[Task, float]:
        """The table of durations, the same on all ranks."""
        rng = random.Random(self.name)
        return {
            task: self.forward_ms.get(task.module, 40.0)
            * (1 if task.kind == "fwd" else 2)
            * (1 + self.uneven * rng.uniform(-1, 1))
            for task in sorted(tasks)
        }


_VISION2_LM2 = {"vision": {"dp_size": 2}, "audio": {"colocate_with": "vision"}, "language_model": {"pp_size": 2}}
_DEEP = {"vision": {"pp_size": 2}, "audio": {"dp_size": 2}, "language_model": {"pp_size": 4}}
_WIDE = {"vision": {"dp_size": 3}, "audio": {}, "language_model": {"dp_size": 2, "pp_size": 2}}
_DRAWS: dict[str, dict[str, Any]] = {"vision": {}, "language_model": {"pp_size": 2}, "image": {}}
_DRAWS_BESIDE = {"vision": {}, "language_model": {"pp_size": 3}, "image": {"colocate_with": "vision"}}
_DRAWS_IN_STAGES = {"vision": {"dp_size": 2}, "language_model": {"dp_size": 2, "pp_size": 2}, "image": {"pp_size": 2}}
_LM = {"colocate_with": "language_model"}
_UNLIKE = {"vision": {"dp_size": 4, "tp_size": 2, **_LM}, "language_model": {"dp_size": 2, "pp_size": 2, "tp_size": 2}}
_IMAGES = {"vision": {"cp_size": 4}, "language_model": {"pp_size": 4}}
_IMAGES_BESIDE = {"vision": {"pp_size": 2, "cp_size": 4, **_LM}, "language_model": {"dp_size": 4, "pp_size": 2}}
_EXPERTS = {"vision": {"dp_size": 8, **_LM}, "language_model": {"dp_size": 4, "pp_size": 2, "ep_size": 4}}
_EXPERTS_APART = {"vision": {"dp_size": 2, "cp_size": 2}, "language_model": {"dp_size": 4, "ep_size": 2}}
_DRAWING: dict[str, Any] = {"others": ("image",)}
_SEEING: dict[str, Any] = {"others": ()}
CASES = (
    Case("4 ranks, vision and audio dp 2 on shared ranks, LM pp 2", 4, _VISION2_LM2),
    Case("4 ranks, the same, GPipe, uneven tasks", 4, _VISION2_LM2, "gpipe", 0.5),
    Case("4 ranks, vision, audio, LM pp 2, uneven tasks", 4, {"language_model": {"pp_size": 2}}, uneven=0.5),
    Case("8 ranks, branches of 2 and 1 stages, LM pp 4", 8, _DEEP),
    Case("8 ranks, the same, GPipe", 8, _DEEP, "gpipe"),
    Case("8 ranks, the same, uneven tasks, slow vision", 8, _DEEP, "1f1b", 0.5, {"vision": 90.0, "audio": 16.0}),
    Case("8 ranks, vision dp 3, LM dp 2 pp 2, uneven tasks", 8, _WIDE, "1f1b", 0.5),
    Case("4 ranks, vision, LM pp 2, generator", 4, _DRAWS, **_DRAWING),
    Case(
        "4 ranks, vision and generator on shared ranks, LM pp 3, uneven tasks",
        4,
        _DRAWS_BESIDE,
        "1f1b",
        0.5,
        **_DRAWING,
    ),
    Case("8 ranks, vision dp 2, LM dp 2 pp 2, generator pp 2", 8, _DRAWS_IN_STAGES, **_DRAWING),
    Case(
        "8 ranks, the same, uneven tasks, slow generator",
        8,
        _DRAWS_IN_STAGES,
        "1f1b",
        0.5,
        {"image": 90.0},
        **_DRAWING,
    ),
    Case("8 ranks, vision dp 4 tp 2 on those of LM dp 2 pp 2 tp 2, uneven tasks", 8, _UNLIKE, uneven=0.5, **_SEEING),
    Case("8 ranks, vision cp 4, LM pp 4", 8, _IMAGES, **_SEEING),
    Case("8 ranks, vision pp 2 cp 4 on those of LM dp 4 pp 2", 8, _IMAGES_BESIDE, **_SEEING),
    Case("8 ranks, vision dp 8 on those of LM dp 4 pp 2 ep 4", 8, _EXPERTS, num_experts=4, **_SEEING),
    Case(
        "8 ranks, vision dp 2 cp 2, LM dp 4 ep 2, uneven tasks",
        8,
        _EXPERTS_APART,
        uneven=0.5,
        num_experts=4,
        **_SEEING,
    ),
)


# Real computation


@dataclass(frozen=True)
class MeasuredTask:
    """A task of a step, its rows and how long it took."""

    task: Task
    rows: int
    time_ms: float


def rows_of(task: Task, inputs: Mapping[str, torch.Tensor]) -> int:
    """Size of a task, on which its time depends: images of an encoder, tokens with padding of the language model."""
    if task.module == "language_model":
        return inputs["input_ids"].numel()
    return len(inputs.get("pixel_values", ()))


def fit(measured: Sequence[MeasuredTask]) -> Callable[[Task, int], float]:
    """Time as a line over rows, for each stage and kind."""
    points: dict[tuple, list[MeasuredTask]] = {}
    for item in measured:
        points.setdefault((item.task.kind, item.task.stage_key), []).append(item)
    lines = {}
    for key, items in points.items():
        matrix = np.array([[1.0, item.rows] for item in items])
        lines[key] = np.linalg.lstsq(matrix, np.array([item.time_ms for item in items]), rcond=None)[0]

    def cost(task: Task, rows: int) -> float:
        constant, slope = lines[task.kind, task.stage_key]
        return max(0.0, float(constant + slope * rows))

    return cost


def real_steps(shapes: common.Shapes, num_calibration: int, num_steps: int) -> dict[str, Any]:
    """Predicted and measured times of steps that compute; vision on rank 0, the language model on rank 1."""
    model = common.build_model(shapes).train()
    spec = build_model_spec(model)
    plan = plan_for_model(MultimodalParallelPlugin({}), spec, 2, NUM_MICROBATCHES)
    engine = ParallelEngine(model, spec, plan, World())
    size = MICROBATCH * NUM_MICROBATCHES
    count = 2 + num_calibration + num_steps
    reader = StepDataset(Reader(common.make_dataset(shapes, size * count), common.collate), engine.inputs, 0)
    travel_ms = message_ms(MICROBATCH * shapes.max_images * shapes.image_tokens // 2 * shapes.width)
    steps: list[tuple[StepBatch, list[MeasuredTask], float, float]] = []
    for index in range(count):
        step = contiguous_step(plan, range(index * size, (index + 1) * size), MICROBATCH)
        batch = StepBatch.of(reader.read(step), build_program(plan, step, engine.sync_groups), engine.rank)
        again_ms = timed_step(engine, batch, index)
        time_ms = timed_step(engine, batch, index)
        assert engine.last_result is not None
        mine = {
            t.task: MeasuredTask(t.task, rows_of(t.task, batch.batches[_chunk_key(t.task)]), t.end_ms - t.start_ms)
            for t in engine.last_result.record.timeline
        }
        steps.append((batch, list(gathered(mine).values()), time_ms, again_ms))
    rows = []
    for index in range(2 + num_calibration, count):
        batch, items, measured_ms, again_ms = steps[index]
        cost = fit([item for _, before, _, _ in steps[index - num_calibration : index] for item in before])
        by_task = {item.task: item for item in items}
        layout = find_representatives(plan, engine.sync_groups)
        predicted, from_own = (
            simulate(layout, batch.step, own, travel_ms, order_cost=default_cost)
            for own in (
                lambda t, c=cost, known=by_task: c(t, known[t].rows),
                lambda t, known=by_task: known[t].time_ms,
            )
        )
        rows.append(
            {
                "predicted_ms": predicted.iteration_ms,
                "with_own_times_ms": from_own.iteration_ms,
                "measured_ms": measured_ms,
                "again_ms": again_ms,
            }
        )
    return {"message_ms": travel_ms, "steps": rows}


def _chunk_key(task: Task) -> tuple[str, int, int, int]:
    return task.module, task.replica, task.microbatch, task.chunk


# Modelled durations


def modelled_steps(case: Case, num_steps: int, num_microbatches: int, scale: float) -> dict[str, Any]:
    """Predicted and measured times of steps whose tasks sleep."""
    modules = ("vision", *case.others)
    model = tiny_model(modules, case.num_experts).train()
    spec = build_model_spec(model)
    plugin = MultimodalParallelPlugin(dict(case.modules), case.schedule)  # type: ignore[arg-type]
    plan = plan_for_model(plugin, spec, case.world_size, num_microbatches)
    engine = ParallelEngine(model, spec, plan, World())
    size = 6 * num_microbatches * plan.modules["language_model"].dp_size
    step: StepPlan = contiguous_step(plan, range(size), 6)
    program = build_program(plan, step, engine.sync_groups)
    data = StepDataset(Reader(tiny_samples(size, modules), collate), engine.inputs, 0).read(step)
    batch = StepBatch.of(data, program, engine.rank)
    tasks = {action.task for actions in program.actions.values() for action in actions if action.task is not None}
    costs = {task: scale * cost_ms for task, cost_ms in case.costs(tasks).items()}
    sleep_instead(engine, costs)
    travel_ms, layout = message_ms(16), find_representatives(plan, engine.sync_groups)
    times, own_times = [], []
    for index in range(2 + num_steps):
        times.append(timed_step(engine, batch, index))
        assert engine.last_result is not None
        own = gathered({t.task: t.end_ms - t.start_ms for t in engine.last_result.record.timeline})
        timeline = simulate(layout, step, own.__getitem__, travel_ms, order_cost=default_cost)
        own_times.append(timeline.iteration_ms)
    predicted = simulate(layout, step, costs.__getitem__, travel_ms, order_cost=default_cost)
    return {
        "case": case.name,
        "world_size": case.world_size,
        "generator": "image" in case.others,
        "message_ms": travel_ms,
        "predicted_ms": predicted.iteration_ms,
        "bubble_fraction": predicted.bubble_fraction,
        "steps_ms": times[2:],
        "with_own_times_ms": own_times[2:],
    }


# The script


def error(predicted_ms: float, measured_ms: float) -> float:
    return abs(predicted_ms - measured_ms) / measured_ms


def run_ranks(options: argparse.Namespace, shapes: common.Shapes) -> None:
    """The function of the ranks; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if options.case == REAL:
        result: Any = real_steps(shapes, *((2, 2) if options.quick else (6, options.steps)))
    else:
        sizes = (1, 2, 0.2) if options.quick else (options.repeats, NUM_MICROBATCHES, 1.0)
        result = [modelled_steps(c, *sizes) for c in CASES if c.world_size == dist.get_world_size()]
    if dist.get_rank() == 0:
        options.ranks.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def real_report(result: dict[str, Any]) -> tuple[Table, dict[str, Any]]:
    """The table and the JSON of the steps that compute."""
    table = Table("quantity", "median", "smallest", "largest", title="Real computation, 2 ranks", title_justify="left")
    steps = result["steps"]
    errors = [error(row["predicted_ms"], row["measured_ms"]) for row in steps]
    own = [error(row["with_own_times_ms"], row["measured_ms"]) for row in steps]
    again = [error(row["again_ms"], row["measured_ms"]) for row in steps]
    rows = {
        "measured ms": [row["measured_ms"] for row in steps],
        "predicted ms": [row["predicted_ms"] for row in steps],
        "error %": [100 * value for value in errors],
        "error %, given the step's own task times": [100 * value for value in own],
        "difference %, the same step run twice": [100 * value for value in again],
    }
    for name, values in rows.items():
        shown = common.spread(values)
        table.add_row(name, *(f"{shown[key]:.1f}" for key in ("median", "min", "max")))
    summary = {name: common.spread(values) for name, values in rows.items()}
    return table, {"median_error": statistics.median(errors), "message_ms": result["message_ms"], **summary}


def modelled_report(results: Sequence[dict[str, Any]]) -> tuple[Table, dict[str, Any]]:
    """The table and the JSON of the steps that sleep."""
    table = Table("case", "predicted ms", "measured ms", "error %", "own times %", "bubble")
    table.title = "Modelled durations"
    table.title_justify = "left"
    rows = []
    for result in results:
        measured = statistics.median(result["steps_ms"])
        row = {**result, "measured_ms": measured, "error": error(result["predicted_ms"], measured)}
        pairs = zip(result["with_own_times_ms"], result["steps_ms"], strict=True)
        row["error_with_own_times"] = statistics.median(error(own, step) for own, step in pairs)
        rows.append(row)
        cells = [
            f"{row['predicted_ms']:.0f}",
            f"{measured:.0f}",
            f"{100 * row['error']:.1f}",
            f"{100 * row['error_with_own_times']:.1f}",
        ]
        table.add_row(row["case"], *cells, f"{row['bubble_fraction']:.0%}")
    errors = [row["error"] for row in rows]
    return table, {"median_error": statistics.median(errors), "largest_error": max(errors), "cases": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--only", choices=(REAL, MODELLED), help="the part to run; the other one stays as it is")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each modelled case")
    parser.add_argument("--steps", type=int, default=20, help="predicted steps of real computation")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = common.QUICK if options.quick else common.Shapes()
    if options.ranks is not None:
        run_ranks(options, shapes)
        return
    load = os.getloadavg()
    arguments = ["--repeats", str(options.repeats), "--steps", str(options.steps), *["--quick"] * options.quick]
    path = options.out / "simulator_error.json"
    parts = json.loads(path.read_text()) if options.only and path.exists() else {}
    tables, notes = [], []
    if options.only != MODELLED:
        table, parts[REAL] = real_report(common.launch(__file__, 2, ["--case", REAL, *arguments]))
        tables.append(table)
        notes.append(f"Real computation: median error {parts[REAL]['median_error']:.1%}, goal {GOALS[REAL]:.0%}.")
    if options.only != REAL:
        worlds = sorted({case.world_size for case in CASES})
        results = [row for world in worlds for row in common.launch(__file__, world, ["--case", MODELLED, *arguments])]
        table, parts[MODELLED] = modelled_report(results)
        tables.append(table)
        largest = parts[MODELLED]["largest_error"]
        notes.append(f"Modelled durations: largest error {largest:.1%}, goal {GOALS[MODELLED]:.0%}.")
    result = {**parts, "goals": GOALS, **common.machine(shapes, load)}
    common.report("simulator_error", tables, notes, result, options.out)


if __name__ == "__main__":
    main()
