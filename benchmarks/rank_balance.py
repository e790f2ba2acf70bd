"""
Even ranks without a plan: predicted waiting of data-parallel ranks for each other.

Global batches in a random order, as the stock Trainer gives them to ranks and accumulation steps (`contiguous`) and
arranged: charts in the model of the example, whose sizes are those that the Trainer reads, and SynthChartNet's sizes
with Llama 1b. Costs are those of a known GPU. `fullest rank` is the work of the fullest rank over the mean, for DDP or
ZeRO-1, which wait once a step; `turns` adds up the fullest batch of each accumulation step, for FSDP and ZeRO-3, which
wait at every layer. `faster` is the sum of turns in the stock Trainer's order over that of the arrangement:
padded rows are shorter, too, where samples of a batch are alike.
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
from paper_samples import PUBLISHED, PUBLISHED_MODELS
from rich.table import Table

sys.path.append(str(common.ROOT / "examples"))
from charts import build_processor, chart_dataset  # pyright: ignore[reportMissingImports]
from train_chart_vlm import ScriptArguments, build_model  # pyright: ignore[reportMissingImports]

from hf_mmparallel.arrange.rank_batches import RANK_ARRANGEMENTS, turn_costs, whole_model_workloads
from hf_mmparallel.cost import CostModel, analytic_costs, batch_workloads, find_device
from hf_mmparallel.cost.step_planner import RankPlanner
from hf_mmparallel.data import ChatCollator
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.layer_tokens import measure_layers
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import SampleSizes, resolve_plan


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
CHARTS, PAPER = "charts of the example", "SynthChartNet, Llama 1b"


def published(sizes: Sizes) -> tuple[CostModel, SampleSizes]:
    """Costs of a SigLIP-like encoder with Llama 1b, and sizes with the published shape of SynthChartNet."""
    costs = analytic_costs(PUBLISHED_MODELS["llama3-1b"].spec, find_device(sizes.gpu))
    return costs, PUBLISHED["synthchartnet"].draw(2048, 0)


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
    """The waiting of each kind of samples, form of rows, layout and arrangement."""
    for name, (costs, samples) in ((CHARTS, measured(sizes)), (PAPER, published(sizes))):
        for packed in (False, True):
            for num_ranks, count in sizes.layouts:
                case = {"samples": name, "packed": packed, "ranks": num_ranks, "accumulation": count}
                for row in arrangements(replace(costs, packing=packed), samples, num_ranks, count, sizes):
                    yield {**case, **row}


def arrangements(
    costs: CostModel, samples: SampleSizes, num_ranks: int, count: int, sizes: Sizes
) -> Iterator[dict[str, Any]]:
    """The work of ranks under each arrangement, means over the same global batches."""
    plan, generator = resolve_plan(costs.spec, {}), np.random.default_rng(0)
    size = num_ranks * count * sizes.batch_size
    chosen = [generator.permutation(samples.num_samples)[:size].tolist() for _ in range(sizes.num_batches)]
    stock_ms = None
    for arrangement in ("contiguous", *(name for name in RANK_ARRANGEMENTS if name != "contiguous")):
        planner = RankPlanner(costs, num_ranks, sizes.batch_size, arrangement)
        found = []
        for indices in chosen:
            own = samples.take(indices)
            workloads = whole_model_workloads(batch_workloads(costs, plan, own))
            times = turn_costs(planner(GlobalBatch(tuple(indices), sizes=own)), workloads)
            found.append((times.sum(axis=1).max(), times.max(axis=0).sum(), times.sum() / num_ranks))
        fullest_ms, turns_ms, mean_ms = np.mean(found, axis=0).tolist()
        stock_ms = turns_ms if stock_ms is None else stock_ms
        yield {
            "arrangement": arrangement,
            "mean_ms": mean_ms,
            "rank_excess": fullest_ms / mean_ms - 1,
            "turn_excess": turns_ms / mean_ms - 1,
            "faster": stock_ms / turns_ms,
        }


def tables(result: dict[str, Any]) -> list[Table]:
    """The table that is printed."""
    columns = ("samples", "rows", "ranks", "steps", "arrangement", "mean ms", "fullest rank", "turns", "faster")
    table = Table(*columns, title="Excess over the mean work of a rank")
    for row in result["balance"]:
        cells = [row["samples"], "packed" if row["packed"] else "padded", str(row["ranks"]), str(row["accumulation"])]
        cells += [row["arrangement"], f"{row['mean_ms']:.3f}" if row["mean_ms"] < 10 else f"{row['mean_ms']:,.0f}"]
        cells += [f"{100 * row['rank_excess']:.1f} %", f"{100 * row['turn_excess']:.1f} %", f"{row['faster']:.2f}"]
        table.add_row(*cells)
    return [table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few charts")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    load = os.getloadavg()
    result = {"balance": list(balance(sizes))}
    result |= {**common.machine(common.QUICK, load), "shapes": asdict(sizes)}
    notes = ["Predicted from the sizes of samples; nothing is run."]
    common.report("rank_balance", tables(result), notes, result, options.out)


if __name__ == "__main__":
    main()
