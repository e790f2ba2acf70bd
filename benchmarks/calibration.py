"""
Predictions of steps before and after `hf-mmparallel calibrate`, beside what the steps took, on plans that were not
fitted.

Links are measured first, as the Trainer does where it does not know a GPU; what the CPU computes is counted by the
table of devices. The Trainer runs one plan, whose `trainer_log.jsonl` is calibrated, as a user would do it. It then
runs other plans with `layer_profile=calibrated.json`: other layouts, microbatches, lengths of samples, packed rows,
something frozen. They take turns, and the fitted plan runs among them again, to tell an error of the prediction from a
machine that became slower. What other programs take of the cores only adds: of each plan the faster half of the steps
counts. Two plans that share matrices are predicted by a calibration that has the log of such a plan as well.

Ranks are processes on the CPU over gloo, one for each core that is used.

```bash
python benchmarks/calibration.py
python benchmarks/calibration.py --quick --out out/bench  # seconds; the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import common
import numpy as np
import torch
import torch.distributed as dist
import transformers
from rich.table import Table
from scipy.stats import rankdata
from transformers import PrinterCallback, TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.cost.calibration import calibrate_logs, without_calibration
from hf_mmparallel.cost.run_log import RUN_LOG, LoggedWindow, tasks_of
from hf_mmparallel.cost.step_planner import Prediction
from hf_mmparallel.planning.comparison import StepComparer, kind_of
from hf_mmparallel.planning.links import link_constants
from hf_mmparallel.trainer.prediction_callback import PredictionCallback
from hf_mmparallel.world import World

RANKS = 2
LINKS = "links.yaml"
VISION, LM = "vision", "language_model"
SHAPES = common.Shapes(image_size=56, text_tokens=(16, 96))
BEFORE, FACTOR, AFTER = "before", "one_factor", "after"


@dataclass(frozen=True)
class Case:
    """
    A plan and what runs under it.

    Args:
        name (`str`): What it is.
        modules (`dict`): The settings of each module.
        schedule (`str`, *optional*, defaults to `"1f1b"`): The schedule.
        microbatch (`int`, *optional*, defaults to 4): Samples of a microbatch.
        packing (`bool`, *optional*, defaults to `False`): Whether rows of the language model are packed.
        text (`int`, *optional*, defaults to 1): How many times as long texts are as in the fitted run.
        by_both (`bool`, *optional*, defaults to `False`): Whether it is predicted by the logs of both fitted plans.
    """

    name: str
    modules: dict[str, dict[str, Any]] = field(default_factory=lambda: {VISION: {}, LM: {}})
    schedule: str = "1f1b"
    microbatch: int = 4
    packing: bool = False
    text: int = 1
    by_both: bool = False

    @property
    def is_same_work(self) -> bool:
        """Whether a step computes what one of the fitted plan does, so that a search could choose between the two."""
        return self.text == 1 and not any("freeze" in module for module in self.modules.values())


SHARED = {"colocate_with": VISION}
COPIES = {VISION: {"dp_size": 2}, LM: SHARED}
CUT = {VISION: {"tp_size": 2}, LM: SHARED}
FITTED = Case("a rank for each module")
FITTED_TOO = Case("both modules cut by two (tensor parallelism)", CUT)
JUDGED = (
    Case("the same, microbatches of 2", microbatch=2),
    Case("the same, microbatches of 8", microbatch=8),
    Case("the same, GPipe", schedule="gpipe"),
    Case("the same, packed rows", packing=True),
    Case("the same, texts three times as long", text=3),
    Case("the same, encoder frozen", {VISION: {"freeze": "tower"}, LM: {}}),
    Case("two copies of both modules", COPIES),
    Case("two copies, packed rows, microbatches of 8", COPIES, microbatch=8, packing=True),
    Case(
        "two copies, activations recomputed",
        {VISION: {"dp_size": 2}, LM: {**SHARED, "activation_checkpointing": True}},
    ),
    Case("both modules in two stages", {VISION: {"pp_size": 2}, LM: SHARED}),
    FITTED_TOO,  # by the log of the other one
    Case("both modules cut by two, microbatches of 8, by both logs", CUT, microbatch=8, by_both=True),
    Case("both modules cut by two, packed rows, by both logs", CUT, packing=True, by_both=True),
)


@dataclass(frozen=True)
class Sizes:
    """
    Sizes of the benchmark.

    Args:
        batch (`int`): Samples of a global batch.
        fitted_steps (`int`): Steps of the run that is calibrated, without its first.
        steps (`int`): Of each run of a judged plan, without its first.
        rounds (`int`): Runs of each judged plan.
        judged (`tuple[Case, ...]`): The plans.
    """

    batch: int = 16
    fitted_steps: int = 8
    steps: int = 3
    rounds: int = 3
    judged: tuple[Case, ...] = JUDGED


QUICK = Sizes(batch=8, fitted_steps=4, steps=1, rounds=1, judged=JUDGED[3::3])


@dataclass(frozen=True)
class Step:
    """
    A step in ms: as measured, as predicted by the costs that were corrected, and by the calibrated ones.

    Args:
        measured (`float`): On the slowest rank.
        before (`float`): Predicted by the device table.
        after (`float`): Predicted by the calibrated costs.
        tasks (`Mapping[str, tuple[float, float, float]]`):
            `"vision/forward"` and so on -> the same three of all tasks of a kind.
        replayed (`float`): With its tasks as measured, and messages and sums as predicted.
    """

    measured: float
    before: float
    after: float
    tasks: Mapping[str, tuple[float, float, float]]
    replayed: float


# What the ranks run


class Keeping(TrainerCallback):
    """Keeps how steps were arranged: number of the step -> what [`StepComparer.predict`] takes."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.steps: dict[int, tuple[Any, Any, Any]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self.engine
        self.steps[state.global_step] = (engine.current_step, engine.current_sizes, engine.current_workloads)


def tokens_of(sample: Mapping[str, Any], image_tokens: int) -> dict[str, Any]:
    """The tokens of a sample in each module."""
    return {LM: len(sample["input_ids"]), VISION: [image_tokens] * len(sample.get("pixel_values", ()))}


def train(
    case: Case, shapes: common.Shapes, batch: int, steps: int, seed: int, folder: Path, profile: Path | None
) -> list[Step]:
    """Runs a plan for some steps, after one that warms up; on rank 0 what they took. Beside `folder` are the links."""
    own = replace(shapes, text_tokens=tuple(case.text * length for length in shapes.text_tokens))
    modules = {**case.modules, LM: {**case.modules[LM], "attn_implementation": "bitfield"}}
    args = MultimodalTrainingArguments(
        output_dir=str(folder),
        parallel={"modules": modules, "schedule": case.schedule},
        global_batch_size=batch,
        per_device_train_batch_size=case.microbatch,
        packing=case.packing,
        gpu_spec=str(folder.parent / LINKS),
        layer_profile=None if profile is None else str(profile),
        max_steps=1 + steps,
        logging_steps=1,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
    )
    trainer = MultimodalParallelTrainer(
        model=common.build_model(shapes),
        args=args,
        train_dataset=common.make_dataset(own, 4 * batch),  # type: ignore[arg-type]
        data_collator=common.collate,
        sample_tokens=lambda sample: tokens_of(sample, shapes.image_tokens),
    )
    keeping = Keeping(trainer.engine)
    trainer.add_callback(keeping)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    (callback,) = (own for own in trainer.callback_handler.callbacks if isinstance(own, PredictionCallback))
    if callback.comparer is None:
        return []
    planner = callback.comparer.planner
    plain = StepComparer(replace(planner, costs=without_calibration(planner.costs)))
    return [step_of(window, plain.predict(*keeping.steps[window.step])) for window in callback.windows]


def step_of(window: LoggedWindow, before: Prediction) -> Step:
    """A logged step, with what the costs without a calibration say of it."""
    plain: dict[str, float] = {}
    for task, (start_ms, end_ms) in before.timeline.task_times.items():
        name = f"{task.module}/{kind_of(task)}"
        plain[name] = plain.get(name, 0.0) + end_ms - start_ms
    tasks = {
        f"{module}/{kind}": (
            window.task_ms("measured_ms", module, kind),
            plain[f"{module}/{kind}"],
            window.task_ms("predicted_ms", module, kind),
        )
        for module, kind in tasks_of([window])
    }
    return Step(window.step_ms, before.timeline.iteration_ms, window.predicted_step_ms, tasks, window.replayed_ms)


def measure_links(repeats: int = 5) -> dict[str, float]:
    """Fields of [`Hardware`] for the links of the ranks: the best of some measurements, which others disturb."""
    world = World()
    found = [link_constants(world) for _ in range(repeats)]
    return {name: (min if name.endswith("_us") else max)(own[name] for own in found) for name in found[0]}


def run_ranks(options: argparse.Namespace, shapes: common.Shapes, sizes: Sizes) -> None:
    """The function of the ranks; rank 0 writes the result."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    rng = random.Random(0)
    folder = options.ranks.parent
    profile, both = folder / "calibrated.json", folder / "calibrated_by_both.json"
    # On a machine with other work a latency may be above the largest one of a device file, 1 ms.
    links = {key: min(value, 1e3) if key.endswith("_latency_us") else value for key, value in measure_links().items()}
    if dist.get_rank() == 0:
        (folder / LINKS).write_text(json.dumps({"name": "cpu", "like": "cpu", **links}))
    dist.barrier()
    result: dict[str, Any] = {"links": links}
    plans = (FITTED, *sizes.judged)
    drawing = mock.patch("hf_mmparallel.trainer.start_report.draw_prediction")
    with drawing, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the plans
        fitted = [
            train(case, shapes, sizes.batch, sizes.fitted_steps, 0, folder / name, None)
            for case, name in ((FITTED, "fitted"), (FITTED_TOO, "fitted_too"))
        ]
        if dist.get_rank() == 0:
            logs = [folder / name / RUN_LOG for name in ("fitted", "fitted_too")]
            for name, path, own in (("calibration", profile, logs[:1]), ("calibration_by_both", both, logs)):
                found = calibrate_logs(own)
                found.save(path)
                result[name] = asdict(found)
        dist.barrier()
        steps: dict[str, list[Step]] = {case.name: [] for case in plans}
        for number in range(1, 1 + sizes.rounds):
            for case in rng.sample(plans, len(plans)):
                out = folder / f"{number}-{plans.index(case)}"
                known = both if case.by_both else profile
                steps[case.name] += train(case, shapes, sizes.batch, sizes.steps, number, out, known)
    if dist.get_rank() == 0:
        result["fitted_steps"] = [asdict(step) for step in fitted[0]]
        result["steps"] = {name: [asdict(step) for step in own] for name, own in steps.items()}
        options.ranks.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# What is made of it


def plan_row(case: Case, steps: Sequence[Mapping[str, Any]], factor: float) -> dict[str, Any]:
    """
    Medians of the faster half of a plan's steps, and predictions over what was measured.

    Args:
        case (`Case`): The plan.
        steps (`Sequence[Mapping]`): Its steps, see [`Step`].
        factor (`float`): What steps of the fitted plan took over what was predicted.
    """
    measured_ms = [step["measured"] for step in steps]
    steps = sorted(steps, key=lambda step: step["measured"] / step[BEFORE])[: -(-len(steps) // 2)]
    over = {when: statistics.median(step[when] / step["measured"] for step in steps) for when in (BEFORE, AFTER)}
    tasks = {
        name: {
            when: statistics.median(step["tasks"][name][index] / step["tasks"][name][0] for step in steps)
            for index, when in ((1, BEFORE), (2, AFTER))
        }
        for name in steps[0]["tasks"]
    }
    times = {name: statistics.median(step[name] for step in steps) for name in ("measured", BEFORE, AFTER, "replayed")}
    return {
        "plan": case.name,
        "fitted": case == FITTED,
        "same_work": case.is_same_work,
        "by_both": case.by_both,
        "steps": len(steps),
        "ms": {**times, FACTOR: factor * times[BEFORE]},
        "over_measured": {**over, FACTOR: factor * over[BEFORE]},
        "replayed_over_measured": statistics.median(step["replayed"] / step["measured"] for step in steps),
        "tasks_over_measured": tasks,
        "measured_ms": measured_ms,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of steps and of tasks, and rank correlations, of the plans that were not fitted."""
    judged = [row for row in rows if not row["fitted"]]
    alike = [row for row in rows if row["same_work"]]
    found: dict[str, Any] = {}
    for when in (BEFORE, FACTOR, AFTER):
        errors = [abs(row["over_measured"][when] - 1) for row in judged]
        times = np.array([[row["ms"][when], row["ms"]["measured"]] for row in alike])
        found[when] = {
            "median_error": statistics.median(errors),
            "largest_error": max(errors),
            "rank_correlation": float(np.corrcoef(rankdata(times, axis=0).T)[0, 1]),
        }
        if when != FACTOR:
            tasks = [abs(own[when] - 1) for row in judged for own in row["tasks_over_measured"].values()]
            found[when] |= {"median_task_error": statistics.median(tasks), "largest_task_error": max(tasks)}
    return {"plans": len(judged), "same_work": len(alike), **found}


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each plan."""
    table = Table("plan", "measured ms", "before", "one factor", "after", "replayed", "tasks after", show_lines=False)
    table.title, table.title_justify = "Predicted over measured", "left"
    for row in rows:
        tasks = [own[AFTER] for own in row["tasks_over_measured"].values()]
        over = row["over_measured"]
        cells = [f"{over[when]:.2f}" for when in (BEFORE, FACTOR, AFTER)]
        table.add_row(
            row["plan"] + (" (fitted)" if row["fitted"] else ""),
            f"{row['ms']['measured']:.0f}",
            *cells,
            f"{row['replayed_over_measured']:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in tasks),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes, sizes = (common.QUICK, QUICK) if options.quick else (SHAPES, Sizes())
    if options.ranks is not None:
        run_ranks(options, shapes, sizes)
        return
    load = os.getloadavg()
    found = common.launch(__file__, RANKS, ["--quick"] * options.quick)
    factor = statistics.median(step["measured"] / step[BEFORE] for step in found["fitted_steps"])
    rows = [plan_row(case, found["steps"][case.name], factor) for case in (FITTED, *sizes.judged)]
    errors = summary(rows)
    notes = [
        f"Steps of {errors['plans']} plans that were not fitted, {name}: median error {own['median_error']:.1%}, "
        f"largest {own['largest_error']:.1%}; rank correlation of the {errors['same_work']} plans that do the same "
        f"work {own['rank_correlation']:.2f}."
        for name, own in ((when.replace("_", " "), errors[when]) for when in (BEFORE, FACTOR, AFTER))
    ]
    result = {
        "errors": errors,
        "factor": factor,
        "links": found["links"],
        **{name: found[name] for name in ("calibration", "calibration_by_both")},
        "plans": rows,
        "ranks": RANKS,
        "sizes": {"batch": sizes.batch, "steps": sizes.steps, "rounds": sizes.rounds},
        **common.machine(shapes, load),
    }
    common.report("calibration", [table_of(rows)], notes, result, options.out)


if __name__ == "__main__":
    main()
