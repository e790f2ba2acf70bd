"""Sentences of `docs/benchmarks.md` on the bounds of arrangements and on their steps on ranks; see `pages.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from figures import all_arrangements, ratio, result, spread

BLOCKS: Mapping[str, Callable[[], str]] = {}


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


QUOTES = {"docs/benchmarks.md": quotes_of_balance}
