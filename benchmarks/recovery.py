"""
Time from a death to the next finished step: with `resilience`, and by a stop and a new start from a checkpoint.

A process of a training run on gloo ranks dies in the forward of a step. With `resilience` under `hf-mmparallel launch`
the others go on. Of the time until they have finished that step, `detected` is until the last of them had stopped its
work, `met` until they were connected anew, `planned`, `copied` and `laid out` what the names say, and `first step` the
step itself. The time limit after which a stopped process counts as lost is subtracted. `checkpoint` is the same script
and death under `accelerate launch` without `resilience`: the job ends, is started again, reads the checkpoint of the
step before the last one, and finishes one step; it then still has to repeat the one in which the process died.

`recovery_memory.json` has the peak of the tensors of each rank's device, from when the gradients of the interrupted
step are freed until the model is laid out, on a device that counts its tensors
([`counted_device`](counted_device.py)).

`overhead` has no deaths: blocks of steps with and without the functions of recovery take turns in one run, whose own
time is also counted directly, and so is the processor time of its threads.

```bash
python benchmarks/recovery.py
python benchmarks/recovery.py --memory  # the peaks only
python benchmarks/recovery.py --quick --out out/bench  # a minute; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from chaos_runs import CONFIG
from rich.table import Table

WORKER = common.ROOT / "benchmarks" / "recovery_worker.py"
PARTS = ("detected", "met", "planned", "copied", "laid out", "first step")
CAUSES = {"SIGKILL": "kill", "exit": "exit", "exception": "raise", "SIGSTOP": "stop"}
HANG_S = 3.0
DEATH_STEP, STEPS, SAVED_STEP = 6, 9, 4
GOALS = {"total_s": 2.0, "detected_s": 0.5, "times_faster": 10.0, "overhead": 0.01}
MEMORY_GOAL = 0.15  # of a predicted peak's error


@dataclass(frozen=True)
class Size:
    """
    A model and a layout.

    Args:
        model (`str`): Its name.
        layers (`int`): Layers of its language model.
        width (`int`): Hidden size of its language model.
        ranks (`int`): Ranks.
        pipelines (`bool`): Whether ranks have different layers, so that layers have to be copied after a loss.
    """

    model: str
    layers: int
    width: int
    ranks: int
    pipelines: bool

    @property
    def parallel(self) -> str:
        if not self.pipelines:
            copies = {"dp_size": self.ranks}
            return json.dumps({"vision": copies, "language_model": {**copies, "colocate_with": "vision"}})
        depth = {"pp_size": self.ranks // 2 - 1} if self.ranks > 4 else {}
        return json.dumps({"vision": {"dp_size": 2}, "language_model": {"dp_size": 2, **depth}})

    @property
    def name(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {'pipelines' if self.pipelines else 'whole copies'}"


MODELS = {"small": (4, 64), "larger": (6, 384)}
MEMORY_MODELS = {**MODELS, "wide": (8, 768)}  # whose state is larger than the window of copies


@dataclass
class Run:
    """
    What a run left.

    Args:
        returncode (`int`): Of the launcher.
        output (`str`): What it printed.
        rows (`dict[int, list[dict]]`): By rank at its start: its notes.
    """

    returncode: int
    output: str
    rows: dict[int, list[dict[str, Any]]]

    @property
    def died_at(self) -> float:
        """When the process died."""
        strikes = [json.loads(line) for line in self.output.splitlines() if line.startswith('{"dies"')]
        assert len(strikes) == 1, self.output[-4000:]
        return strikes[0]["time"]


def launch(size: Size, folder: Path, options: Sequence[str], elastic: bool, timeout_s: float = 300) -> Run:
    """Runs the worker under `hf-mmparallel launch`, or under `accelerate launch`."""
    environment = {**os.environ, "PYTHONPATH": str(common.ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "TRANSFORMERS_VERBOSITY": "error"}
    words = ["hf_mmparallel.cli.main", "launch", "--hang_timeout", str(HANG_S)]
    launcher = words if elastic else ["accelerate.commands.launch"]
    launcher = [sys.executable, "-m", *launcher, "--config_file", str(CONFIG), "--num_processes", str(size.ranks)]
    model = ["--layers", str(size.layers), "--width", str(size.width), "--world-size", str(size.ranks)]
    worker = [str(WORKER), "--parallel", size.parallel, "--folder", str(folder), *model, *options]
    for file in folder.glob("rank-*.jsonl"):
        file.unlink()
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [*launcher, *worker], env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        returncode = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = (folder / "output.txt").read_text(errors="replace")
    if returncode is None:
        raise RuntimeError(f"{size.name}: still running after {timeout_s:.0f} s.\n{text[-8000:]}")
    rows = {
        int(file.stem.partition("-")[2]): [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("rank-*.jsonl"))
    }
    return Run(returncode, text, rows)


def run_with_death(size: Size, cause: str, *options: str) -> Run:
    """A run in which the last rank dies."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        death = f"{size.ranks - 1}:{DEATH_STEP}:forward:{CAUSES[cause]}"
        given = ["--resilience", "--steps", str(STEPS), "--death", death, *options]
        run = launch(size, Path(name), given, elastic=True)
    if run.returncode:
        raise RuntimeError(f"{size.name}, {cause}: exit code {run.returncode}.\n{run.output[-4000:]}")
    return run


def recovered(size: Size, cause: str, run: Run) -> dict[str, float]:
    """Seconds of each part of a recovery, on the rank that was the last to finish the step."""
    own = [parts_of(rows, run.died_at) for rank, rows in run.rows.items() if rank != size.ranks - 1]
    parts = max(own, key=lambda one: one["total"])
    parts["detected_last"] = max(one["detected"] for one in own)
    if cause == "SIGSTOP":
        for part in ("detected", "detected_last", "total"):
            parts[part] -= HANG_S
    return parts


def memory_of(size: Size, dtype: str, run: Run) -> dict[str, Any]:
    """The measured and the predicted peak of the device of each rank that is left, in bytes."""
    ranks = {rank: row["memory"] for rank, rows in run.rows.items() for row in rows if "memory" in row}
    error = max(abs(row["predicted"] / row["peak"] - 1) for row in ranks.values())
    return {"case": f"{size.name}, {dtype}", "largest_error": round(error, 4), "ranks": ranks}


def memory_cases() -> list[dict[str, Any]]:
    """Measures the peaks of recoveries on four ranks."""
    sizes = [Size(name, *shape, 4, True) for name, shape in MEMORY_MODELS.items()]
    options = {"float32": ["--memory"], "bfloat16": ["--memory", "--bf16"]}
    kinds = ((size, dtype) for size in sizes for dtype in options)
    return [memory_of(size, dtype, run_with_death(size, "SIGKILL", *options[dtype])) for size, dtype in kinds]


def report_memory(cases: list[dict[str, Any]], load: Sequence[float], folder: Path) -> None:
    """Reports the peaks of recoveries."""
    largest_error = max(case["largest_error"] for case in cases)
    result = {"cases": cases, "largest_error": largest_error, "goal": MEMORY_GOAL}
    result |= {**common.machine(common.QUICK, load), "shapes": MEMORY_MODELS}
    numbers = ("held", "peak", "predicted")
    table = Table("run", "rank", *(f"{name}, MiB" for name in numbers), "error", title="A device's peak in a recovery")
    for case in cases:
        for rank, row in case["ranks"].items():
            cells = [f"{row[name] / 2**20:.2f}" for name in numbers]
            table.add_row(case["case"], str(rank), *cells, f"{row['predicted'] / row['peak'] - 1:+.1%}")
    notes = [f"Predictions are at most {largest_error:.1%} off; goal {MEMORY_GOAL:.0%}."]
    common.report("recovery_memory", [table], notes, result, folder)


def parts_of(rows: Sequence[dict[str, Any]], died_at: float) -> dict[str, float]:
    """Seconds of each part of the recovery that a rank noted."""
    (event,) = (row["event"] for row in rows if "event" in row)
    ended = next(row["ended"] for row in rows if row.get("step") == DEATH_STEP)
    lost_at = event["lost_at"]
    parts = {
        "detected": lost_at + event["stopped_s"] - died_at,
        "met": event["regrouped_s"] - event["stopped_s"] - event["planned_s"],
        "planned": event["planned_s"],
        "copied": event["copied_s"],
        "laid out": event["total_s"] - event["regrouped_s"] - event["copied_s"],
        "first step": ended - lost_at - event["total_s"],
    }
    return {**parts, "total": ended - died_at, "copied_mib": event["copied_bytes"] / 2**20}


def restarted(size: Size) -> dict[str, float]:
    """Seconds from a death until the job had ended, and until a new one had finished its first step."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        given = ["--steps", str(STEPS), "--save-steps", str(SAVED_STEP)]
        death = f"{size.ranks - 1}:{DEATH_STEP}:forward:kill"
        before = launch(size, folder, [*given, "--death", death], elastic=False)
        ended = time.time()
        if not before.returncode:
            raise RuntimeError(f"{size.name}: the job has not ended by its death.\n{before.output[-4000:]}")
        checkpoint = folder / "run" / f"checkpoint-{SAVED_STEP}"
        after = launch(size, folder, [*given, "--resume", str(checkpoint)], elastic=False)
        if after.returncode:
            raise RuntimeError(f"{size.name}: the new start failed.\n{after.output[-4000:]}")
    steps = {row["step"]: row["ended"] for row in after.rows[0]}
    died_at = before.died_at
    return {
        "ended": ended - died_at,
        "total": steps[SAVED_STEP + 1] - died_at,
        "caught_up": steps[DEATH_STEP] - died_at,
    }


def overhead(size: Size, steps: int) -> dict[str, Any]:
    """What `resilience` adds to a step without failures."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        run = launch(size, Path(name), ["--resilience", "--turns", "--steps", str(steps)], elastic=True, timeout_s=900)
        if run.returncode:
            raise RuntimeError(f"{size.name}: exit code {run.returncode}.\n{run.output[-4000:]}")
        ranks = [json.loads(file.read_text()) for file in sorted(Path(name).glob("turns-*.json"))]
    step_s = {way: statistics.median(ranks[0][f"{way}_s"]) for way in ("with", "without")}
    own_s = max(rank["own_s"] for rank in ranks)
    threads = max(rank["threads_share"] for rank in ranks)
    return {
        "ranks": size.ranks,
        "model": size.model,
        "steps": steps,
        "with_ms": round(1e3 * step_s["with"], 4),
        "without_ms": round(1e3 * step_s["without"], 4),
        "measured": round(step_s["with"] / step_s["without"] - 1, 5),
        "own_us": round(1e6 * own_s, 2),
        "own_share": round(own_s / step_s["without"], 6),
        "threads_share": round(threads, 6),
    }


def case_of(size: Size, cause: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The repeated measurements of a case."""
    result: dict[str, Any] = {"case": size.name, "model": size.model, "ranks": size.ranks, "cause": cause}
    result |= {"pipelines": size.pipelines, "copied_mib": round(runs[0]["copied_mib"], 3)}
    names = (*PARTS, "total", "detected_last")
    return {**result, "seconds": {name: common.spread([run[name] for run in runs]) for name in names}}


def stock_of(size: Size, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The repeated new starts of a case."""
    return {"case": size.name, "seconds": {name: common.spread([run[name] for run in runs]) for name in runs[0]}}


def tables_of(result: dict[str, Any]) -> list[Table]:
    """The printed tables."""
    stock = {row["case"]: row["seconds"]["total"]["median"] for row in result["restarts"]}
    first = Table("run", "death", title="Seconds from a death")
    for column in (*PARTS, "all", "at most", "new start", "times"):
        first.add_column(column, justify="right")
    for case in result["cases"]:
        seconds = case["seconds"]
        total, restart = seconds["total"], stock[case["case"]]
        cells = [f"{seconds[part]['median']:.3f}" for part in PARTS]
        cells += [f"{total['median']:.2f}", f"{total['max']:.2f}"]
        first.add_row(case["case"], case["cause"], *cells, f"{restart:.1f}", f"{restart / total['median']:.1f}")
    second = Table("run", "step ms with", "without", "measured", "counted", "of it", "threads", title="Overhead")
    for row in result["overhead"]:
        numbers = (f"{row['with_ms']:.2f}", f"{row['without_ms']:.2f}", f"{row['measured']:+.2%}")
        own = (f"{row['own_us']:.0f} us", f"{row['own_share']:.3%}", f"{row['threads_share']:.3%}")
        second.add_row(f"{row['model']}, {row['ranks']} ranks", *numbers, *own)
    return [first, second]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, one death; two ranks start anew")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    parser.add_argument("--repeats", type=int, help="runs of each case")
    parser.add_argument("--steps", type=int, help="steps of the runs without failures")
    parser.add_argument("--memory", action="store_true", help="only the peaks of memory")
    options = parser.parse_args()
    repeats, steps = options.repeats or (1 if options.quick else 3), options.steps or (20 if options.quick else 400)
    load = os.getloadavg()
    if not options.quick:
        report_memory(memory_cases(), load, options.out)
    if options.memory:
        return
    sizes = [
        Size(name, *shape, ranks, pipelines)
        for name, shape in MODELS.items()
        for ranks in (4, 8)
        for pipelines in (False, True)
    ]
    two_ranks = Size("small", *MODELS["small"], 2, False)
    if options.quick:
        sizes = [sizes[1]]
    cases, restarts = [], []
    for size in sizes:
        causes = ["SIGKILL"] if options.quick or size.model != "small" else list(CAUSES)
        for cause in causes:
            runs = [run_with_death(size, cause, *["--memory"] * options.quick) for _ in range(repeats)]
            cases.append(case_of(size, cause, [recovered(size, cause, run) for run in runs]))
            if options.quick:  # times and memory of one run
                report_memory([memory_of(size, "float32", runs[0])], load, options.out)
        starts = [restarted(two_ranks if options.quick else size) for _ in range(repeats)]
        restarts.append(stock_of(size, starts))
    unloaded = [two_ranks] if options.quick else [size for size in sizes if not size.pipelines]
    result = {
        "cases": cases,
        "restarts": restarts,
        "overhead": [overhead(size, steps) for size in unloaded],
        "goals": GOALS,
        **common.machine(common.QUICK, load),
        "shapes": MODELS,
        "repeats": repeats,
    }
    notes = ["Times of a rank's parts are of the one that finished the step last; a stopped process counts as lost"]
    notes = [f"{notes[0]} after {HANG_S:g} s, which are subtracted."]
    common.report("recovery", tables_of(result), notes, result, options.out)


if __name__ == "__main__":
    main()
