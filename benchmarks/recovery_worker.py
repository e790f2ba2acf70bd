"""One process of a training run of `recovery.py`: notes each step and each recovery, and what `resilience` takes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import counted_device
import torch
from chaos_worker import Deaths, Samples, collate, make_model
from recovery_memory import recovery_memory
from transformers import TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.trainer.recovery import Recovery
from hf_mmparallel.trainer.recovery_plan import NodeLayouts

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


class PeakMemory(TrainerCallback):
    """Notes the peak of the device's tensors in a recovery, from when gradients are freed, and what is predicted."""

    def __init__(self, notes: Notes):
        self.notes, self.memory = notes, counted_device.Memory()
        self.trainer: Any = None
        self.held_bytes = 0
        self.layouts: Any = None
        counted_device.COUNTS.memory = self.memory

    def watch(self, trainer: Any) -> None:
        """Notes where a recovery begins, and between which layouts."""
        self.trainer, held_parameters, transfers = trainer, trainer._survival.held_parameters, NodeLayouts.transfers

        def begin() -> Any:
            held = held_parameters()
            self.held_bytes = self.memory.peak_bytes = self.memory.num_bytes
            return held

        def noted(layouts: NodeLayouts, before: Any, after: Any) -> Any:
            self.layouts = before, after
            return transfers(layouts, before, after)

        trainer._survival.held_parameters = begin
        NodeLayouts.transfers = noted  # type: ignore[method-assign]

    def on_reconfigure(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        member = self.trainer._survival.recovery.membership.id
        predicted = recovery_memory(self.trainer.engine.spec, *self.layouts)[member]
        self.notes.note(memory={"held": self.held_bytes, "peak": self.memory.peak_bytes, "predicted": predicted})


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
    more = {}
    if options.memory:
        spec = options.folder / f"gpu-{os.environ['RANK']}.yaml"
        spec.write_text("name: counted\nlike: h100\n")
        more["gpu_spec"] = str(spec)
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
        **more,
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
    parser.add_argument("--memory", action="store_true", help="on a device whose tensors are counted")
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16, with copies in float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    deaths = Deaths(options.death, rank, options.folder)
    deaths.install()
    with contextlib.ExitStack() as stack:
        if options.memory:
            del os.environ["ACCELERATE_USE_CPU"]  # by which accelerate would refuse another device
            counted_device.init_process_group(rank, options.world_size, "env://")
            stack.enter_context(counted_device.train_on_device())
        train(options, deaths, rank)


def train(options: argparse.Namespace, deaths: Deaths, rank: int) -> None:
    """Trains, and writes what is measured."""
    notes, turns = Notes(options.folder / f"rank-{rank}.jsonl", deaths), Turns()
    model = make_model(options.layers, options.width)
    peak = PeakMemory(notes) if options.memory else None
    trainer = MultimodalParallelTrainer(
        model=model.to(torch.bfloat16) if options.bf16 else model,
        args=make_arguments(options),
        train_dataset=Samples(deaths),
        data_collator=collate,
        callbacks=[notes] if peak is None else [notes, peak],
    )
    if peak is not None:
        peak.watch(trainer)
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
