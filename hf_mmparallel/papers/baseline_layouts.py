"""Baselines by layout: one for the whole model (Megatron-LM), fully sharded (FSDP), ratio-based (DistTrain)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..arrange import contiguous_step
from ..cost import LayerTable, StepCost, layer_table, memory_per_rank, model_flops, module_model_flops
from ..cost.sharded_passes import GATHERS_IN_PASSES, REDUCES_IN_PASSES
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, SampleSizes, sync_groups
from ..plan.checkpointing import Checkpointing
from ..plan.layout import ModuleLayout
from ..plan.parallel_plan import ShardingSettings
from ..planning.candidates import CandidateSpace, EstimatedCandidate
from ..planning.combinations import Combinations, LayoutEstimate, LayoutTable, side_by_side
from ..planning.options import ModuleOptions, ParallelConfig, divisors, microbatch_counts
from ..planning.problem import Candidate, PlanningProblem
from ..schedule import Task, find_representatives, simulate
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
        *limits, last = (min(self.options[name].max_stages for name in names) for names in self.sharing)
        for stages in itertools.product(*(range(1, limit + 1) for limit in limits)):
            rest = pp_size - sum(stages)
            if 1 <= rest <= last:
                yield *stages, rest

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
                recomputed: dict[str, Checkpointing] = {
                    name: problem.checkpointing.get(name, recompute) for name in problem.spec.modules
                }
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


# Encoders replicated on every rank of the language model and run again in each of its stages: the baseline "encoders-
# replicated" of Cornstarch (first version, sections 2.2 and 6.1), after the multimodal Llama 3. The engine can't run
# such plans; their steps are simulated.


@dataclass(frozen=True)
class ReplicatedLayout:
    """A layout of the language model with the encoders in every stage."""

    layout: ModuleLayout  # of the language model
    num_microbatches: int  # of each of its replicas
    estimate_ms: float  # closed-form estimate of its step time

    def __str__(self) -> str:
        return f"language_model: {self.layout}; encoders in every stage; {self.num_microbatches} microbatches"


@dataclass(frozen=True)
class ReplicatedStep:
    """Simulated step of a layout with replicated encoders."""

    layout: ReplicatedLayout
    step_ms: float  # mean over the batches
    bubble_fraction: float  # share of all ranks' time without a task
    memory_bytes: float  # of the fullest rank
    flops_utilisation: float  # model FLOPs, those of each encoder once, over the peak of all ranks


class ReplicatedEncoders:
    """
    All layouts with the encoders in each of at least two stages of the language model; sizes set by the user do not
    apply.

    With one stage nothing runs twice, and [`SingleLayouts`] has that layout. A task of the language model also runs
    the encoders on all media of its microbatch: their forward, and their backward if any of their parameters are
    trained. Their gradients are all-reduced over all ranks. Layers of the language model are split evenly; samples are
    in the sampler's order. An encoder has the tensor parallelism of the language model if its heads allow it, and is
    replicated otherwise.
    """

    def __init__(self, problem: PlanningProblem):
        self.problem, self.spec = problem, problem.spec
        self.options = {name: ModuleOptions(problem, name) for name in problem.spec.modules}

    def __iter__(self) -> Iterator[ReplicatedLayout]:
        """All layouts, in no particular order."""
        problem, language = self.problem, self.options[LANGUAGE_MODEL]
        for kind in language.plain_kinds:
            if kind.cp_size > 1 or problem.num_ranks % kind.tp_size:
                continue
            for pp_size in divisors(problem.num_ranks // kind.tp_size)[1:]:
                dp_size = problem.num_ranks // kind.tp_size // pp_size
                if pp_size > language.max_stages or problem.global_batch_size % dp_size:
                    continue
                layers = even_layers(language.module_spec.num_layers, pp_size)
                sharding = language.sharding(kind, dp_size)
                layout = ModuleLayout(layers, dp_size, 1, kind.tp_size, kind.activation_checkpointing, sharding)
                for count in microbatch_counts(problem, dp_size):
                    yield ReplicatedLayout(layout, count, self._estimate_ms(kind, layout, count))

    def _encoder_kind(self, name: str, layout: ModuleLayout) -> ParallelConfig:
        """Configuration of an encoder on the ranks of a stage."""
        kinds = [kind for kind in self.options[name].plain_kinds if kind.tp_size in (1, layout.tp_size)]
        return max(
            kinds, key=lambda kind: (kind.tp_size, kind.activation_checkpointing == layout.activation_checkpointing)
        )

    def _estimate_ms(self, kind: ParallelConfig, layout: ModuleLayout, count: int) -> float:
        """`sum of stages + (microbatches - 1) x slowest stage`, with the encoders in each stage."""
        num_samples = self.problem.global_batch_size / layout.dp_size / count
        encoders_ms = sum(
            float(self.options[name].layer_ms(self._encoder_kind(name, layout), num_samples).sum())
            for name in self.spec.encoders
        )
        stops = np.cumsum([0, *layout.layers])[:-1]
        stages = np.add.reduceat(self.options[LANGUAGE_MODEL].layer_ms(kind, num_samples), stops) + encoders_ms
        return float(stages.sum() + (count - 1) * stages.max())

    def step(self, layout: ReplicatedLayout, batches: Sequence[SampleSizes]) -> ReplicatedStep:
        """Simulates a layout on global batches."""
        plan, language = self._language_plan(layout)
        times, memories = zip(*(self._simulated(layout, plan, language, batch) for batch in batches), strict=True)
        step_ms, bubble = (float(np.mean(values)) for values in zip(*times, strict=True))
        peak = 1e9 * self.problem.costs.device.peak_tflops * self.problem.num_ranks
        utilisation = float(np.mean([model_flops(self.spec, batch) for batch in batches])) / (peak * step_ms)
        return ReplicatedStep(layout, step_ms, bubble, max(memories), utilisation)

    def _language_plan(self, replicated: ReplicatedLayout) -> tuple[ParallelPlan, ModelSpec]:
        """The plan of the language model alone, whose stages have a backward if an encoder needs one."""
        language_uses = {n: tuple(u for u in uses if u[0] == LANGUAGE_MODEL) for n, uses in self.spec.tied.items()}
        tied = {name: uses for name, uses in language_uses.items() if uses}
        language = ModelSpec({LANGUAGE_MODEL: replace(self.spec.language_model, features=())}, tied)
        candidate = Candidate(
            {LANGUAGE_MODEL: replicated.layout}, {}, replicated.num_microbatches, self.problem.first_schedule
        )
        plan = candidate.plan(language)
        if not any(p.trainable for name in self.spec.encoders for p in self.spec.modules[name].parameters):
            return plan, language
        module = plan.modules[LANGUAGE_MODEL]
        replicas = tuple(tuple(replace(stage, trainable=True) for stage in replica) for replica in module.replicas)
        return replace(plan, modules={LANGUAGE_MODEL: replace(module, replicas=replicas)}), language

    def _simulated(
        self, replicated: ReplicatedLayout, plan: ParallelPlan, language: ModelSpec, batch: SampleSizes
    ) -> tuple[tuple[float, float], float]:
        """(Step in ms, bubble) and peak bytes of the fullest rank."""
        size = -(-self.problem.global_batch_size // (replicated.layout.dp_size * replicated.num_microbatches))
        step = contiguous_step(plan, range(batch.num_samples), size)
        representatives = find_representatives(plan, sync_groups(language, plan))
        costs = self.problem.costs
        stages = StepCost(costs, plan, step, batch, representatives.first_represented)
        encoders = {name: self._encoder_kind(name, replicated.layout) for name in self.spec.encoders}
        tables = {
            name: layer_table(costs, name, kind.tp_size, kind.activation_checkpointing)
            for name, kind in encoders.items()
        }
        batch_indices = {key: list(chunks[0]) for key, chunks in step.chunks.items() if chunks}
        cost = _with_encoders(stages, tables, batch_indices, batch)
        timeline = simulate(representatives, step, cost, stages.messages_ms, stages.sync_ms)
        sums_ms = [
            self.options[name].sync_ms(kind, self.problem.num_ranks // kind.tp_size, 1)
            for name, kind in encoders.items()
        ]
        step_ms = timeline.iteration_ms + sum(sums_ms)
        busy_ms = timeline.iteration_ms * (1 - timeline.bubble_fraction)
        memory = memory_per_rank(costs, plan, step, batch, timeline.peak_in_flight)
        peak = max(rank.total for rank in memory.values()) + self._encoder_bytes(
            encoders, tables, batch_indices, batch, max(timeline.peak_in_flight.values())
        )
        return (step_ms, 1 - busy_ms / step_ms), peak

    def _encoder_bytes(
        self,
        kinds: Mapping[str, ParallelConfig],
        tables: Mapping[str, LayerTable],
        batch_indices: Mapping[tuple, list[int]],
        batch: SampleSizes,
        in_flight: float,
    ) -> float:
        """State of all encoders, and activations of microbatches in flight, all as large as the largest one."""
        total = 0.0
        for name, kind in kinds.items():
            options = self.options[name]
            largest = max(float(batch.tokens[name][chunk].sum()) for chunk in batch_indices.values())
            saved = options.saved_bytes(kind) * largest / max(options.tokens, 1.0)
            state = options.state_bytes(kind, 1, dp_size=self.problem.num_ranks // kind.tp_size)
            total += state + saved * (in_flight if tables[name].backward.any() else 1.0)
        return total


def _with_encoders(
    stages: StepCost, tables: Mapping[str, LayerTable], batch_indices: Mapping[tuple, list[int]], batch: SampleSizes
) -> Callable[[Task], float]:
    """Task of the language model -> milliseconds, including all encoders on the media of its samples."""
    known: dict[tuple, float] = {}

    def encoders_ms(task: Task) -> float:
        key = (task.kind, task.replica, task.microbatch)
        if key not in known:
            chunk, direction = batch_indices[task.module, task.replica, task.microbatch], task.row.direction
            known[key] = math.fsum(
                float(table.times(batch.tokens[name][chunk].sum(), batch.squares[name][chunk].sum())[direction].sum())
                for name, table in tables.items()
            )
        return known[key]

    return lambda task: stages(task) + encoders_ms(task)
