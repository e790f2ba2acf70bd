"""
The best layout by the size of the model and the number of GPUs, and the picture of it in `docs/planner.md`.

Qwen2.5-VL's encoder with Llama 3 of 1b and 3b parameters, and Cornstarch's encoders and language models of 8b and 32b
parameters, all trained, on A40 and H100 with samples of SynthChartNet's shape.

```bash
python benchmarks/layouts.py
python benchmarks/layouts.py --only "H100"      # cases with this in their name; the results of others are kept
python benchmarks/layouts.py --picture          # draws the stored results
python benchmarks/layouts.py --quick --out out/bench
```
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from paper_samples import PUBLISHED, PUBLISHED_MODELS
from planner import GIB, USABLE, vlm
from rich.table import Table

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.papers.compare import compare
from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.planning.problem import Candidate, PlanningProblem
from hf_mmparallel.planning.search import search_plans

DEVICES = {"A40": "a40", "H100": "h100"}
MODELS = ("1b", "3b", "8b", "32b")
GPUS = (8, 16, 32, 64, 128)
SAMPLES_PER_GPU = 8
PICTURE = common.ROOT / "docs" / "images" / "layouts.png"
KINDS = {
    "replicated": "weights whole on each rank, one stage",
    "sharded": "weights divided over ranks (ZeRO-3), one stage",
    "pipeline": "several stages",
    "tensor": "tensor parallelism",
    "none": "does not fit",
}
LEGEND = (
    "V: encoder, L: language model, each with its sizes that are not 1: d data-, p pipeline-, c context-, t "
    "tensor-parallel.  z1, z2, z3: ZeRO stage, z3/8: over 8 copies.\n"
    "*: activations recomputed.  h: optimizer or frozen weights in host memory.  apart: encoder and language model on "
    "ranks of their own; else they share them.\n"
    "Last line: predicted MFU."
)
COLORS = {"replicated": "#cfe3f5", "sharded": "#f7d9a8", "pipeline": "#d4ecc9", "tensor": "#e7cfe8", "none": "#eeeeee"}


def cases() -> Iterator[tuple[str, str, int]]:
    """Devices, models and numbers of GPUs."""
    for device in DEVICES:
        for model in MODELS:
            for gpus in GPUS:
                yield device, model, gpus


def problem(device: str, model: str, gpus: int) -> PlanningProblem:
    """A question to the planner."""
    known = {"1b": "llama3-1b", "3b": "llama3-3b"}
    spec = PUBLISHED_MODELS[known[model]].spec if model in known else vlm({"8b": "MM", "32b": "LL"}[model])
    found = find_device(DEVICES[device])
    sizes = PUBLISHED["synthchartnet"].draw(4096, 0)
    memory = USABLE * (found.memory_gib or 0) * GIB
    return PlanningProblem(analytic_costs(spec, found), sizes, gpus, SAMPLES_PER_GPU * gpus, memory)


def run(device: str, model: str, gpus: int, with_others: bool) -> dict[str, Any]:
    """The best layout of a case, and how much slower others are."""
    asked = problem(device, model, gpus)
    start = time.process_time()
    try:
        result = search_plans(asked)
    except ValueError as error:
        return {"kind": "none", "text": "", "plan": str(error)}
    best = result.best
    row = {
        "kind": kind_of(best.candidate),
        "text": text_of(best.candidate),
        "plan": f"{best.candidate}; {best.candidate.schedule}, {best.candidate.arrangement}",
        "step_ms": best.step_ms,
        "utilisation": best.prediction.flops_utilisation,
        "gib": best.peak_memory_bytes / GIB,
        "search_s": time.process_time() - start,
    }
    if with_others:
        row["others"] = {
            other.name: {"times_slower": other.step_ms / best.step_ms, "plan": other.layout, "note": other.note}
            for other in compare(asked, result)
        }
    return row


def kind_of(candidate: Candidate) -> str:
    """What a layout is called in the picture."""
    layouts = candidate.layouts.values()
    if any(layout.tp_size > 1 for layout in layouts):
        return "tensor"
    if any(layout.pp_size > 1 for layout in layouts):
        return "pipeline"
    return "sharded" if any(layout.zero_stage == 3 for layout in layouts) else "replicated"


def text_of(candidate: Candidate) -> str:
    """The layout of the encoder over that of the language model, in a few characters."""
    lines = []
    for name, layout in candidate.layouts.items():
        sizes = (("d", layout.dp_size), ("p", layout.pp_size), ("c", layout.cp_size), ("t", layout.tp_size))
        words = " ".join(f"{letter}{size}" for letter, size in sizes if size > 1) or "1"
        words += f" z{layout.zero_stage}" if layout.zero_stage else ""
        words += f"/{layout.shard_size}" if layout.shard_size else ""
        words += " h" if layout.storage.offload_optimizer or layout.storage.offload_params else ""
        lines.append(
            f"{'L' if name == LANGUAGE_MODEL else 'V'} {words}{'*' if layout.activation_checkpointing else ''}"
        )
    return "\n".join([*lines, "" if candidate.colocated_with else "apart"]).strip()


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """A cell for each case, coloured by the kind of its layout; cases that were not run are empty."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12.5, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, device in enumerate(DEVICES, start=1):
        axes = figure.add_subplot(1, 2, panel)
        for y, model in enumerate(MODELS):
            for x, gpus in enumerate(GPUS):
                row = rows.get(f"{model}, {gpus} {device}")
                if row is not None:
                    _draw_cell(axes, x, y, row)
        axes.set(xlim=(-0.5, len(GPUS) - 0.5), ylim=(-0.5, len(MODELS) - 0.5), title=device, xlabel="GPUs")
        axes.set_xticks(range(len(GPUS)), [str(gpus) for gpus in GPUS])
        axes.set_yticks(range(len(MODELS)), MODELS)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if panel == 1:
            axes.set_ylabel("parameters of the language model")
    seen = {row["kind"] for row in rows.values()}
    handles = [Patch(facecolor=COLORS[kind], label=words) for kind, words in KINDS.items() if kind in seen]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9, frameon=False)
    figure.supxlabel(LEGEND, fontsize=8.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _draw_cell(axes: Any, x: int, y: int, row: dict[str, Any]) -> None:
    """The layout of a case, with its predicted MFU."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=COLORS[row["kind"]]))
    text = "does not\nfit" if row["kind"] == "none" else f"{row['text']}\n{100 * row['utilisation']:.0f} %"
    axes.text(x, y, text, ha="center", va="center", fontsize=8, linespacing=1.35)


def reported(rows: dict[str, dict[str, Any]]) -> Table:
    """A row for each case."""
    table = Table("case", "step s", "GiB", "search s", "best plan", "closest other")
    table.title, table.title_justify = "The best layouts", "left"
    for name, row in rows.items():
        if row["kind"] == "none":
            table.add_row(name, "", "", "", "none fits", "")
            continue
        fitting = {n: o for n, o in row.get("others", {}).items() if "more than a rank has" not in o["note"]}
        closest = min(fitting, key=lambda other: fitting[other]["times_slower"], default="")
        words = f"{closest} {fitting[closest]['times_slower']:.3f}" if closest else ""
        figures = (f"{row['step_ms'] / 1e3:.2f}", f"{row['gib']:.0f}", f"{row['search_s']:.1f}")
        table.add_row(name, *figures, row["plan"], words)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case, to try the script itself")
    parser.add_argument("--only", metavar="TEXT", help="cases with this in their name; the results of others are kept")
    parser.add_argument("--others", action="store_true", help="compare with other systems as well")
    parser.add_argument("--picture", action="store_true", help="only draw the stored results")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    options = parser.parse_args()
    path = options.out / "layouts.json"
    kept = json.loads(path.read_text())["cases"] if path.exists() else {}
    if options.picture:
        draw(kept, PICTURE)
        return
    rows, load = {}, os.getloadavg()
    for device, model, gpus in [("A40", "1b", 8)] if options.quick else cases():
        name = f"{model}, {gpus} {device}"
        if options.only and options.only not in name:
            rows |= {name: kept[name]} if name in kept else {}
            continue
        rows[name] = run(device, model, gpus, options.others)
        print(name, rows[name]["plan"], flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"benchmark": "layouts", "cases": kept | rows}, indent=2) + "\n")
    common.report("layouts", [reported(rows)], [], {"cases": rows, **common.machine(common.QUICK, load)}, options.out)
    draw(rows, options.out / "layouts.png" if options.quick else PICTURE)


if __name__ == "__main__":
    main()
