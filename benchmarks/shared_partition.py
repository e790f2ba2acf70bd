"""Partitions of colocated modules: stages that minimize the time of the slowest one, for Cornstarch's baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_mmparallel.planning.partition import partition_all

_SAME = 1 + 1e-9  # tolerance for sums in another order


@dataclass(frozen=True)
class SharedPartition:
    """
    The stages of modules on the same ranks.

    Args:
        layers (`tuple[tuple[int, ...], ...]`): For each module the layers of each stage, in order.
        slowest_stage_ms (`float`): Time of all modules together on the slowest stage.
    """

    layers: tuple[tuple[int, ...], ...]
    slowest_stage_ms: float


def partition_shared(costs_ms: Sequence[ArrayLike], num_stages: int) -> SharedPartition:
    """
    Splits modules on the same ranks into the same number of stages, such that the slowest stage is as fast as
    possible.

    Each stage has at least one layer of every module, and their times add up (Cornstarch, section 4.2, colocated
    encoders, where each module is split separately). Optimal to a relative 1e-9, by bisection over the time of the
    slowest stage. For each limit, all states (finished layers of each module) that are reachable within it are marked,
    stage by stage: a state is reachable if, among the states before it, the one with the most finished work is close
    enough, which is a running maximum over the grid of states. Time and memory grow with the product of the numbers of
    layers and with the number of stages.

    Args:
        costs_ms (sequence of arrays of shape `[num_layers]`): Layer times of each module, at least 0.
        num_stages (`int`): Number of stages.

    Returns:
        [`SharedPartition`]: The stages.

    Raises:
        `ValueError`: If a module has fewer layers than stages, or a cost is negative or not finite.
    """
    tables = [partition_all(costs, num_stages) for costs in costs_ms]
    parts = [table.partition(num_stages) for table in tables]
    if len(parts) == 1:
        return SharedPartition((parts[0].layers,), parts[0].slowest_stage_ms)
    prefixes = [np.concatenate([[0.0], np.cumsum(table.costs_ms)]) for table in tables]
    stages = sum(part.stage_costs(table.costs_ms) for part, table in zip(parts, tables, strict=True))
    best = SharedPartition(tuple(part.layers for part in parts), float(np.max(stages)))
    if num_stages == 1:
        return best
    low = max(float(np.mean(stages)), *(float(table.slowest_stages_ms[-1]) for table in tables))
    work = prefixes[0]
    for prefix in prefixes[1:]:
        work = work[..., None] + prefix
    while best.slowest_stage_ms > low * _SAME:
        limit = (low + best.slowest_stage_ms) / 2
        partition = _shared_within(work, num_stages, limit)
        if partition is None:
            low = limit
        else:
            best = partition
    return best


def _shared_within(work: NDArray, num_stages: int, limit: float) -> SharedPartition | None:
    """
    Stages within a time limit, if there are any.

    Args:
        work (`numpy.ndarray` of shape `[layers of the first module + 1, ...]`): Time of the first layers of each.
    """
    inner = (slice(1, None),) * work.ndim
    outer = (slice(None, -1),) * work.ndim
    reached = np.full((num_stages + 1, *work.shape), -np.inf)  # finished work of reachable states
    reached[(0,) + (0,) * work.ndim] = 0.0
    for stage in range(num_stages):
        most = reached[stage][outer]
        for axis in range(work.ndim):
            most = np.maximum.accumulate(most, axis=axis)
        reached[stage + 1][inner] = np.where(work[inner] - most <= limit, work[inner], -np.inf)
    state = tuple(size - 1 for size in work.shape)
    if not np.isfinite(reached[num_stages][state]):
        return None
    cuts, slowest = [state], 0.0
    for stage in range(num_stages - 1, -1, -1):
        before = reached[stage][tuple(slice(0, end) for end in state)]
        within = before >= work[state] - limit
        # An even share of the remaining work keeps the other stages even.
        distance = np.where(within, np.abs(before - work[state] * stage / (stage + 1)), np.inf)
        earlier = tuple(int(index) for index in np.unravel_index(int(np.argmin(distance)), distance.shape))
        slowest = max(slowest, float(work[state] - work[earlier]))
        state = earlier
        cuts.append(state)
    layers = np.diff(np.array(cuts[::-1]), axis=0).T
    return SharedPartition(tuple(tuple(row) for row in layers.tolist()), slowest)
