"""The figures of `published_runs.py` in `docs/planner.md`, see `pages.py`."""

from __future__ import annotations

from collections.abc import Iterator

from figures import percent, result, table

CHECKED = {"original": "original", "copy": "a copy", "unread": "nothing"}
"""What the figures of a study were compared with -> how the table says so."""


def published_runs() -> str:
    """How far off predictions are, study by study."""
    rows = []
    for own in result("published_runs")["studies"].values():
        counts = f"{len(own['runs'])} / {own['num_judged']}"
        ranks = f"{own['rank_correlation']:.2f} / {own['rank_correlation_mfu']:.2f}"
        errors = f"{percent(own['median_error'])} / {percent(own['largest_error'])} %"
        shares = f"{percent(own['best_mfu'])} / {percent(own['best_mfu_predicted'])} %"
        rows.append(f"| {own['study']} | {counts} | {ranks} | {errors} | {shares} | {CHECKED[own['checked']]} |")
    kinds = "rank correlation: step, MFU | error: median / largest | best MFU: published / predicted"
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


def quotes_of_planner() -> Iterator[str]:
    """What is said of all studies together."""
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
    yield f"Over the {found['num_judged']} judged runs the median error is {median} %, the largest {largest} %."


BLOCKS = {"published_runs": published_runs, "published_worst": published_worst}
QUOTES = {"docs/planner.md": quotes_of_planner}
