"""The order of simulated plans, and which of them differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .problem import Candidate, RankedPlan

AS_FAST = 1.005  # ratio to the fastest step up to which plans count as equally fast, so that something else decides


def sizes_of(candidate: Candidate) -> tuple:
    """All sizes but the number of microbatches and their order."""
    return candidate.colocated_with, candidate.layouts


def distinct_sizes(ranked: Iterable[Any]) -> list[Any]:
    """Entries whose `candidate` differs from all before in more than the microbatches and their order."""
    seen, result = [], []
    for entry in ranked:
        sizes = sizes_of(entry.candidate)
        if sizes not in seen:
            seen.append(sizes)
            result.append(entry)
    return result


def in_order(plans: Iterable[RankedPlan]) -> list[RankedPlan]:
    """
    Plans in order of step time; among equally fast ones, see [`AS_FAST`], the one whose copies divide what they hold
    among the fewest ranks comes first, and of these the one with the smallest peak memory.
    """
    result, left = [], sorted(plans, key=lambda plan: (plan.step_ms, plan.peak_memory_bytes))
    while left:
        as_fast = [plan for plan in left if plan.step_ms <= AS_FAST * left[0].step_ms]
        left = left[len(as_fast) :]
        # Fewer ranks wait for each other, and predictions of their collectives are surer.
        result += sorted(as_fast, key=lambda p: (shard_size(p.candidate), p.peak_memory_bytes, p.step_ms))
    return result


def shard_size(candidate: Candidate) -> int:
    """Most ranks over modules among which copies divide what they hold; all copies where they divide nothing."""
    layouts = candidate.layouts.values()
    return max(layout.shard_size or layout.dp_size * layout.cp_size for layout in layouts)
