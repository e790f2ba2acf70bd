"""The tables of `planner.py` in `docs/benchmarks.md`, and sentences about them, see `pages.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from figures import percent, ratio, result, spread, table


def planner_frozen() -> str:
    mean = result("planner")["parts"]["frozen"]["mean_improvement"]
    published = statistics.mean(
        case["paper"]["improvement"] for case in result("planner")["parts"]["frozen"]["models"]
    )
    rows = [f"| the paper's table | {ratio(published)} | |"]
    for name, words in (
        ("counted", "counted operations"),
        ("counted and recomputed", "counted, activations recomputed"),
        ("printed times", "the forward times and backward ratios of the paper's table"),
    ):
        chosen = mean.get(f"{name}, 24 GPUs")
        last = "" if chosen is None else f"{ratio(chosen)} "
        rows.append(f"| {words} | {ratio(mean[f'{name}, six stages'])} | {last}|")
    return table("| costs | six stages of four GPUs | 24 GPUs, sizes chosen by the planner |", rows)


def planner_plans() -> str:
    parts = result("planner")["parts"]
    rows = []
    for words, found in (
        ("real computation, 2 ranks", parts["real"]),
        ("modelled durations, 4 ranks", parts["slept"]["4"]),
        ("modelled durations, 8 ranks", parts["slept"]["8"]),
    ):
        rows.append(
            f"| {words} | {ratio(found['rank_correlation'])} | {percent(found['median_error'])} % "
            f"| {percent(found['largest_error'])} % |"
        )
    alone = [plan for plan in parts["real"]["plans"] if "tp " not in plan["plan"]]
    errors = [abs(plan["predicted_ms"] / plan["measured_ms"] - 1) for plan in alone]
    order = rank_correlation([p["predicted_ms"] for p in alone], [p["measured_ms"] for p in alone])
    without = f"the same without the {10 - len(alone)} plans with tensor parallelism"
    rows.insert(
        1, f"| {without} | {ratio(order)} | {percent(statistics.median(errors))} % | {percent(max(errors))} % |"
    )
    return table("| plans | rank correlation | median error | largest |", rows)


def planner_others() -> str:
    cases = result("planner")["parts"]["others"]["cases"]
    names = list(cases[0]["others"])
    rows = []
    for device, words in (
        ("A40", f"mean of {_count(cases, 'A40')} cases"),
        ("H100", f"mean of {_count(cases, 'H100')} cases"),
    ):
        own = [case for case in cases if case["case"].endswith(device)]
        times = {name: [case["others"][name]["times_slower"] for case in own] for name in names}
        rows.append(f"| {device}, {words} | " + " | ".join(ratio(statistics.mean(times[n])) for n in names) + " |")
        rows.append(f"| {device}, least and most | " + " | ".join(spread(times[n], ratio) for n in names) + " |")
    return table("| | " + " | ".join(names) + " |", rows)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of numbers that all differ."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    count = len(first)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*places, strict=True)) / (count * (count**2 - 1))


def _count(cases: Sequence[Mapping[str, Any]], device: str) -> int:
    return sum(case["case"].endswith(device) for case in cases)


def quotes_of_planner() -> Iterator[str]:
    """Sentences of `docs/benchmarks.md` outside of its tables."""
    planner = result("planner")["parts"]
    mean = planner["frozen"]["mean_improvement"]
    yield f"as large on the same GPUs ({mean['printed times, 24 GPUs']:.3f} against 1.424)"
    speed = planner["speed"]
    allocation, search = speed["allocation"]["1296"]["s"]["processor"]["median"], speed["search"]
    taken = {gpus: own["s"]["processor"]["median"] for gpus, own in search.items()}
    yield (
        f"Of one core the allocation takes {1000 * allocation:.0f} ms, the search {taken['8']:.0f} s, "
        f"{taken['64']:.1f} s, {taken['1024']:.0f} s and {taken['4096']:.0f} s, the profiling batch size "
        f"{1000 * speed['profiling_batch']['s']['processor']['median']:.0f} ms; the process has at most "
        f"{max(own['gib'] for own in search.values()):.2f} GiB, imports included"
    )
    cases = planner["others"]["cases"]
    slower = [other["times_slower"] for case in cases for other in case["others"].values()]
    sharded = [case["others"]["FSDP-like"]["times_slower"] for case in cases]
    yield (
        f"slower than ours in all {len(cases)} cases, by {percent(min(slower) - 1)} % at least, FSDP-like by "
        f"{100 * (min(sharded) - 1):.0f} %"
    )


BLOCKS = {function.__name__: function for function in (planner_frozen, planner_plans, planner_others)}
QUOTES = {"docs/benchmarks.md": quotes_of_planner}
