"""Choices of tensor- and data-parallel sizes of all modules, and the minimum step time of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from ..cost.stage_memory import GIB
from ..plan import LANGUAGE_MODEL
from ..planning.options import divisors

Role = Literal["encoder", "generator"]
# Options by the data-parallel size of the language model: for each module [options, 6], rows of the table of
# `Strategies`.
Options = Mapping[int, tuple[NDArray, ...]]

_MANY = 2**40
_MODEST = 3  # options per module for the first layouts
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


@dataclass(frozen=True)
class ModuleDemand:
    """Time and memory demand of a module, for all of its layers together."""

    # tensor-parallel size -> forward and backward of one sample through the whole module, including communication;
    # without the backward if it has none
    sample_ms: Callable[[int], float] | Mapping[int, float]
    num_layers: int  # and maximum number of stages
    num_heads: int  # tensor-parallel sizes divide it
    weight_bytes: float = 0.0  # weights and gradients
    optimizer_bytes: float = 0.0  # sharded over replicas
    activation_bytes: float = 0.0  # saved for one sample
    role: Role = "encoder"  # before or after the language model; ignored for the language model

    def time_ms(self, tp_size: int) -> float:
        """`sample_ms` of a tensor-parallel size."""
        return float(self.sample_ms[tp_size] if isinstance(self.sample_ms, Mapping) else self.sample_ms(tp_size))


@dataclass(frozen=True)
class StrategySpace:
    """
    All choices of sizes (DistTrain, section 4.3). Raises `ValueError` if there is no language model, no integer number
    of microbatches, or no tensor-parallel size that divides the heads of a module.

    Tensor-parallel sizes divide the heads and data-parallel sizes the batch; an encoder or generator has an integer
    number of samples for each microbatch of the language model.
    """

    modules: Mapping[str, ModuleDemand]
    num_ranks: int  # for all modules together
    global_batch_size: int  # samples of a step
    memory_bytes: float  # of a rank
    microbatch_size: int  # samples of a microbatch of the language model
    tp_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if LANGUAGE_MODEL not in self.modules:
            raise ValueError(f"There is no `{LANGUAGE_MODEL}` among {list(self.modules)}. Give one module this name.")
        if self.global_batch_size % self.microbatch_size:
            raise ValueError(
                f"`global_batch_size={self.global_batch_size}` is not a multiple of "
                f"`microbatch_size={self.microbatch_size}`. Use one that is."
            )
        for name, module in self.modules.items():
            if not any(module.num_heads % size == 0 for size in self.tp_sizes):
                raise ValueError(
                    f"None of the tensor-parallel sizes {self.tp_sizes} divides the {module.num_heads} heads of "
                    f"`{name}`. Add 1 to them."
                )

    @cached_property
    def chain(self) -> Chain:
        """Order of the modules."""
        names = list(self.modules)
        others = [index for index, name in enumerate(names) if name != LANGUAGE_MODEL]
        encoders = tuple(index for index in others if self.modules[names[index]].role == "encoder")
        generators = tuple(index for index in others if index not in encoders)
        return Chain(encoders, names.index(LANGUAGE_MODEL), generators)

    @cached_property
    def options(self) -> Options:
        """Options of each module that would fit if it were alone on the ranks."""
        options = {}
        for size, tables in self._every_option.items():
            fitting = []
            for index, table in enumerate(tables):
                min_stages = self._least(size, index, table)
                fits = min_stages <= self._num_layers[index] * SAME
                fitting.append(table[fits & (min_stages * table[:, 0] * table[:, 1] <= self.num_ranks * SAME)])
            if all(map(len, fitting)):
                options[size] = tuple(fitting)
        return options

    @property
    def num_strategies(self) -> int:
        """Number of combinations of sizes, including those that do not fit."""
        return sum(math.prod(map(len, tables)) for tables in self._every_option.values())

    def modest_options(self) -> Options:
        """For each module the options with the best scores of its own, and those that need the fewest ranks."""
        options = {}
        for size, tables in self.options.items():
            steady = (self._num_microbatches(size) - 1) / self.num_ranks
            chosen = []
            for index, table in enumerate(tables):
                ranks = table[:, 0] * table[:, 1]
                scores = (table[:, 2] * (1 + steady * ranks), ranks * np.ceil(self._least(size, index, table)))
                best = [np.argsort(score, kind="stable")[:_MODEST] for score in scores]
                chosen.append(table[np.unique(np.concatenate(best))])
            options[size] = tuple(chosen)
        return options

    def strategies(self, options: Options, limit_ms: float = np.inf) -> Strategies | None:
        """All combinations of options within a limit of the step time, by a simple bound."""
        tables, counts = [], []
        for size, choices in options.items():
            combinations = self._combinations(size, choices, limit_ms * SAME)
            tables.append(combinations)
            counts.append(np.full(len(combinations), self._num_microbatches(size)))
        if not sum(map(len, tables)):
            return None
        table, count = np.concatenate(tables), np.concatenate(counts)
        return Strategies(table, count, self._num_layers, self.chain, self.num_ranks, limit_ms)

    def no_layout_error(self) -> ValueError:
        """The error if there is no layout, with the reason."""
        for index, (name, module) in enumerate(self.modules.items()):
            min_bytes = self._least_bytes(index)
            if min_bytes > self.memory_bytes:
                return ValueError(
                    f"`{name}` needs {min_bytes / GIB:.2f} GiB on each rank even with a stage for each of its "
                    f"{module.num_layers} layers; a rank has {self.memory_bytes / GIB:.2f} GiB. Freeze parts of it, "
                    "use activation checkpointing, larger `tp_sizes`, or ranks with more memory."
                )
        plenty = replace(self, num_ranks=_MANY)
        strategies = plenty.strategies(plenty.modest_options())
        needed = np.inf if strategies is None else strategies.least_ranks().min()
        remedy = f"Use {needed:.0f}." if np.isfinite(needed) else "Use ranks with more memory."
        return ValueError(
            f"{self.num_ranks} ranks with {self.memory_bytes / GIB:.2f} GiB are not enough for {list(self.modules)} "
            f"with the activations of all microbatches in flight. {remedy}"
        )

    @cached_property
    def _num_layers(self) -> NDArray:
        return np.array([module.num_layers for module in self.modules.values()])

    @cached_property
    def _least_after(self) -> NDArray:
        """`[modules]`: minimum number of stages after each module."""
        return self.chain.after(np.ones((1, len(self.modules)), np.int64))[0]

    @cached_property
    def _times_ms(self) -> list[dict[int, float]]:
        """For each module its time with each tensor-parallel size that divides its heads."""
        return [
            {size: module.time_ms(size) for size in self.tp_sizes if module.num_heads % size == 0}
            for module in self.modules.values()
        ]

    @cached_property
    def _every_option(self) -> Options:
        sizes = divisors(self.global_batch_size // self.microbatch_size)
        return {size: tuple(self._table(name, size) for name in self.modules) for size in sizes}

    def _table(self, name: str, language_dp: int) -> NDArray:
        """`[options, 6]` of a module with `language_dp` replicas of the language model."""
        module, samples = self.modules[name], self.microbatch_size * language_dp
        times_ms = self._times_ms[list(self.modules).index(name)]
        dp_sizes = [language_dp] if name == LANGUAGE_MODEL else divisors(samples)
        tp_size, dp_size = (grid.ravel() for grid in np.meshgrid(list(times_ms), dp_sizes, indexing="ij"))
        pass_ms = np.repeat(list(times_ms.values()), len(dp_sizes)) * samples / dp_size
        state = module.weight_bytes + module.optimizer_bytes / dp_size
        return np.stack(
            [
                tp_size,
                dp_size,
                pass_ms,
                state,
                module.activation_bytes * samples / dp_size,
                self.memory_bytes * tp_size,
            ],
            axis=1,
        )

    def _num_microbatches(self, dp_size: int) -> int:
        return self.global_batch_size // (self.microbatch_size * dp_size)

    def _least(self, dp_size: int, index: int, table: NDArray) -> NDArray:
        """`[options]`: minimum (fractional) number of stages of a module with the minimum after it."""
        after, count = self._least_after[index], self._num_microbatches(dp_size)
        return np.maximum(1.0, least_stages(table[:, 3], table[:, 4], table[:, 5], count, after))

    def _least_bytes(self, index: int) -> float:
        """Minimum memory of a rank of a module."""
        num_layers, min_bytes = int(self._num_layers[index]), np.inf
        for size, tables in self._every_option.items():
            tp_size, _, _, state, saved, _ = tables[index].T
            in_flight = min(num_layers + int(self._least_after[index]), self._num_microbatches(size))
            min_bytes = min(min_bytes, float(((state + saved * in_flight) / (tp_size * num_layers)).min()))
        return min_bytes

    def _combinations(self, dp_size: int, tables: tuple[NDArray, ...], limit_ms: float) -> NDArray:
        """`[strategies, modules, 6]`: combinations that may be within a limit, by a bound without idle ranks."""
        steady = (self._num_microbatches(dp_size) - 1) / self.num_ranks
        passes = [table[:, 2] for table in tables]
        work = [steady * table[:, 0] * table[:, 1] * table[:, 2] for table in tables]
        ranks = [t[:, 0] * t[:, 1] * self._least(dp_size, i, t) for i, t in enumerate(tables)]
        # Options that exceed the limit with the best options of all other modules are dropped first, so that the grid
        # of all combinations stays small.
        alone = [np.flatnonzero(self._bound_with_the_best(passes, work, i) <= limit_ms) for i in range(len(tables))]
        grids = [
            [
                np.expand_dims(values[keep], [axis for axis in range(len(tables)) if axis != index])
                for index, (values, keep) in enumerate(zip(quantity, alone, strict=True))
            ]
            for quantity in (passes, work, ranks)
        ]
        bound = self._through(grids[0]) + reduce(np.add, grids[1])
        fits = (bound <= limit_ms) & (reduce(np.add, grids[2]) <= self.num_ranks * SAME)
        chosen = np.nonzero(fits)
        rows = [table[keep][indices] for table, keep, indices in zip(tables, alone, chosen, strict=True)]
        return np.stack(rows, axis=1)

    def _bound_with_the_best(self, passes: list[NDArray], work: list[NDArray], index: int) -> NDArray:
        """`[options]` of a module: a lower bound for any options of the other modules."""
        best = [values.min(initial=np.inf) for values in passes]
        rest = sum(values.min(initial=np.inf) for other, values in enumerate(work) if other != index)
        return self._through([*best[:index], passes[index], *best[index + 1 :]]) + work[index] + rest

    def _through(self, values: list) -> NDArray:
        """Sum along the slowest path through the model, of one array of any shape per module."""
        sides = [[values[i] for i in side] for side in (self.chain.encoders, self.chain.generators) if side]
        return reduce(np.add, [reduce(np.maximum, side) for side in sides], values[self.chain.language_model])
