"""
What a step costs beside its kernels, counted: waits of the host for the device, bytes that are copied, process groups.

`waits` are counted on this machine by ranks with a device that counts them ([`counted_device`](counted_device.py)):
after two steps, of the rank that waits most, without those that a log of the loss makes. On a GPU
`torch.cuda.set_sync_debug_mode` reports the same ones. ZeRO-3 and tied weights are not among the layouts: the device
has no memory of its own that weights could give back or share. `groups` are counted in plans of 8 to 4,096 ranks, with
the models of `scale.py`: communicators of the fullest rank, all process groups of the plan, and the processor time in
which one rank makes its own over a backend that sends nothing.

```bash
python benchmarks/step_costs.py
python benchmarks/step_costs.py --quick --out out/bench  # fewer layouts
```
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import counted_device
import scale
import torch
import torch.distributed as dist
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import TrainerCallback

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, sync_groups
from hf_mmparallel.runtime.groups import ProcessGroups, channels_of_step, collective_groups

VISION, SHARDED = "vision", {"dp_size": 2, "zero_stage": 2}


@dataclass(frozen=True)
class Layout:
    """A layout of a tiny model on a few ranks."""

    family: str  # of tests/tiny.py
    ranks: int
    modules: Mapping[str, Mapping[str, Any]]
    packing: bool = False


LAYOUTS = {
    "llava, pp 2": Layout("llava", 3, {LANGUAGE_MODEL: {"pp_size": 2}}),
    "qwen2_vl, cp 2, packed": Layout("qwen2_vl", 3, {LANGUAGE_MODEL: {"cp_size": 2}}, True),
    "llava, dp 2, ZeRO-2": Layout("llava", 4, {VISION: {"dp_size": 2}, LANGUAGE_MODEL: SHARDED}),
    "qwen2_vl, tp 2": Layout("qwen2_vl", 3, {LANGUAGE_MODEL: {"tp_size": 2}}),
    "qwen3_vl, pp 2": Layout("qwen3_vl", 3, {LANGUAGE_MODEL: {"pp_size": 2}}),
    "qwen2_5_vl, vision pp 2": Layout("qwen2_5_vl", 3, {VISION: {"pp_size": 2}}),
}
QUICK = ("llava, pp 2", "qwen2_vl, cp 2, packed")
FIRST, LAST = 2, 6  # counted are the steps after the first of these, of a run of the second
GROUP_RANKS = (8, 64, 512, 4096)
GPU = "name: counted\nlike: h100\n"


class _Steady(TrainerCallback):
    """Counts from one step on, to the end of the last but one, which is not logged."""

    def __init__(self) -> None:
        self.waits: dict[str, int] = {}
        self.copied_bytes: dict[str, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        counts = counted_device.COUNTS
        if state.global_step == FIRST:
            counts.clear()
        if state.global_step == LAST - 1:
            self.waits = {f"{wait.kind}: {wait.where}": number for wait, number in counts.waits.items()}
            self.copied_bytes = dict(counts.copied_bytes)
        counted_device.catch_up()


def count_rank(layout: Layout, rendezvous: str) -> tuple[dict[str, int], dict[str, int], list[float]]:
    """Waits and copied bytes of this rank over the steady steps of a run, and the losses that it logged."""
    from tests.trainer import runs

    rank = int(os.environ["RANK"])
    if dist.is_initialized():
        dist.destroy_process_group()
    counted_device.init_process_group(rank, layout.ranks, rendezvous)
    with tempfile.TemporaryDirectory() as folder, counted_device.train_on_device():
        spec = Path(folder) / "gpu.yaml"
        spec.write_text(GPU)
        arguments: dict[str, Any] = {"max_steps": LAST, "logging_steps": LAST, "gpu_spec": str(spec)}
        if layout.packing:
            arguments["packing"] = True
        modules: Any = {name: dict(sizes) for name, sizes in layout.modules.items()}
        trainer = runs.make_trainer(layout.family, modules, folder, **arguments)
        assert trainer.engine.world.on_device
        steady = _Steady()
        trainer.add_callback(steady)
        trainer.train()
        losses = [row["loss"] for row in runs.step_logs(trainer)]
        dist.barrier(trainer.engine.world.host_group)
    return steady.waits, steady.copied_bytes, losses


def run_ranks(file: str, name: str, rendezvous: str) -> None:
    """Body of a rank: rank 0 writes what all ranks counted."""
    waits, copied_bytes, losses = count_rank(LAYOUTS[name], rendezvous)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (waits, copied_bytes))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps({"ranks": found, "losses": losses}))


def per_step(counts: Mapping[str, int]) -> float:
    return sum(counts.values()) / (LAST - 1 - FIRST)


def count_waits(name: str) -> dict[str, Any]:
    """The row of a layout: waits and copied bytes a step, of the rank with most."""
    with tempfile.TemporaryDirectory() as folder:
        found = common.launch(
            __file__, LAYOUTS[name].ranks, ["--layout", name, "--rendezvous", f"file://{folder}/meet"]
        )
    total: Counter[str] = Counter()
    for waits, _ in found["ranks"]:
        total.update(waits)
    return {
        "layout": name,
        "waits": max(per_step(waits) for waits, _ in found["ranks"]),
        "kib_to_device": max(copied.get("to the device", 0) for _, copied in found["ranks"])
        / (LAST - 1 - FIRST)
        / 1024,
        "where": dict(total.most_common()),
    }


def plan_of(num_ranks: int) -> ParallelPlan:
    """A plan of one encoder rank for each four of the language model, or of few ranks."""
    if num_ranks == 8:
        return scale.make_plan(ModulePlugin(dp_size=1, pp_size=2, tp_size=2), ModulePlugin(dp_size=4), 8)
    copies = num_ranks * 7 // 8 // 64 or 1
    language = ModulePlugin(dp_size=copies, pp_size=7 if num_ranks == 64 else 8, tp_size=8)
    vision = ModulePlugin(dp_size=(num_ranks - copies * language.pp_size * 8) // 2, tp_size=2)
    return scale.make_plan(language, vision, 32)


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
    groups = [count_groups(size) for size in (GROUP_RANKS[:2] if arguments.quick else GROUP_RANKS)]
    table = Table("layout", "waits a step", "KiB to the device a step", title="Waits for the device")
    for row in waits:
        table.add_row(row["layout"], f"{row['waits']:g}", f"{row['kib_to_device']:.1f}")
    counted = Table("ranks", "groups", "communicators of a rank", "its channels", "seconds", title="Process groups")
    for row in groups:
        counted.add_row(
            *(str(row[key]) for key in ("ranks", "groups", "communicators", "channels_of_a_rank", "seconds"))
        )
    notes = [f"{row['layout']}: {number} x {where}" for row in waits for where, number in row["where"].items()]
    machine = common.machine(common.QUICK, load)
    common.report("step_costs", [table, counted], notes, {"waits": waits, "groups": groups, **machine}, arguments.out)
    return int(any(row["waits"] for row in waits))


if __name__ == "__main__":
    sys.exit(main())
