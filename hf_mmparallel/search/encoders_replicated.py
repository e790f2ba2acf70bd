"""
Encoders copied on every rank of the language model and run again in each of its stages: Cornstarch's baseline
"encoders-replicated" (first version, sections 2.2 and 6.1), after how Llama 3 was made multimodal. The engine has no
such plan; its step is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..arrange import contiguous_step
from ..cost import LayerTable, StepCost, layer_table, memory_per_rank, model_flops
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, SampleSizes, sync_groups
from ..schedule import Task, condense, condensed_program, simulate
from .options import Kind, ModuleOptions, divisors
from .problem import Candidate, Layout, PlanningProblem
from .single_layout import even_layers

_MOST_MICROBATCHES = 256


@dataclass(frozen=True)
class Replicated:
    """
    One way to run the language model with its encoders in every stage.

    Args:
        layout (`Layout`): Of the language model.
        num_microbatches (`int`): Of each of its replicas.
        estimate_ms (`float`): The closed form of its step.
    """

    layout: Layout
    num_microbatches: int
    estimate_ms: float

    def __str__(self) -> str:
        return f"language_model: {self.layout}; encoders in every stage; {self.num_microbatches} microbatches"


@dataclass(frozen=True)
class ReplicatedStep:
    """
    What it takes.

    Args:
        found ([`Replicated`]): The layout.
        step_ms (`float`): Mean over the batches.
        bubble_fraction (`float`): Share of all ranks' time without a task.
        memory_bytes (`float`): Of the fullest rank.
        flops_utilisation (`float`): Operations that the model needs, those of an encoder once, over the peak of all.
    """

    found: Replicated
    step_ms: float
    bubble_fraction: float
    memory_bytes: float
    flops_utilisation: float


class ReplicatedEncoders:
    """
    All plans with the encoders in each of at least two stages of the language model; with one stage there is nothing
    that runs twice, and [`SingleLayouts`] has that plan.

    A task of the language model also runs the encoders on all media of its microbatch: their forward, and their
    backward where something of them is trained. Their gradients are summed over all ranks. Layers of the language
    model are cut evenly, samples come in the sampler's order. An encoder has the tensor parallelism of the language
    model where its heads allow it, and is whole on each rank otherwise.

    Args:
        problem ([`PlanningProblem`]): The question; sizes that the user has set do not count.
    """

    def __init__(self, problem: PlanningProblem):
        self.problem, self.spec = problem, problem.spec
        self.options = {name: ModuleOptions(problem, name) for name in problem.spec.modules}

    def __iter__(self) -> Iterator[Replicated]:
        """All of them, in no order."""
        problem, language = self.problem, self.options[LANGUAGE_MODEL]
        for kind in language.kinds:
            if kind.cp_size > 1 or problem.num_ranks % kind.tp_size:
                continue
            for pp_size in divisors(problem.num_ranks // kind.tp_size)[1:]:
                dp_size = problem.num_ranks // kind.tp_size // pp_size
                if pp_size > language.max_stages or problem.global_batch_size % dp_size:
                    continue
                layers = even_layers(language.part.num_layers, pp_size)
                layout = Layout(layers, dp_size, tp_size=kind.tp_size, activation_checkpointing=kind.checkpointing)
                for count in self._microbatch_counts(problem.global_batch_size // dp_size):
                    yield Replicated(layout, count, self._estimate_ms(kind, layout, count))

    def _microbatch_counts(self, replica: int) -> list[int]:
        if self.problem.microbatch_size is not None:
            return [-(-replica // self.problem.microbatch_size)]
        return [count for count in divisors(replica) if count <= _MOST_MICROBATCHES]

    def _encoder_kind(self, name: str, layout: Layout) -> Kind:
        """How an encoder is shared and kept on the ranks of a stage."""
        kinds = [kind for kind in self.options[name].kinds if kind.tp_size in (1, layout.tp_size)]
        return max(kinds, key=lambda kind: (kind.tp_size, kind.checkpointing == layout.activation_checkpointing))

    def _estimate_ms(self, kind: Kind, layout: Layout, count: int) -> float:
        """`sum of stages + (microbatches - 1) x slowest stage`, the encoders in each stage."""
        num_samples = self.problem.global_batch_size / layout.dp_size / count
        again_ms = sum(
            float(self.options[name].layer_ms(self._encoder_kind(name, layout), num_samples).sum())
            for name in self.spec.encoders
        )
        stops = np.cumsum([0, *layout.layers])[:-1]
        stages = np.add.reduceat(self.options[LANGUAGE_MODEL].layer_ms(kind, num_samples), stops) + again_ms
        return float(stages.sum() + (count - 1) * stages.max())

    def step(self, found: Replicated, batches: Sequence[SampleSizes]) -> ReplicatedStep:
        """
        Simulates a way to run it.

        Args:
            found ([`Replicated`]): The way.
            batches (`Sequence[SampleSizes]`): Global batches.
        """
        plan, language = self._language_plan(found)
        times, memories = zip(*(self._simulated(found, plan, language, batch) for batch in batches), strict=True)
        step_ms, bubble = (float(np.mean(values)) for values in zip(*times, strict=True))
        peak = 1e9 * self.problem.costs.device.peak_tflops * self.problem.num_ranks
        utilisation = float(np.mean([model_flops(self.spec, batch) for batch in batches])) / (peak * step_ms)
        return ReplicatedStep(found, step_ms, bubble, max(memories), utilisation)

    def _language_plan(self, found: Replicated) -> tuple[ParallelPlan, ModelSpec]:
        """The plan of the language model alone, whose stages have a backward where an encoder needs one."""
        tied = {name: place for name, place in self.spec.tied.items() if place[0] == LANGUAGE_MODEL}
        language = ModelSpec({LANGUAGE_MODEL: replace(self.spec.language_model, features=())}, tied)
        plan = Candidate({LANGUAGE_MODEL: found.layout}, {}, found.num_microbatches, self.problem.first_schedule).plan(
            language
        )
        if not any(p.trainable for name in self.spec.encoders for p in self.spec.modules[name].parameters):
            return plan, language
        module = plan.modules[LANGUAGE_MODEL]
        replicas = tuple(tuple(replace(stage, trainable=True) for stage in replica) for replica in module.replicas)
        return replace(plan, modules={LANGUAGE_MODEL: replace(module, replicas=replicas)}), language

    def _simulated(
        self, found: Replicated, plan: ParallelPlan, language: ModelSpec, batch: SampleSizes
    ) -> tuple[tuple[float, float], float]:
        """(Step in ms, bubble) and bytes of the fullest rank."""
        size = -(-self.problem.global_batch_size // (found.layout.dp_size * found.num_microbatches))
        step = contiguous_step(plan, range(batch.num_samples), size)
        few = condense(plan, sync_groups(language, plan))
        costs = self.problem.costs
        stages = StepCost(costs, plan, step, batch, few.whole_groups)
        encoders = {name: self._encoder_kind(name, found.layout) for name in self.spec.encoders}
        tables = {name: layer_table(costs, name, kind.tp_size, kind.checkpointing) for name, kind in encoders.items()}
        slots = {key: list(chunks[0]) for key, chunks in step.chunks.items() if chunks}
        cost = _with_encoders(stages, tables, slots, batch)
        program = condensed_program(few.parts(step), cost, check=False)
        simulation = simulate(few.plan, program, cost, stages.message_ms, stages.sync_ms)
        sums_ms = [
            self.options[name].sync_ms(kind, self.problem.num_ranks // kind.tp_size, 1)
            for name, kind in encoders.items()
        ]
        step_ms = simulation.iteration_ms + sum(sums_ms)
        busy_ms = simulation.iteration_ms * (1 - simulation.bubble_fraction)
        memory = memory_per_rank(costs, plan, step, batch, simulation.peak_in_flight)
        peak = max(own.total for own in memory.values()) + self._encoder_bytes(
            encoders, tables, slots, batch, max(simulation.peak_in_flight.values())
        )
        return (step_ms, 1 - busy_ms / step_ms), peak

    def _encoder_bytes(
        self,
        kinds: Mapping[str, Kind],
        tables: Mapping[str, LayerTable],
        slots: Mapping[tuple, list[int]],
        batch: SampleSizes,
        in_flight: float,
    ) -> float:
        """State of all encoders, and the activations of the microbatches in flight, each as large as the largest."""
        total = 0.0
        for name, kind in kinds.items():
            options = self.options[name]
            largest = max(float(batch.tokens[name][own].sum()) for own in slots.values())
            kept = options.kept_bytes(kind) * largest / max(options.tokens, 1.0)
            total += options.state_bytes(kind, 1) + kept * (in_flight if tables[name].backward.any() else 1.0)
        return total


def _with_encoders(
    stages: StepCost, tables: Mapping[str, LayerTable], slots: Mapping[tuple, list[int]], batch: SampleSizes
) -> Callable[[Task], float]:
    """Task of the language model -> milliseconds, with all encoders on the media of its samples."""
    again: dict[tuple, float] = {}

    def encoders_ms(task: Task) -> float:
        key = (task.kind, task.replica, task.microbatch)
        if key not in again:
            own, place = slots[task.module, task.replica, task.microbatch], int(task.kind != "fwd")
            again[key] = math.fsum(
                float(table.times(batch.tokens[name][own].sum(), batch.squares[name][own].sum())[place].sum())
                for name, table in tables.items()
            )
        return again[key]

    return lambda task: stages(task) + encoders_ms(task)
