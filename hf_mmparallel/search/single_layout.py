"""Baseline with one layout for the whole model, as in Megatron-LM: encoders are the first stages of the pipeline."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL
from .candidates import EstimatedCandidate
from .combinations import LayoutEstimate
from .options import ModuleOptions, ParallelConfig, divisors
from .problem import Candidate, Layout, PlanningProblem

ParallelConfigs = Mapping[str, ParallelConfig]

_MOST_MICROBATCHES = 256
_MAX_SPLITS = 4  # splits of the stages between parts of the model, per layout and number of microbatches


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Stages with nearly equal numbers of layers; the first ones may have one more."""
    size, rest = divmod(num_layers, num_stages)
    return tuple(size + (stage < rest) for stage in range(num_stages))


class SingleLayouts:
    """
    All plans with one data-, tensor- and pipeline-parallel size for the whole model; sizes set by the user do not
    apply.

    Encoders share the first stages, generators the last ones, and layers are split evenly. Without pipeline
    parallelism all modules are on the same ranks.
    """

    def __init__(self, problem: PlanningProblem):
        self.problem, spec = problem, problem.spec
        self.options = {name: ModuleOptions(problem, name) for name in spec.modules}
        modules = (spec.encoders, (LANGUAGE_MODEL,), spec.generators)
        self.sharing = [names for names in map(tuple, modules) if names]  # modules that share their stages
        self._known: dict[tuple, list[float]] = {}

    def __iter__(self) -> Iterator[EstimatedCandidate]:
        """All candidates with their estimated step times, in no particular order."""
        problem = self.problem
        for kinds in self._kinds():
            tp_size = kinds[LANGUAGE_MODEL].tp_size
            for pp_size in divisors(problem.num_ranks // tp_size):
                dp_size = problem.num_ranks // (tp_size * pp_size)
                if problem.num_ranks % tp_size or problem.global_batch_size % dp_size:
                    continue
                for count in self._microbatch_counts(problem.global_batch_size // dp_size):
                    yield from self._estimated(kinds, dp_size, pp_size, count)

    def candidate(self, estimated: EstimatedCandidate) -> Candidate:
        """The candidate with its layers split evenly."""
        layouts = {
            name: Layout(
                even_layers(self.options[name].module_spec.num_layers, estimate.pp_size),
                estimate.dp_size,
                tp_size=estimate.kind.tp_size,
                activation_checkpointing=estimate.kind.checkpointing,
                sharding=self.options[name].sharding(estimate.kind, estimate.dp_size),
            )
            for name, estimate in estimated.estimates.items()
        }
        return Candidate(layouts, estimated.colocated_with, estimated.num_microbatches, self.problem.first_schedule)

    def _kinds(self) -> list[ParallelConfigs]:
        """Tensor-parallel sizes that all modules support, with recomputation in all that support it or in none."""
        result: list[ParallelConfigs] = []
        for tp_size in sorted({kind.tp_size for options in self.options.values() for kind in options.plain_kinds}):
            for recompute in (False, True):
                kinds = {}
                for name, options in self.options.items():
                    same = [kind for kind in options.plain_kinds if (kind.cp_size, kind.tp_size) == (1, tp_size)]
                    if same:
                        kinds[name] = min(same, key=lambda kind: kind.checkpointing != recompute)
                if len(kinds) == len(self.options) and kinds not in result:
                    result.append(kinds)
        return result

    def _microbatch_counts(self, replica: int) -> list[int]:
        if self.problem.microbatch_size is not None:
            return [-(-replica // self.problem.microbatch_size)]
        return [count for count in divisors(replica) if count <= _MOST_MICROBATCHES]

    def _estimated(
        self, kinds: ParallelConfigs, dp_size: int, pp_size: int, count: int
    ) -> Iterator[EstimatedCandidate]:
        """Candidates with the best splits of the stages between the parts of the model."""
        num_samples = self.problem.global_batch_size / dp_size / count
        times = (options.layer_ms(kinds[name], num_samples).sum() for name, options in self.options.items())
        warm_up_ms = float(sum(times))
        if pp_size == 1:
            colocated_with = {name: LANGUAGE_MODEL for name in self.options if name != LANGUAGE_MODEL}
            estimates = {name: self._estimate(name, kinds[name], dp_size, 1, num_samples) for name in self.options}
            yield EstimatedCandidate(count * warm_up_ms, estimates, colocated_with, count)
            return
        colocated_with = {name: names[0] for names in self.sharing for name in names[1:]}
        slowest = [self._slowest(names, kinds, num_samples) for names in self.sharing]
        splits = []
        for stages in self._splits(pp_size):
            slowest_stage_ms = max(times[size - 1] for times, size in zip(slowest, stages, strict=True))
            splits.append((warm_up_ms + (count - 1) * slowest_stage_ms, stages))
        for step_ms, stages in heapq.nsmallest(_MAX_SPLITS, splits):
            estimates = {
                name: self._estimate(name, kinds[name], dp_size, size, num_samples)
                for names, size in zip(self.sharing, stages, strict=True)
                for name in names
            }
            yield EstimatedCandidate(step_ms, estimates, colocated_with, count)

    def _slowest(self, names: tuple[str, ...], kinds: ParallelConfigs, num_samples: float) -> list[float]:
        """Time of the slowest stage of modules that share their stages, for 1, 2, ... stages."""
        key = names, tuple(kinds[name] for name in names), num_samples
        if key not in self._known:
            layers_ms = [self.options[name].layer_ms(kinds[name], num_samples) for name in names]
            max_stages = min(self.options[name].max_stages for name in names)
            stages = (sum(_stage_ms(values, count) for values in layers_ms) for count in range(1, max_stages + 1))
            self._known[key] = [float(np.max(values)) for values in stages]
        return self._known[key]

    def _splits(self, pp_size: int) -> Iterator[tuple[int, ...]]:
        """Numbers of stages of modules that share them, from one to its number of layers."""
        limits = [min(self.options[name].max_stages for name in names) for names in self.sharing]
        for ends in itertools.combinations(range(1, pp_size), len(self.sharing) - 1):
            stages = tuple(np.diff([0, *ends, pp_size]).tolist())
            if all(count <= limit for count, limit in zip(stages, limits, strict=True)):
                yield stages

    def _estimate(
        self, name: str, kind: ParallelConfig, dp_size: int, pp_size: int, num_samples: float
    ) -> LayoutEstimate:
        """Sizes of a module with its memory estimates."""
        options = self.options[name]
        first, last = (
            float(options.state_bytes(kind, pp_size, last=is_last, dp_size=dp_size)) for is_last in (False, True)
        )
        saved = options.saved_bytes(kind, num_samples) / pp_size
        return LayoutEstimate(
            kind, dp_size, pp_size, num_samples, first, last, *options.running_bytes(kind, num_samples), saved
        )


def _stage_ms(layer_ms: NDArray, num_stages: int) -> NDArray:
    """`[num_stages]`: times of even stages."""
    return np.add.reduceat(layer_ms, _starts(len(layer_ms), num_stages))


@lru_cache(maxsize=4096)
def _starts(num_layers: int, num_stages: int) -> NDArray:
    """`[num_stages]`: the first layer of each even stage."""
    return np.cumsum([0, *even_layers(num_layers, num_stages)])[:-1]
