"""How many microbatches each of unequal pipelines computes (Oobleck, section 2.4.2.2)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def fastest_counts(fill_ms: Sequence[float], slowest_ms: Sequence[float], num_microbatches: int) -> list[int]:
    """
    Microbatches of each pipeline such that the last one is done as early as possible, at least one each.

    A pipeline takes `fill + (count - 1) * slowest`. Each microbatch goes to the pipeline that would be done with it
    first, which is optimal since times only grow.

    Args:
        fill_ms (`Sequence[float]`): Time of the first microbatch in each pipeline.
        slowest_ms (`Sequence[float]`): Time of each further one.
        num_microbatches (`int`): Microbatches of all pipelines.

    Raises:
        `ValueError`: If there are fewer microbatches than pipelines.
    """
    check_microbatches(num_microbatches, len(fill_ms))
    counts = [1] * len(fill_ms)
    ends = [(fill + slowest, index) for index, (fill, slowest) in enumerate(zip(fill_ms, slowest_ms, strict=True))]
    heapq.heapify(ends)
    for _ in range(num_microbatches - len(counts)):
        end_ms, index = ends[0]
        counts[index] += 1
        heapq.heapreplace(ends, (end_ms + slowest_ms[index], index))
    return counts


def check_microbatches(num_microbatches: int, num_pipelines: int) -> None:
    """
    Raises:
        `ValueError`: If there are fewer microbatches than pipelines.
    """
    if num_microbatches < num_pipelines:
        raise ValueError(
            f"{num_microbatches} microbatches are too few for {num_pipelines} pipelines, each of which needs one. Use "
            "a larger global batch or smaller microbatches."
        )
