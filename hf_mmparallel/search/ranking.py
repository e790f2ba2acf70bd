"""The order of simulated plans, and which of them differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .problem import Candidate, RankedPlan

AS_FAST = 1.005
"""Ratio to the fastest step up to which plans count as equally fast; the one with the smallest memory comes first."""


def sizes_of(candidate: Candidate) -> tuple:
    """All sizes but the number of microbatches and their order."""
    return candidate.colocated_with, candidate.layouts


def distinct_sizes(ranked: Iterable[Any]) -> list[Any]:
    """
    Entries that differ from all before them in more than the number of microbatches and their order.

    Args:
        ranked (`Iterable`): Objects with a `candidate`, such as [`RankedPlan`].
    """
    seen, result = [], []
    for entry in ranked:
        sizes = sizes_of(entry.candidate)
        if sizes not in seen:
            seen.append(sizes)
            result.append(entry)
    return result


def in_order(plans: Iterable[RankedPlan]) -> list[RankedPlan]:
    """
    Plans in order of step time; among equally fast ones, see [`AS_FAST`], the one with the smallest peak memory comes
    first.

    Args:
        plans (`Iterable[RankedPlan]`): The plans.
    """
    result, left = [], sorted(plans, key=lambda plan: (plan.step_ms, plan.peak_memory_bytes))
    while left:
        as_fast = [plan for plan in left if plan.step_ms <= AS_FAST * left[0].step_ms]
        left = left[len(as_fast) :]
        result += sorted(as_fast, key=lambda plan: (plan.peak_memory_bytes, plan.step_ms))
    return result
