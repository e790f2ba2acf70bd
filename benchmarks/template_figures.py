"""The figures of `templates.py` on the pages, see `pages.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figures import percent, result, table
from paper_failures import EVERY_S, LAYERS, PLANNING_S

NAMES = {
    "Oobleck": "templates (Oobleck)",
    "replanned": "templates, planned anew",
    "Varuna": "grid (Varuna)",
    "Varuna, free checkpoints": "grid, free checkpoints",
    "Bamboo": "redundant stages (Bamboo)",
}
CAUSES = ("computing", "redundant", "lost", "copying", "saving", "restarting", "idle")


def latency() -> str:
    """Seconds for one template, and the paper's."""
    rows = []
    for nodes, size in PLANNING_S:
        own = [row for row in result("templates")["latency"] if (row["nodes"], row["size"]) == (nodes, size)]
        cells = (f"{row['s']:.2f}, {row['limited_s']:.2f} / {row['paper_s']:,.2f}" for row in own)
        rows.append(f"| {nodes} | {size} | {' | '.join(cells)} |")
    layers = " | ".join(f"{count} layers" for count in LAYERS)
    return table(f"| nodes | GPUs of each | {layers} |", rows)


def heuristic() -> str:
    """How much slower the paper's stages are."""
    rows = []
    for row in result("templates")["heuristic"]:
        slower = f"{percent(row['mean'])} / {percent(row['worst'])} %"
        fewest = "yes" if row["fewest_stages"] else "no"
        rows.append(f"| {row['nodes']} | {row['size']} | {row['layers']} | {row['costs']} | {slower} | {fewest} |")
    return table("| nodes | GPUs of each | layers | times | slower: mean / worst | fewest stages |", rows)


def throughput() -> str:
    """Samples per second, and the share that frequent failures leave, beside table 2.2."""
    rows = []
    for row in result("templates")["throughput"]:
        for system, name in NAMES.items():
            if system not in row["simulator"]:
                continue
            paper = row["paper"].get(system)
            cells = [_rates(row["simulator"][system]), *(_kept(row[kind][system]) for kind in _KINDS)]
            printed = " / ".join(f"{rate:g}" for rate in paper.values()) if paper else "-"
            rows.append(f"| {row['workload']} | {name} | {' | '.join(cells)} | {printed} | {_kept(paper)} |")
    kept = "kept at 10 min"
    header = (
        f"| workload | recovery | samples/s at 6 h / 1 h / 10 min | {kept} | the paper's speed | the table's batch |"
    )
    return table(f"{header} paper: samples/s | {kept} |", rows)


_KINDS = ("simulator", "paper_speed", "table")


def _rates(rates: dict[str, Any]) -> str:
    return " / ".join(f"{rates[name]['rate']:.3g}" for name in EVERY_S)


def kept_share(rates: dict[str, Any]) -> float:
    """Throughput with a loss each 10 minutes over that with one each 6 hours."""
    frequent, rare = (rates[name] if isinstance(rates[name], float) else rates[name]["rate"] for name in ("10m", "6h"))
    return frequent / rare if rare else 0.0


def _kept(rates: dict[str, Any] | None) -> str:
    return "-" if rates is None else f"{100 * kept_share(rates):.1f} %"


def over_grid(row: dict[str, Any], kind: str, name: str) -> float:
    """Throughput of templates over that of the grid; infinite if the grid has none."""
    ours, grid = (row[kind][system][name] for system in ("Oobleck", "Varuna"))
    ours, grid = (value if isinstance(value, float) else value["rate"] for value in (ours, grid))
    return ours / grid if grid else float("inf")


def ratios() -> str:
    """Templates over the grid at a loss each 10 minutes, and in spot markets."""
    rows = []
    for row in result("templates")["throughput"]:
        cells = [_times(over_grid(row, kind, "10m")) for kind in (*_KINDS, "paper")]
        cells += [_times(over_grid(row, "simulator", name)) for name in ("EC2 P3", "GCP")]
        rows.append(f"| {row['workload']} | {' | '.join(cells)} |")
    header = "| workload | 10 min | the paper's speed | the table's batch | paper | market like EC2 P3 | like GCP |"
    return table(header, rows)


def _times(value: float) -> str:
    return "no progress of the grid" if value == float("inf") else f"{value:.2f}"


def shares() -> str:
    """What the time of nodes goes to with a loss each 10 minutes, for the smallest and the largest workload."""
    rows = []
    for row in result("templates")["throughput"]:
        if row["workload"] not in ("BERT-Large", "GPT-3 6.7b"):
            continue
        for system in ("Oobleck", "Varuna", "Bamboo"):
            if system in row["paper_speed"]:
                found = row["paper_speed"][system]["10m"]["shares"]
                cells = (f"{percent(found[cause])} %" for cause in CAUSES)
                rows.append(f"| {row['workload']} | {NAMES[system]} | {' | '.join(cells)} |")
    return table(f"| workload | recovery | {' | '.join(CAUSES)} |", rows)


def quotes_of_benchmarks() -> Iterator[str]:
    """Sentences of `docs/benchmarks.md`."""
    found = result("templates")
    slowest = max(found["latency"], key=lambda row: row["limited_s"])
    yield f"The slowest template takes {slowest['limited_s']:.1f} s of processor time (goal {found['goals']['latency_s']:g} s)"
    worst = found["distribution"]
    yield (
        f"in {worst['cases']} random clusters of unequal pipelines its steps are {percent(worst['mean'])} % slower on "
        f"average and {percent(worst['worst'])} % at most"
    )
    last = found["listing"][-1]
    yield (
        f"{last['instantiations']:,} instantiations on {last['nodes']} nodes take {last['all_s']:.1f} s to list, and "
        f"{last['best_s']:.2f} s to choose from without a list"
    )
    gains = [
        row["simulator"]["replanned"]["6h"]["rate"] / row["simulator"]["Oobleck"]["6h"]["rate"] - 1 for row in _rows()
    ]
    yield f"it gains {percent(min(gains))} to {percent(max(gains))} % at 6 hours"


def _rows() -> list[dict[str, Any]]:
    return result("templates")["throughput"]


def quotes_of_papers() -> Iterator[str]:
    """Sentences of `docs/papers.md`."""
    for system in ("Oobleck", "Varuna"):
        for kind in ("paper_speed", "simulator"):
            shares_kept = (f"{100 * kept_share(row[kind][system]):.0f}" for row in _rows())
            yield f"{', '.join(shares_kept)} %"
    yield " / ".join(_times(over_grid(row, "paper_speed", "10m")) for row in _rows())
    latency_rows = result("templates")["latency"]
    fewest, most = latency_rows[0], latency_rows[-1]
    yield f"{fewest['limited_s']:.2f} s and {most['limited_s']:.1f} s"


BLOCKS = {
    "template_latency": latency,
    "template_heuristic": heuristic,
    "template_throughput": throughput,
    "template_ratios": ratios,
    "template_shares": shares,
}
QUOTES = {"docs/benchmarks.md": quotes_of_benchmarks, "docs/papers.md": quotes_of_papers}
