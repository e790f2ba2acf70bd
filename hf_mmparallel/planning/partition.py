"""Partitions of layers into stages that minimize the time of the slowest stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SUM_TOLERANCE = 1 + 1e-9  # tolerance for sums in another order
_CACHED_TABLES = 4096


@dataclass(frozen=True)
class Partition:
    """The stages of a module."""

    layers: tuple[int, ...]  # of each stage, in order
    slowest_stage_ms: float

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def stage_costs(self, costs_ms: ArrayLike) -> NDArray:
        """float64 `[num_stages]`: time of each stage, from the costs of the layers."""
        return np.diff(_prefix(np.asarray(costs_ms, float))[np.cumsum((0, *self.layers))])


@dataclass(frozen=True)
class Partitions:
    """The best partitions of a module into every number of stages, see [`partition_all`]."""

    costs_ms: NDArray  # [num_layers]
    slowest_stages_ms: NDArray  # [max_stages]: minimum time of the slowest of 1, 2, ... stages
    _known: dict[int, Partition] = field(default_factory=dict, repr=False, compare=False)

    @property
    def max_stages(self) -> int:
        return len(self.slowest_stages_ms)

    def partition(self, num_stages: int) -> Partition:
        """
        The partition for a number of stages, computed on first use; raises `ValueError` if there are fewer layers than
        stages.

        Among the partitions with the fastest slowest stage it has the smallest sum of squared stage times, so that the
        other stages are even as well; among those, the first stages have the fewest layers, since earlier stages keep
        the activations of more microbatches. Costs within rounding errors count as equal.
        """
        _check_stages(num_stages, self.max_stages)
        if num_stages not in self._known:
            slowest_stage_ms = float(self.slowest_stages_ms[num_stages - 1])
            layers = _evenest_layers(_prefix(self.costs_ms), num_stages, slowest_stage_ms * _SUM_TOLERANCE)
            self._known[num_stages] = Partition(layers, slowest_stage_ms)
        return self._known[num_stages]


def partition_all(costs_ms: ArrayLike, max_stages: int) -> Partitions:
    """
    Splits layers into every number of stages up to a limit, such that the slowest stage is as fast as possible
    (Cornstarch, chapter 3, equation 3.5; Entrain, equation 4.1). Results are cached.

    Costs `[num_layers]` are at least 0; work before the first and after the last layer, such as embeddings and the
    head, is included in these layers. Raises `ValueError` for fewer layers than stages, or a cost that is negative or
    not finite.
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
    # With `D(i, s)` the minimum time of the slowest stage of the first `i` layers in `s` stages and `P` the prefix
    # sums of costs, `max(D(j, s - 1), P(i) - P(j))` is minimal over `j` where the terms cross, since the former grows
    # with `j` and the latter falls: where `D(j, s - 1) + P(j)`, which grows, reaches `P(i)`. One binary search for all
    # `i` finds that, `O(num_layers log num_layers)` for each number of stages.
    for stage in range(1, max_stages):
        # An additional stage never hurts, so that "at most" and "exactly" agree if there are enough layers.
        crossing = np.minimum(np.searchsorted(best + prefix, prefix), np.arange(len(prefix)))
        before = np.maximum(crossing - 1, 0)
        best = np.minimum(np.maximum(best[crossing], prefix - prefix[crossing]), prefix - prefix[before])
        bottlenecks[stage] = best[-1]
    bottlenecks = np.maximum(np.minimum.accumulate(bottlenecks), costs.max())
    bottlenecks.setflags(write=False)
    return Partitions(costs, bottlenecks)


def _evenest_layers(prefix: NDArray, num_stages: int, limit: float) -> tuple[int, ...]:
    """Layers of stages within a time limit, with the smallest sum of squared stage times."""
    num_layers = len(prefix) - 1
    starts = np.arange(num_layers + 1)
    last = np.minimum(np.searchsorted(prefix, prefix + limit, side="right") - 1, num_layers)
    width = int((last - starts).max())
    # Only ends within the limit are considered: a band about `num_layers / num_stages` wide.
    ends = starts[:, None] + np.arange(1, width + 1)
    allowed = ends <= last[:, None]
    ends = np.minimum(ends, num_layers)
    squares = np.where(allowed, (prefix[ends] - prefix[:, None]) ** 2, np.inf)
    # `rest[s][i]` is the smallest sum for the layers from `i` on in `s` stages.
    rest = np.full((num_stages + 1, num_layers + 1), np.inf)
    rest[0, num_layers] = 0.0
    for stage in range(1, num_stages + 1):
        rest[stage] = (squares + rest[stage - 1][ends]).min(axis=1)
    layers, start = [], 0
    for stage in range(num_stages, 0, -1):
        sums = squares[start] + rest[stage - 1][ends[start]]
        layers.append(int(np.argmax(sums <= rest[stage, start] * _SUM_TOLERANCE)) + 1)
        start += layers[-1]
    return tuple(layers)


def _prefix(costs: NDArray) -> NDArray:
    """float64 `[num_layers + 1]`: prefix sums of costs."""
    return np.concatenate([[0.0], np.cumsum(costs)])


def _check_costs(costs: NDArray) -> None:
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(wrong):
        raise ValueError(
            f"Layer {wrong[0]} costs {costs[wrong[0]]} ms, which is not a time. "
            "Give each layer a finite cost of at least 0."
        )


def _check_stages(num_stages: int, num_layers: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"{num_stages} stages need at least one layer each; there are {num_layers}. "
            f"Ask for 1 to {num_layers} stages."
        )
