"""Figures of recoveries, chaos runs and asynchronous saves in `docs/benchmarks.md`, see `pages.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from figures import ms, percent, ratio, result, spread, table

PARTS = ("detected", "met", "planned", "copied", "laid out", "first step")


def _new_start(case: str) -> float:
    """Seconds of a stop and a new start."""
    return next(row["seconds"]["total"]["median"] for row in result("recovery")["restarts"] if row["case"] == case)


def recovery() -> str:
    """Seconds of each part of a recovery from SIGKILL, of all deaths, and of a new start from a checkpoint."""
    cases: dict[str, dict[str, Any]] = {}
    for row in result("recovery")["cases"]:
        cases.setdefault(row["case"], {})[row["cause"]] = row["seconds"]
    rows = []
    for case, by_cause in cases.items():
        killed, restart = by_cause["SIGKILL"], _new_start(case)
        parts = " | ".join(f"{killed[part]['median']:.2f}" for part in (*PARTS, "total"))
        deaths = spread([seconds["total"]["median"] for seconds in by_cause.values()], "{:.2f}".format)
        times = ratio(restart / killed["total"]["median"])
        rows.append(f"| {case} | {parts} | {deaths} | {restart:.1f} | {times} |")
    return table(f"| run | {' | '.join(PARTS)} | all | any death | new start | times |", rows)


def recovery_overhead() -> str:
    """What a step without failures takes with and without the functions of recovery."""
    header = "| run | step with, ms | without | measured | counted | of a step | its threads, of a step |"
    rows = []
    for row in result("recovery")["overhead"]:
        measured = f"{100 * row['measured']:+.1f} %"
        times = f"{ms(row['with_ms'])} | {ms(row['without_ms'])} | {measured} | {row['own_us']:.0f} us"
        shares = f"{100 * row['own_share']:.2f} % | {100 * row['threads_share']:.2f} %"
        rows.append(f"| {row['model']}, {row['ranks']} ranks | {times} | {shares} |")
    return table(header, rows)


def recovery_memory() -> str:
    """Peaks of the devices of the ranks that are left, in a recovery."""
    rows = []
    for case in result("recovery_memory")["cases"]:
        cells = (
            " / ".join(f"{rank[name] / 2**20:.1f}" for rank in case["ranks"].values())
            for name in ("held", "peak", "predicted")
        )
        rows.append(f"| {case['case']} | {' | '.join(cells)} | {percent(case['largest_error'])} % |")
    return table("| run | held before, MiB of each rank | peak | predicted | largest error |", rows)


def async_save() -> str:
    """Time that training waits for a save."""
    found = result("async_save")
    rows = []
    for way, words in (("waited for", "a save that it waits for"), ("asynchronous", "`async_save=True`")):
        blocked, processor = found["blocked_s"][way], found["processor_s"][way]
        share = "100" if way == "waited for" else percent(found["ratio"]["median"])
        rows.append(
            f"| {words} | {blocked['median']:.2f} s ({blocked['min']:.2f} to {blocked['max']:.2f}) | "
            f"{processor['median']:.2f} s | {share} % |"
        )
    first = f"{found['first_blocked_s']:.2f} s | | {percent(found['first_ratio'])} %"
    rows.append(f"| `async_save=True`, the first save | {first} |")
    return table("| training waits for | clock time | processor time | against waiting |", rows)


def quotes() -> Iterator[str]:
    """Sentences of `docs/benchmarks.md` outside of the tables."""
    deaths, saves = result("chaos"), result("async_save")
    yield f"{deaths['died']} processes died in {deaths['num_runs']} runs"
    yield f"{deaths['hangs']} runs hung, and {len(deaths['faults'])} differed"
    seconds = [row["next_step_s"] for row in deaths["recoveries"]]
    yield f"finished {statistics.median(seconds):.1f} s after a death in the median, {max(seconds):.1f} s at most"
    yield f"A checkpoint has {saves['checkpoint_bytes'] / 1e6:,.0f} MB"
    yield f"The files were written {saves['written_s']['median']:.1f} s later"


BLOCKS = {
    "recovery": recovery,
    "recovery_overhead": recovery_overhead,
    "recovery_memory": recovery_memory,
    "async_save": async_save,
}
QUOTES = {"docs/benchmarks.md": quotes}
