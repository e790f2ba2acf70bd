"""Baselines by layout: one for the whole model (Megatron-LM), fully sharded (FSDP), ratio-based (DistTrain)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..cost import module_model_flops
from ..cost.sharded_passes import GATHERS_IN_PASSES, REDUCES_IN_PASSES
from ..plan import LANGUAGE_MODEL
from ..plan.layout import ModuleLayout
from ..plan.parallel_plan import ShardingSettings
from ..planning.candidates import CandidateSpace, EstimatedCandidate
from ..planning.combinations import Combinations, LayoutEstimate, LayoutTable, side_by_side
from ..planning.options import ModuleOptions, ParallelConfig, divisors, microbatch_counts
from ..planning.problem import Candidate, PlanningProblem
from .allocation import proportional_allocation

ParallelConfigs = Mapping[str, ParallelConfig]

_MAX_SPLITS = 4  # splits of the stages between parts of the model, per layout and number of microbatches


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Stages with nearly equal numbers of layers; the first ones may have one more."""
    size, rest = divmod(num_layers, num_stages)
    return tuple(size + (stage < rest) for stage in range(num_stages))


def _with_even_layers(
    problem: PlanningProblem, options: Mapping[str, ModuleOptions], estimated: EstimatedCandidate
) -> Candidate:
    """The candidate with its layers split evenly."""
    layouts = {
        name: ModuleLayout(
            even_layers(options[name].module_spec.num_layers, estimate.pp_size),
            estimate.dp_size,
            estimate.kind.cp_size,
            estimate.kind.tp_size,
            estimate.kind.activation_checkpointing,
            options[name].sharding(estimate.kind, estimate.dp_size),
        )
        for name, estimate in estimated.estimates.items()
    }
    return Candidate(layouts, estimated.colocated_with, estimated.num_microbatches, problem.first_schedule)


class SingleLayouts:
    """
    All plans with one data-, tensor- and pipeline-parallel size for the whole model, as in Megatron-LM; sizes set by
    the user do not apply.

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
                for count in microbatch_counts(problem, dp_size):
                    yield from self._estimated(kinds, dp_size, pp_size, count)

    def candidate(self, estimated: EstimatedCandidate) -> Candidate:
        """The candidate with its layers split evenly."""
        return _with_even_layers(self.problem, self.options, estimated)

    def _kinds(self) -> list[ParallelConfigs]:
        """Tensor-parallel sizes that all modules support, with recomputation in all that support it or in none."""
        result: list[ParallelConfigs] = []
        for tp_size in sorted({kind.tp_size for options in self.options.values() for kind in options.plain_kinds}):
            for recompute in (False, True):
                kinds = {}
                for name, options in self.options.items():
                    same = [kind for kind in options.plain_kinds if (kind.cp_size, kind.tp_size) == (1, tp_size)]
                    if same:
                        kinds[name] = min(same, key=lambda kind: kind.activation_checkpointing != recompute)
                if len(kinds) == len(self.options) and kinds not in result:
                    result.append(kinds)
        return result

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


class FullyShardedLayouts:
    """
    All plans with every rank data-parallel and every parameter shared, by all ranks or by those of a node (hybrid
    sharding), with recomputation in all modules or in none; sizes set by the user do not apply.
    """

    def __init__(self, problem: PlanningProblem):
        self.problem = problem
        self.options = {name: ModuleOptions(problem, name) for name in problem.spec.modules}

    def __iter__(self) -> Iterator[Candidate]:
        """All candidates, fastest first by the closed form."""
        return iter(sorted(self._candidates(), key=self._estimate_ms))

    def _candidates(self) -> Iterator[Candidate]:
        problem = self.problem
        num_ranks, node_size = problem.num_ranks, problem.costs.device.node_size
        if problem.global_batch_size % num_ranks or num_ranks == 1:
            return
        colocated = {name: LANGUAGE_MODEL for name in problem.spec.modules if name != LANGUAGE_MODEL}
        sizes = [None, node_size] if 1 < node_size < num_ranks and num_ranks % node_size == 0 else [None]
        for shard_size in sizes:
            sharding = ShardingSettings(GATHERS_IN_PASSES, shard_size)
            for recompute in (False, True):
                recomputed = {name: problem.checkpointing.get(name, recompute) for name in problem.spec.modules}
                if not recompute and list(recomputed.values()).count(True) == len(recomputed):
                    continue
                layouts = {
                    name: ModuleLayout((module.num_layers,), num_ranks, 1, 1, recomputed[name], sharding)
                    for name, module in problem.spec.modules.items()
                }
                for count in microbatch_counts(problem, num_ranks):
                    yield Candidate(layouts, colocated, count, problem.first_schedule)

    def _estimate_ms(self, candidate: Candidate) -> float:
        """Time of all microbatches of a replica in sequence, of gradient sums and of the optimizer step."""
        num_samples = self.problem.global_batch_size / self.problem.num_ranks / candidate.num_microbatches
        result = 0.0
        for name, layout in candidate.layouts.items():
            plain = ParallelConfig(1, 1, layout.activation_checkpointing, sharding=layout.sharding)
            kind = plain.with_shards(layout.dp_size)
            layers_ms = float(self.options[name].layer_ms(kind, num_samples).sum())
            result += candidate.num_microbatches * layers_ms + self.options[name].sync_ms(kind, layout.dp_size, 1)
        return result


class RatioLayouts(CandidateSpace):
    """
    All plans in which every module has separate ranks, in proportion to its share of the model's FLOPs (DistTrain,
    section 7.2.1); sizes set by the user do not apply.

    The paper defines only the criterion, "the computational demands (flops) of each module". Here FLOPs are those of
    the forward and backward of a mean sample; the ranks per replica of the language model are the nearest integers to
    the shares, at least one; the layout of a module on its ranks (replicas, stages, tensor parallelism, recomputation)
    is the best one by the closed-form estimate. Layers are split evenly.
    """

    def __init__(self, problem: PlanningProblem):
        plain = tuple(stage for stage in problem.zero_stages if stage < REDUCES_IN_PASSES)
        super().__init__(replace(problem, zero_stages=plain))
        self.work = {}
        for name, options in self.options.items():
            self.work[name] = float(module_model_flops(problem.spec, name, options.tokens, options.squares))

    def ranks(self, dp_size: int) -> dict[str, int]:
        """Module -> its ranks with `dp_size` replicas of the language model; empty if there are too few ranks."""
        per_copy, rest = divmod(self.problem.num_ranks, dp_size)
        if rest or per_copy < len(self.work):
            return {}
        shares = proportional_allocation(self.work, per_copy, rounding="nearest")
        return {name: dp_size * count for name, count in shares.items()}

    def _combined(self) -> Iterator[tuple[Mapping[str, LayoutTable], Mapping[str, str], int, Combinations]]:
        """See [`CandidateSpace`]: encoders run next to each other, all other modules in sequence."""
        spec = self.problem.spec
        for dp_size in divisors(self.problem.global_batch_size):
            ranks = self.ranks(dp_size)
            if not ranks:
                continue
            total = self.problem.num_ranks
            for count in microbatch_counts(self.problem, dp_size):
                tables = {name: self._table(name, dp_size, count) for name in self.options}
                modules = {n: Combinations.of(n, table).with_ranks(ranks[n]) for n, table in tables.items()}
                encoders = [modules.pop(name) for name in spec.encoders]
                combined = side_by_side(encoders, float(count - 1), total) if encoders else None
                for layouts in modules.values():
                    combined = (
                        layouts
                        if combined is None
                        else combined.on_separate_ranks(layouts, None, total, in_series=True)
                    )
                if combined is not None:
                    yield tables, {}, count, combined

    def candidate(self, estimated: EstimatedCandidate) -> Candidate:
        """The candidate with its layers split evenly."""
        return _with_even_layers(self.problem, self.options, estimated)
