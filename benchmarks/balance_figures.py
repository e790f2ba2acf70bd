"""Sentences and rows of `docs/benchmarks.md` on arrangements, their bounds and steps on ranks; see `pages.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from figures import all_arrangements, percent, ratio, result, spread, table


def rank_balance() -> str:
    """The waiting of ranks without a plan, by the arrangement of their batches."""
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in result("rank_balance")["balance"]:
        case = (row["samples"], row["packed"], row["ranks"], row["accumulation"])
        rows.setdefault(case, {})[row["arrangement"]] = row
    lines = []
    for (samples, packed, ranks, count), own in rows.items():
        if (ranks, count) == (4, 4):  # lies between the others
            continue
        stock, even = own["contiguous"], own["hierarchical"]
        cells = [f"{percent(stock[key])} / {percent(even[key])} %" for key in ("rank_excess", "turn_excess")]
        lines.append(
            f"| {samples} | {'packed' if packed else 'padded'} | {ranks} | {count} | {' | '.join(cells)} "
            f"| {ratio(even['faster'])} |"
        )
    columns = ("fullest rank: stock / arranged", "turns: stock / arranged", "faster")
    return table(f"| samples | rows | ranks | accumulation steps | {' | '.join(columns)} |", lines)


def over_bound(arrangement: str, bound: str) -> str:
    """Steps of an arrangement over a bound, of all datasets and models."""
    steps = [case[arrangement] for case in all_arrangements()]
    return spread([step["iteration_ms"] / step["bounds_ms"][bound] for step in steps], ratio)


def quotes_of_balance() -> Iterator[str]:
    goals = result("microbatch_balance")["goals"]
    yield f"at least {goals[0]} times below DistTrain's"
    yield f"a step within {100 * (goals[1] - 1):.0f} % of the bound"
    yield f"`hierarchical` takes {over_bound('hierarchical', 'even')} of the step of equal microbatches"
    yield f"`tapered` with eager forwards takes {over_bound('tapered, eager', 'best')} of the best"
    yield f"({over_bound('tapered, eager', 'busiest')} for `tapered`, eager)"
    slept = {case["arrangement"]: case for case in result("microbatch_balance")["slept"]}
    yield f"{slept['contiguous']['measured_ms']:,.0f} ms for `contiguous`"
    order, even = (slept[name]["std_ms"]["vision"] for name in ("disttrain", "hierarchical"))
    yield f"deviation falls from {order:.1f} (`disttrain`) to {even:.1f} ms"


def rows_of_microbatch_balance() -> Iterator[str]:
    """The rows of the table of arrangements in `docs/benchmarks.md`, and the sentences about them."""
    for case in result("microbatch_balance")["simulated"]:
        found = case["arrangements"]
        order, own_plan = found["disttrain"], found["disttrain, its own plan"]["iteration_ms"]
        published, even, tapered = (found[name] for name in ("entrain", "hierarchical", "tapered, eager"))
        deviations = [
            " / ".join(f"{own['std_ms'][module]:.1f}" for own in (order, published, even))
            for module in ("vision", "language_model")
        ]
        faster = [
            f"{order['iteration_ms'] / own['iteration_ms']:.2f}, {own_plan / own['iteration_ms']:.2f}"
            for own in (published, even, tapered)
        ]
        over_even = even["iteration_ms"] / even["bounds_ms"]["even"]
        over_best = tapered["iteration_ms"] / tapered["bounds_ms"]["best"]
        peaks = " / ".join(f"{max(own['peak_gib']):.1f}" for own in (order, published, even, tapered))
        start = f"| {case['dataset']} | {case['model']} | {deviations[0]} | {deviations[1]} | {faster[0]} "
        yield f"{start}| {faster[1]} | {over_even:.3f} | {faster[2]} | {over_best:.3f} | {peaks} |"
    measured_ms = {case["arrangement"]: case["measured_ms"] for case in result("microbatch_balance")["slept"]}
    for name in ("disttrain", "entrain", "hierarchical", "tapered"):
        yield f"{measured_ms[name]:,.0f} for `{name}`"


def quotes_of_page() -> Iterator[str]:
    yield from quotes_of_balance()
    yield from rows_of_microbatch_balance()


BLOCKS: Mapping[str, Callable[[], str]] = {"rank_balance": rank_balance}
QUOTES = {"docs/benchmarks.md": quotes_of_page}
