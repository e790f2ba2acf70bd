"""
Predicted and measured steps of plans whose copies divide gradients (ZeRO-2) or weights (ZeRO-3), on 4 and 8 ranks.

The device is modelled: the prediction is that of the planner, `StepCost` and `simulate`, for a device so slow that a
layer takes tens of milliseconds. In the measured step these durations pass on the clock, on more ranks than there are
cores.

Real: the engine with its processes, programs and messages between stages; the actions in the passes, from the hooks of
`runtime/joint_passes.py`; every all-gather and reduce-scatter of the weights and gradients, which are tiny; embedding,
head and loss, which take about a millisecond, beside the modelled time.

Modelled: the computation of layers, which sleep for their time in the cost model and pass their input on; the time of
gathers and reductions, by their bytes. Each rank has one link, on which they follow one another beside the
computation; what waits for one sleeps until it would have arrived. A transfer starts when this rank has issued it, and
ends no sooner than the real one. Computation is not slowed by the transfers beside it, nor is it in the model of this
device.

```bash
python benchmarks/sharded_simulation.py
python benchmarks/sharded_simulation.py --quick --out out/bench  # seconds; the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
from modelled import message_ms, timed_step
from rich.table import Table
from simulator_error import error
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.cost.collectives import all_gather
from hf_mmparallel.cost.devices import Hardware
from hf_mmparallel.cost.layer_table import layer_table
from hf_mmparallel.cost.step import StepCost
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, SampleSizes, plan_for_model
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.schedule import Task, build_program, find_representatives, simulate
from hf_mmparallel.world import World

GOAL = 0.10
FAST_GB_PER_S, SLOW_GB_PER_S = 0.004, 0.001
"""Links on which a layer arrives while another is computed, and on which it does not."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a step: the forward of a layer takes about 60 ms for a microbatch."""

    width: int = 64
    num_layers: int = 4
    length: int = 16
    microbatch: int = 2
    num_microbatches: int = 4
    tflops: float = 0.6e-4


SIZES = Sizes()
QUICK = Sizes(num_microbatches=2, tflops=6e-4)


@dataclass(frozen=True)
class Case:
    """
    A layout.

    Args:
        world_size (`int`): Ranks.
        layout (`dict`): Settings of the language model.
        zero_stage (`int`): What its copies divide.
        schedule (`str`, *optional*, defaults to `"1f1b"`): The schedule.
        link_gb_per_s (`float`, *optional*): Bandwidth of a rank's link.
    """

    world_size: int
    layout: dict[str, int]
    zero_stage: int
    schedule: str = "1f1b"
    link_gb_per_s: float = FAST_GB_PER_S

    @property
    def name(self) -> str:
        sizes = ", ".join(f"{name.removesuffix('_size')} {size}" for name, size in self.layout.items())
        notes = [self.schedule] * (self.schedule != "1f1b") + ["slow link"] * (self.link_gb_per_s < FAST_GB_PER_S)
        return ", ".join([f"{self.world_size} ranks, {sizes}, ZeRO-{self.zero_stage}", *notes])


CASES = (
    Case(4, {"dp_size": 4}, 2),
    Case(4, {"dp_size": 4}, 3),
    Case(4, {"dp_size": 4}, 3, link_gb_per_s=SLOW_GB_PER_S),
    Case(4, {"dp_size": 2, "pp_size": 2}, 2),
    Case(4, {"dp_size": 2, "pp_size": 2}, 3),
    Case(8, {"dp_size": 8}, 2),
    Case(8, {"dp_size": 8}, 3),
    Case(8, {"dp_size": 8}, 3, link_gb_per_s=SLOW_GB_PER_S),
    Case(8, {"dp_size": 4, "pp_size": 2}, 3),
    Case(8, {"dp_size": 4, "pp_size": 2}, 3, "gpipe"),
    Case(8, {"dp_size": 2, "pp_size": 4}, 3),
)


class _Sleep(torch.autograd.Function):
    """Passes a tensor on after a time, and its gradient after another; `anchor` is a parameter that is trained."""

    @staticmethod
    def forward(ctx: Any, times_ms: tuple[float, float], hidden: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.backward_ms = times_ms[1]
        time.sleep(times_ms[0] / 1e3)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.backward_ms / 1e3)
        return None, gradients[0], None


class SleepingLayers:
    """
    Lets the layers of an engine, and what is before and after them, sleep for their time in a cost model.

    Args:
        engine (`ParallelEngine`): The engine of a language model without context and tensor parallelism.
        cost (`StepCost`): Times of the step.
    """

    def __init__(self, engine: ParallelEngine, cost: StepCost):
        self.cost = cost
        self.table = layer_table(cost.costs, LANGUAGE_MODEL)
        self.task: Task | None = None
        engine._first_step = None  # the loss is not that of the model
        functions = replace(engine.executor.functions, before_forward=self.note)
        engine.executor.functions = functions
        for stage in engine.stages.values():
            for index, layer in stage.own_layers.items():
                anchor = next(layer.parameters())
                layer.forward = lambda hidden, *_, row=index + 1, anchor=anchor, **__: self.sleep(row, hidden, anchor)
            if stage.is_first:
                embedding: nn.Module = engine.model.get_input_embeddings()
                embedding.register_forward_hook(lambda module, _, out: self.sleep(0, out, module.weight))
            if stage.is_last:
                head: nn.Module = engine.model.get_output_embeddings()
                head.register_forward_pre_hook(lambda module, args: (self.sleep(-1, args[0], module.weight),))

    def note(self, task: Task) -> None:
        """Before each forward."""
        self.task = task

    def sleep(self, row: int, hidden: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """Sleeps in the place of a row of the table of layers."""
        assert self.task is not None
        chunk = self.cost.chunks[self.task.module, self.task.replica, self.task.microbatch, self.task.chunk]
        forward, backward = self.table.times(chunk.tokens, chunk.squares)
        result = _Sleep.apply((float(forward[row]), float(backward[row])), hidden, anchor)
        assert isinstance(result, torch.Tensor)
        return result


class _Transfer:
    """A collective that ends no sooner than a time on the clock."""

    def __init__(self, work: Any, end_s: float):
        self.work, self.end_s = work, end_s

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.end_s - time.perf_counter()))


class ModelledLink:
    """
    The link of this rank, on which gathers and reductions follow one another. A context manager.

    Args:
        device (`Hardware`): The device.

    Attributes:
        num_transfers (`int`): How many there have been.
    """

    def __init__(self, device: Hardware):
        self.device = device
        self.free_s = 0.0
        self.num_transfers = 0
        self._collectives = dist.all_gather_single, dist.all_to_all_single

    def __enter__(self) -> ModelledLink:
        dist.all_gather_single = partial(self._start, self._collectives[0])
        dist.all_to_all_single = partial(self._start, self._collectives[1])
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_gather_single, dist.all_to_all_single = self._collectives

    def _start(self, collective: Any, out: torch.Tensor, given: torch.Tensor, *splits: Any, **options: Any) -> Any:
        """Starts to gather weights, or to exchange the rows of a reduce-scatter."""
        ranks = dist.get_process_group_ranks(options["group"])
        is_gather = collective is self._collectives[0]
        rank_bytes = (
            given.nbytes if is_gather else given.nbytes / (len(ranks) - 1)
        )  # a rank sends all rows but its own
        time_ms = all_gather(self.device, ranks)(rank_bytes * len(ranks))
        self.num_transfers += 1
        self.free_s = max(self.free_s, time.perf_counter()) + time_ms / 1e3
        return _Transfer(collective(out, given, *splits, **options), self.free_s)


def modelled_device(sizes: Sizes, link_gb_per_s: float) -> Hardware:
    """A slow device, of which only matrix products and links take time."""
    return replace(
        find_device("cpu"),
        fp32_tflops=sizes.tflops,
        bf16_tflops=sizes.tflops,
        memory_gb_per_s=1e9,
        launch_us=0.0,
        link_gb_per_s=link_gb_per_s,
        node_size=64,
        collective_latency_us=100.0,
        overlap_efficiency=1.0,
        dtype="float32",
    )


def collate(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Samples of one length."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def run_case(case: Case, sizes: Sizes, num_steps: int) -> dict[str, Any]:
    """Predicted and measured times of the steps of one layout."""
    torch.manual_seed(0)
    shape = {"hidden_size": sizes.width, "intermediate_size": 2 * sizes.width, "num_hidden_layers": sizes.num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).train()
    spec = build_model_spec(model)
    settings: Any = {LANGUAGE_MODEL: {**case.layout, "zero_stage": case.zero_stage}}
    plugin = MultimodalParallelPlugin(settings, case.schedule)  # type: ignore[arg-type]
    plan = plan_for_model(plugin, spec, case.world_size, sizes.num_microbatches)
    device = modelled_device(sizes, case.link_gb_per_s)
    costs = analytic_costs(spec, device, 4)
    engine = ParallelEngine(model, spec, plan, World())
    # The last microbatch of the last replica has a sample less.
    num_samples = sizes.microbatch * sizes.num_microbatches * plan.modules[LANGUAGE_MODEL].dp_size - 1
    lengths = np.full(num_samples, sizes.length)
    known = SampleSizes({LANGUAGE_MODEL: lengths}, {LANGUAGE_MODEL: lengths.astype(float) ** 2})
    step = contiguous_step(plan, range(num_samples), sizes.microbatch)
    cost = StepCost(costs, plan, step, known, engine.sync_groups)
    program = build_program(plan, step, engine.sync_groups, cost)
    ids = torch.arange(sizes.length) % 64
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    data = StepDataset(Reader([sample] * num_samples, collate), engine.inputs, 0).read(step)
    batch = StepBatch.of(data, program, engine.rank)
    travel_ms = message_ms(sizes.microbatch * sizes.length * sizes.width)
    SleepingLayers(engine, cost)
    with ModelledLink(device) as link:
        times = [timed_step(engine, batch, index) for index in range(1 + num_steps)]
    layout = find_representatives(plan, engine.sync_groups)
    predicted = simulate(layout, step, cost, travel_ms, lambda number: cost.sync_ms(layout.represented[number][0]))
    without = replace(
        plan.modules[LANGUAGE_MODEL], sharding=replace(plan.modules[LANGUAGE_MODEL].sharding, zero_stage=1)
    )
    plain = replace(plan, modules={**plan.modules, LANGUAGE_MODEL: without})
    compute = StepCost(costs, plain, step, known, engine.sync_groups)
    return {
        "case": case.name,
        "zero_stage": case.zero_stage,
        "world_size": case.world_size,
        "message_ms": travel_ms,
        "predicted_ms": predicted.iteration_ms,
        "without_transfers_ms": simulate(layout, step, compute, travel_ms, order_cost=cost).iteration_ms,
        "steps_ms": times[1:],
        "transfers_a_step": link.num_transfers / len(times),
    }


def run_ranks(options: argparse.Namespace) -> None:
    """The function of the ranks; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arguments = (QUICK, 1) if options.quick else (SIZES, options.repeats)
    result = [run_case(case, *arguments) for case in CASES if case.world_size == dist.get_world_size()]
    if dist.get_rank() == 0:
        options.ranks.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def tabled(results: Sequence[dict[str, Any]]) -> tuple[Table, list[dict[str, Any]]]:
    """The table and the rows of the JSON."""
    columns = ("predicted ms", "measured ms", "error %", "exposed transfers %", "gathers and sums")
    table = Table("case", *columns, title="Modelled durations under ZeRO", title_justify="left")
    rows = []
    for result in results:
        measured = statistics.median(result["steps_ms"])
        rows.append({**result, "measured_ms": measured, "error": error(result["predicted_ms"], measured)})
        exposed = 1 - result["without_transfers_ms"] / result["predicted_ms"]
        shown = (f"{result['predicted_ms']:.0f}", f"{measured:.0f}", f"{100 * rows[-1]['error']:.1f}")
        table.add_row(result["case"], *shown, f"{100 * exposed:.1f}", f"{result['transfers_a_step']:.0f}")
    return table, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each layout")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks is not None:
        run_ranks(options)
        return
    load = os.getloadavg()
    arguments = ["--repeats", str(options.repeats), *["--quick"] * options.quick]
    table, rows = tabled([row for world in (4, 8) for row in common.launch(__file__, world, arguments)])
    errors = [row["error"] for row in rows]
    summary = {"median_error": statistics.median(errors), "largest_error": max(errors), "goal": GOAL}
    notes = [f"Largest error {max(errors):.1%}, median {statistics.median(errors):.1%}, goal {GOAL:.0%}."]
    machine = {**common.machine(common.Shapes(), load), "shapes": asdict(QUICK if options.quick else SIZES)}
    common.report("sharded_simulation", [table], notes, {"cases": rows, **summary, **machine}, options.out)


if __name__ == "__main__":
    main()
