"""
The predicted peak of tensor bytes of each rank against the measured one.

Each plan trains two steps with the Trainer on gloo ranks of this host. In the second one, when the optimizer has its
state, the profiler notes what the allocator of tensors gives and takes back; the highest sum is the peak. Beside the
named plans there are plans drawn at random, which nobody has looked at.

```bash
python benchmarks/memory_error.py
python benchmarks/memory_error.py --random 20 --seed 7
python benchmarks/memory_error.py --only shared --random 0
python benchmarks/memory_error.py --quick --out out/bench  # seconds; the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import common
import memory_models
import torch
import torch.distributed as dist
import transformers
from memory_cases import GROUPS, LM, NAMED, VISION, Case, random_cases
from rich.table import Table
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import PrinterCallback, TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.cost import CostModel, StepCost, analytic_costs, memory_per_rank, memory_timeline
from hf_mmparallel.schedule import find_representatives, simulate
from hf_mmparallel.trainer import start_report as report

GOAL = 0.15
MIB = 2**20
_QUICK = (("named", 2), ("padded", 3), ("packed", 3), ("shared", 2))
"""Group and ranks of the plans of a quick run."""


# Measuring


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of tensors, each storage once."""
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if torch.is_tensor(local):
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class PeakMemory(TrainerCallback):
    """
    Measures the second step of a training run.

    Args:
        trainer (`MultimodalParallelTrainer`): The Trainer.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.profiler: Any = None
        self.measured: dict[str, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = self.trainer.model.parameters()
        self.measured["gradients"] = tensor_bytes(p.grad for p in parameters if p.grad is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            model, optimizer = self.trainer.model, self.trainer.optimizer
            self.measured["weights"] = tensor_bytes([*model.parameters(), *model.buffers()])
            states = [value for row in optimizer.state.values() for value in row.values()]
            self.measured["optimizer"] = tensor_bytes(states)
            gc.collect()
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.start()
        elif state.global_step == 2:
            self.profiler.stop()
            self._read()

    def _read(self) -> None:
        """Follows what is allocated and freed, without what the data loader makes: that is the host's."""
        events: list[tuple[int, int, int]] = []
        pending = list(self.profiler.profiler.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            if not event.name.startswith("enumerate(DataLoader)"):
                pending.extend(event.children)
            if event.tag == _EventType.Allocation:
                events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        changes: list[tuple[int, int]] = []
        unseen: list[tuple[int, int]] = []
        live: dict[int, tuple[int, int]] = {}
        for when, pointer, size in sorted(events):
            if size > 0:
                unseen += [live.pop(pointer)] if pointer in live else []
                live[pointer] = when, size
            elif pointer in live:
                changes += [live[pointer], (when, -live.pop(pointer)[1])]
        changes += self._unseen(sorted([*unseen, *live.values()]))
        total = peak = peak_ns = 0
        for when, change in sorted(changes):
            total += change
            if total > peak:
                peak, peak_ns = total, when
        state = self.measured["weights"] + self.measured["optimizer"]
        task, share = self._task_at(peak_ns)
        place = f"{task.task} ({share:.0%})" if task else "between tasks"
        self.measured |= {"peak": state + peak, "peak_at": place}  # type: ignore[dict-item]

    def _unseen(self, blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """
        The changes of blocks that this thread did not free. The two threads of gloo hold the tensors of a collective
        until their next one, which no other backend does: a block counts until the next but one of them, and no
        longer than the task that allocated it.
        """
        started_ns = 1e9 * self.trainer.engine.last_result.started_s
        changes = list(blocks)
        for index, (when, size) in enumerate(blocks):
            task, _ = self._task_at(when)
            if task is not None:
                end_ns = int(started_ns + 1e6 * task.end_ms)
                later = blocks[index + 2][0] if index + 2 < len(blocks) else end_ns
                changes.append((min(later, end_ns), -size))
        return changes

    def _task_at(self, time_ns: int) -> tuple[Any, float]:
        """The task that ran at a time, and how far it was."""
        result = self.trainer.engine.last_result
        at_ms = time_ns / 1e6 - 1e3 * result.started_s
        for item in result.record.timeline:
            if item.start_ms <= at_ms <= item.end_ms:
                return item, (at_ms - item.start_ms) / (item.end_ms - item.start_ms)
        return None, 0.0


def text_tokens(case: Case, rng: random.Random) -> int:
    """Tokens of a sample, by `Case.lengths`."""
    if case.lengths == "even":
        return 120
    return rng.randint(20, 200) if case.lengths == "uneven" else round(16 * 32 ** rng.random())


def make_trainer(case: Case, shrink: bool) -> Any:
    """The Trainer of a case on this rank."""
    plan = {"modules": case.modules, "schedule": case.schedule}
    copies = case.modules.get(LM, {}).get("dp_size", 1)
    if case.modules.get(LM, {}).get("colocate_with"):
        copies = case.modules[VISION]["dp_size"]
    size = case.microbatch * case.num_microbatches * copies
    args = MultimodalTrainingArguments(
        output_dir=tempfile.gettempdir(),
        parallel=plan,
        global_batch_size=size,
        per_device_train_batch_size=case.microbatch,
        max_steps=2,
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        ddp_backend="gloo",
        microbatch_assignment="contiguous",
        **case.arguments,
    )
    rng = random.Random(0)
    images = [1 if case.lengths == "even" else rng.choice([0, 1, 2]) for _ in range(2 * size)]
    texts = [text_tokens(case, rng) for _ in range(2 * size)]
    if shrink:
        texts = [max(1, length // 10) for length in texts]
    trainer = MultimodalParallelTrainer(
        model=memory_models.build_model(case.family, getattr(torch, case.dtype), case.heads),
        args=args,
        train_dataset=memory_models.make_dataset(case.family, images, texts),
        data_collator=memory_models.collate,
        sample_tokens=functools.partial(memory_models.sample_tokens, case.family),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def predict(trainer: Any, costs: CostModel) -> tuple[dict[int, float], dict[int, float]]:
    """For each rank, the peak of its timeline and the bound, of the step that ran last."""
    engine = trainer.engine
    plan, step, sizes = engine.plan, engine.current_step, engine.current_sizes
    layout, order_cost = find_representatives(plan, ()), StepCost(engine.costs, plan, step, sizes)
    simulation = simulate(layout, step, StepCost(costs, plan, step, sizes), order_cost=order_cost)
    timeline = memory_timeline(costs, plan, step, sizes, simulation.task_times)
    bound = memory_per_rank(costs, plan, step, sizes, simulation.peak_in_flight, simulation.peak_held)
    peaks = {rank: float(num_bytes.max()) for rank, (_, num_bytes) in timeline.items()}
    return peaks, {rank: memory.total for rank, memory in bound.items()}


def measure(case: Case, shrink: bool) -> list[dict[str, Any]]:
    """For each rank, the predicted and the measured bytes."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = make_trainer(case, shrink)
        peaks = PeakMemory(trainer)
        trainer.add_callback(peaks)
        trainer.train()
    value_bytes = 2 if case.arguments.get("bf16") or case.dtype == "bfloat16" else 4
    costs = analytic_costs(trainer.engine.spec, trainer.engine.costs.device, value_bytes)
    costs = replace(costs, packing=trainer.engine.costs.packing)
    predicted, bound = predict(trainer, costs)
    rank = dist.get_rank()
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, {**peaks.measured, "predicted": predicted[rank], "bound": bound[rank]})
    return rows


def run_ranks(options: argparse.Namespace) -> None:
    """The function of the ranks; rank 0 writes the result."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    report.gantt_png = report.balance_png = lambda *args, **kwargs: None  # type: ignore[assignment]
    result = []
    for case in chosen_cases(options):
        if case.world_size == int(os.environ["WORLD_SIZE"]):
            result.append({**asdict(case), "ranks": measure(case, options.quick)})
            gc.collect()
    if dist.get_rank() == 0:
        options.ranks.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The cases of a run."""
    if options.quick:
        return [next(case for case in GROUPS[group] if case.world_size == size) for group, size in _QUICK]
    named = [case for case in NAMED if options.only in case.name]
    return [*named, *random_cases(options.random, options.seed)]


# The script


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Predicted and measured MiB of each rank."""
    table = Table("plan", "rank", "measured MiB", "predicted", "error", "bound", "of that state", "peak at")
    for row in rows:
        for rank, found in enumerate(row["ranks"]):
            state = found["weights"] + found["gradients"] + found["optimizer"]
            cells = [f"{found[name] / MIB:.1f}" for name in ("peak", "predicted")]
            cells += [f"{error(found):+.1%}", f"{found['bound'] / MIB:.1f}", f"{state / found['peak']:.0%}"]
            table.add_row(row["name"] if rank == 0 else "", str(rank), *cells, found["peak_at"])
    return table


def error(found: dict[str, float]) -> float:
    """Excess of the prediction over the measured peak, as a share of the peak."""
    return found["predicted"] / found["peak"] - 1


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the fullest rank of each plan, and of all ranks, those that hold more than was predicted apart."""
    fullest = [abs(error(max(row["ranks"], key=lambda found: found["peak"]))) for row in rows]
    every = [error(found) for row in rows for found in row["ranks"]]
    under = [-value for value in every if value < 0]
    return {
        "plans": len(rows),
        "median_error": statistics.median(fullest),
        "largest_error": max(fullest),
        "largest_error_of_any_rank": max(map(abs, every)),
        "ranks": len(every),
        "ranks_within_goal": sum(abs(value) <= GOAL for value in every),
        "ranks_underestimated": len(under),
        "median_underestimate": statistics.median(under) if under else 0.0,
        "largest_underestimate": max(under, default=0.0),
    }


def group_of(name: str) -> str:
    """The group of the plan of this name."""
    return next((group for group, cases in GROUPS.items() if any(case.name == name for case in cases)), "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short samples, to try the script itself")
    parser.add_argument("--only", default="", help="named plans with this in their names; others stay")
    parser.add_argument("--random", type=int, default=8, help="plans drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the plans drawn at random")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks is not None:
        run_ranks(options)
        return
    load = os.getloadavg()
    words = ["--only", options.only, "--random", str(options.random), "--seed", str(options.seed)]
    rows = []
    for world_size in sorted({case.world_size for case in chosen_cases(options)}):
        rows += common.launch(__file__, world_size, [*words, *["--quick"] * options.quick], 3600)
    path, names = options.out / "memory_error.json", {row["name"] for row in rows}
    stored = json.loads(path.read_text())["cases"] if options.only and path.exists() else []
    every = [*(row for row in stored if row["name"] not in names), *rows]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in every:
        groups.setdefault(group_of(row["name"]), []).append(row)
    errors = {name: summary(found) for name, found in groups.items()}
    notes = [
        f"{name.capitalize()} plans: {found['plans']}, error on the fullest rank {found['median_error']:.1%} (median) "
        f"to {found['largest_error']:.1%}; {found['ranks_within_goal']} of {found['ranks']} ranks within {GOAL:.0%}, "
        f"the worst at {found['largest_error_of_any_rank']:.1%}; {found['ranks_underestimated']} hold more than "
        f"predicted, {found['largest_underestimate']:.1%} at most."
        for name, found in errors.items()
    ]
    notes += [
        "Gloo's threads hold the tensors of a collective until their next one, which counts. The Trainer on a CPU has "
        "each batch twice, once as the host's, which does not.",
        "The bound is what plans are made by: all gradients, and microbatches in flight that are all as large as the "
        "largest one.",
    ]
    result = {"errors": errors, "goal": GOAL, "cases": every, **common.machine(common.Shapes(), load)}
    common.report("memory_error", [table_of(rows)], notes, result, options.out)


if __name__ == "__main__":
    main()
