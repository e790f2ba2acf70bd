"""
Where an encoder should be, against the length of the context: the best plan with one layout for all modules, with
layouts of their own on shared ranks, and on ranks of their own (the question of heterogeneous parallelism).

Half of the tokens of a sample are those of images; a step has the same number of tokens whatever its context. The
three kinds of plans are searched by the planner with counted costs, and simulated; nothing runs. "One layout" gives
encoder and language model the same dp, pp, cp and tp on the same ranks, which is one choice on shared ranks.

```bash
python benchmarks/placements.py
python benchmarks/placements.py --quick --out out/bench  # the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import common
import numpy as np
from planner_models import AUDIO, MERGED, PATCHES, all_trained, cornstarch_model
from rich.table import Table

from hf_mmparallel.cost import CostModel, analytic_costs, find_device, module_model_flops
from hf_mmparallel.cost.communication import boundaries_of
from hf_mmparallel.cost.stage_memory import GIB
from hf_mmparallel.cost.step_planner import Prediction
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from hf_mmparallel.planning import search
from hf_mmparallel.planning.candidates import CandidateSpace
from hf_mmparallel.planning.combinations import Combinations, LayoutTable
from hf_mmparallel.planning.options import microbatch_counts
from hf_mmparallel.planning.problem import PlanningProblem

VISION = "vision"
IMAGE_TOKENS = PATCHES // MERGED
USABLE = 0.9  # of the memory
TFLOP = 1e12


@dataclass(frozen=True)
class Shapes:
    """The questions: models by their sizes in Cornstarch's table 1, lengths of samples, and the cluster."""

    models: tuple[str, ...] = ("SM", "MM", "LM")  # encoder and language model
    contexts: tuple[int, ...] = (8192, 16384, 32768, 65536, 131072, 262144)
    tokens: int = 2**21  # of a step
    device: str = "h100"
    num_ranks: int = 32
    effort: int = 96  # of a search


SHAPES = Shapes()
QUICK = Shapes(models=("SS",), contexts=(8192, 16384), tokens=2**17, num_ranks=4, effort=8)


class OnSharedRanks(CandidateSpace):
    """Plans whose encoder is on the ranks of the language model, with sizes of its own."""

    def placements(self) -> list[dict[str, str]]:
        return [placement for placement in super().placements() if placement]


class OnOwnRanks(CandidateSpace):
    """Plans whose encoder has ranks of its own."""

    def placements(self) -> list[dict[str, str]]:
        return [{}]


class OneLayout(CandidateSpace):
    """Plans in which both modules have the same sizes, on the same ranks."""

    def _combined(self) -> Iterator[tuple[Mapping[str, LayoutTable], Mapping[str, str], int, Combinations]]:
        total = self.problem.num_ranks
        for dp_size in (size for size in range(1, total + 1) if not self.problem.global_batch_size % size):
            for count in microbatch_counts(self.problem, dp_size):
                tables = {name: self._table(name, dp_size, count) for name in self.options}
                language, vision = (
                    Combinations.of(name, tables[name]).with_ranks(total) for name in (LANGUAGE_MODEL, VISION)
                )
                pairs = language.colocate(vision)
                sizes = [_sizes(tables[name], pairs.rows[name]) for name in (LANGUAGE_MODEL, VISION)]
                same = np.flatnonzero((sizes[0] == sizes[1]).all(axis=1))
                yield tables, {VISION: LANGUAGE_MODEL}, count, pairs.take(same)


def _sizes(table: LayoutTable, rows: np.ndarray) -> np.ndarray:
    """`[rows, 4]`: dp, pp, cp and tp."""
    meshes = np.array([(kind.cp_size, kind.tp_size) for kind in table.kinds])
    return np.column_stack([table.dp_size[rows], table.pp_size[rows], meshes[table.kind[rows]]])


SPACES: dict[str, type[CandidateSpace]] = {
    "one layout": OneLayout,
    "shared ranks": OnSharedRanks,
    "own ranks": OnOwnRanks,
}


def spec_of(model: str) -> ModelSpec:
    """An encoder and a language model, all trained."""
    spec = all_trained(cornstarch_model(f"{model[0]}S{model[1]}"))
    modules = {name: module for name, module in spec.modules.items() if name != AUDIO}
    return ModelSpec(modules, spec.tied, {"image": 1})


def sizes_of(context: int, count: int) -> SampleSizes:
    """Samples of which images fill half."""
    num_images = max(1, round(context / 2 / IMAGE_TOKENS))
    return SampleSizes.of_sequences({VISION: [[PATCHES] * num_images] * count, LANGUAGE_MODEL: [[context]] * count})


def best_plans(model: str, context: int, shapes: Shapes) -> dict[str, Any]:
    """Kind of plan -> the fastest one with its figures; `None` if none fits."""
    spec, device = spec_of(model), find_device(shapes.device)
    batch = shapes.tokens // context
    sizes = sizes_of(context, batch)
    memory = USABLE * (device.memory_gib or 0.0) * GIB
    problem = PlanningProblem(
        analytic_costs(spec, device),
        sizes,
        shapes.num_ranks,
        batch,
        memory,
        schedule="1f1b",
        zero_stages=(1,),
        offloads=False,
        effort=shapes.effort,
    )
    flops = sum(
        module_model_flops(spec, name, float(sizes.tokens[name].mean()), float(sizes.squares[name].mean()))
        for name in spec.modules
    )
    result: dict[str, Any] = {}
    for name, space in SPACES.items():
        start = time.perf_counter()
        with mock.patch.object(search, "CandidateSpace", space):
            try:
                best = search.search_plans(problem).best
            except ValueError:
                result[name] = None
                continue
        step_s = best.step_ms / 1e3
        result[name] = {
            "plan": str(best.candidate),
            "step_ms": best.step_ms,
            "tokens_per_second": batch * context / step_s,
            "tflops_per_gpu": batch * float(flops) / step_s / shapes.num_ranks / TFLOP,
            "bubble": best.prediction.timeline.bubble_fraction,
            "boundary": boundary_of(problem.costs, best.prediction),
            "search_s": time.perf_counter() - start,
        }
    fits = [result[name] for name in ("one layout", "shared ranks") if result[name] is not None]
    result["shared ranks"] = min(fits, key=lambda row: row["step_ms"], default=None)
    return result


def boundary_of(costs: CostModel, prediction: Prediction) -> dict[str, float]:
    """What crosses the boundary of encoder and language model in a step."""
    (boundary,) = boundaries_of(costs, prediction)
    return {
        "feature_bytes": boundary.feature_bytes or 0.0,
        "messages": len(boundary.message_ms),
        "message_ms": float(boundary.message_ms.sum()),
        "exposed_ms": boundary.exposed_ms,
    }


def gains(found: Mapping[str, Any]) -> dict[str, float]:
    """Kind of plan -> by how much more than one layout it computes, where both fit."""
    base = found["one layout"]
    others = {name: row for name, row in found.items() if name != "one layout" and row is not None}
    return {} if base is None else {name: base["step_ms"] / row["step_ms"] - 1 for name, row in others.items()}


def draw(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """TFLOP/s a GPU against the context, a panel for each model."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(case["model"] for case in cases))
    figure = Figure(figsize=(3.4 * len(models), 3.0), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), sharey=True, squeeze=False)[0], models, strict=True):
        own = [case for case in cases if case["model"] == model]
        for name in SPACES:
            points = [(case["context"], case["plans"][name]) for case in own if case["plans"][name] is not None]
            axes.plot(
                [context for context, _ in points], [row["tflops_per_gpu"] for _, row in points], "o-", label=name
            )
        contexts = [case["context"] for case in own]
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
        axes.set_title(f"encoder {own[0]['billions'][0]:.1f}B, LM {own[0]['billions'][1]:.1f}B", fontsize=9)
        axes.set_xlabel("tokens of a sample")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("TFLOP/s per GPU")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def table_of(cases: Sequence[Mapping[str, Any]]) -> Table:
    """Tokens a second and gains of all cases."""
    table = Table("model", "context", *(f"{name}, tokens/s (TFLOP/s)" for name in SPACES), "shared", "own")
    for case in cases:
        rows = [case["plans"][name] for name in SPACES]
        texts = ["-" if r is None else f"{r['tokens_per_second']:,.0f} ({r['tflops_per_gpu']:.0f})" for r in rows]
        more = [
            f"{100 * case['gains'][n]:+.1f} %" if n in case["gains"] else "" for n in ("shared ranks", "own ranks")
        ]
        table.add_row(case["model"], f"{case['context'] // 1024}k", *texts, *more)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny questions, to try the script itself")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--picture", type=Path, default=common.ROOT / "docs" / "images" / "placements.png")
    options = parser.parse_args()
    load, shapes = os.getloadavg(), QUICK if options.quick else SHAPES
    cases: list[dict[str, Any]] = []
    for model in shapes.models:
        modules = spec_of(model).modules
        billions = [sum(p.num_elements for p in modules[name].parameters) / 1e9 for name in (VISION, LANGUAGE_MODEL)]
        for context in shapes.contexts:
            plans = best_plans(model, context, shapes)
            cases.append({"model": model, "billions": billions, "context": context, "plans": plans})
            cases[-1]["gains"] = gains(plans)
    if options.quick:
        options.picture = options.out / "placements.png"
    draw(cases, options.picture)
    notes = ["Gains: tokens a second of the best plan over those of the best one with one layout."]
    result = {"cases": cases, **common.machine(shapes, load)}
    common.report("placements", [table_of(cases)], notes, result, options.out)


if __name__ == "__main__":
    main()
