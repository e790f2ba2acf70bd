"""Predictions with one rank for all that run the same list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..arrange import arrange_step
from ..cost import StepCost, batch_workloads, eager_caps, memory_per_rank
from ..cost.optimizer import optimizer_ms
from ..plan import SampleSizes
from ..schedule import Condensed, Span, SumSpan, condensed_program, condensed_ranks, simulate
from .steps import PlannedStep, Prediction, StepPlanner


def on_all_ranks(prediction: Prediction) -> Prediction:
    """
    A prediction with the spans of all ranks in place of those of one of all that run the same list.

    Args:
        prediction ([`Prediction`]): From [`predict_condensed`].
    """
    plan, simulation = prediction.plan, prediction.simulation
    tasks = {span.task: span for span in simulation.spans}
    spans = [
        Span(rank, task, span.start_ms, span.end_ms)
        for task, span in tasks.items()
        for rank in plan.stage(*task.stage_key).all_ranks
    ]
    ordered = tuple(sorted(spans, key=lambda span: (span.start_ms, span.rank, span.end_ms)))
    few = _by_rank(simulation.sums)
    sums = [replace(span, rank=rank) for rank, number in condensed_ranks(plan).items() for span in few.get(number, ())]
    sums.sort(key=lambda span: (span.start_ms, span.rank))
    whole = replace(simulation, spans=ordered, num_ranks=plan.world_size, sums=tuple(sums))
    return replace(prediction, simulation=whole)


def _by_rank(sums: Sequence[SumSpan]) -> dict[int, list[SumSpan]]:
    """Gradient sums by their rank."""
    found: dict[int, list[SumSpan]] = {}
    for span in sums:
        found.setdefault(span.rank, []).append(span)
    return found


def predict_condensed(planner: StepPlanner, condensed: Condensed, sizes: SampleSizes) -> Prediction:
    """
    [`StepPlanner.predict`] of a batch with one rank for all that run the same list, many times faster. Its spans are
    of these ranks; its memory is of all.

    Args:
        planner ([`StepPlanner`]): Of the whole plan.
        condensed ([`Condensed`]): Its plan.
        sizes (`SampleSizes`): Of the samples of the batch.
    """
    costs, plan = planner.costs, planner.plan
    workloads = batch_workloads(costs, plan, sizes, planner.max_tokens, planner.memory_bytes)
    step = arrange_step(plan, range(sizes.num_samples), workloads, planner.microbatch_size, planner.method)
    cost = StepCost(costs, plan, step, sizes, condensed.whole_groups)
    caps = eager_caps(costs, plan, step, sizes, planner.memory_bytes) if plan.schedule == "eager" else None
    program = condensed_program(condensed.parts(step), cost, caps=caps, check=False)
    simulation = simulate(condensed.plan, program, cost, cost.message_ms, cost.sync_ms)
    memory = memory_per_rank(costs, plan, step, sizes, simulation.peak_in_flight)
    planned = PlannedStep(step, program, sizes, workloads)
    update_ms = optimizer_ms(planner.costs, plan) if planner.training else 0.0
    utilisation = planner.utilisation(sizes, simulation.iteration_ms + update_ms)
    return Prediction(plan, planned, sizes, simulation, memory, utilisation, update_ms)
