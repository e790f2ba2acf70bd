"""
Time to arrange global batches, its overlap with the step, and the speed of the loader of steps.

Arranging: SynthChartNet's published sizes, Qwen2.5-VL's encoder with Llama 3b. `arrange` is the arrangement alone,
from workloads to microbatches; `step` adds the sizes and workloads before it and the `StepPlan` after it; `program`
adds the program of all ranks with its checks, and is all that there is to plan. Processor time is what is left where
other programs use the cores too. DistTrain's figures are from its table 3.

Hiding: a loop whose steps sleep takes planned steps from a data loader, with and without a worker process, and notes
what it waits.

Reading: charts drawn by matplotlib, with Qwen's image processor and a chat template, by the loader of an encoder rank,
of a language-model rank and of a rank that has both, against torch's own `DataLoader` with the same collator and as
many workers. The processor time is that of a loader without workers.

```bash
python benchmarks/sampler_overhead.py
python benchmarks/sampler_overhead.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import torch
from paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from rich.table import Table
from torch.utils.data import DataLoader

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step, find_arrangement, num_microbatches
from hf_mmparallel.cost import analytic_costs, batch_workloads, find_device
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data import ChatCollator
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.media import readers
from hf_mmparallel.data.step_dataset import RankInputs, Reader, StepDataset, as_is
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, resolve_plan, sync_groups

sys.path.append(str(common.ROOT / "examples"))
from charts import build_processor, chart_dataset  # pyright: ignore[reportMissingImports]

MICROBATCH = 4
DATASET, MODEL = "synthchartnet", "llama3-3b"
IMAGE_INPUTS = frozenset(("pixel_values", "image_grid_thw"))
PUBLISHED_MS = {"DistTrain, 1,920 over 30": 7.69, "DistTrain, 1,920 over 60": 4.89, "DistTrain, 1,920 over 120": 3.60}


@dataclass(frozen=True)
class Batch:
    """
    A global batch and where it goes.

    Args:
        name (`str`): What it is.
        num_samples (`int`): Samples.
        replicas (`int`): Of both modules.
        microbatch_size (`int`): Samples of a microbatch.
        stages (`tuple[int, int]`): Of the encoder and of the language model.
        goal_ms (`float`, *optional*): What `arrange` may take.
    """

    name: str
    num_samples: int
    replicas: int
    microbatch_size: int
    stages: tuple[int, int]
    goal_ms: float | None = None


@dataclass(frozen=True)
class Sizes:
    """
    Sizes of the measurement.

    Args:
        batches (`tuple[Batch, ...]`): What is arranged; the loop takes the first.
        repeats (`int`): Of each arrangement.
        programs (`int`): Of each program.
        step_ms (`float`): What a step of the loop takes.
        num_steps (`int`): Steps of the loop.
        num_charts (`int`): Charts that are read.
        chart_batch (`int`): Charts of a global batch.
        rounds (`int`): How often each loader reads them.
        workers (`int`): Of a loader.
    """

    batches: tuple[Batch, ...] = (
        Batch("512 over 4", 512, 4, MICROBATCH, (4, 4), 10.0),
        Batch("1,920 over 120", 1920, 120, MICROBATCH, (1, 3), 20.0),
        Batch("1,920 over 120, single samples", 1920, 120, 1, (1, 3), 20.0),
    )
    repeats: int = 31
    programs: int = 5
    step_ms: float = 500.0
    num_steps: int = 10
    num_charts: int = 512
    chart_batch: int = 64
    rounds: int = 5
    workers: int = 2


QUICK = Sizes((Batch("32 over 2", 32, 2, 4, (1, 2)),), 3, 1, 20.0, 2, 16, 8, 1, 1)


def make_planner(batch: Batch, method: str) -> StepPlanner:
    """Plans steps of a batch whose sizes are known."""
    spec = PUBLISHED_MODELS[MODEL].spec
    plugins = {
        name: ModulePlugin(dp_size=batch.replicas, pp_size=count)
        for name, count in zip((VISION, LANGUAGE_MODEL), batch.stages, strict=True)
    }
    plan = resolve_plan(spec, plugins)
    sizes = PUBLISHED[DATASET].draw(batch.num_samples, 0)
    groups = sync_groups(spec, plan)
    return StepPlanner(
        analytic_costs(spec, find_device("a40")), plan, groups, batch.microbatch_size, method, sizes.take
    )


def arranging(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The times of every arrangement of every batch."""
    for batch in sizes.batches:
        for method in ARRANGEMENTS:
            planner = make_planner(batch, method)
            draw = GlobalBatch(tuple(range(batch.num_samples)))
            yield {
                "batch": batch.name,
                "microbatches": num_microbatches(batch.num_samples, batch.microbatch_size, batch.replicas),
                "method": method,
                "goal_ms": batch.goal_ms,
                **_times(planner, draw, sizes),
            }


def _times(planner: StepPlanner, draw: GlobalBatch, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of the three parts, each with those before it."""
    source: Any = planner.sizes

    def workloads() -> Any:
        return batch_workloads(planner.costs, planner.plan, source(draw.samples))

    known, arrange = workloads(), find_arrangement(planner.arrangement)
    return {
        "arrange_ms": common.measured(lambda: arrange(planner.plan, known, planner.microbatch_size), sizes.repeats),
        "step_ms": common.measured(
            lambda: arrange_step(
                planner.plan, draw.samples, workloads(), planner.microbatch_size, planner.arrangement
            ),
            sizes.repeats,
        ),
        "program_ms": common.measured(lambda: planner(draw), sizes.programs),
    }


class Numbers(torch.utils.data.Dataset):
    """Samples that cost nothing to read."""

    def __getitem__(self, index: int) -> int:
        return index


def nothing(samples: Sequence[Any]) -> dict[str, Any]:
    """A collator that costs nothing."""
    return {"samples": len(samples)}


def hiding(sizes: Sizes) -> list[dict[str, Any]]:
    """Time that a loop waits for planned steps, with and without a worker."""
    batch, results = sizes.batches[0], []
    for method in ARRANGEMENTS:
        planner = make_planner(batch, method)
        dataset = StepDataset(Reader(Numbers(), nothing), RankInputs(planner.plan, 0), 0, planner)
        draws: Any = [GlobalBatch(tuple(range(batch.num_samples)))] * sizes.num_steps
        for workers in (0, 1):
            loader = iter(DataLoader(dataset, batch_sampler=draws, collate_fn=as_is, num_workers=workers))
            waits = []
            for _ in range(sizes.num_steps):
                begin = time.perf_counter()
                next(loader)
                waits.append(1e3 * (time.perf_counter() - begin))
                time.sleep(sizes.step_ms / 1e3)
            # The first step has nothing to hide behind.
            results.append({"method": method, "workers": workers, "waits_ms": common.spread(waits[1:])})
    return results


@dataclass(frozen=True)
class Charts:
    """
    The dataset of the loaders.

    Args:
        dataset (`datasets.Dataset`): The charts.
        collator ([`ChatCollator`]): Of the charts.
    """

    dataset: Any
    collator: ChatCollator

    def stock(self, workers: int) -> DataLoader:
        """Torch's loader of whole samples."""
        return DataLoader(
            self.dataset, MICROBATCH, collate_fn=self.collator, num_workers=workers, persistent_workers=workers > 0
        )

    def steps(self, plan: ParallelPlan, rank: int, batch_size: int, workers: int) -> DataLoader:
        """The loader of one rank of a plan."""
        spec = PUBLISHED_MODELS[MODEL].spec
        planner = StepPlanner(
            analytic_costs(spec, find_device("cpu")), plan, sync_groups(spec, plan), MICROBATCH, "contiguous"
        )
        made = readers(self.dataset, self.collator, spec, {VISION: IMAGE_INPUTS})
        inputs = RankInputs(plan, rank, {LANGUAGE_MODEL: IMAGE_INPUTS})
        dataset = StepDataset(made, inputs, 0, planner)
        order = range(len(self.dataset))
        draws: Any = [GlobalBatch(tuple(order[start : start + batch_size])) for start in order[::batch_size]]
        return DataLoader(
            dataset, batch_sampler=draws, collate_fn=as_is, num_workers=workers, persistent_workers=workers > 0
        )

    def loaders(self, batch_size: int, workers: int) -> dict[str, DataLoader]:
        """All loaders."""
        spec = PUBLISHED_MODELS[MODEL].spec
        apart = resolve_plan(spec, {VISION: ModulePlugin(), LANGUAGE_MODEL: ModulePlugin()})
        together = resolve_plan(spec, {VISION: ModulePlugin(), LANGUAGE_MODEL: ModulePlugin(colocate_with=VISION)})
        return {
            "stock": self.stock(workers),
            "both": self.steps(together, 0, batch_size, workers),
            "encoder": self.steps(apart, 0, batch_size, workers),
            "language model": self.steps(apart, 1, batch_size, workers),
        }


def reading(sizes: Sizes) -> dict[str, Any]:
    """Samples per second of the loaders, which read the same charts in turns."""
    dataset = chart_dataset(sizes.num_charts)
    charts = Charts(dataset, ChatCollator(build_processor(dataset)))
    processor_ms = {
        name: common.measured(lambda loader=loader: list(loader), 1)["processor"] / len(dataset)
        for name, loader in charts.loaders(sizes.chart_batch, 0).items()
    }
    rates: dict[str, list[float]] = {name: [] for name in processor_ms}
    loaders = charts.loaders(sizes.chart_batch, sizes.workers)
    for turn in range(sizes.rounds + 1):
        for name, loader in loaders.items():
            begin = time.perf_counter()
            for _ in loader:
                pass
            if turn:  # the first one starts the workers
                rates[name].append(len(dataset) / (time.perf_counter() - begin))
    return {
        name: {
            "samples_per_second": common.spread(values),
            "ratio": round(statistics.median(a / b for a, b in zip(values, rates["stock"], strict=True)), 3),
            "processor_ms": round(processor_ms[name], 3),
            "processor_ratio": round(processor_ms["stock"] / processor_ms[name], 3),
        }
        for name, values in rates.items()
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The printed table and notes."""
    parts = ("arrange", "step", "program")
    title = "Planning: processor time (and time by the clock) in ms"
    arranged = Table("batch", "microbatches", "method", *parts, "goal of arrange", title=title)
    for row in result["arranging"]:
        goal = "" if row["goal_ms"] is None else f"{row['goal_ms']:.0f}"
        found = [row[f"{part}_ms"] for part in parts]
        times = [f"{values['processor']:.1f} ({values['median']:.1f})" for values in found]
        arranged.add_row(row["batch"], str(row["microbatches"]), row["method"], *times, goal)
    for name, value in PUBLISHED_MS.items():
        arranged.add_row(name, "", "published", f"({value:.2f})", "", "", "")
    waited = Table(
        "method", "workers", "median ms", "max", title=f"Waiting, steps of {result['shapes']['step_ms']} ms"
    )
    for row in result["hiding"]:
        waits = [f"{row['waits_ms'][key]:.1f}" for key in ("median", "max")]
        waited.add_row(row["method"], str(row["workers"]), *waits)
    columns = ("samples/s", "min", "max", "against stock", "processor ms a sample", "against stock")
    read = Table("loader", *columns, title="Reading charts")
    for name, row in result["reading"].items():
        cells = [f"{row['samples_per_second'][key]:.0f}" for key in ("median", "min", "max")]
        cells += [f"{row['ratio']:.2f}", f"{row['processor_ms']:.2f}", f"{row['processor_ratio']:.2f}"]
        read.add_row(name, *cells)
    return [arranged, waited, read]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small batch, few charts")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    load = os.getloadavg()
    torch.set_num_threads(1)
    result = {
        "published_ms": PUBLISHED_MS,
        "arranging": list(arranging(sizes)),
        "hiding": hiding(sizes),
        "reading": reading(sizes),
        **common.machine(common.QUICK, load),
        "shapes": asdict(sizes),
    }
    notes = ["Medians. `step` and `program` include what stands before them."]
    common.report("sampler_overhead", tables(result), notes, result, options.out)


if __name__ == "__main__":
    main()
