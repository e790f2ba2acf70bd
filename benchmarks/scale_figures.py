"""The figures of `scale.py`, `split_backward.py` and `step_costs.py` in `docs/benchmarks.md`, see `pages.py`."""

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


def waits() -> str:
    """Waits for the device and copied bytes of each layout."""
    found = result("step_costs")["waits"]
    rows = [f"| {row['layout']} | {row['waits']:g} | {row['kib_to_device']:.0f} KiB |" for row in found]
    return table("| model and layout | waits a step | copied to the device a step |", rows)


def groups() -> str:
    """Process groups of plans, and of their fullest rank."""
    rows = [
        f"| {row['ranks']:,} | {row['groups']:,} | {row['communicators']} | {row['channels_of_a_rank']} | "
        f"{row['seconds']:.2f} s |"
        for row in result("step_costs")["groups"]
    ]
    return table("| ranks | groups | communicators of a rank | its channels | to make them |", rows)


def split_backward() -> str:
    """The two parts of a split backward beside a whole one, and the memory that stays between them."""
    rows = [
        f"| {row['case']} | {row['b_ms']:.0f} ms | {row['i_ms']:.0f} ms | {row['w_ms']:.0f} ms | "
        f"{row['ratio']['median']:.3f} | {row['saved_mib']:.0f} MiB | {row['kept_mib']:.0f} MiB |"
        for row in result("split_backward")["backwards"]
    ]
    return table("| two layers | whole | inputs | weights | both over whole | saved | stays |", rows)


def virtual_stages() -> str:
    """The forwards of the virtual stages of a rank over their share of the forward of all layers."""
    rows = [
        f"| {row['layers']} | {row['stages']} | {row['share']['median']:.3f} |"
        for row in result("split_backward")["stages"]
    ]
    return table("| layers of a stage | stages of the rank | forwards over their share |", rows)


BLOCKS = {
    "split_backward": split_backward,
    "virtual_stages": virtual_stages,
    "scale": scale,
    "waits": waits,
    "groups": groups,
}
