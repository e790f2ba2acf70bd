"""How many ranks each module gets: in proportion to its work, or by the convex program of DistTrain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .strategies import SAME, Strategies
from .strategy_space import ModuleDemand, StrategySpace

Rounding = Literal["fastest", "nearest"]

_CLOSE = SAME**4  # halving stops a little before times count as equal
_SOLVED = 1 - 1e-6  # the solver's optimum may be this far off


def _fastest(shares: NDArray, ranks: NDArray) -> NDArray:
    """A module that is slow with the ranks it has needs one most."""
    return shares / ranks


def _nearest(shares: NDArray, ranks: NDArray) -> NDArray:
    """A module that is far below its share needs one most."""
    return shares - ranks


_NEEDS: Mapping[Rounding, Callable[[NDArray, NDArray], NDArray]] = {"fastest": _fastest, "nearest": _nearest}


def proportional_allocation(
    work: Mapping[str, float], num_ranks: int, minimum: int = 1, rounding: Rounding = "fastest"
) -> dict[str, int]:
    """
    Gives each module ranks in proportion to its work (Entrain, section 4.4.2 and algorithm 2, line 5).

    Args:
        work (`Mapping[str, float]`): Module -> its work, in any unit, above 0.
        num_ranks (`int`): Ranks of one replica; all of them are given away.
        minimum (`int`, *optional*, defaults to 1): What each module has at least.
        rounding (`str`, *optional*, defaults to `"fastest"`):
            `"fastest"` makes the largest work for a rank as small as whole ranks can. `"nearest"` gives the whole
            numbers that are nearest to the shares (least squares), which is what the paper says. They differ near
            the borders: of 16 ranks, 0.595 of the work gets 10 by the latter, since the share is 9.52, and 9 by the
            former, since 0.405 / 6 is more than 0.595 / 9. With two modules only the module with the larger share
            can get fewer.

    Returns:
        `dict[str, int]`: Module -> ranks.

    Raises:
        `ValueError`: If there are too few ranks or a work is not a number above 0.
    """
    shares = np.array([list(work.values())], float)
    for name, value in work.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"The work of `{name}` is {value}, which has no share. Leave out modules without work.")
    found = proportional_allocations(shares, num_ranks, minimum, rounding)[0]
    return dict(zip(work, found.tolist(), strict=True))


def proportional_allocations(
    work: NDArray, num_ranks: int, minimum: int = 1, rounding: Rounding = "fastest"
) -> NDArray:
    """
    The same for many works at once.

    Ranks are handed out one by one to the module that needs one most, which is optimal for both roundings: for
    `"fastest"` since a better allocation has to give the slowest module more, for `"nearest"` since the squares are
    convex. All but a few of them are handed out at once.

    Args:
        work (`numpy.ndarray` of shape `[num_works, num_modules]`): Each at least 0, with a sum above 0.
        num_ranks, minimum, rounding: See [`proportional_allocation`].

    Returns:
        `numpy.ndarray`: int64 `[num_works, num_modules]`.

    Raises:
        `ValueError`: If there are too few ranks, or a work is not a number of at least 0 or all of them are 0.
    """
    num_modules = work.shape[1]
    if minimum < 1 or num_ranks < num_modules * minimum:
        raise ValueError(
            f"{num_ranks} ranks are not {max(minimum, 1)} for each of {num_modules} modules. "
            "Use more ranks for a replica, or a smaller `dp_size`."
        )
    total = work.sum(axis=1, keepdims=True)
    if not ((work >= 0).all() and np.isfinite(total).all() and (total > 0).all()):
        raise ValueError(f"Works are from {work.min()} to {work.max()}. Each is at least 0, some of a batch above 0.")
    shares = work * (num_ranks / total)
    taken = num_modules * minimum
    # Both are on the way that one by one takes: what all have when the need has come down to some level.
    if rounding == "fastest":
        start = np.ceil(shares * ((num_ranks - taken) / num_ranks))
    else:
        start = np.ceil(shares - taken - 1)
    ranks = np.maximum(start, minimum).astype(np.int64)
    left = num_ranks - ranks.sum(axis=1)
    while (rows := np.flatnonzero(left > 0)).size:
        neediest = _NEEDS[rounding](shares[rows], ranks[rows]).argmax(axis=1)
        ranks[rows, neediest] += 1
        left[rows] -= 1
    return ranks


@dataclass(frozen=True)
class AllocatedModule:
    """
    The layout of a module.

    Args:
        tp_size, dp_size, pp_size (`int`): Its sizes.
        stage_ms (`float`): Forward and backward of a microbatch on one of its stages.
        memory_bytes (`float`): Of a rank of its first stage.
    """

    tp_size: int
    dp_size: int
    pp_size: int
    stage_ms: float
    memory_bytes: float

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.dp_size * self.pp_size


@dataclass(frozen=True)
class Allocation:
    """
    The layouts of all modules, on ranks of their own.

    Args:
        modules (`Mapping[str, AllocatedModule]`): Module -> its layout.
        iteration_ms (`float`): Warm-up and all microbatches of a replica of the language model.
        warm_up_ms (`float`): The part of the first microbatch.
        num_microbatches (`int`): Of a replica of the language model.
        relaxed_ms (`float`): The least time if stages could be fractions, which bounds every layout from below.
        rounded_ms (`float`): The best whole stages for the sizes of that optimum; infinite where it has none.
        num_strategies (`int`): Choices of tensor- and data-parallel sizes.
        num_solved (`int`): Convex programs that were solved for them.
    """

    modules: Mapping[str, AllocatedModule]
    iteration_ms: float
    warm_up_ms: float
    num_microbatches: int
    relaxed_ms: float
    rounded_ms: float
    num_strategies: int
    num_solved: int

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
    Finds the layouts of modules on ranks of their own with the fastest step (DistTrain, section 4 and algorithm 1).

    With `K` microbatches in a replica of the language model a step takes the first of them through the whole model,
    and then `K - 1` times the slowest stage. For every choice of tensor-parallel sizes and of data-parallel sizes that
    divide the batch, how many ranks each module gets is a convex program. Programs are solved in the order of a lower
    bound in closed form, until the bound of the next one is no better than the best so far.

    The paper leaves open how fractions of stages become whole. Here every choice that its bound does not rule out
    competes with whole stages, so that no layout of this model of a step is faster than the one returned.

    As in the paper a module's work is cut evenly, however many layers it has, optimizer state is spread over replicas,
    and nothing but the pipeline is in the time of a step. Unlike there, a stage keeps the activations of as many
    microbatches as there are stages from it to the end of the whole model, at most `K`; encoders stand beside each
    other, and so do generators.

    Args:
        modules (`Mapping[str, ModuleDemand]`): Each module's needs; one is `"language_model"`.
        num_ranks (`int`): Ranks for all modules together; some may stay without work.
        global_batch_size (`int`): Samples of a step.
        memory_bytes (`float`): Memory of a rank.
        microbatch_size (`int`, *optional*, defaults to 1): Samples of a microbatch of the language model.
        tp_sizes (`Sequence[int]`, *optional*, defaults to `(1, 2, 4, 8)`): Tensor-parallel sizes to choose from.

    Returns:
        [`Allocation`]: The layouts, the lower bound, and how much of the search was needed.

    Raises:
        `ValueError`: If a module fits into no rank's memory or all together need more ranks, with how many.
    """
    space = StrategySpace(modules, num_ranks, global_batch_size, memory_bytes, microbatch_size, tuple(tp_sizes))
    first = space.strategies(space.modest_options())
    _, _, limit_ms = _best_whole(first) if first else (0, None, np.inf)
    strategies = space.strategies(space.options, limit_ms)
    if strategies is None:
        raise space.refusal()
    row, stages, iteration_ms = _best_whole(strategies)
    if stages is None:
        raise space.refusal()
    within = replace(strategies, limit_ms=iteration_ms)
    best_row, num_solved, relaxed_ms = _best_relaxed(within)
    return Allocation(
        modules=_layouts(modules, strategies, row, stages),
        iteration_ms=iteration_ms,
        warm_up_ms=float(strategies.warm_up_ms[row]),
        num_microbatches=int(strategies.num_microbatches[row]),
        relaxed_ms=min(relaxed_ms, iteration_ms),
        rounded_ms=_best_whole(replace(strategies.take(np.array([best_row])), limit_ms=np.inf))[2],
        num_strategies=space.num_strategies,
        num_solved=num_solved,
    )


def _best_relaxed(strategies: Strategies) -> tuple[int, int, float]:
    """Which strategy is fastest with fractions of stages, how many programs it takes to know, and its time."""
    best_row, best_ms, num_solved = -1, np.inf, 0
    for row in np.argsort(strategies.bound_ms, kind="stable").tolist():
        bound_ms = float(strategies.bound_ms[row])
        if bound_ms >= best_ms * _SOLVED:
            break
        num_solved += 1
        time_ms = strategies.solve(row, bound_ms)
        if best_row < 0 or time_ms < best_ms:
            best_row, best_ms = row, time_ms
    return best_row, num_solved, best_ms


def _best_whole(strategies: Strategies) -> tuple[int, NDArray | None, float]:
    """
    Which strategy is fastest with whole stages, its stages `[modules]`, and its time.

    Halves the distance between a time that none reaches and the best so far; who does not reach what another does is
    out.
    """
    rows = np.arange(len(strategies.num_microbatches))
    low, limit, best = float(strategies.bound_ms.min(initial=np.inf)), np.inf, (-1, None, np.inf)
    while True:
        tried = rows[strategies.bound_ms[rows] <= limit]
        stages, times = strategies.take(tried).whole_stages(limit)
        reached = np.isfinite(times)
        if reached.any():
            place = int(np.argmin(times))
            rows, best = tried[reached], (int(tried[place]), stages[place], float(times[place]))
        else:
            low = limit
        if best[2] <= low * _CLOSE or not np.isfinite(low):
            return best
        limit = (low + best[2]) / 2


def _layouts(
    modules: Mapping[str, ModuleDemand], strategies: Strategies, row: int, stages: NDArray
) -> dict[str, AllocatedModule]:
    """The layouts of a strategy with some numbers of stages."""
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
