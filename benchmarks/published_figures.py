"""The figures of `published_runs.py` in `docs/planner.md`, see `pages.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from figures import percent, result, table
from scipy.stats import spearmanr

CHECKED = {"original": "original", "copy": "a copy", "unread": "nothing"}
"""What the figures of a study were compared with -> how the table says so."""


def published_runs() -> str:
    """Prediction errors, study by study."""
    rows = []
    for own in result("published_runs")["studies"].values():
        counts = f"{len(own['runs'])} / {own['num_judged']}"
        ranks = f"{own['rank_correlation']:.2f} / {own['rank_correlation_mfu']:.2f}"
        errors = f"{percent(own['median_error'])} / {percent(own['largest_error'])} %"
        plans = (own["best_plans"][kind]["mfu"] for kind in ("own_engine", "ours"))
        shares = " / ".join(map(percent, (own["best_mfu"], own["best_mfu_predicted"], *plans))) + " %"
        rows.append(f"| {own['study']} | {counts} | {ranks} | {errors} | {shares} | {CHECKED[own['checked']]} |")
    shares = "best MFU: published / predicted / best plan by its engine / by ours"
    kinds = f"rank correlation: step, MFU | error: median / largest | {shares}"
    return table(f"| study | runs / judged | {kinds} | checked against |", rows)


def published_worst() -> str:
    """The judged runs that are furthest off."""
    found = [
        (abs(run["ratio"] - 1), own["study"], run)
        for own in result("published_runs")["studies"].values()
        for run in own["runs"]
        if run["use"] == "judge"
    ]
    found.sort(key=lambda entry: -entry[0])
    rows = [
        f"| {study} | {run['name']} | {run['measured_ms'] / 1e3:.1f} s | {run['predicted_ms'] / 1e3:.1f} s |"
        for _, study, run in found[:8]
    ]
    return table("| study | run | published | predicted |", rows)


def _by_recomputation(key: str) -> dict[str, tuple[float, float]]:
    """Runs of a study with and without full recomputation: the median error with its sign, the rank by MFU."""
    runs = result("published_runs")["studies"][key]["runs"]
    found = {}
    for name, is_full in (("full", True), ("none", False)):
        own = [run for run in runs if run["name"].endswith("full recomputation") == is_full]
        ranked: Any = spearmanr([run["measured_mfu"] for run in own], [run["predicted_mfu"] for run in own])
        found[name] = (statistics.median(run["ratio"] for run in own) - 1, float(ranked[0]))
    return found


def _order_quotes() -> Iterator[str]:
    """Why MFU are not in order everywhere."""
    studies = result("published_runs")["studies"]
    split = _by_recomputation("mosaic_a100")
    yield (
        f"On A100 runs with full recomputation are predicted {percent(split['full'][0])} % too slow in the median and "
        f"the others {percent(-split['none'][0])} % too fast; among the latter alone the rank correlation is "
        f"{split['none'][1]:.2f}."
    )
    small = [run for run in studies["mosaic_a100"]["runs"] if run["name"].startswith("760m")]
    shares = [percent(run["measured_mfu"]) for run in small if run["name"].endswith((" 512", " 1024", " 2048"))]
    yield f"those of 760 million parameters reach {' / '.join(shares)} % at 2,048 / 1,024 / 512 tokens"
    wide = [run["ratio"] for run in studies["mosaic_h100"]["runs"] if run["name"].startswith("13b")]
    fast = percent(1 - statistics.median(sorted(wide)[:4]))
    yield (
        f"runs of 13 billion parameters with microbatches of two samples are predicted {fast} % too fast, alike on 8 "
        "to 64 GPUs"
    )
    megatron = sorted(run["measured_mfu"] for run in studies["megatron_a100_2021"]["runs"])
    yield (
        f"six of its ten runs lie between {percent(megatron[0])} and {percent(megatron[5])} %, as close as the "
        "errors of their predictions"
    )


def _ceiling_quotes() -> Iterator[str]:
    """Published MFU that plans reach."""
    studies = result("published_runs")["studies"].values()
    ratios = {
        kind: sorted(own["best_plans"][kind]["mfu"] / own["best_mfu"] for own in studies)
        for kind in ("own_engine", "ours")
    }
    least = ratios["own_engine"]
    reached = sum(ratio >= 1 for ratio in least)
    yield (
        f"By the costs of the study's own engine it is at least the published one in {reached} studies of "
        f"{len(least)}, {percent(1 - least[1])} % below it in the second worst and {percent(1 - least[0])} % in the "
        "worst"
    )
    yield (
        f"By the costs of hf_mmparallel's engine it is at least the published one in "
        f"{sum(ratio >= 1 for ratio in ratios['ours'])} of {len(least)}"
    )


def quotes_of_planner() -> Iterator[str]:
    """Sentences about all studies together."""
    found = result("published_runs")
    median, largest = (percent(found[key]) for key in ("median_error", "largest_error"))
    studies = found["studies"].values()
    judged = {kind: sum(own["num_judged"] for own in studies if own["checked"] == kind) for kind in CHECKED}
    yield (
        f"Of the {found['num_judged']} judged runs {judged['original']} were compared with the original, "
        f"{judged['copy']} with copies of it, and {judged['unread']} with neither."
    )
    plain = found["studies"]["nanotron_1b"]["without_assumptions"]
    yield (
        f"Without them the rank correlation of step times is {plain['rank_correlation']:.2f}, the median error "
        f"{percent(plain['median_error'])} %, the largest {percent(plain['largest_error'])} %."
    )
    yield from _order_quotes()
    yield from _ceiling_quotes()
    yield f"Over the {found['num_judged']} judged runs the median error is {median} %, the largest {largest} %."


BLOCKS = {"published_runs": published_runs, "published_worst": published_worst}
QUOTES = {"docs/planner.md": quotes_of_planner}
