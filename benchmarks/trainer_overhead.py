"""
Samples per second of `MultimodalParallelTrainer` against the stock Trainer on the same machine.

On one process with every size 1, and on four gloo processes: vision dp 2 and language model pp 2 against the stock
Trainer's DDP. All variants take turns in the same processes, on the same samples and global batch.

```bash
python benchmarks/trainer_overhead.py
python benchmarks/trainer_overhead.py --quick --out out/bench  # seconds; the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
import torch.distributed as dist
import transformers
from rich.table import Table
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import ModulePlugin, resolve_plan

STOCK, OURS, ENGINE = "stock", "ours", "ours, engine"
GLOBAL_BATCH = 32
MICROBATCH = 4
WARMUP_STEPS = 1
FOUR_RANKS = {"vision": {"dp_size": 2}, "language_model": {"pp_size": 2}}
ALL_ONE = {"vision": {"dp_size": 1}, "language_model": {"pp_size": 1}}
GOAL, FLOOR = 1.00, 0.97


@dataclass(frozen=True)
class Speed:
    """
    Speed of a run.

    Args:
        rate (`float`): Samples per second.
        cpu_ms (`float`):
            Processor time of all processes for a sample, in ms. Other work on the machine disturbs it far less.
    """

    rate: float
    cpu_ms: float


class StepClock(TrainerCallback):
    """Seconds from the end of the last warm-up step to the end of training: on the clock, and of the processor."""

    def __init__(self) -> None:
        self.start = self.stop = (0.0, 0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop = (time.perf_counter(), time.process_time())
        if state.global_step == WARMUP_STEPS:
            self.start = self.stop


def make_trainer(variant: str, parallel: dict[str, Any], shapes: common.Shapes, num_steps: int) -> Trainer:
    """A Trainer with a fresh model."""
    arguments: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),
        "max_steps": WARMUP_STEPS + num_steps,
        "per_device_train_batch_size": MICROBATCH,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
    }
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        arguments["ddp_backend"] = "gloo"
    given: dict[str, Any] = {
        "model": common.build_model(shapes),
        "train_dataset": common.make_dataset(shapes, GLOBAL_BATCH * (WARMUP_STEPS + num_steps)),
        "data_collator": common.collate,
    }
    if variant == STOCK:
        share = GLOBAL_BATCH // (MICROBATCH * int(os.environ.get("WORLD_SIZE", "1")))
        return Trainer(args=TrainingArguments(**arguments, gradient_accumulation_steps=share), **given)
    args = MultimodalTrainingArguments(**arguments, global_batch_size=GLOBAL_BATCH, parallel=parallel)
    return MultimodalParallelTrainer(args=args, **given)


def speed_of(trainer: Trainer, num_steps: int) -> Speed:
    """Trains and times what follows the warm-up."""
    clock = StepClock()
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds, cpu_seconds = (stop - start for start, stop in zip(clock.start, clock.stop, strict=True))
    if dist.is_initialized():
        total = torch.tensor(cpu_seconds)
        dist.all_reduce(total)
        cpu_seconds = float(total)
    return Speed(num_steps * GLOBAL_BATCH / seconds, 1e3 * cpu_seconds / (num_steps * GLOBAL_BATCH))


@contextmanager
def engine_on_one_process() -> Iterator[None]:
    """Makes the Trainer use the engine where it would hand over to the stock Trainer, in a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch("hf_mmparallel.trainer.build.is_single_process", return_value=False):
            yield
    finally:
        dist.destroy_process_group()


def run_engine(shapes: common.Shapes, num_steps: int) -> Speed:
    """The engine with both modules on this process."""
    spec = build_model_spec(common.build_model(shapes))
    plan = resolve_plan(spec, {"language_model": ModulePlugin(colocate_with="vision")}, 1).to_dict()
    with engine_on_one_process():
        trainer = make_trainer(OURS, {**plan, "num_microbatches": GLOBAL_BATCH // MICROBATCH}, shapes, num_steps)
        return speed_of(trainer, num_steps)


def take_turns(runs: dict[str, Callable[[], Speed]], repeats: int) -> dict[str, list[Speed]]:
    """Runs every variant once per round, in random order; the first round is a warm-up."""
    rng = random.Random(0)
    values: dict[str, list[Speed]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        for name in rng.sample(sorted(runs), len(runs)):
            gc.collect()
            value = runs[name]()
            if number:
                values[name].append(value)
    return values


def measure(parallel: dict[str, Any], shapes: common.Shapes, num_steps: int, repeats: int) -> dict[str, list[Speed]]:
    """Speeds of every variant in this process, or on these ranks."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()

    def run(variant: str) -> Speed:
        return speed_of(make_trainer(variant, parallel, shapes, num_steps), num_steps)

    runs: dict[str, Callable[[], Speed]] = {STOCK: lambda: run(STOCK), OURS: lambda: run(OURS)}
    if parallel == ALL_ONE:
        runs[ENGINE] = lambda: run_engine(shapes, num_steps)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the plans and the bars
        return take_turns(runs, repeats)


def summary(values: dict[str, list[Speed]]) -> dict[str, Any]:
    """Spreads of each variant, and of the ratios to stock in the same round; above 1 is better than stock."""
    result: dict[str, Any] = {}
    for name, row in values.items():
        result[name] = {
            "samples_per_second": common.spread([speed.rate for speed in row]),
            "cpu_ms_per_sample": common.spread([speed.cpu_ms for speed in row]),
        }
        if name != STOCK:
            pairs = list(zip(row, values[STOCK], strict=True))
            result[name]["ratio"] = common.spread([mine.rate / stock.rate for mine, stock in pairs])
            result[name]["cpu_ratio"] = common.spread([stock.cpu_ms / mine.cpu_ms for mine, stock in pairs])
    return result


def table_of(title: str, result: dict[str, Any], stock: str) -> Table:
    """The numbers of one setting."""
    table = Table("variant", "samples/s", "CPU ms/sample", "ratio of samples/s", "ratio of CPU time", title=title)
    table.title_justify = "left"

    def shown(row: dict[str, float] | None, digits: int) -> str:
        if row is None:
            return "1"
        low, high = f"{row['min']:.{digits}f}", f"{row['max']:.{digits}f}"
        return f"{row['median']:.{digits}f} ({low} to {high})"

    for name, row in result.items():
        table.add_row(
            stock if name == STOCK else name,
            shown(row["samples_per_second"], 1),
            shown(row["cpu_ms_per_sample"], 1),
            shown(row.get("ratio"), 3),
            shown(row.get("cpu_ratio"), 3),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--repeats", type=int, default=15, help="rounds after the warm-up round")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a run")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = common.QUICK if options.quick else common.Shapes()
    repeats, steps = (1, 2) if options.quick else (options.repeats, options.steps)
    if options.ranks is not None:
        values = measure(FOUR_RANKS, shapes, steps, repeats)
        if dist.get_rank() == 0:
            options.ranks.write_text(json.dumps({k: [asdict(speed) for speed in v] for k, v in values.items()}))
        dist.barrier()
        dist.destroy_process_group()
        return
    load = os.getloadavg()
    one = summary(measure(ALL_ONE, shapes, steps, repeats))
    arguments = ["--quick"] if options.quick else ["--repeats", str(repeats), "--steps", str(steps)]
    launched = common.launch(__file__, 4, arguments)
    four = summary({name: [Speed(**speed) for speed in row] for name, row in launched.items()})
    cores = len(os.sched_getaffinity(0))
    ratio = one[OURS]["ratio"]["median"]
    notes = [
        f"One process: the goal is {GOAL:.2f}, the floor {FLOOR:.2f}; measured {ratio:.3f}. With every size 1 the "
        f"stock Trainer's own loop runs; `{ENGINE}` forces the engine, with both modules on the one process.",
        f"Four processes on {cores} cores, one thread each. DDP holds the whole model on every process and sums all "
        "gradients over four; the plan holds parts of it and sums those of the encoder over two.",
        "Ratios are medians (and extremes) over rounds in which all variants ran, above 1 when ours is faster, or "
        "needs less processor time. The processor time is that of all processes, and is the better number while "
        "others use the cores. Runs are short, so that a round sees one load.",
    ]
    if cores < 4:
        notes.append("With fewer cores than processes a waiting one leaves its core to another, which hides bubbles.")
    tables = [
        table_of("One process", one, "stock"),
        table_of("Four processes: vision dp 2, language model pp 2", four, "stock, DDP"),
    ]
    result = {
        "one_process": one,
        "four_processes": four,
        "goal": GOAL,
        "floor": FLOOR,
        "repeats": repeats,
        "steps": steps,
        "global_batch": GLOBAL_BATCH,
        "microbatch": MICROBATCH,
        "num_parameters": common.build_model(shapes).num_parameters(),
        **common.machine(shapes, load),
    }
    common.report("trainer_overhead", tables, notes, result, options.out)


if __name__ == "__main__":
    main()
