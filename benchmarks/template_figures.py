"""The figures of `templates.py` on the pages, see `pages.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figures import percent, result, table
from paper_failures import EVERY_S

NAMES = {
    "Oobleck": "templates (Oobleck)",
    "Varuna": "grid (Varuna)",
    "Bamboo": "redundant stages (Bamboo)",
}


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


def papers_failures() -> str:
    """Oobleck's claims and what the replay of its traces gives."""
    rows = [
        (
            "throughput hardly falls from a failure every 6 hours to one every 10 minutes: 98, 99, 98, 95 and 82 % of "
            "it remain with BERT-Large, GPT-2, GPT-3 Medium, 2.7b and 6.7b",
            "table 2.2",
            "reproduced, simulated",
            f"{_all_kept('paper_speed', 'Oobleck')} at the paper's speed, {_all_kept('simulator', 'Oobleck')} at the "
            "modelled speed, with the batches of the authors' simulator. What is lost is half a step on average, so "
            "that the share follows from the length of a step",
        ),
        (
            "with Varuna 67, 88, 68, 24 and 6 % remain",
            "table 2.2",
            "order only",
            f"{_all_kept('paper_speed', 'Varuna')} at the paper's speed. In the larger models ten steps and a new "
            "start take longer than the ten minutes between two losses, so that at most one checkpoint is ever "
            "written; in the paper some progress is made nevertheless",
        ),
        (
            "up to 13.9 times Varuna's throughput",
            "section 2.7.2, table 2.2",
            "order only, simulated",
            f"at the paper's speed {_all_ratios('paper_speed')} times, in the table "
            f"{_all_ratios('paper')} (3.55 and 0.26 samples/s are a factor of 13.65)",
        ),
        (
            "batches of 8,192, 8,192, 8,192, 1,024 and 1,024 samples, and a checkpoint every ten steps",
            "tables 2.1 and 2.2",
            "contradictory",
            "with GPT-2's 76.39 samples/s, ten steps of 8,192 samples take 1,072 s: with a loss every 601 s Varuna "
            "would not write one checkpoint, and with GPT-3 Medium Oobleck would lose half of a step of 280 s of "
            "every 601 s, not 2 %. The authors' simulator has batches of 8,192, 1,024, 819, 512 and 1,024 samples. "
            f"With those of the table, {_all_kept('table', 'Oobleck')} remain, and {_all_kept('table', 'Varuna')} "
            "with the grid",
        ),
        (
            "Bamboo has 27 and 20 % of Oobleck's throughput, and does not fit with GPT-3",
            "table 2.2",
            "not",
            f"{_bamboo()} of it, and only 6.7b does not fit: redundant forwards alone do not explain the paper's "
            "factor, for which it names effects that can't be told apart (section 2.7.4.2)",
        ),
        (
            "templates are planned in 0.28 s (8 nodes, 24 layers) to 3,298 s (24 nodes of 8 GPUs, 96 layers)",
            "table 2.3",
            "better",
            f"{_limited(0):.3f} s and {_limited(-1):.1f} s of processor time with limited memory, by exact dynamic "
            "programming; in Python on this machine, the paper's is C++ on another one",
        ),
        (
            "Varuna without the cost of checkpoints keeps 96 % (BERT-Large) and 43 % (6.7b)",
            "table 2.4",
            "order only",
            f"{_free('BERT-Large')} and {_free('GPT-3 6.7b')}. A new start of 86 s every 601 s alone leaves 86 %, so "
            "that the paper's 96 % need a shorter one than its simulator's",
        ),
        (
            "on spot instances up to 9.1 times faster on average",
            "section 2.7.3",
            "order only, simulated",
            f"{_all_ratios('EC2 P3')} times Varuna on random losses as frequent as on EC2, {_all_ratios('GCP')} as "
            "on GCP; the recorded traces are not in the repository, and no warning before a loss is modelled",
        ),
        (
            "at least 75 % of the time is effective, with Varuna up to 75 % are wasted",
            "figure 2.11",
            "reproduced, simulated",
            f"{_computing('Oobleck')} with a loss every 10 minutes, at the paper's speed; {_computing('Varuna')} "
            "with the grid",
        ),
    ]
    return table("| claim | where | | figure |", [f"| {' | '.join(row)} |" for row in rows])


def _rows() -> list[dict[str, Any]]:
    return result("templates")["throughput"]


def _all_kept(kind: str, system: str) -> str:
    return f"{_listed([f'{100 * kept_share(row[kind][system]):.0f}' for row in _rows()])} %"


def _listed(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _all_ratios(kind: str) -> str:
    """Templates over the grid: every 10 minutes with a kind of speed and batch, or in a market."""
    pairs = [(kind, "10m")] * 5 if kind in (*_KINDS, "paper") else [("simulator", kind)] * 5
    values = [over_grid(row, *pair) for row, pair in zip(_rows(), pairs, strict=True)]
    return _listed(["infinitely many" if value == float("inf") else f"{value:.2f}" for value in values])


def _bamboo() -> str:
    shares_of = [
        row["paper_speed"]["Bamboo"]["6h"]["rate"] / row["paper_speed"]["Oobleck"]["6h"]["rate"] for row in _rows()[:2]
    ]
    return f"{_listed([f'{100 * share:.0f}' for share in shares_of])} %"


def _limited(index: int) -> float:
    return result("templates")["latency"][index]["limited_s"]


def _free(workload: str) -> str:
    row = next(row for row in _rows() if row["workload"] == workload)
    return f"{100 * kept_share(row['paper_speed']['Varuna, free checkpoints']):.0f} %"


def _computing(system: str) -> str:
    found = [row["paper_speed"][system]["10m"]["shares"]["computing"] for row in (_rows()[0], _rows()[-1])]
    return f"{_listed([f'{100 * share:.0f}' for share in found])} % (BERT-Large, 6.7b)"


def quotes_of_benchmarks() -> Iterator[str]:
    """Sentences of `docs/benchmarks.md`."""
    found = result("templates")
    slowest = max(found["latency"], key=lambda row: row["limited_s"])
    yield f"The slowest template takes {slowest['limited_s']:.1f} s of processor time"
    yield f"are at most {percent(max(row['worst'] for row in found['heuristic']))} % slower than the exact ones"
    worst = found["distribution"]
    yield (
        f"in {worst['cases']} random clusters of unequal pipelines its steps are {percent(worst['mean'])} % slower on "
        f"average and {percent(worst['worst'])} % at most"
    )
    last = found["listing"][-1]
    yield (
        f"To list all {last['instantiations']} instantiations on {last['nodes']} nodes takes {last['all_s']:.2f} s, "
        f"to choose the fastest without a list {last['best_s']:.3f} s"
    )
    rates = [(row["simulator"]["weighed"]["6h"]["rate"], row["simulator"]["Oobleck"]["6h"]["rate"]) for row in _rows()]
    gains = [anew / kept - 1 for anew, kept in rates]
    yield f"that is {percent(min(gains))} to {percent(max(gains))} % faster at 6 hours"


BLOCKS = {
    "template_throughput": throughput,
    "papers_failures": papers_failures,
}
QUOTES = {"docs/benchmarks.md": quotes_of_benchmarks}
