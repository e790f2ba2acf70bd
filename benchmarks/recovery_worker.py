"""One process of a training run of `recovery.py`: notes each step and each recovery, and what `resilience` takes."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from chaos_worker import Deaths, Samples, collate, make_model
from transformers import TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.trainer.recovery import Recovery

BLOCK = 5  # steps with recovery, or without, before the other way has its turn


class Notes(TrainerCallback):
    """Writes a line for each step and for each recovery, at once, since the process may die."""

    def __init__(self, file: Path, deaths: Deaths):
        self.file = file.open("a")
        self.deaths = deaths

    def note(self, **row: Any) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.deaths.step = state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(step=state.global_step, ended=time.time())

    def on_reconfigure(self, args: Any, state: Any, control: Any, event: Any = None, **kwargs: Any) -> None:
        self.note(event=vars(event))


class Turns(TrainerCallback):
    """Some steps with recovery, then some without, in turn; and what the functions of recovery take."""

    def __init__(self):
        self.trainer: Any = None
        self.recovery: Any = None
        self.own_s = 0.0
        self.times_s: dict[bool, list[float]] = {True: [], False: []}
        self.own_by_step_s: list[float] = []
        self.ended_s: float | None = None

    def count(self, name: str) -> None:
        """Counts the time of a method of [`Recovery`] without that of the work that it is given."""
        method = getattr(Recovery, name)

        def counted(recovery: Recovery, work: Callable[[], Any]) -> Any:
            spent_s = 0.0

            def timed() -> Any:
                nonlocal spent_s
                begin_s = time.perf_counter()
                try:
                    return work()
                finally:
                    spent_s = time.perf_counter() - begin_s

            begin_s = time.perf_counter()
            try:
                return method(recovery, timed)
            finally:
                self.own_s += time.perf_counter() - begin_s - spent_s

        setattr(Recovery, name, counted)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now_s, is_with = time.perf_counter(), self.trainer._survival.recovery is not None
        if self.ended_s is not None:
            self.times_s[is_with].append(now_s - self.ended_s)
            if is_with:
                self.own_by_step_s.append(self.own_s)
        self.recovery = self.recovery or self.trainer._survival.recovery
        self.trainer._survival.recovery = self.recovery if (state.global_step // BLOCK) % 2 == 0 else None
        self.own_s, self.ended_s = 0.0, time.perf_counter()

    def summary(self, began_s: float) -> dict[str, Any]:
        """Medians, and the processor time of the threads that listen and give signs of life."""
        threads_s = sum(_processor_s(one) for one in threading.enumerate() if one.name.startswith("hf_mmparallel"))
        return {
            "with_s": self.times_s[True],
            "without_s": self.times_s[False],
            "own_s": statistics.median(self.own_by_step_s),
            "threads_share": threads_s / (time.perf_counter() - began_s),
        }


def _processor_s(thread: threading.Thread) -> float:
    """Processor time of a thread."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) if thread.ident else 0.0


def make_arguments(options: argparse.Namespace) -> MultimodalTrainingArguments:
    """The arguments of a run."""
    return MultimodalTrainingArguments(
        output_dir=str(options.folder / "run"),
        parallel=options.parallel,
        resilience={"failures": 1} if options.resilience else None,
        global_batch_size=2 * options.world_size,
        per_device_train_batch_size=2,
        max_steps=options.steps,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 1,
        logging_steps=10**6,
        log_predictions=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_backend="gloo",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--death", action="append", default=[])
    parser.add_argument("--resilience", action="store_true")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    deaths = Deaths(options.death, rank, options.folder)
    deaths.install()
    turns = Turns()
    trainer = MultimodalParallelTrainer(
        model=make_model(options.layers, options.width),
        args=make_arguments(options),
        train_dataset=Samples(deaths),
        data_collator=collate,
        callbacks=[Notes(options.folder / f"rank-{rank}.jsonl", deaths)],
    )
    if options.turns:
        turns.trainer = trainer
        turns.count("run")
        turns.count("commit")
        trainer.add_callback(turns)
    began_s = time.perf_counter()
    trainer.train(resume_from_checkpoint=None if options.resume is None else str(options.resume))
    if options.turns:
        (options.folder / f"turns-{rank}.json").write_text(json.dumps(turns.summary(began_s)))


if __name__ == "__main__":
    main()
