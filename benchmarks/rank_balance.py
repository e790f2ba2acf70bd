"""
Even ranks without a plan: predicted waiting of data-parallel ranks for each other, on the charts of the example.

Global batches of the chart dataset in a random order, as the stock Trainer gives them to ranks and accumulation steps
(`contiguous`) and arranged. The costs are those of the example's model on a known GPU, from the sizes that the Trainer
reads. `ranks` is the work of the fullest rank over the mean, for DDP and ZeRO-1, which wait once a step; `turns` adds
up the fullest batch of each accumulation step, for FSDP and ZeRO-3, which wait at every layer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from rich.table import Table

sys.path.append(str(common.ROOT / "examples"))
from charts import build_processor, chart_dataset  # pyright: ignore[reportMissingImports]
from train_chart_vlm import ScriptArguments, build_model  # pyright: ignore[reportMissingImports]

from hf_mmparallel.arrange.rank_batches import RANK_ARRANGEMENTS, turn_costs, whole_model_workloads
from hf_mmparallel.cost import CostModel, analytic_costs, batch_workloads, find_device
from hf_mmparallel.data import ChatCollator
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.layer_tokens import measure_layers
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import SampleSizes, resolve_plan
from hf_mmparallel.steps.rank_planner import RankPlanner


@dataclass(frozen=True)
class Sizes:
    """
    Sizes of the batches.

    Args:
        num_charts (`int`): Charts of the dataset.
        batch_size (`int`): Samples of a batch of one rank.
        layouts (`tuple[tuple[int, int], ...]`): Ranks and accumulation steps.
        num_batches (`int`): Global batches of each layout.
        gpu (`str`): Its costs.
    """

    num_charts: int = 512
    batch_size: int = 4
    layouts: tuple[tuple[int, int], ...] = ((4, 1), (4, 4), (8, 4))
    num_batches: int = 10
    gpu: str = "h100"


QUICK = Sizes(num_charts=64, layouts=((2, 2),), num_batches=2)


def measured(sizes: Sizes) -> tuple[CostModel, SampleSizes]:
    """Costs of the example's model, and the sizes of the charts in it."""
    dataset = chart_dataset(sizes.num_charts)
    processor = build_processor(dataset)
    with torch.device("meta"):
        model = build_model(ScriptArguments(), processor)
    spec, collator = build_model_spec(model), ChatCollator(processor)
    source: Any = size_source(dataset, collator, spec, processor=processor)
    source = source.with_layers(measure_layers(model, spec, dataset, collator, source))
    return analytic_costs(spec, find_device(sizes.gpu)), source(range(len(dataset)))


def balance(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Excess over the mean of each layout, form of rows and arrangement."""
    costs, samples = measured(sizes)
    plan = resolve_plan(costs.spec, {})
    for packed in (False, True):
        costs = replace(costs, packing=packed)
        for num_ranks, count in sizes.layouts:
            generator = np.random.default_rng(0)
            size = num_ranks * count * sizes.batch_size
            chosen = [generator.permutation(samples.num_samples)[:size].tolist() for _ in range(sizes.num_batches)]
            for arrangement in RANK_ARRANGEMENTS:
                planner = RankPlanner(costs, num_ranks, sizes.batch_size, arrangement)
                excess = []
                for indices in chosen:
                    own = samples.take(indices)
                    workloads = whole_model_workloads(batch_workloads(costs, plan, own))
                    times = turn_costs(planner(GlobalBatch(tuple(indices), sizes=own)), workloads)
                    excess.append((times.sum(axis=1).max(), times.max(axis=0).sum(), times.sum() / num_ranks))
                fullest, turns, mean = np.sum(excess, axis=0)
                yield {
                    "packed": packed,
                    "ranks": num_ranks,
                    "accumulation": count,
                    "arrangement": arrangement,
                    "mean_ms": mean / len(chosen),
                    "rank_excess": fullest / mean - 1,
                    "turn_excess": turns / mean - 1,
                }


def tables(result: dict[str, Any]) -> list[Table]:
    """The table that is printed."""
    columns = ("rows", "ranks", "accumulation", "arrangement", "mean ms", "fullest rank", "turns")
    table = Table(*columns, title="Excess over the mean work of a rank")
    for row in result["balance"]:
        cells = ["packed" if row["packed"] else "padded", str(row["ranks"]), str(row["accumulation"])]
        cells += [row["arrangement"], f"{row['mean_ms']:.3f}"]
        table.add_row(*cells, f"{100 * row['rank_excess']:.1f} %", f"{100 * row['turn_excess']:.1f} %")
    return [table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few charts")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    load = os.getloadavg()
    result = {"balance": list(balance(sizes)), **common.machine(common.QUICK, load), "shapes": asdict(sizes)}
    notes = ["Predicted from the sizes of samples; nothing is run."]
    common.report("rank_balance", tables(result), notes, result, options.out)


if __name__ == "__main__":
    main()
