"""
What the modules `*_figures.py` share: the results, the rounding of their figures, and readings of several tables.

Rounding: ratios have two decimals below ten and one from ten on; shares and errors in percent one below ten and none
from ten on; times in ms one below ten and none from ten on. What has more or fewer decimals says so by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@cache
def result(name: str) -> dict[str, Any]:
    """A result in `benchmarks/results`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def result_names() -> list[str]:
    """The names of all results."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


# Rounding


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def percent(share: float) -> str:
    """A share as a number of percent, without the sign."""
    return f"{100 * share:.1f}" if 100 * share < 9.95 else f"{100 * share:.0f}"


def ms(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def pair(values: Mapping[str, float], digits: int) -> str:
    """Mean and worst."""
    return f"{values['mean']:.{digits}f} / {values['worst']:.{digits}f}"


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The least and the most."""
    return f"{text(min(values))} to {text(max(values))}"


def table(header: str, rows: Sequence[str]) -> str:
    """A table in Markdown; `header` is its first line."""
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *rows])


# What several tables read


def arrangements(dataset: str, model: str) -> dict[str, Any]:
    """The simulated arrangements of a dataset and a model."""
    cases = result("microbatch_balance")["simulated"]
    return next(c["arrangements"] for c in cases if (c["dataset"], c["model"]) == (dataset, model))


def all_arrangements() -> list[dict[str, Any]]:
    return [case["arrangements"] for case in result("microbatch_balance")["simulated"]]


def chart_net() -> list[dict[str, Any]]:
    return [arrangements("synthchartnet", model) for model in ("llama3-1b", "llama3-3b")]


def steps(cases: Sequence[Mapping[str, Any]], slower: str, faster: str) -> list[float]:
    """Step of one arrangement over that of another, for each case."""
    return [case[slower]["iteration_ms"] / case[faster]["iteration_ms"] for case in cases]


def deviations(module: str, more: str, less: str) -> list[float]:
    """Deviation of one arrangement over that of another, on SynthChartNet with both models."""
    return [case[more]["std_ms"][module] / case[less]["std_ms"][module] for case in chart_net()]


def balance(part: str, kind: str, length: int, method: str) -> dict[str, Any]:
    cases = result("context_parallel_balance")[part]
    return next(c for c in cases if (c["kind"], c["length"], c["method"]) == (kind, length, method))


def attention(length: int, which: str) -> dict[str, Any]:
    return next(r for r in result("attention")["rows"] if (r["length"], r["pass"]) == (length, which))


def arranging(batch: str, method: str) -> float:
    """Milliseconds of an arrangement."""
    rows = result("sampler_overhead")["arranging"]
    return next(r["arrange_ms"]["median"] for r in rows if (r["batch"], r["method"]) == (batch, method))
