"""The figures of `scale.py` in `docs/benchmarks.md`, see `pages.py`."""

from __future__ import annotations

from figures import ms, result, table


def scale() -> str:
    """Size and time of the plan of a step on one rank, for the fewest and the most ranks and samples."""
    rows = []
    for row in result("scale")["rows"]:
        if row["ranks"] < 10_000 and row["samples"] not in (64, 102_400):
            continue
        counts = [f"{row[key]:,}" for key in ("ranks", "samples", "microbatches", "planned_ranks", "planned_tasks")]
        times = [ms(row[f"{part}_ms"]["processor"]) for part in ("arrange", "program", "rest", "step", "sync_groups")]
        rows.append("| " + " | ".join([*counts, *(f"{value} ms" for value in times)]) + " |")
    counted = "ranks | samples | microbatches per replica | planned ranks | their tasks"
    return table(f"| {counted} | arrangement | program, checks | checksums | whole step | gradient sums, once |", rows)


BLOCKS = {"scale": scale}
