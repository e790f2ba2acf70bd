"""Choices of tensor- and data-parallel sizes of all modules, and the minimum step time of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

_ROUNDS = 4
SAME = 1 + 1e-9  # relative tolerance for equal numbers of stages and times


@dataclass(frozen=True)
class Chain:
    """Order of the modules, by index."""

    encoders: tuple[int, ...]
    language_model: int
    generators: tuple[int, ...]

    def through(self, values: NDArray) -> NDArray:
        """`[strategies]`: the sum along the slowest path through the model, from values `[strategies, modules]`."""
        return self._most(values, self.encoders) + values[:, self.language_model] + self._most(values, self.generators)

    def after(self, stages: NDArray) -> NDArray:
        """`[strategies, modules]`: stages between a module and the end of the model."""
        result = np.zeros_like(stages)
        result[:, self.language_model] = self._most(stages, self.generators)
        result[:, self.encoders] = (result + stages)[:, [self.language_model]]
        return result

    def paths_after(self, module: int) -> list[tuple[int, ...]]:
        """The modules after one, for each path to the end."""
        ends = [(index,) for index in self.generators] or [()]
        if module in self.encoders:
            return [(self.language_model, *path) for path in ends]
        return ends if module == self.language_model else [()]

    @staticmethod
    def _most(values: NDArray, modules: tuple[int, ...]) -> NDArray:
        return values[:, modules].max(axis=1) if modules else np.zeros(len(values), values.dtype)


def least_stages(
    state_bytes: NDArray,
    saved_bytes: NDArray,
    capacity_bytes: NDArray,
    num_microbatches: NDArray | int,
    after: NDArray | int,
) -> NDArray:
    """
    Minimum (fractional) number of stages of a module that fits into memory, given the stages after it, in arrays of
    one shape, see [`Strategies`].
    """
    # A rank of the first of `p` stages needs `(state + saved * min(p + after, num_microbatches)) / p` of its share of
    # the capacity, as in 1F1B. The smaller result of the two terms of the minimum is sufficient.
    spare = capacity_bytes - saved_bytes
    with np.errstate(over="ignore"):  # an infinite number of stages, of which the minimum takes nothing
        deep = (state_bytes + saved_bytes * after) / np.where(spare > 0, spare, 1.0)
    flat = (state_bytes + saved_bytes * num_microbatches) / capacity_bytes
    return np.where(spare > 0, np.minimum(deep, flat), flat)


@dataclass(frozen=True)
class Strategies:
    """Choices of tensor- and data-parallel sizes, with the resulting times and memory of the modules."""

    # [strategies, modules, 6]: tensor- and data-parallel size; milliseconds of a microbatch through all layers; bytes
    # of the weights, gradients and optimizer state of a replica, of the activations of a microbatch, and of the memory
    # of the ranks of a stage
    table: NDArray
    num_microbatches: NDArray  # [strategies]: of a replica of the language model
    num_layers: NDArray  # [modules]
    chain: Chain
    num_ranks: int  # available ranks
    limit_ms: float = np.inf  # maximum step time of interest

    def take(self, rows: NDArray) -> Strategies:
        """The strategies at some indices."""
        return replace(self, table=self.table[rows], num_microbatches=self.num_microbatches[rows])

    @property
    def tp_size(self) -> NDArray:
        return self.table[:, :, 0]

    @property
    def dp_size(self) -> NDArray:
        return self.table[:, :, 1]

    @property
    def pass_ms(self) -> NDArray:
        return self.table[:, :, 2]

    @property
    def state_bytes(self) -> NDArray:
        return self.table[:, :, 3]

    @property
    def saved_bytes(self) -> NDArray:
        return self.table[:, :, 4]

    @property
    def capacity_bytes(self) -> NDArray:
        return self.table[:, :, 5]

    @cached_property
    def stage_ranks(self) -> NDArray:
        """`[strategies, modules]`: additional ranks per stage, over all replicas."""
        return self.tp_size * self.dp_size

    @cached_property
    def warm_up_ms(self) -> NDArray:
        """`[strategies]`: time of the first microbatch through the whole model (DistTrain, equation 1)."""
        return self.chain.through(self.pass_ms)

    @cached_property
    def least(self) -> NDArray:
        """`[strategies, modules]`: minimum (fractional) number of stages within the time limit and the memory."""
        least = np.maximum(1.0, self._least_within(self.limit_ms))
        # Either may require more stages, and more stages after a module require more of its own; a few rounds get
        # close.
        for _ in range(_ROUNDS):
            least = np.maximum(least, self.least_stages(self.chain.after(least)))
        return np.minimum(least, self.num_layers + 1.0)

    def _least_within(self, limit_ms: float) -> NDArray:
        """`[strategies, modules]`: minimum (fractional) number of stages for a step within a time limit."""
        steady = np.maximum(self.num_microbatches - 1, 1e-12)
        slowest = np.maximum(limit_ms * SAME - self.warm_up_ms, 1e-300) / steady
        return self.pass_ms / slowest[:, None]

    def least_stages(self, after: NDArray) -> NDArray:
        """`[strategies, modules]`: see [`least_stages`], with the stages after each module."""
        counts = self.num_microbatches[:, None]
        return least_stages(self.state_bytes, self.saved_bytes, self.capacity_bytes, counts, after)

    def memory_bytes(self, stages: NDArray) -> NDArray:
        """`[strategies, modules]`: memory of a rank of the first stage, from the stages of each module."""
        in_flight = np.minimum(stages + self.chain.after(stages), self.num_microbatches[:, None])
        return (self.state_bytes + self.saved_bytes * in_flight) / (self.tp_size * stages)

    def least_ranks(self) -> NDArray:
        """`[strategies]`: minimum ranks that all modules fit on; infinite if they have too few layers."""
        stages, times = self.whole_stages(np.inf)
        return np.where(np.isfinite(times), (stages * self.stage_ranks).sum(axis=1), np.inf)

    @cached_property
    def bound_ms(self) -> NDArray:
        """
        `[strategies]`: closed-form lower bound of the step time of all layouts within the limit; infinite if none
        fits.

        A stage time `t` needs `ranks * max(least, pass / t)` of each module. For every set of modules that are fixed
        at their minimum, the others share the remaining ranks; the worst set has the modules with the shortest stages.
        """
        least_ranks = self.stage_ranks * self.least
        work = self.stage_ranks * self.pass_ms
        order = np.argsort(self.pass_ms / self.least, axis=1, kind="stable")
        fixed = np.take_along_axis(least_ranks, order, 1).cumsum(axis=1)
        shared = np.take_along_axis(work, order, 1)[:, ::-1].cumsum(axis=1)[:, ::-1]
        left = np.concatenate(
            [np.full((len(fixed), 1), float(self.num_ranks)), self.num_ranks - fixed[:, :-1]], axis=1
        )
        fits = (fixed[:, -1] <= self.num_ranks * SAME) & (self.least <= self.num_layers * SAME).all(axis=1)
        slowest = np.max(shared / np.where(left > 0, left, np.inf), axis=1)
        slowest = np.maximum(slowest, (self.pass_ms / self.num_layers).max(axis=1))
        return np.where(fits, self.iteration_ms(slowest), np.inf)

    def iteration_ms(self, slowest_ms: NDArray) -> NDArray:
        """`[strategies]`: step time from the time of the slowest stage (DistTrain, section 4.2)."""
        return self.warm_up_ms + (self.num_microbatches - 1) * slowest_ms

    def whole_stages(self, limit_ms: float) -> tuple[NDArray, NDArray]:
        """
        int64 `[strategies, modules]`: minimum numbers of stages for a step within a limit, and `[strategies]`: the
        time of that step, infinite if there are none.
        """
        stages = self._up(np.maximum(self._least_within(limit_ms), self.least))
        # Every stage is required, either by the limit or by memory, which grows with the stages after a module, so
        # that the first sufficient numbers are minimal.
        while True:
            more = np.maximum(stages, self._up(self.least_stages(self.chain.after(stages))))
            if (more == stages).all():
                break
            stages = more
        fits = (stages <= self.num_layers).all(axis=1) & ((stages * self.stage_ranks).sum(axis=1) <= self.num_ranks)
        time_ms = self.iteration_ms((self.pass_ms / stages).max(axis=1))
        return stages, np.where(fits & (time_ms <= limit_ms * SAME), time_ms, np.inf)

    def _up(self, stages: NDArray) -> NDArray:
        """The next integers; one more than the number of layers stands for all that do not fit."""
        return np.ceil(np.minimum(stages / SAME, self.num_layers + 1)).astype(np.int64)

    def solve(self, row: int, bound_ms: float) -> float:
        """
        Minimum step time in ms with fractional stages: the convex program of DistTrain as a linear program; infinite
        without a solution. `bound_ms` is the lower bound of the strategy.

        Its variables are the stages `p` of each module and the inverse `u` of the time of the slowest stage, in units
        of a lower bound of that time: `t p >= pass` with `t = 1 / u` is `p >= pass u`, so that `u` is maximized;
        ranks, memory and numbers of layers are linear.
        """
        steady = float(self.num_microbatches[row] - 1)
        unit = (bound_ms - self.warm_up_ms[row]) / steady if steady else 1.0
        num_modules = self.pass_ms.shape[1]
        eye = np.eye(num_modules, num_modules + 1)
        lines = [(np.append(self.stage_ranks[row] / self.num_ranks, 0.0), 1.0), *self.memory_lines(row)]
        for index, time in enumerate(self.pass_ms[row] / unit):
            line = -eye[index]
            line[-1] = time
            lines.append((line, 0.0))
        bounds = [*zip(self.least[row].tolist(), self.num_layers.tolist(), strict=True), (0.0, 1.0)]
        if any(least > most * SAME for least, most in bounds):
            return np.inf
        bounds = [(min(least, most), most) for least, most in bounds]
        matrix, limits = np.array([line for line, _ in lines]), np.array([limit for _, limit in lines])
        solution = linprog(np.append(np.zeros(num_modules), -1.0), matrix, limits, bounds=bounds)
        if not solution.success or solution.x[-1] <= 0:
            return np.inf
        return max(bound_ms, float(self.warm_up_ms[row] + steady / solution.x[-1] * unit))  # rounding

    def memory_lines(self, row: int) -> list[tuple[NDArray, float]]:
        """`capacity * p >= state + saved * (stages in flight)` for each path from a module to the end, scaled."""
        lines = []
        for module in range(self.pass_ms.shape[1]):
            capacity = self.capacity_bytes[row, module]
            for after in self.chain.paths_after(module):
                path = [module, *after]
                shallow, deep = float(self.least[row, path].sum()), float(self.num_layers[path].sum())
                count = float(self.num_microbatches[row])
                # If a replica has fewer microbatches than the model has stages, the number in flight is the minimum of
                # a constant and of the depth; a chord below it keeps the program convex and its optimum a bound.
                slope = min(1.0, max(0.0, (count - shallow) / (deep - shallow))) if deep > shallow else 1.0
                offset = min(shallow, count) - slope * shallow
                line = np.zeros(self.pass_ms.shape[1] + 1)
                line[path] = self.saved_bytes[row, module] / capacity * slope
                line[module] -= 1.0
                saved = self.saved_bytes[row, module] * offset
                lines.append((line, -(self.state_bytes[row, module] + saved) / capacity))
        return lines
