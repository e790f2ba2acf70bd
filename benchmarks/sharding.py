"""
ZeRO stages of a plan against FSDP2 and DeepSpeed under the stock Trainer: time, memory and bytes sent of a step.

All train one model on the same global batches with the same AdamW, on two and on four gloo ranks with one thread each.
In turns, each in fresh processes, they run for time and for the peak of their resident memory; one more run counts
the bytes of live tensors and those that collectives send, see `live_bytes.py`.

```bash
python benchmarks/sharding.py
python benchmarks/sharding.py --quick --out out/bench  # the numbers mean nothing
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
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from rich.table import Table
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.cost import GRADIENT_BUCKET_BYTES
from hf_mmparallel.plan.plugin import ZERO_STAGES
from hf_mmparallel.trainer import start_report

FSDP2 = "FSDP2"
OURS = {f"ours, stage {stage}": stage for stage in ZERO_STAGES}
KEPT = "ours, stage 3, weights kept"
OURS[KEPT] = 3
DEEPSPEED = {f"DeepSpeed, stage {stage}": stage for stage in (1, 2, 3)}
PEERS = {0: (), 1: ("DeepSpeed, stage 1",), 2: ("DeepSpeed, stage 2",), 3: (FSDP2, "DeepSpeed, stage 3")}
"""Stage of ours -> those that divide as much among the ranks."""
GOALS = {"sent_mib": 1.00, "step_ms": 1.05, "live_mib": 1.05}
RANKS = (2, 4)
MICROBATCH, ACCUMULATION = 2, 2
WARMUP_STEPS = 2
SHAPES = common.Shapes(width=384, vocab_size=2000, max_images=2, text_tokens=(8, 32))
MIB = 2**20


class StepMeter(TrainerCallback):
    """
    Measures the steps after the warm-up.

    Args:
        counter ([`LiveBytes`], *optional*): Counts since before the model was built.
    """

    def __init__(self, counter: LiveBytes | None):
        self.counter = counter
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.losses: list[float] = []
        self.sent: dict[str, float] = {}
        self.calls: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())
        self.cpu_times.append(time.process_time())
        if state.global_step == WARMUP_STEPS:
            Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
            if self.counter is not None:
                gc.collect()
                self.counter.reset()
        elif state.global_step == args.max_steps and self.counter is not None:
            num_steps = args.max_steps - WARMUP_STEPS
            self.sent = {name: num_bytes / num_steps for name, num_bytes in self.counter.sent_bytes.items()}
            self.calls = {name: count / num_steps for name, count in self.counter.num_calls.items()}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def resident_bytes(field: str) -> int:
    """`VmRSS` or, for its peak, `VmHWM` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def make_dataset(shapes: common.Shapes, size: int) -> list[dict[str, torch.Tensor]]:
    """Samples with images: FSDP2 and DeepSpeed hang or abort where a rank's microbatch has none and another's has."""
    samples = [sample for sample in common.make_dataset(shapes, 3 * size) if "pixel_values" in sample]
    assert len(samples) >= size
    return samples[:size]


def trainer_of(
    model: Any,
    make_data: Callable[[int], list[dict[str, torch.Tensor]]],
    num_steps: int,
    parallel: dict[str, Any] | None = None,
    collator: Callable | None = None,
    **peer: Any,
) -> Trainer:
    """Ours with a layout, or the stock Trainer with the arguments of a peer, on the same global batches."""
    global_batch = MICROBATCH * ACCUMULATION * int(os.environ["WORLD_SIZE"])
    arguments: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),
        "max_steps": WARMUP_STEPS + num_steps,
        "per_device_train_batch_size": MICROBATCH,
        "optim": "adamw_torch",
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
        "ddp_backend": "gloo",
        **peer,
    }
    data = make_data(global_batch * (WARMUP_STEPS + num_steps))
    given: dict[str, Any] = {"model": model, "train_dataset": data, "data_collator": collator}
    if parallel is None:
        return Trainer(args=TrainingArguments(**arguments, gradient_accumulation_steps=ACCUMULATION), **given)
    ours = {"global_batch_size": global_batch, "microbatch_assignment": "contiguous", "parallel": parallel}
    return MultimodalParallelTrainer(args=MultimodalTrainingArguments(**arguments, **ours), **given)


def make_trainer(variant: str, shapes: common.Shapes, num_steps: int) -> Trainer:
    """The Trainer of a variant with a fresh model."""
    # DeepSpeed's stage 3 would divide a model that is built after its arguments before it has its random weights.
    model = common.build_model(shapes)
    make_data = functools.partial(make_dataset, shapes)
    if variant not in OURS:
        return trainer_of(model, make_data, num_steps, collator=common.collate, **peer_arguments(variant))
    sharding = {"zero_stage": OURS[variant], "reshard_after_forward": variant != KEPT}
    modules = {"vision": {"dp_size": int(os.environ["WORLD_SIZE"]), **sharding}}
    modules["language_model"] = {"colocate_with": "vision", **sharding}
    return trainer_of(model, make_data, num_steps, modules, common.collate)


def peer_arguments(variant: str) -> dict[str, Any]:
    """The arguments that choose FSDP2 or a stage of DeepSpeed, with all else as the library chooses it."""
    from tests.trainer import engines

    if variant == FSDP2:
        arguments = engines.arguments_of("fsdp2")
        layers = ["LlamaDecoderLayer", "SiglipEncoderLayer"]
        return {**arguments, "fsdp_config": {**arguments["fsdp_config"], "transformer_layer_cls_to_wrap": layers}}
    arguments = engines.arguments_of(f"zero{DEEPSPEED[variant]}")
    # The default of 500 million elements is 2 GB of buffers.
    arguments["deepspeed"]["zero_optimization"]["reduce_bucket_size"] = GRADIENT_BUCKET_BYTES // 4
    return arguments


def measure(make: Callable[[], Trainer], counts: bool) -> list[dict[str, Any]]:
    """What each rank measures of the training of a Trainer."""
    torch.set_num_threads(1)
    start_report.gantt_png = start_report.balance_png = lambda *args, **kwargs: None  # type: ignore[assignment]
    gc.collect()
    start_bytes = resident_bytes("VmRSS")
    counter = LiveBytes() if counts else None
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        counter or contextlib.nullcontext(),
    ):
        trainer = make()
        meter = StepMeter(counter)
        trainer.add_callback(meter)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    found: dict[str, Any] = {"losses": meter.losses}
    if counter is None:
        for name, times in (("step_ms", meter.times), ("cpu_ms", meter.cpu_times)):
            steps = [after - before for before, after in zip(times, times[1:], strict=False)]
            found[name] = 1e3 * statistics.median(steps[WARMUP_STEPS - 1 :])
        found["resident_mib"] = (resident_bytes("VmHWM") - start_bytes) / MIB
    else:
        found["live_mib"] = counter.peak_bytes / MIB
        found["sent_mib"] = sum(meter.sent.values()) / MIB
        found["sent_by"] = {name: num_bytes / MIB for name, num_bytes in meter.sent.items()}
        found["calls"] = meter.calls
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, found)
    return rows


def run_ranks(options: argparse.Namespace) -> None:
    """The function of the ranks; rank 0 writes the result."""
    if options.variant in DEEPSPEED:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401
    shapes = common.QUICK if options.quick else SHAPES
    rows = measure(functools.partial(make_trainer, options.variant, shapes, options.steps), options.counts)
    if dist.get_rank() == 0:
        options.ranks.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def take_turns(
    variants: list[str],
    world_size: int,
    options: argparse.Namespace,
    script: str = __file__,
    words: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Variant -> its figures on this many ranks: time and memory of the slowest and fullest rank, mean bytes sent."""
    common_words = ["--steps", str(options.steps), *["--quick"] * options.quick, *words]

    def launch(words: list[str]) -> list[dict[str, Any]]:
        return common.launch(script, world_size, ["--variant", *words], timeout_s=300)

    rng = random.Random(0)
    times: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in variants}
    for _ in range(options.repeats):
        for name in rng.sample(variants, len(variants)):
            times[name].append(launch([name, *common_words]))
    result = {}
    for name in variants:
        counted = launch([name, "--counts", *common_words])
        result[name] = {
            "step_ms": common.spread([max(row["step_ms"] for row in rows) for rows in times[name]]),
            "cpu_ms": common.spread([sum(row["cpu_ms"] for row in rows) for rows in times[name]]),
            "resident_mib": common.spread([max(row["resident_mib"] for row in rows) for rows in times[name]]),
            "live_mib": max(row["live_mib"] for row in counted),
            "sent_mib": statistics.mean(row["sent_mib"] for row in counted),
            "sent_by": counted[0]["sent_by"],
            "calls": counted[0]["calls"],
            "losses": counted[0]["losses"],
        }
    return result


def value_of(row: dict[str, Any], key: str) -> float:
    """A figure, or the median of its repeats."""
    return row[key]["median"] if isinstance(row[key], dict) else row[key]


def ratios(result: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """
    Stage of ours -> figure -> its ratio to the smallest of the peers that divide as much. Processor time has no goal,
    but other programs disturb it far less than time.
    """
    return {
        name: {
            key: value_of(result[name], key) / min(value_of(result[p], key) for p in PEERS[stage])
            for key in (*GOALS, "cpu_ms")
        }
        for name, stage in OURS.items()
        if name in result and PEERS[stage] and all(peer in result for peer in PEERS[stage])
    }


def table_of(title: str, result: dict[str, dict[str, Any]]) -> Table:
    """The figures on a number of ranks."""
    table = Table(
        "variant", "step ms", "CPU ms", "live tensors MiB", "resident MiB", "sent MiB", "ratios", title=title
    )
    table.title_justify = "left"
    compared = ratios(result)
    for name, row in result.items():
        step, resident = row["step_ms"], row["resident_mib"]
        over = compared.get(name, {})
        table.add_row(
            name,
            f"{step['median']:.0f} ({step['min']:.0f} to {step['max']:.0f})",
            f"{row['cpu_ms']['median']:.0f}",
            f"{row['live_mib']:.1f}",
            f"{resident['median']:.0f}",
            f"{row['sent_mib']:.1f}",
            ", ".join(f"{key.partition('_')[0]} {value:.2f}" for key, value in over.items()),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and two ranks, to try the script itself")
    parser.add_argument("--only", default="", help="variants whose names have this in them")
    parser.add_argument("--sizes", type=int, nargs="+", default=RANKS, help="numbers of ranks")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each variant for time")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a run")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks is not None:
        run_ranks(options)
        return
    load = os.getloadavg()
    if options.quick:
        options.repeats, options.steps = 1, 1
    variants = [name for name in (*OURS, FSDP2, *DEEPSPEED) if options.only in name]
    shapes = common.QUICK if options.quick else SHAPES
    sizes = options.sizes[:1] if options.quick else options.sizes
    results = {str(size): take_turns(variants, size, options) for size in sizes}
    tables = [table_of(f"{size} ranks", results[str(size)]) for size in sizes]
    notes = [
        "Ratios compare a stage of ours with the best of FSDP2 and the DeepSpeed stage that divide as much. Goals: "
        + ", ".join(f"{key} at most {goal:.2f}" for key, goal in GOALS.items())
        + ".",
        "Live tensors: the peak on the fullest rank, storages counted once; sent: per step and rank, as on a ring.",
    ]
    result = {
        "ranks": results,
        "ratios": {size: ratios(of_size) for size, of_size in results.items()},
        "goals": GOALS,
        "repeats": options.repeats,
        "steps": options.steps,
        "microbatch": MICROBATCH,
        "accumulation": ACCUMULATION,
        "num_parameters": common.build_model(shapes).num_parameters(),
        **common.machine(replace(shapes), load),
    }
    common.report("sharding", tables, notes, result, options.out)


if __name__ == "__main__":
    main()
