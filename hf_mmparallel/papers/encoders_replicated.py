"""
Encoders replicated on every rank of the language model and run again in each of its stages: the baseline
"encoders-replicated" of Cornstarch (first version, sections 2.2 and 6.1), after the multimodal Llama 3. The engine
can't run such plans; their steps are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..arrange import contiguous_step
from ..cost import LayerTable, StepCost, layer_table, memory_per_rank, model_flops
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, SampleSizes, sync_groups
from ..plan.layout import ModuleLayout
from ..planning.options import ModuleOptions, ParallelConfig, divisors, microbatch_counts
from ..planning.problem import Candidate, PlanningProblem
from ..schedule import Task, find_representatives, simulate
from .baseline_layouts import even_layers


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
        tied = {name: use for name, use in self.spec.tied.items() if use[0] == LANGUAGE_MODEL}
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
