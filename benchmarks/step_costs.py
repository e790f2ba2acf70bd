"""
What a step costs beside its kernels, counted: waits of the host for the device, bytes that are copied, Python, memory
of gradients, logits, the plan of a step, process groups.

`waits` are counted on this machine by ranks with a device that counts them ([`counted_device`](counted_device.py)):
after two steps, of the rank that waits most, without those that a log of the loss makes. On a GPU
`torch.cuda.set_sync_debug_mode` reports the same ones. ZeRO-3 and tied weights are not among the layouts: the device
has no memory of its own that weights could give back or share. `python_ms` is processor time of a task outside of the
device's operations, of the rank with most: what a GPU has to be kept busy for. `gradients` is the most memory that
gradients, their sums and copies take at once, beside one `.grad` in the type of its weight for each trained parameter;
buckets are of 1/25 MiB, as the models are tiny. `losses` are the time and the memory of a loss and its backward of
2,048 tokens, all or a quarter of which are targets. `planning` is the processor time in which a rank plans a step of
4,096 ranks with 32 microbatches. `groups` are counted in plans of 8 to 4,096 ranks, with the models of `scale.py`:
communicators of the fullest rank, all process groups of the plan, and the processor time in which one rank makes its
own over a backend that sends nothing.

```bash
python benchmarks/step_costs.py
python benchmarks/step_costs.py --quick --out out/bench  # fewer layouts
```
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import common
import counted_device
import scale
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.modeling import lazy_logits, token_loss
from hf_mmparallel.modeling.lazy_logits import return_lazy_logits
from hf_mmparallel.modeling.unowned import local
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, sync_groups
from hf_mmparallel.runtime import engine, executor, optimizer_slices
from hf_mmparallel.runtime.gradients import GradientSync
from hf_mmparallel.runtime.groups import ProcessGroups, channels_of_step, collective_groups
from hf_mmparallel.runtime.joint_passes import GradientSums

VISION, SHARDED = "vision", {"dp_size": 2, "zero_stage": 2}


@dataclass(frozen=True)
class Layout:
    """A layout of a tiny model on a few ranks."""

    family: str  # of tests/tiny.py
    ranks: int
    modules: Mapping[str, Mapping[str, Any]]
    packing: bool = False
    dtype: torch.dtype = torch.float32  # of the weights


LAYOUTS = {
    "llava, pp 2": Layout("llava", 3, {LANGUAGE_MODEL: {"pp_size": 2}}),
    "qwen2_vl, cp 2, packed": Layout("qwen2_vl", 3, {LANGUAGE_MODEL: {"cp_size": 2}}, True),
    "llava, dp 2, ZeRO-2": Layout("llava", 4, {VISION: {"dp_size": 2}, LANGUAGE_MODEL: SHARDED}),
    "qwen2_vl, tp 2": Layout("qwen2_vl", 3, {LANGUAGE_MODEL: {"tp_size": 2}}),
    "qwen3_vl, pp 2": Layout("qwen3_vl", 3, {LANGUAGE_MODEL: {"pp_size": 2}}),
    "qwen2_5_vl, vision pp 2": Layout("qwen2_5_vl", 3, {VISION: {"pp_size": 2}}),
}
QUICK = ("llava, pp 2", "qwen2_vl, cp 2, packed")
_COPIES = {VISION: {"dp_size": 2}}
SUMMED = {
    "llava, dp 2": Layout("llava", 4, {**_COPIES, LANGUAGE_MODEL: {"dp_size": 2}}),
    "llava, dp 2, bfloat16 weights": Layout(
        "llava", 4, {**_COPIES, LANGUAGE_MODEL: {"dp_size": 2}}, dtype=torch.bfloat16
    ),
    "llava, dp 2, ZeRO-1": Layout("llava", 4, {**_COPIES, LANGUAGE_MODEL: {**SHARDED, "zero_stage": 1}}),
    "llava, dp 2, ZeRO-2": LAYOUTS["llava, dp 2, ZeRO-2"],
}
BUCKET_BYTES = 2**20 // 25
TOKENS, HIDDEN, WORDS, TARGETS = 2048, 256, 16_384, 512  # of a loss
PLANNED_RANKS = 4096
# milliseconds of a rank to plan a step; buckets that gradients take beside one `.grad` for each float32 weight
GOALS = {"planning_ms": 50.0, "extra_buckets": 2.0}
FIRST, LAST = 2, 6  # counted are the steps after the first of these, of a run of the second
GROUP_RANKS = (8, 64, 512, 4096)
GPU = "name: counted\nlike: h100\n"


class TaskTimes:
    """Processor time of tasks outside of the operations of the device."""

    def __init__(self) -> None:
        self.python_s, self.num_tasks = 0.0, 0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """A block in which tasks are timed."""
        compute = executor._Step.compute

        def timed(step: Any, task: Any) -> None:
            begin = time.process_time() - counted_device.COUNTS.operations_s
            compute(step, task)
            self.python_s += time.process_time() - counted_device.COUNTS.operations_s - begin
            self.num_tasks += 1

        with patch.object(executor._Step, "compute", timed):
            yield


class _Steady(TrainerCallback):
    """Counts from one step on, to the end of the last but one, which is not logged."""

    def __init__(self, tasks: TaskTimes) -> None:
        self.tasks = tasks
        self.waits: dict[str, int] = {}
        self.copied_bytes: dict[str, int] = {}
        self.python_ms = 0.0  # of a task

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        counts = counted_device.COUNTS
        if state.global_step == FIRST:
            counts.clear()
            self.tasks.python_s, self.tasks.num_tasks = 0.0, 0
        if state.global_step == LAST - 1:
            self.python_ms = 1e3 * self.tasks.python_s / self.tasks.num_tasks
            self.waits = {f"{wait.kind}: {wait.where}": number for wait, number in counts.waits.items()}
            self.copied_bytes = dict(counts.copied_bytes)
        counted_device.catch_up()


def _make_trainer(layout: Layout, folder: str, **arguments: Any) -> Any:
    """The Trainer of a rank of a layout."""
    from tests import tiny
    from tests.trainer import runs

    if layout.packing:
        arguments["packing"] = True
    modules: Any = {name: dict(sizes) for name, sizes in layout.modules.items()}
    model = tiny.FAMILIES[layout.family]().to(layout.dtype)
    steps = {"max_steps": LAST, "logging_steps": LAST}
    return runs.make_trainer(layout.family, modules, folder, model=model, **steps, **arguments)


def count_rank(layout: Layout, rendezvous: str) -> dict[str, Any]:
    """What this rank counted over the steady steps of a run, and the losses that it logged."""
    from tests.trainer import runs

    rank = int(os.environ["RANK"])
    if dist.is_initialized():
        dist.destroy_process_group()
    counted_device.init_process_group(rank, layout.ranks, rendezvous)
    tasks = TaskTimes()
    with tempfile.TemporaryDirectory() as folder, counted_device.train_on_device(), tasks.measuring():
        spec = Path(folder) / "gpu.yaml"
        spec.write_text(GPU)
        trainer = _make_trainer(layout, folder, gpu_spec=str(spec))
        assert trainer.engine.world.on_device
        steady = _Steady(tasks)
        trainer.add_callback(steady)
        trainer.train()
        losses = [row["loss"] for row in runs.step_logs(trainer)]
        dist.barrier(trainer.engine.world.host_group)
    return {
        "waits": steady.waits,
        "copied_bytes": steady.copied_bytes,
        "python_ms": steady.python_ms,
        "losses": losses,
    }


class GradientBytes(LiveBytes):
    """Bytes of gradients, and of all that is made to sum, scale and measure them."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: Sequence[nn.Parameter] = ()

    def counting(self, function: Any) -> Any:
        """The function, with all that it touches counted."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            for parameter in self.trained:
                if parameter.grad is not None:
                    self._count(local(parameter.grad).untyped_storage())
            self._is_inside = True
            try:
                with self:
                    return function(*args, **kwargs)
            finally:
                self._is_inside = False

        return counted

    _is_inside = False


def count_gradients(layout: Layout) -> dict[str, float]:
    """Bytes of one `.grad` for each parameter that this rank trains, and the most that gradients took beside it."""
    counter = GradientBytes()
    places = [(GradientSync, name) for name in ("reach", "start", "finish")]
    places += [(GradientSums, name) for name in ("add", "wait", "take")]
    places += [(engine, name) for name in ("scale_gradients", "gradient_square", "clip_gradients")]
    with contextlib.ExitStack() as patches, tempfile.TemporaryDirectory() as folder:
        patches.enter_context(patch.object(optimizer_slices, "GRADIENT_BUCKET_BYTES", BUCKET_BYTES))
        for owner, name in places:
            patches.enter_context(patch.object(owner, name, counter.counting(getattr(owner, name))))
        trainer = _make_trainer(layout, folder)
        counter.trained = trainer.engine.trained
        whole = sum(local(parameter).nbytes for parameter in counter.trained)
        trainer.train()
    return {"gradient_bytes": whole, "extra_bytes": counter.peak_bytes - whole}


def run_ranks(file: str, name: str, rendezvous: str) -> None:
    """Body of a rank: rank 0 writes what all ranks counted."""
    own = count_rank(LAYOUTS[name], rendezvous) if rendezvous else count_gradients(SUMMED[name])
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))


def per_step(counts: Mapping[str, int]) -> float:
    return sum(counts.values()) / (LAST - 1 - FIRST)


def count_waits(name: str) -> dict[str, Any]:
    """The row of a layout: waits and copied bytes a step, of the rank with most."""
    with tempfile.TemporaryDirectory() as folder:
        found = common.launch(
            __file__, LAYOUTS[name].ranks, ["--layout", name, "--rendezvous", f"file://{folder}/meet"]
        )
    total: Counter[str] = Counter()
    for rank in found:
        total.update(rank["waits"])
    copied = max(rank["copied_bytes"].get("to the device", 0) for rank in found)
    return {
        "layout": name,
        "waits": max(per_step(rank["waits"]) for rank in found),
        "kib_to_device": copied / (LAST - 1 - FIRST) / 1024,
        "python_ms": round(max(rank["python_ms"] for rank in found), 2),
        "where": dict(total.most_common()),
    }


def gradient_row(name: str) -> dict[str, Any]:
    """The row of a layout: memory of gradients of the rank with the most of them."""
    found = common.launch(__file__, SUMMED[name].ranks, ["--layout", name])
    most = max(found, key=lambda rank: rank["gradient_bytes"] + rank["extra_bytes"])
    return {"layout": name, **most, "bucket_bytes": BUCKET_BYTES}


def measure_loss(name: str, tokens: int, num_targets: int, repeats: int) -> dict[str, Any]:
    """The row of a way to compute a loss: milliseconds and largest memory of it and its backward."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, HIDDEN, generator=generator, requires_grad=True)
    labels = torch.randint(WORDS, (1, tokens), generator=generator)
    labels[:, torch.randperm(tokens, generator=generator)[num_targets:]] = common.IGNORE_INDEX
    head, model = nn.Linear(HIDDEN, WORDS, bias=False), SimpleNamespace(loss_function=ForCausalLMLoss)
    if name != "all tokens":
        return_lazy_logits(head)

    def compute() -> None:
        hidden.grad = head.weight.grad = None
        if name == "all tokens":
            model.loss_function(head(hidden), None, WORDS, 1, shift_labels=labels).backward()
        else:
            token_loss(model, head(hidden), labels, shifted=True)[0].backward()  # type: ignore[arg-type]

    most = WORDS * tokens // 4 if name == "targets, in chunks" else WORDS * tokens
    with patch.object(lazy_logits, "MAX_LOGITS", most):
        compute()
        hidden.grad = head.weight.grad = None
        with LiveBytes() as memory:
            hidden.detach(), head.weight.detach()
            before = memory.live_bytes
            compute()
        elapsed = common.measured(compute, repeats)
    return {
        "loss": name,
        "targets": num_targets / tokens,
        "peak_mib": round((memory.peak_bytes - before) / 2**20, 1),
        "ms": round(elapsed["processor"], 1),
    }


def loss_rows(quick: bool) -> list[dict[str, Any]]:
    """Rows of all ways to compute a loss, with a quarter of the tokens as targets and with all."""
    torch.set_num_threads(1)
    tokens, repeats = (TOKENS // 16, 1) if quick else (TOKENS, 5)
    names = ("all tokens", "targets", "targets, in chunks")
    return [measure_loss(name, tokens, count, repeats) for count in (tokens // 4, tokens) for name in names]


def layout_of(num_ranks: int) -> tuple[ModulePlugin, ModulePlugin]:
    """One encoder rank for each seven of the language model, or of few ranks other numbers."""
    if num_ranks == 8:
        return ModulePlugin(dp_size=1, pp_size=2, tp_size=2), ModulePlugin(dp_size=4)
    copies = num_ranks * 7 // 8 // 64 or 1
    language = ModulePlugin(dp_size=copies, pp_size=7 if num_ranks == 64 else 8, tp_size=8)
    return language, ModulePlugin(dp_size=(num_ranks - copies * language.pp_size * 8) // 2, tp_size=2)


def measure_planning(num_ranks: int, repeats: int) -> dict[str, Any]:
    """The row of a plan: milliseconds in which a rank plans a step with 32 microbatches."""
    torch.set_num_threads(1)
    language, vision = layout_of(num_ranks)
    samples = language.dp_size * 32 * scale.MICROBATCH
    found = scale.measure("step", language, vision, samples, scale.MICROBATCH, repeats)
    times = {f"{name}_ms": found[f"{name}_ms"]["processor"] for name in ("arrange", "program", "rest", "step")}
    return {**{name: found[name] for name in ("ranks", "samples", "microbatches")}, **times}


def plan_of(num_ranks: int) -> ParallelPlan:
    """The plan of [`layout_of`]."""
    language, vision = layout_of(num_ranks)
    return scale.make_plan(language, vision, 8 if num_ranks == 8 else 32)


def count_groups(num_ranks: int) -> dict[str, Any]:
    """The row of a plan: process groups, communicators of the fullest rank, time of one rank to make its own."""
    plan = plan_of(num_ranks)
    assert plan.world_size == num_ranks, plan.world_size
    spec = scale.PUBLISHED_MODELS[scale.MODEL].spec
    batch = plan.modules[LANGUAGE_MODEL].dp_size * plan.num_microbatches * scale.MICROBATCH
    costs = analytic_costs(spec, find_device("h100"), 2)
    sizes = scale.PUBLISHED[scale.DATASET].draw(batch, seed=0)
    channels = channels_of_step(plan, scale.arranged_step(plan, costs, sizes, scale.MICROBATCH))
    groups = collective_groups(plan, sync_groups(spec, plan))
    members: Counter[int] = Counter(rank for ranks in (*groups, *channels) for rank in ranks)
    [seconds] = common.in_processes(_make_groups, [num_ranks], [members.most_common(1)[0][0]])[0]
    return {
        "ranks": num_ranks,
        "groups": len(groups),
        "channels": len(channels),
        "channels_of_a_rank": max(Counter(rank for ends in channels for rank in ends).values()),
        "communicators": max(members.values()),
        "seconds": round(seconds, 2),
    }


def _make_groups(num_ranks: int, rank: int) -> tuple[float]:
    """Processor seconds in which a rank makes the groups of its plan."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    plan = plan_of(num_ranks)
    sums = sync_groups(scale.PUBLISHED_MODELS[scale.MODEL].spec, plan)
    world: Any = FakeWorld(rank, num_ranks)
    begin = time.process_time()
    ProcessGroups(plan, sums, world)
    return (time.process_time() - begin,)


class FakeWorld:
    """What [`World`] is to groups, over a backend that sends nothing."""

    def __init__(self, rank: int, size: int):
        self.rank, self.processes = rank, range(size)
        self.device, self.on_device = torch.device("cpu"), True

    def new_group(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), sort_ranks=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layouts")
    parser.add_argument(
        "--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the result"
    )
    parser.add_argument("--ranks", help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks:
        run_ranks(arguments.ranks, arguments.layout, arguments.rendezvous)
        return 0
    load = os.getloadavg()
    waits = [count_waits(name) for name in (QUICK if arguments.quick else LAYOUTS)]
    gradients = [gradient_row(name) for name in list(SUMMED)[: 1 if arguments.quick else None]]
    losses = loss_rows(arguments.quick)
    planning = measure_planning(64 if arguments.quick else PLANNED_RANKS, 1 if arguments.quick else 11)
    groups = [count_groups(size) for size in (GROUP_RANKS[:2] if arguments.quick else GROUP_RANKS)]
    table = Table("layout", "waits a step", "KiB to the device", "Python, ms a task", title="Waits for the device")
    for row in waits:
        table.add_row(row["layout"], f"{row['waits']:g}", f"{row['kib_to_device']:.1f}", f"{row['python_ms']:.2f}")
    sums = Table("layout", "one .grad each, KiB", "more, KiB", "a bucket, KiB", title="Memory of gradients")
    for row in gradients:
        sums.add_row(row["layout"], *(f"{row[f'{key}_bytes'] / 1024:.1f}" for key in ("gradient", "extra", "bucket")))
    logits = Table("loss of", "targets", "memory, MiB", "ms", title="Loss and its backward")
    for row in losses:
        logits.add_row(row["loss"], f"{row['targets']:.0%}", f"{row['peak_mib']:.1f}", f"{row['ms']:.1f}")
    planned = Table(*planning, title="Plan of a step, ms of a rank")
    planned.add_row(*(f"{value:,.1f}" if key.endswith("_ms") else f"{value:,}" for key, value in planning.items()))
    counted = Table("ranks", "groups", "communicators of a rank", "its channels", "seconds", title="Process groups")
    for row in groups:
        counted.add_row(
            *(str(row[key]) for key in ("ranks", "groups", "communicators", "channels_of_a_rank", "seconds"))
        )
    notes = [f"{row['layout']}: {number} x {where}" for row in waits for where, number in row["where"].items()]
    machine = common.machine(common.QUICK, load)
    counts = {"waits": waits, "gradients": gradients, "losses": losses, "planning": planning, "groups": groups}
    result = {"goals": GOALS, **counts, **machine}
    common.report("step_costs", [table, sums, logits, planned, counted], notes, result, arguments.out)
    return int(any(row["waits"] for row in waits))


if __name__ == "__main__":
    sys.exit(main())
