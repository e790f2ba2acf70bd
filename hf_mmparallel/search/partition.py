"""Stages of consecutive layers whose slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SAME = 1 + 1e-9  # sums of the same layers in another order differ by rounding
_CACHED_TABLES = 4096


@dataclass(frozen=True)
class Partition:
    """
    The stages of a module.

    Args:
        layers (`tuple[int, ...]`): Layers of each stage, in order.
        bottleneck_ms (`float`): What the slowest stage takes.
    """

    layers: tuple[int, ...]
    bottleneck_ms: float

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def stage_costs(self, costs_ms: ArrayLike) -> NDArray:
        """float64 `[num_stages]`: what each stage takes, from the costs of the layers."""
        return np.diff(_prefix(np.asarray(costs_ms, float))[np.cumsum((0, *self.layers))])


@dataclass(frozen=True)
class Partitions:
    """
    The best partitions of a module into every number of stages, see [`partition_all`].

    Args:
        costs_ms (`numpy.ndarray` of shape `[num_layers]`): What each layer takes.
        bottlenecks_ms (`numpy.ndarray` of shape `[max_stages]`): What the slowest of 1, 2, ... stages takes at best.
    """

    costs_ms: NDArray
    bottlenecks_ms: NDArray
    _found: dict[int, Partition] = field(default_factory=dict, repr=False, compare=False)

    @property
    def max_stages(self) -> int:
        return len(self.bottlenecks_ms)

    def partition(self, num_stages: int) -> Partition:
        """
        The stages themselves, found when asked for the first time.

        Among the partitions with the best bottleneck it has the least sum of squares over the stages, so that the
        others are as even as they can be as well; among those, the first stages have the fewest layers, since a
        stage holds the activations of more microbatches the earlier it is. Costs that differ by rounding are equal.

        Args:
            num_stages (`int`): At most `max_stages`.

        Raises:
            `ValueError`: If there are fewer layers than stages.
        """
        _check_stages(num_stages, self.max_stages)
        if num_stages not in self._found:
            bottleneck_ms = float(self.bottlenecks_ms[num_stages - 1])
            layers = _evenest_layers(_prefix(self.costs_ms), num_stages, bottleneck_ms * _SAME)
            self._found[num_stages] = Partition(layers, bottleneck_ms)
        return self._found[num_stages]


@dataclass(frozen=True)
class SharedPartition:
    """
    The stages of modules on the same ranks.

    Args:
        layers (`tuple[tuple[int, ...], ...]`): For each module the layers of each stage, in order.
        bottleneck_ms (`float`): What all modules together take on the slowest stage.
    """

    layers: tuple[tuple[int, ...], ...]
    bottleneck_ms: float


def partition_layers(costs_ms: ArrayLike, num_stages: int) -> Partition:
    """
    Cuts layers into stages such that the slowest stage is as fast as possible (Cornstarch, chapter 3,
    equation 3.5; Entrain, equation 4.1).

    Args:
        costs_ms (array of shape `[num_layers]`):
            What each layer takes, at least 0. Work before the first layer and behind the last, such as embeddings
            and the head, is part of the first and the last.
        num_stages (`int`): How many; each has at least one layer.

    Returns:
        [`Partition`]: The evenest of the optimal ones, see [`Partitions.partition`].

    Raises:
        `ValueError`: If there are fewer layers than stages, or a cost is negative or not finite.
    """
    return partition_all(costs_ms, num_stages).partition(num_stages)


def partition_all(costs_ms: ArrayLike, max_stages: int) -> Partitions:
    """
    Cuts layers into every number of stages up to a limit; a repeated call is answered from memory.

    With `D(i, s)` the least bottleneck of the first `i` layers in `s` stages and `P` the sums of costs, Cornstarch
    takes the least of `max(D(j, s - 1), P(i) - P(j))` over `j` (chapter 3, equation 3.5). The former grows with `j`
    and the latter falls, so that the least lies where they cross: where `D(j, s - 1) + P(j)`, which grows, reaches
    `P(i)`. One binary search for all `i` finds that, `O(num_layers log num_layers)` for each number of stages.

    Args:
        costs_ms (array of shape `[num_layers]`): What each layer takes, at least 0.
        max_stages (`int`): The largest number of stages.

    Returns:
        [`Partitions`]: The bottlenecks, and the stages on demand.

    Raises:
        `ValueError`: If there are fewer layers than stages, or a cost is negative or not finite.
    """
    costs = np.ascontiguousarray(costs_ms, float)
    return _partition_all(costs.tobytes(), int(max_stages))


@lru_cache(maxsize=_CACHED_TABLES)
def _partition_all(costs_bytes: bytes, max_stages: int) -> Partitions:
    costs = np.frombuffer(costs_bytes)
    _check_costs(costs)
    _check_stages(max_stages, len(costs))
    prefix = _prefix(costs)
    bottlenecks = np.empty(max_stages)
    best = prefix.copy()  # [num_layers + 1]: of the first layers in at most that many stages
    bottlenecks[0] = best[-1]
    for stage in range(1, max_stages):
        # A stage more never hurts, so that "at most" and "exactly" agree wherever there are layers enough.
        crossing = np.minimum(np.searchsorted(best + prefix, prefix), np.arange(len(prefix)))
        before = np.maximum(crossing - 1, 0)
        best = np.minimum(np.maximum(best[crossing], prefix - prefix[crossing]), prefix - prefix[before])
        bottlenecks[stage] = best[-1]
    bottlenecks = np.maximum(np.minimum.accumulate(bottlenecks), costs.max())
    bottlenecks.setflags(write=False)
    return Partitions(costs, bottlenecks)


def _evenest_layers(prefix: NDArray, num_stages: int, limit: float) -> tuple[int, ...]:
    """
    Layers of stages none of which takes longer than the limit, with the least sum of squares.

    `rest[s][i]` is that sum for the layers from `i` on in `s` stages. Only ends within the limit are looked at: a band
    that is `num_layers / num_stages` wide or little more.
    """
    num_layers = len(prefix) - 1
    starts = np.arange(num_layers + 1)
    last = np.minimum(np.searchsorted(prefix, prefix + limit, side="right") - 1, num_layers)
    width = int((last - starts).max())
    ends = starts[:, None] + np.arange(1, width + 1)
    allowed = ends <= last[:, None]
    ends = np.minimum(ends, num_layers)
    squares = np.where(allowed, (prefix[ends] - prefix[:, None]) ** 2, np.inf)
    rest = np.full((num_stages + 1, num_layers + 1), np.inf)
    rest[0, num_layers] = 0.0
    for stage in range(1, num_stages + 1):
        rest[stage] = (squares + rest[stage - 1][ends]).min(axis=1)
    layers, start = [], 0
    for stage in range(num_stages, 0, -1):
        found = squares[start] + rest[stage - 1][ends[start]]
        layers.append(int(np.argmax(found <= rest[stage, start] * _SAME)) + 1)
        start += layers[-1]
    return tuple(layers)


def partition_shared(costs_ms: Sequence[ArrayLike], num_stages: int) -> SharedPartition:
    """
    Cuts modules on the same ranks into the same number of stages, such that the slowest stage is as fast as possible.

    Each stage holds at least one layer of every module and takes the sum of what it holds (Cornstarch, section 4.2,
    encoders that are colocated, where each is cut on its own). Optimal to a relative 1e-9, by binary search over the
    bottleneck. For each limit all states (layers of each module that are done) that some stages reach within it are
    marked, stage by stage: a state is reached if among those before it the one with the most work done is near enough,
    and that one is a running maximum over the grid of states. Time and memory grow with the product of the numbers of
    layers and with the number of stages.

    Args:
        costs_ms (sequence of arrays of shape `[num_layers]`): For each module what its layers take, at least 0.
        num_stages (`int`): How many.

    Returns:
        [`SharedPartition`]: The stages.

    Raises:
        `ValueError`: If a module has fewer layers than stages, or a cost is negative or not finite.
    """
    tables = [partition_all(costs, num_stages) for costs in costs_ms]
    own = [table.partition(num_stages) for table in tables]
    if len(own) == 1:
        return SharedPartition((own[0].layers,), own[0].bottleneck_ms)
    prefixes = [_prefix(table.costs_ms) for table in tables]
    stages = sum(part.stage_costs(table.costs_ms) for part, table in zip(own, tables, strict=True))
    best = SharedPartition(tuple(part.layers for part in own), float(np.max(stages)))
    if num_stages == 1:
        return best
    low = max(float(np.mean(stages)), *(float(table.bottlenecks_ms[-1]) for table in tables))
    work = prefixes[0]
    for prefix in prefixes[1:]:
        work = work[..., None] + prefix
    while best.bottleneck_ms > low * _SAME:
        limit = (low + best.bottleneck_ms) / 2
        found = _shared_within(work, num_stages, limit)
        if found is None:
            low = limit
        else:
            best = found
    return best


def _shared_within(work: NDArray, num_stages: int, limit: float) -> SharedPartition | None:
    """
    Stages none of which takes longer than the limit, if there are any.

    Args:
        work (`numpy.ndarray` of shape `[layers of the first module + 1, ...]`): What the first layers of each take.
    """
    inner = (slice(1, None),) * work.ndim
    outer = (slice(None, -1),) * work.ndim
    reached = np.full((num_stages + 1, *work.shape), -np.inf)  # the work done, where a state can be reached
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
        # An even share of what is left keeps the other stages even.
        distance = np.where(within, np.abs(before - work[state] * stage / (stage + 1)), np.inf)
        earlier = tuple(int(index) for index in np.unravel_index(int(np.argmin(distance)), distance.shape))
        slowest = max(slowest, float(work[state] - work[earlier]))
        state = earlier
        cuts.append(state)
    layers = np.diff(np.array(cuts[::-1]), axis=0).T
    return SharedPartition(tuple(tuple(row) for row in layers.tolist()), slowest)


def _prefix(costs: NDArray) -> NDArray:
    """float64 `[num_layers + 1]`: what the first layers take."""
    return np.concatenate([[0.0], np.cumsum(costs)])


def _check_costs(costs: NDArray) -> None:
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(wrong):
        raise ValueError(
            f"Layer {wrong[0]} costs {costs[wrong[0]]} ms, which is no time. "
            "Give each layer a finite cost of at least 0."
        )


def _check_stages(num_stages: int, num_layers: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"{num_stages} stages need at least one layer each; there are {num_layers}. "
            f"Ask for 1 to {num_layers} stages."
        )
