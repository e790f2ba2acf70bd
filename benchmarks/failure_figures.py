"""The tables of recoveries, chaos runs and asynchronous saves in `docs/benchmarks.md`, see `pages.py`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from figures import ms, percent, ratio, result, table

PARTS = ("detected", "met", "planned", "copied", "laid out", "first step")


def _new_start(case: str) -> float:
    """Seconds of a stop and a new start."""
    return next(row["seconds"]["total"]["median"] for row in result("recovery")["restarts"] if row["case"] == case)


def recovery() -> str:
    """Seconds of each part of a recovery, and of a new start from a checkpoint."""
    header = f"| run | death | {' | '.join(PARTS)} | all (longest) | new start | times |"
    rows = []
    for case in result("recovery")["cases"]:
        seconds, restart = case["seconds"], _new_start(case["case"])
        parts = " | ".join(f"{seconds[part]['median']:.2f}" for part in PARTS)
        total = f"{seconds['total']['median']:.2f} ({seconds['total']['max']:.2f})"
        times = ratio(restart / seconds["total"]["median"])
        rows.append(f"| {case['case']} | {case['cause']} | {parts} | {total} | {restart:.1f} | {times} |")
    return table(header, rows)


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


def chaos() -> str:
    """Deaths in each kind of run."""
    rows = [
        f"| {name} | {row['runs']} | {row['died']} | {row['at_fault']} |"
        for name, row in result("chaos")["by_setting"].items()
    ]
    return table("| runs | number | processes that died | runs at fault |", rows)


def chaos_recoveries() -> str:
    """Recoveries by the point at which a process died."""
    by_point: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in result("chaos")["recoveries"]:
        by_point[row["at"]].append(row)
    header = "| died in | recoveries | detected, s | recovered | next step finished | the longest |"
    rows = []
    for point, own in sorted(by_point.items()):
        names = ("detected_s", "recovered_s", "next_step_s")
        medians = " | ".join(f"{statistics.median(row[name] for row in own):.2f}" for name in names)
        rows.append(f"| `{point}` | {len(own)} | {medians} | {max(row['next_step_s'] for row in own):.2f} |")
    return table(header, rows)


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
    yield f"A checkpoint has {saves['checkpoint_bytes'] / 1e6:,.0f} MB"
    yield f"The files were written {saves['written_s']['median']:.1f} s later"


BLOCKS = {
    "recovery": recovery,
    "recovery_overhead": recovery_overhead,
    "chaos": chaos,
    "chaos_recoveries": chaos_recoveries,
    "async_save": async_save,
}
QUOTES = {"docs/benchmarks.md": quotes}
