"""The figures of `published_runs.py` in `docs/planner.md`, see `pages.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figures import percent, result, table

from hf_mmparallel.cost.ledger import TERMS

CHECKED = {"original": "original", "copy": "a copy", "unread": "nothing"}
"""What the figures of a study were compared with -> how the table says so."""


def studies(unseen: bool) -> list[dict[str, Any]]:
    """Records of the studies that were known when constants were fitted, or of those that were not."""
    return [own for own in result("published_runs")["studies"].values() if own["unseen"] == unseen]


def unseen_runs() -> str:
    """Prediction errors of runs that nobody had looked at, device by device."""
    rows = []
    for device, own in result("published_runs")["unseen"].items():
        errors = f"{percent(own['median_error'])} / {percent(own['largest_error'])} %"
        memory = "-"
        if "median_memory_error" in own:
            memory = f"{percent(own['median_memory_error'])} / {percent(own['largest_memory_error'])} %"
        rows.append(f"| {device} | {own['num_judged']} | {own['rank_correlation']:.2f} | {errors} | {memory} |")
    return table("| device | runs | rank correlation | step: median / largest error | peak memory |", rows)


def missed_runs() -> str:
    """Runs of studies that nothing is fitted to whose step is more than 15 % off, by reason."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for own in studies(unseen=True):
        for run in own["runs"]:
            if run["why"] is not None:
                groups.setdefault((own["study"].split(",")[0], run["why"]), []).append(run)
    rows = []
    for (study, why), runs in groups.items():
        ratios = sorted(run["ratio"] for run in runs)
        span = f"{ratios[0]:.2f}" + (f" to {ratios[-1]:.2f}" if len(runs) > 1 else "")
        mean = {name: sum(run["ledger"].get(name, 0.0) for run in runs) / len(runs) for name in TERMS}
        largest = sorted(mean, key=mean.__getitem__, reverse=True)[:4]
        terms = ", ".join(f"{name} {percent(mean[name])} %" for name in largest)
        rows.append(f"| {study} | {len(runs)} | {span} | {terms} | {why} |")
    return table("| study | runs | predicted over published | largest terms | why |", rows)


def mimo() -> str:
    """By how much a step is shorter with an encoder on a GPU of its own, published and predicted."""
    rows = []
    for own in result("mimo")["rows"]:
        shares = " | ".join(
            f"{percent(share)} %" for share in (own["published"], own["Megatron"]["shorter"], own["ours"]["shorter"])
        )
        rows.append(f"| {own['dataset']} | {own['seq_len']:,} | {own['batch']} | {shares} |")
    return table("| dataset | sequence | batch | published | by Megatron-LM's costs | by ours |", rows)


def published_runs() -> str:
    """Prediction errors, study by study."""
    rows = []
    for own in studies(unseen=False):
        counts = f"{len(own['runs'])} / {own['num_judged']}"
        ranks = f"{own['rank_correlation']:.2f} / {own['rank_correlation_mfu']:.2f}"
        errors = f"{percent(own['median_error'])} / {percent(own['largest_error'])} %"
        plans = (own["best_plans"][kind]["mfu"] for kind in ("own_engine", "ours"))
        shares = " / ".join(map(percent, (own["best_mfu"], own["best_mfu_predicted"], *plans))) + " %"
        rows.append(f"| {own['study']} | {counts} | {ranks} | {errors} | {shares} | {CHECKED[own['checked']]} |")
    shares = "best MFU: published / predicted / best plan by its engine / by ours"
    kinds = f"rank correlation: step, MFU | error: median / largest | {shares}"
    return table(f"| study | runs / judged | {kinds} | checked against |", rows)


def _ceiling_quotes() -> Iterator[str]:
    """Published MFU that plans reach."""
    ratios = {
        kind: sorted(own["best_plans"][kind]["mfu"] / own["best_mfu"] for own in studies(unseen=False))
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
        f"{sum(ratio >= 1 for ratio in ratios['ours'])} of {len(least)}, and at least 0.95 of it in "
        f"{sum(ratio >= 0.95 for ratio in ratios['ours'])}"
    )


def quotes_of_planner() -> Iterator[str]:
    """Sentences about all studies together."""
    found = result("published_runs")
    median, largest = (percent(found[key]) for key in ("median_error", "largest_error"))
    seen = studies(unseen=False)
    judged = {kind: sum(own["num_judged"] for own in seen if own["checked"] == kind) for kind in CHECKED}
    yield (
        f"Of the {found['num_judged']} judged runs {judged['original']} were compared with the original, "
        f"{judged['copy']} with copies of it, and {judged['unread']} with neither."
    )
    plain = found["studies"]["nanotron_1b"]["without_assumptions"]
    yield (
        f"Without them the rank correlation of step times is {plain['rank_correlation']:.2f}, the median error "
        f"{percent(plain['median_error'])} %, the largest {percent(plain['largest_error'])} %."
    )
    yield from _ceiling_quotes()
    yield f"Over the {found['num_judged']} judged runs the median error is {median} %, the largest {largest} %."


BLOCKS = {
    "published_runs": published_runs,
    "unseen_runs": unseen_runs,
    "missed_runs": missed_runs,
    "mimo": mimo,
}
QUOTES = {"docs/planner.md": quotes_of_planner}
