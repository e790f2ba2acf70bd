"""
Time that training waits for a checkpoint: `async_save=True` against the save that it waits for.

Two gloo ranks, the encoder on one and the language model on the other, with AdamW. In one run the two ways take turns,
with steps between them; each waits for the one before, untimed. `blocked` is the duration of `_save_checkpoint` on the
slower rank, `written` the time from there until the folder was there. The first asynchronous save gets the memory of
the copies from the system, the others have it. `step` is the median step beside a write, and without one.

```bash
python benchmarks/async_save.py
python benchmarks/async_save.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch.distributed as dist
from rich.table import Table
from transformers import TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments

WAITED, ASYNC = "waited for", "asynchronous"
GOAL = 0.10
LAYOUT = {"vision": {}, "language_model": {}}
BATCH = 4


@dataclass(frozen=True)
class Sizes:
    """
    Sizes of the measurement.

    Args:
        shapes (`Shapes`): The model.
        rounds (`int`): Saves of each way, after the first of each.
        steps (`int`): Steps between two saves.
    """

    shapes: common.Shapes = common.Shapes(512, 8, 768, 8, 8000, 32, 2, (8, 16))
    rounds: int = 5
    steps: int = 4


QUICK = Sizes(common.QUICK, 2, 2)


class TimedSaves(MultimodalParallelTrainer):
    """Takes turns, and notes what each save and each step took on this rank."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.saves: list[dict[str, Any]] = []

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._run.finish_save()
        self.args.async_save = len(self.saves) % 2 == 1
        self.world.barrier("starting together")
        begin_s = time.perf_counter(), time.thread_time()
        super()._save_checkpoint(model, trial)
        blocked_s, processor_s = time.perf_counter() - begin_s[0], time.thread_time() - begin_s[1]
        save = self._run.saves._save
        way = WAITED if save is None else ASYNC
        self.saves.append({"way": way, "blocked_s": blocked_s, "processor_s": processor_s, "save": save})


class StepTimes(TrainerCallback):
    """Durations of steps, with whether a write went on at their end."""

    def __init__(self, trainer: TimedSaves):
        self.trainer = trainer
        self.steps: list[tuple[bool, float]] = []
        self.begin_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        save = self.trainer._run.saves._save
        writes = save is not None and save._thread is not None and save._thread.is_alive()
        self.steps.append((writes, time.perf_counter() - self.begin_s))


def rank_main(file: Path, sizes: Sizes) -> None:
    """Body of a rank; rank 0 writes the measurements of both."""
    folder = Path(tempfile.mkdtemp(prefix="async-save-")) if dist_rank() == 0 else None
    num_saves = 2 * (sizes.rounds + 1)
    args = MultimodalTrainingArguments(
        output_dir=str(folder or tempfile.gettempdir()),
        parallel=LAYOUT,
        async_save=True,
        max_steps=num_saves * sizes.steps + 1,
        global_batch_size=BATCH,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=sizes.steps,
        save_total_limit=1,
        logging_steps=10**6,
        log_predictions=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
    )
    values = [args.output_dir]
    dist.broadcast_object_list(values)
    args.output_dir = values[0]
    trainer = TimedSaves(
        model=common.build_model(sizes.shapes),
        args=args,
        train_dataset=common.make_dataset(sizes.shapes, BATCH * 8),
        data_collator=common.collate,
    )
    times = StepTimes(trainer)
    trainer.add_callback(times)
    trainer.train()
    saves = trainer.saves[:num_saves]
    for row in saves:
        save = row.pop("save")
        row["written_s"] = 0.0 if save is None else save.write_s
    ranks = trainer.world.gather((saves, times.steps))
    trainer.world.barrier()
    if ranks is not None:
        checkpoint = next(Path(args.output_dir).glob("checkpoint-*"))
        num_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
        file.write_text(json.dumps({"ranks": ranks, "checkpoint_bytes": num_bytes}))
        shutil.rmtree(args.output_dir)


def dist_rank() -> int:
    """This rank, before there is a process group."""
    return int(os.environ["RANK"])


def summary(measured: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The slower rank of each save, and the steps of rank 0."""
    slower = [
        {key: rows[0][key] if key == "way" else max(row[key] for row in rows) for key in rows[0]}
        for rows in zip(*(saves for saves, _ in measured["ranks"]), strict=True)
    ]
    by_way = {way: [row for row in slower if row["way"] == way] for way in (WAITED, ASYNC)}
    first = by_way[ASYNC][0]["blocked_s"]
    kept = {way: rows[1:] for way, rows in by_way.items()}
    assert all(len(rows) == sizes.rounds for rows in kept.values())
    blocked = {way: [row["blocked_s"] for row in rows] for way, rows in kept.items()}
    ratios = [mine / theirs for mine, theirs in zip(blocked[ASYNC], blocked[WAITED], strict=True)]
    steps = measured["ranks"][0][1][1:]
    beside = {writes: [seconds for writing, seconds in steps if writing == writes] for writes in (False, True)}
    return {
        "checkpoint_bytes": measured["checkpoint_bytes"],
        "blocked_s": {way: common.spread(values) for way, values in blocked.items()},
        "processor_s": {way: common.spread([row["processor_s"] for row in rows]) for way, rows in kept.items()},
        "written_s": common.spread([row["written_s"] for row in kept[ASYNC]]),
        "first_blocked_s": round(first, 4),
        "ratio": common.spread(ratios),
        "first_ratio": round(first / statistics.median(blocked[WAITED]), 4),
        "step_s": {
            name: round(statistics.median(beside[writes]), 4) if beside[writes] else None
            for name, writes in (("alone", False), ("beside a write", True))
        },
        "goal": GOAL,
    }


def table_of(found: dict[str, Any]) -> Table:
    """The printed table."""
    megabytes = found["checkpoint_bytes"] / 1e6
    table = Table(
        "save", "blocked s (min, max)", "of it processor", "written after", "against", title=f"{megabytes:,.0f} MB"
    )
    for way, blocked in found["blocked_s"].items():
        cells = [f"{blocked['median']:.3f} ({blocked['min']:.3f}, {blocked['max']:.3f})"]
        cells.append(f"{found['processor_s'][way]['median']:.3f}")
        ours = way == ASYNC
        cells.append(f"{found['written_s']['median']:.2f}" if ours else "")
        cells.append(f"{found['ratio']['median']:.1%} (goal {found['goal']:.0%})" if ours else "1")
        table.add_row(way, *cells)
    table.add_row("asynchronous, the first", f"{found['first_blocked_s']:.3f}", "", "", f"{found['first_ratio']:.1%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few saves")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    parser.add_argument("--rounds", type=int, help="saves of each way")
    parser.add_argument("--steps", type=int, help="steps between two saves")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    sizes = replace(sizes, rounds=options.rounds or sizes.rounds, steps=options.steps or sizes.steps)
    if options.ranks:
        rank_main(options.ranks, sizes)
        return
    load = os.getloadavg()
    given = [f"--rounds={sizes.rounds}", f"--steps={sizes.steps}", *(["--quick"] if options.quick else [])]
    found = summary(common.launch(__file__, 2, given), sizes)
    result = {**found, **common.machine(sizes.shapes, load), "rounds": sizes.rounds, "steps": sizes.steps}
    steps = found["step_s"]
    notes = [f"Median step: {steps['alone']} s alone, {steps['beside a write']} s beside a write."]
    common.report("async_save", [table_of(found)], notes, result, options.out)


if __name__ == "__main__":
    main()
