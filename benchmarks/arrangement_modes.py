"""
The arrangement that is chosen where nobody names one, against all others: padded and packed rows, microbatches of 4
and of 8 samples. Part of `microbatch_balance.py`.

All times are those of the package's own cost model, in which padded tokens and dense masks cost what they take, on
stages as fast as Entrain's. The arrangement is chosen by one batch, as the Trainer does before its first step, and
judged by others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from rich.table import Table

from hf_mmparallel.cost import AnalyticLayers, CostModel, LayerCost, find_device
from hf_mmparallel.cost.arrangement_choice import choose_arrangement
from hf_mmparallel.cost.row_sizes import chunk_sizes
from hf_mmparallel.cost.step_planner import Prediction, StepPlanner
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.plan.methods import ARRANGEMENT_CANDIDATES

BASELINES = ("contiguous", "batch_rebalance", "disttrain")
METHODS = (*ARRANGEMENT_CANDIDATES, "entrain", "batch_rebalance", "disttrain", "contiguous")
MICROBATCHES = (4, 8)
MODES = ("padded", "packed")
_CHOSEN_BY = 1000  # the seed of the batch


@dataclass(frozen=True)
class PublishedLayers:
    """Costs of layers by operation counts, where each module reaches its fitted share of a device's peak."""

    model: str

    def starting_at(self, first_rank: int) -> PublishedLayers:
        """See [`LayerCosts`]; no ranks share matrices here."""
        return self

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        model, device = PUBLISHED_MODELS[self.model], find_device("a40")
        share = model.efficiency[module]
        device = replace(device, matmul_efficiency=share, attention_efficiency=share)
        return AnalyticLayers(model.spec, device).layer(module, index, tp_size)


def planner_of(dataset: str, model: str, mode: str, microbatch_size: int, replicas: int) -> StepPlanner:
    """Plans steps on Entrain's stages for a dataset, without gradient sums, which are the same in all arrangements."""
    stages = PUBLISHED[dataset].stated.parallel_sizes[model]["entrain"]
    sizes = {
        name: ModulePlugin(dp_size=replicas, pp_size=count)
        for name, count in zip((VISION, LANGUAGE_MODEL), stages, strict=True)
    }
    spec = PUBLISHED_MODELS[model].spec
    costs = CostModel(spec, find_device("a40"), PublishedLayers(model), packing=mode == "packed")
    return StepPlanner(costs, resolve_plan(spec, sizes), [], microbatch_size)


def compare_modes(dataset: str, model: str, batch: int, replicas: int, num_batches: int) -> list[dict[str, Any]]:
    """A row for each mode and size of microbatches of a dataset and a model."""
    shape = PUBLISHED[dataset]
    batches = [shape.draw(batch, seed) for seed in range(num_batches)]
    rows = []
    for mode in MODES:
        for size in MICROBATCHES:
            planner = planner_of(dataset, model, mode, size, replicas)
            choice = choose_arrangement(planner, [shape.draw(batch, _CHOSEN_BY)])
            steps = {method: _mean(planner, method, batches) for method in METHODS}
            rows.append(
                {
                    "dataset": dataset,
                    "model": model,
                    "mode": mode,
                    "microbatch_size": size,
                    "chosen": choice.arrangement,
                    "predicted_ms": choice.step_ms[choice.arrangement],
                    "step_ms": {method: row["step_ms"] for method, row in steps.items()},
                    "padding": {method: row["padding"] for method, row in steps.items()},
                }
            )
    return rows


def _mean(planner: StepPlanner, method: str, batches: Sequence[SampleSizes]) -> dict[str, float]:
    """A step of an arrangement, and its tokens over real ones, the mean over batches."""
    planner = replace(planner, arrangement=method)
    found = [planner.predict_batch(batch) for batch in batches]
    return {
        "step_ms": statistics.fmean(prediction.step_ms for prediction in found),
        "padding": statistics.fmean(_padding(planner, prediction) for prediction in found),
    }


def _padding(planner: StepPlanner, prediction: Prediction) -> float:
    """Tokens that the language model computes over those of its samples."""
    chunks = chunk_sizes(planner.costs, planner.plan, prediction.planned.step, prediction.sizes)
    computed = sum(size.tokens for key, size in chunks.items() if key[0] == LANGUAGE_MODEL)
    return computed / float(prediction.sizes.tokens[LANGUAGE_MODEL].sum())


def over_best(row: dict[str, Any], method: str) -> float:
    """The step of an arrangement over that of the best baseline."""
    return row["step_ms"][method] / min(row["step_ms"][name] for name in BASELINES)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mode -> over all of its rows: the chosen arrangement against the best baseline, and its prediction's error."""
    result = {}
    for mode in MODES:
        own = [row for row in rows if row["mode"] == mode]
        chosen = [over_best(row, row["chosen"]) for row in own]
        errors = [abs(row["predicted_ms"] / row["step_ms"][row["chosen"]] - 1) for row in own]
        result[mode] = {
            "num_cases": len(own),
            "slowest_over_best_baseline": max(chosen),
            "fastest_over_best_baseline": min(chosen),
            "mean_over_best_baseline": statistics.fmean(chosen),
            "largest_prediction_error": max(errors),
            **{f"{name}_slowest": max(over_best(row, name) for row in own) for name in ARRANGEMENT_CANDIDATES},
        }
    return result


def modes_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each case, steps in ms."""
    table = Table("dataset", "model", "rows", "microbatch", *METHODS, "chosen", "/ best baseline", "predicted")
    table.title = (
        "The arrangement that is chosen by itself, and all others: step in ms (tokens computed over real ones)"
    )
    table.title_justify = "left"
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("dataset", "model", "mode", "microbatch_size")),
            *(f"{row['step_ms'][name]:.0f} ({row['padding'][name]:.2f})" for name in METHODS),
            row["chosen"],
            f"{over_best(row, row['chosen']):.3f}",
            f"{row['predicted_ms']:.0f}",
        )
    return table


def modes_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The figures that the goals are compared with."""
    return [
        f"{mode} rows, {own['num_cases']} cases: the chosen arrangement takes {own['fastest_over_best_baseline']:.3f} "
        f"to {own['slowest_over_best_baseline']:.3f} of the best baseline's step (at most 1 wanted); its prediction "
        f"is at most {own['largest_prediction_error']:.1%} off (5 % wanted)."
        for mode, own in summary(rows).items()
    ]
