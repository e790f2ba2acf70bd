"""
Predicted against published step times of the runs in `benchmarks/published`, study by study: rank correlation over all
runs, errors of those that fitted no constant, and whether a plan reaches the best MFU of each study. Studies that are
`unseen` came after everything was fitted and assumed, and are summed up by themselves, device by device, with their
peak memory where it is published.

```bash
python benchmarks/published_runs.py
```
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Shapes, machine, report
from published_ceilings import MOST_GPUS, best_plans, best_run, mfu_of
from published_study import Run, Study, ledger, predicted_gib, predicted_ms, studies
from rich.table import Table
from scipy.stats import spearmanr

QUICK_TASKS = 3000
MISSED = 0.15  # error of a step from which a run needs a reason


def run_record(run: Run) -> dict[str, Any]:
    """A run with its prediction."""
    own = ledger(run) if run.study.is_unseen else None
    predicted = predicted_ms(run) if own is None else own.step_ms
    why = run.why_missed if abs(predicted / run.step_ms - 1) > MISSED else None
    memory = {}
    if run.judges_memory:
        memory = {"measured_gib": run.peak_gib, "predicted_gib": round(predicted_gib(run), 1)}
    return {
        "name": run.name,
        "device": run.device.name,
        "dtype": run.dtype,
        "use": "fit" if run.is_fitted else "judge",
        "measured_ms": round(run.step_ms, 1),
        "predicted_ms": round(predicted, 1),
        "ratio": round(predicted / run.step_ms, 3),
        "measured_mfu": round(mfu_of(run, run.step_ms), 4),
        "predicted_mfu": round(mfu_of(run, predicted), 4),
        **memory,
        **(
            {}
            if own is None
            else {"ledger": {name: round(share, 4) for name, share in own.shares.items()}, "why": why}
        ),
    }


def rank_correlation(runs: list[dict[str, Any]], quantity: str) -> float:
    """Spearman's rank correlation of predictions and measurements."""
    predicted, measured = ([run[f"{kind}_{quantity}"] for run in runs] for kind in ("predicted", "measured"))
    found: Any = spearmanr(predicted, measured)
    return round(float(found[0]), 3)


def how_far_off(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Rank correlations over all runs, errors of those that are judged."""
    errors = [abs(run["ratio"] - 1) for run in runs if run["use"] == "judge"]
    return {
        "rank_correlation": rank_correlation(runs, "ms"),
        "rank_correlation_mfu": rank_correlation(runs, "mfu"),
        "median_error": round(statistics.median(errors), 3),
        "largest_error": round(max(errors), 3),
        "num_judged": len(errors),
    }


def memory_error(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Errors of predicted peaks, of runs that publish theirs."""
    errors = [abs(run["predicted_gib"] / run["measured_gib"] - 1) for run in runs if "measured_gib" in run]
    if not errors:
        return {}
    return {"median_memory_error": round(statistics.median(errors), 3), "largest_memory_error": round(max(errors), 3)}


def unseen_record(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Errors of the runs that nobody had looked at, by device and over all."""
    runs = [run for own in records if own["unseen"] for run in own["runs"]]
    by_device = {"all": runs}
    for run in runs:
        by_device.setdefault(run["device"], []).append(run)
    return {device: {**how_far_off(own), **memory_error(own)} for device, own in by_device.items()}


def study_record(study: Study, runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Prediction errors of a study, with and without the assumptions that are specific to it."""
    own = [run for run in runs if run["dtype"] != "float8"]
    best = best_run(study)
    is_planned = not study.is_unseen or best.gpus > MOST_GPUS  # a search for each study would take long
    return {
        "study": study.data["study"],
        "source": study.data["source"],
        "checked": study.data["checked"],
        "unseen": study.is_unseen,
        "runs": runs,
        **how_far_off(runs),
        **({"without_assumptions": how_far_off(plain)} if plain else {}),
        "best_mfu": max(run["measured_mfu"] for run in own),
        "best_mfu_predicted": max(run["predicted_mfu"] for run in own),
        "best_plans": best_plans(best) if is_planned else {},
        "notes": study.data.get("notes", []),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out runs with many stages and microbatches")
    parser.add_argument(
        "--study", nargs="+", default=[], metavar="NAME", help="these only, all others as they are kept"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()
    records = {}
    if options.study:
        records = json.loads((ROOT / "benchmarks" / "results" / "published_runs.json").read_text())["studies"]
    for study in studies():
        if options.study and study.key not in options.study:
            continue
        runs = [run for run in study.runs if not options.quick or run.num_tasks <= QUICK_TASKS]
        plain = [replace(run, study=study.without_assumptions) for run in runs if study.data.get("assumed")]
        records[study.key] = study_record(study, list(map(run_record, runs)), list(map(run_record, plain)))
    records = {study.key: records[study.key] for study in studies() if study.key in records}
    seen = [own for own in records.values() if not own["unseen"]]
    judged = [abs(run["ratio"] - 1) for own in seen for run in own["runs"] if run["use"] == "judge"]
    unseen = unseen_record(records.values())
    table = Table(title="predicted over published step times", title_justify="left")
    for name in (
        "study",
        "runs",
        "judged",
        "rank correlation",
        "median error",
        "largest error",
        "MFU",
        "predicted",
        "best plan",
        "of our engine",
    ):
        table.add_column(name, justify="left" if name == "study" else "right")
    for own in records.values():
        shares = [f"{own[key]:.1%}" for key in ("median_error", "largest_error", "best_mfu", "best_mfu_predicted")]
        plans = own["best_plans"]
        shares += [f"{plans[kind]['mfu']:.1%}" if plans else "-" for kind in ("own_engine", "ours")]
        counts = (str(len(own["runs"])), str(own["num_judged"]), f"{own['rank_correlation']:.2f}")
        table.add_row(own["study"], *counts, *shares)
    others = Table(title="runs that nobody had looked at", title_justify="left")
    for name in ("device", "runs", "rank correlation", "median error", "largest", "memory: median error", "largest"):
        others.add_column(name, justify="left" if name == "device" else "right")
    for device, own in unseen.items():
        shares = [own.get(f"{which}_error") for which in ("median", "largest", "median_memory", "largest_memory")]
        cells = ["-" if share is None else f"{share:.1%}" for share in shares]
        others.add_row(device, str(own["num_judged"]), f"{own['rank_correlation']:.2f}", *cells)
    note = f"{len(judged)} judged runs: median {statistics.median(judged):.1%}, largest {max(judged):.1%}"
    result = {
        **machine(Shapes(), load),
        "median_error": round(statistics.median(judged), 3),
        "largest_error": round(max(judged), 3),
        "num_judged": len(judged),
        "unseen": unseen,
        "studies": records,
    }
    report("published_runs", [table, others], [note], result, options.out)


if __name__ == "__main__":
    main()
