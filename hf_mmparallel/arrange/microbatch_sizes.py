"""Number of microbatches of a step, and their target sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from .._portable import exp, log
from ..plan import LANGUAGE_MODEL
from .estimate import Pipeline

MAX_RELATIVE_SIZE = 1.35  # maximum size relative to the mean, so that memory stays close to that of equal sizes
_MIN_RELATIVE_SIZE = 0.05  # minimum size relative to the mean, even for tiny samples: an empty microbatch has no use
_LOG_QUANTUM = 0.05  # quantum of the logarithm of a module's share of the work
_CHANGE_PENALTY, _DEFERRAL_PENALTY = 2e-4, 1e-3  # of changed sizes and of deferred work, relative to the time
_MIN_GAIN = 0.01  # minimum relative gain of unequal sizes, or of fewer microbatches
_FEWER_RATIOS = (0.75, 0.5, 0.375, 0.25)
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Sizes:
    """Share of the work of each microbatch in the encoders and in the language model, 1 on average."""

    encoder: tuple[float, ...]
    language: tuple[float, ...]

    @classmethod
    def even(cls, count: int) -> Sizes:
        """Equal sizes."""
        return cls((1.0,) * count, (1.0,) * count)


def best_sizes(
    pipeline: Pipeline,
    totals: Mapping[str, float],  # module -> milliseconds of one replica's samples
    count: int,
    smallest: float = 0.0,  # relative to the mean, at least 0.05
    largest: float = MAX_RELATIVE_SIZE,  # relative to the mean
) -> Sizes:
    """
    Finds the sizes with the shortest step if samples could be divided arbitrarily.

    Microbatches are small at the start, while the pipeline fills, and at the end, while it drains, because stages wait
    for them there. Sizes and the times of all tasks are the solution of a linear program for the order of
    [`Pipeline.time_steps`], where the language model processes samples in the encoder's microbatch or one later.
    """
    max_total_ms = max(totals.values())
    if pipeline.num_stages == 1 or smallest >= 1 or largest <= 1 or count < 3 or max_total_ms <= 0:
        return Sizes.even(count)
    weights = np.array([totals[name] for name in pipeline.modules]) + 1e-9 * max_total_ms
    work = weights * np.array(list(pipeline.bottleneck.values()))
    # rounded, since batches of a dataset are similar and solutions are cached
    steps = np.rint(log(work / work.max()) / _LOG_QUANTUM).astype(int)
    solved = min(count, 4 * pipeline.num_stages + 16)  # of many microbatches, those in the middle are equal
    smallest = max(_MIN_RELATIVE_SIZE, math.ceil(10 * smallest) / 10)
    solution = _solve(pipeline, tuple(steps.tolist()), solved, smallest, round(largest, 2))
    return Sizes(_stretched(solution.encoder, count), _stretched(solution.language, count))


def _stretched(sizes: Sequence[float], count: int) -> tuple[float, ...]:
    """Repeats the largest size until there are `count`, and rescales the mean to 1."""
    middle = int(np.argmax(sizes))
    longer = np.insert(np.array(sizes), middle, np.full(count - len(sizes), sizes[middle]))
    return tuple((longer * count / longer.sum()).tolist())


class _Constraints:
    """Constraints `sum of coefficients <= 0` of a linear program."""

    def __init__(self):
        self.entries: list[tuple[int, int, float]] = []
        self.count = 0

    def add(self, *terms: tuple[int, float]) -> None:
        self.entries += [(self.count, variable, value) for variable, value in terms]
        self.count += 1

    def matrix(self, num_variables: int) -> csr_array:
        rows, columns, values = zip(*self.entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(self.count, num_variables)).tocsr()


@lru_cache(maxsize=256)
def _solve(pipeline: Pipeline, steps: tuple[int, ...], count: int, smallest: float, largest: float) -> Sizes:
    """Solves the linear program of [`best_sizes`]."""
    # Variables: sizes in the encoders and in the language model, starts of all tasks, the end, and smoothing terms:
    # changes of sizes, and differences between encoders and language model.
    work = exp(_LOG_QUANTUM * np.array(steps)) / np.array(list(pipeline.bottleneck.values())) / count
    costs = pipeline.costs * work[:, None]
    # Generators have the language model's microbatches.
    language = pipeline.modules.index(LANGUAGE_MODEL)
    kinds = [int(position >= language) for position in range(len(pipeline.modules))]
    by_kind = np.stack([costs[:, [kind == k for k in kinds]].sum(axis=1) for kind in range(2)], axis=1)
    when, num_stages = pipeline.time_steps(count), len(pipeline.depth)
    end = 2 * count + 2 * num_stages * count
    change, other = end + 1, end + 1 + 2 * count
    constraints = _Constraints()

    def start(direction: int, microbatch: int, stage: int) -> int:
        """The variable of the start of a task."""
        return 2 * count + (direction * count + microbatch) * num_stages + stage

    def after(direction: int, microbatch: int, stage: int, following: int) -> None:
        """Constrains variable `following` to be at least the end of a task."""
        terms = [(kind * count + microbatch, float(by_kind[direction, kind, stage])) for kind in range(2)]
        constraints.add(
            (start(direction, microbatch, stage), 1.0), *(term for term in terms if term[1]), (following, -1.0)
        )

    for stage, sources in enumerate(pipeline.before):
        for microbatch in range(count):
            for source in sources:
                after(0, microbatch, source, start(0, microbatch, stage))
                if pipeline.backwards[source]:
                    after(1, microbatch, stage, start(1, microbatch, source))
        directions = range(1 + pipeline.backwards[stage])
        order = sorted((int(when[way, index, stage]), way, index) for way in directions for index in range(count))
        for (_, way, index), (_, next_way, next_index) in zip(order, order[1:], strict=False):
            after(way, index, stage, start(next_way, next_index, stage))
        after(order[-1][1], order[-1][2], stage, end)
    encoded = [(index, 1.0) for index in range(count)]
    consumed = [(count + index, 1.0) for index in range(count)]
    for index in range(count):
        constraints.add(*consumed[: index + 1], *((variable, -1.0) for variable, _ in encoded[: index + 1]))
        constraints.add(*encoded[:index], *((variable, -1.0) for variable, _ in consumed[: index + 1]))
        for kind in range(2 * (index > 0)):
            here, extra = kind * count + index, change + kind * count + index
            constraints.add((here, 1.0), (here - 1, -1.0), (extra, -1.0))
            constraints.add((here, -1.0), (here - 1, 1.0), (extra, -1.0))
        constraints.add((index, 1.0), (count + index, -1.0), (other + index, -1.0))
        constraints.add((index, -1.0), (count + index, 1.0), (other + index, -1.0))

    num_variables = other + count
    whole = np.zeros((2, num_variables))
    whole[0, :count] = whole[1, count : 2 * count] = 1.0
    objective = np.zeros(num_variables)
    objective[end], objective[change:other], objective[other:] = 1.0, _CHANGE_PENALTY, _DEFERRAL_PENALTY
    lowest, highest = np.zeros(num_variables), np.full(num_variables, np.inf)
    lowest[: 2 * count], highest[: 2 * count] = smallest, largest
    solution = linprog(
        objective,
        A_ub=constraints.matrix(num_variables),
        b_ub=np.zeros(constraints.count),
        A_eq=whole,
        b_eq=[count, count],
        bounds=np.stack([lowest, highest], axis=1),
        method="highs",
    )
    even = {name: np.full((1, count), work_ms) for name, work_ms in zip(pipeline.modules, work, strict=True)}
    if solution.x is None or solution.x[end] > (1 - _MIN_GAIN) * pipeline.iteration_ms(even)[0]:
        return Sizes.even(count)
    sizes = np.round(solution.x[: 2 * count], 3)
    return Sizes(tuple(sizes[:count].tolist()), tuple(sizes[count:].tolist()))


def best_count(
    pipeline: Pipeline,
    totals: Mapping[str, float],  # module -> milliseconds of one replica's samples
    count: int,
    # encoder -> milliseconds [replicas, any] of the heaviest samples of each replica, descending
    heaviest: Mapping[str, NDArray],
) -> int:
    """
    Finds the best number of microbatches, at most `count`, if single samples are heavier than a microbatch should be.

    With fewer microbatches such a sample is closer to the others, but the pipeline takes longer to fill and to drain;
    the trade-off is estimated. (Entrain, section 4.5.1, divides the work of all samples by that of the largest one,
    regardless of the pipeline.)
    """
    best, best_ms = count, math.inf
    for trial in (count, *(max(1, round(share * count)) for share in _FEWER_RATIOS)):
        loads = {name: np.full((1, trial), total / trial) for name, total in totals.items()}
        loads |= {name: _around(samples, totals[name], trial) for name, samples in heaviest.items()}
        num_trials = max(map(len, loads.values()))
        loads = {name: np.broadcast_to(values, (num_trials, trial)) for name, values in loads.items()}
        time_ms = float(pipeline.iteration_ms(loads).max())
        if time_ms < (1 - _MIN_GAIN) * best_ms:
            best, best_ms = trial, time_ms
    return best


def _around(samples: NDArray, total: float, count: int) -> NDArray:
    """Loads `[replicas, count]` if samples above the mean have their own microbatches and all others are even."""
    samples = samples[:, : count - 1]
    rest = total - np.pad(np.cumsum(samples, axis=1), ((0, 0), (1, 0)))
    level = np.maximum(rest, 0) / (count - np.arange(rest.shape[1]))
    alone = np.cumprod(samples > level[:, :-1], axis=1)
    even = np.take_along_axis(level, alone.sum(axis=1, keepdims=True), 1)
    loads = np.repeat(even, count, axis=1)
    loads[:, : samples.shape[1]] = np.where(alone > 0, samples, even)
    # Spread out, so that they are not at the start, where they would cost most.
    return loads[:, np.argsort((np.arange(count) * _GOLDEN + 0.5) % 1, kind="stable")]
