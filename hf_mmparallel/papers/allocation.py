"""Number of ranks of each module: proportional to its work, or from the convex program of DistTrain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .strategies import ModuleDemand, Strategies, StrategySpace

# "fastest" minimizes the largest work per rank, "nearest" the squared distance to the fractional shares, as in the
# paper. They differ near the borders: of 16 ranks, a module with 0.595 of the work gets 10 by "nearest", since its
# share is 9.52, and 9 by "fastest", since 0.405 / 6 is more than 0.595 / 9. With two modules only the module with the
# larger share can get fewer.
Rounding = Literal["fastest", "nearest"]

_CLOSE = 1 + 4e-9  # tolerance of the bisection, tighter than that of equal times
_SOLVED = 1 - 1e-6  # tolerance of the solver's optimum


def _fastest(shares: NDArray, ranks: NDArray) -> NDArray:
    """Need of ranks: the time with the current ranks."""
    return shares / ranks


def _nearest(shares: NDArray, ranks: NDArray) -> NDArray:
    """Need of ranks: the distance to the share."""
    return shares - ranks


_NEEDS: Mapping[Rounding, Callable[[NDArray, NDArray], NDArray]] = {"fastest": _fastest, "nearest": _nearest}


def proportional_allocation(
    work: Mapping[str, float], num_ranks: int, minimum: int = 1, rounding: Rounding = "fastest"
) -> dict[str, int]:
    """
    Divides all ranks of a replica over modules in proportion to their work (Entrain, section 4.4.2 and algorithm 2,
    line 5). Works are in any unit and above 0, and each module gets at least `minimum` ranks; otherwise raises
    `ValueError`.
    """
    shares = np.array([list(work.values())], float)
    for name, value in work.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"The work of `{name}` is {value}; it must be above 0. Leave out modules without work.")
    ranks = proportional_allocations(shares, num_ranks, minimum, rounding)[0]
    return dict(zip(work, ranks.tolist(), strict=True))


def proportional_allocations(
    work: NDArray, num_ranks: int, minimum: int = 1, rounding: Rounding = "fastest"
) -> NDArray:
    """
    Does [`proportional_allocation`] for many works `[num_works, num_modules]` at once; returns int64 ranks of this
    shape. A work may be 0 here, but not all works of a row.
    """
    num_modules = work.shape[1]
    if minimum < 1 or num_ranks < num_modules * minimum:
        raise ValueError(
            f"{num_ranks} ranks are not {max(minimum, 1)} for each of {num_modules} modules. "
            "Use more ranks for a replica, or a smaller `dp_size`."
        )
    total = work.sum(axis=1, keepdims=True)
    if not ((work >= 0).all() and np.isfinite(total).all() and (total > 0).all()):
        raise ValueError(
            f"Works are between {work.min()} and {work.max()}; they must be finite, at least 0, and not all 0."
        )
    shares = work * (num_ranks / total)
    assigned = num_modules * minimum
    # A state of the one-by-one assignment: the ranks of each module when the largest need has fallen to some level.
    if rounding == "fastest":
        start = np.ceil(shares * ((num_ranks - assigned) / num_ranks))
    else:
        start = np.ceil(shares - assigned - 1)
    ranks = np.maximum(start, minimum).astype(np.int64)
    left = num_ranks - ranks.sum(axis=1)
    # One rank after the other to the module with the largest need is optimal: for "fastest" since a better allocation
    # has to give the slowest module more, for "nearest" since the squares are convex.
    while (rows := np.flatnonzero(left > 0)).size:
        neediest = _NEEDS[rounding](shares[rows], ranks[rows]).argmax(axis=1)
        ranks[rows, neediest] += 1
        left[rows] -= 1
    return ranks


@dataclass(frozen=True)
class AllocatedModule:
    """The layout of a module."""

    tp_size: int
    dp_size: int
    pp_size: int
    stage_ms: float  # forward plus backward of a microbatch on one of its stages
    memory_bytes: float  # of a rank of its first stage

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.dp_size * self.pp_size


@dataclass(frozen=True)
class Allocation:
    """The layouts of all modules, on disjoint ranks."""

    modules: Mapping[str, AllocatedModule]
    iteration_ms: float  # the warm-up, and all microbatches of a replica of the language model
    warm_up_ms: float  # the first microbatch
    num_microbatches: int  # of a replica of the language model
    relaxed_ms: float  # minimum time with fractional stages, a lower bound for every layout
    num_strategies: int  # choices of tensor- and data-parallel sizes
    num_solved: int  # convex programs that were solved for them

    @property
    def num_ranks(self) -> int:
        return sum(module.num_ranks for module in self.modules.values())

    @property
    def bottleneck(self) -> str:
        """The module with the slowest stage."""
        return max(self.modules, key=lambda name: self.modules[name].stage_ms)


def allocate(
    modules: Mapping[str, ModuleDemand],
    num_ranks: int,
    global_batch_size: int,
    memory_bytes: float,
    microbatch_size: int = 1,
    tp_sizes: Sequence[int] = (1, 2, 4, 8),
) -> Allocation:
    """
    Finds the layouts of modules on disjoint ranks with the fastest step (DistTrain, section 4 and algorithm 1).

    With `K` microbatches in a replica of the language model, the first one passes the whole model, and the slowest
    stage then takes `K - 1` more. For every choice of tensor-parallel sizes and of data-parallel sizes that divide the
    batch, the number of ranks of each module is a convex program.

    As in the paper, a module's work is split evenly regardless of its number of layers, optimizer state is sharded
    over replicas, and only the pipeline takes time. Unlike the paper, a stage keeps the activations of as many
    microbatches as there are stages from it to the end of the whole model, at most `K`; encoders run next to each
    other, and so do generators.

    `memory_bytes` is that of a rank, `microbatch_size` that of the language model, and some ranks may stay idle.
    Raises `ValueError` if a module does not fit into memory, or all together need more ranks; says how many.
    """
    space = StrategySpace(modules, num_ranks, global_batch_size, memory_bytes, microbatch_size, tuple(tp_sizes))
    first = space.strategies(space.modest_options())
    _, _, limit_ms = _best_whole(first) if first else (0, None, np.inf)
    strategies = space.strategies(space.options, limit_ms)
    if strategies is None:
        raise space.no_layout_error()
    # The paper does not say how fractional stages are rounded. Here every choice that its bound does not exclude
    # competes with whole stages, so that the result is optimal under this model of a step.
    row, stages, iteration_ms = _best_whole(strategies)
    if stages is None:
        raise space.no_layout_error()
    num_solved, relaxed_ms = _best_relaxed(replace(strategies, limit_ms=iteration_ms))
    return Allocation(
        modules=_layouts(modules, strategies, row, stages),
        iteration_ms=iteration_ms,
        warm_up_ms=float(strategies.warm_up_ms[row]),
        num_microbatches=int(strategies.num_microbatches[row]),
        relaxed_ms=min(relaxed_ms, iteration_ms),
        num_strategies=space.num_strategies,
        num_solved=num_solved,
    )


def _best_relaxed(strategies: Strategies) -> tuple[int, float]:
    """Number of solved programs, and the time of the fastest strategy with fractional stages."""
    best_ms, num_solved = np.inf, 0
    # in the order of the lower bound, until the next bound is no better than the best result
    for row in np.argsort(strategies.bound_ms, kind="stable").tolist():
        bound_ms = float(strategies.bound_ms[row])
        if bound_ms >= best_ms * _SOLVED:
            break
        num_solved += 1
        best_ms = min(best_ms, strategies.solve(row, bound_ms))
    return num_solved, best_ms


def _best_whole(strategies: Strategies) -> tuple[int, NDArray | None, float]:
    """
    Row of the fastest strategy with whole stages, its stages `[modules]`, and its time: bisects between a time that no
    strategy reaches and the best time so far, and drops strategies that are slower than another one.
    """
    rows = np.arange(len(strategies.num_microbatches))
    low, limit, best = float(strategies.bound_ms.min(initial=np.inf)), np.inf, (-1, None, np.inf)
    while True:
        tried = rows[strategies.bound_ms[rows] <= limit]
        stages, times = strategies.take(tried).whole_stages(limit)
        reached = np.isfinite(times)
        if reached.any():
            fastest = int(np.argmin(times))
            rows, best = tried[reached], (int(tried[fastest]), stages[fastest], float(times[fastest]))
        else:
            low = limit
        if best[2] <= low * _CLOSE or not np.isfinite(low):
            return best
        limit = (low + best[2]) / 2


def _layouts(
    modules: Mapping[str, ModuleDemand], strategies: Strategies, row: int, stages: NDArray
) -> dict[str, AllocatedModule]:
    """The layouts of a strategy with the given numbers of stages."""
    chosen = strategies.take(np.array([row]))
    memory_bytes = chosen.memory_bytes(stages[None])[0]
    return {
        name: AllocatedModule(
            tp_size=int(chosen.tp_size[0, index]),
            dp_size=int(chosen.dp_size[0, index]),
            pp_size=int(stages[index]),
            stage_ms=float(chosen.pass_ms[0, index] / stages[index]),
            memory_bytes=float(memory_bytes[index]),
        )
        for index, name in enumerate(modules)
    }
