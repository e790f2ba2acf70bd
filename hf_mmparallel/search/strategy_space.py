"""All choices of tensor- and data-parallel sizes for an allocation of ranks to modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..cost.stage_memory import GIB
from ..plan import LANGUAGE_MODEL
from .strategies import SAME, Chain, Strategies, least_stages

Role = Literal["encoder", "generator"]
# Options by the data-parallel size of the language model: for each module [options, 6], rows of the table of
# `Strategies`.
Options = Mapping[int, tuple[NDArray, ...]]

_MANY = 2**40
_MODEST = 3  # options per module for the first layouts


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
        sizes = _divisors(self.global_batch_size // self.microbatch_size)
        return {size: tuple(self._table(name, size) for name in self.modules) for size in sizes}

    def _table(self, name: str, language_dp: int) -> NDArray:
        """`[options, 6]` of a module with `language_dp` replicas of the language model."""
        module, samples = self.modules[name], self.microbatch_size * language_dp
        times_ms = self._times_ms[list(self.modules).index(name)]
        dp_sizes = [language_dp] if name == LANGUAGE_MODEL else _divisors(samples)
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


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
