"""Predictions on representatives: one rank stands for all ranks that run the same actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..cost import StepCost, fitting_in_flight, memory_per_rank
from ..cost.gradient_sums import optimizer_ms
from ..plan import ParallelPlan, SampleSizes
from ..plan.methods import ARRANGEMENT_CANDIDATES
from ..schedule import Replay, Simulation, Span, SumSpan, default_cost, representative_ranks, simulate_parts
from .step_planner import PlannedStep, Prediction, StepPlanner


def on_all_ranks(prediction: Prediction) -> Prediction:
    """Expands a prediction of [`predict_batch`], on representatives, to all ranks."""
    return replace(prediction, simulation=on_plan(prediction.simulation, prediction.plan))


def on_plan(simulation: Simulation, plan: ParallelPlan) -> Simulation:
    """Expands a simulation of representative ranks to the whole plan."""
    tasks = {span.task: span for span in simulation.spans}
    spans = [
        Span(rank, task, span.start_ms, span.end_ms, span.wait_ms)
        for task, span in tasks.items()
        for rank in plan.stage(*task.stage_key).all_ranks
    ]
    ordered = tuple(sorted(spans, key=lambda span: (span.start_ms, span.rank, span.end_ms)))
    by_representative = _by_rank(simulation.sums)
    sums = [
        replace(span, rank=rank)
        for rank, number in representative_ranks(plan).items()
        for span in by_representative.get(number, ())
    ]
    sums.sort(key=lambda span: (span.start_ms, span.rank))
    return replace(simulation, spans=ordered, num_ranks=plan.world_size, sums=tuple(sums))


def _by_rank(sums: Sequence[SumSpan]) -> dict[int, list[SumSpan]]:
    """Rank -> its gradient all-reduces."""
    result: dict[int, list[SumSpan]] = {}
    for span in sums:
        result.setdefault(span.rank, []).append(span)
    return result


def predict_batch(planner: StepPlanner, sizes: SampleSizes) -> Prediction:
    """
    Predicts a batch like [`StepPlanner.predict`], but on representatives: many times faster, without a program.

    Its spans are those of the representatives; its memory is that of all ranks.
    """
    return predict_arranged(planner, planner.arrange(range(sizes.num_samples), sizes))


def predict_arranged(planner: StepPlanner, arranged: PlannedStep, sizes: SampleSizes | None = None) -> Prediction:
    """Predicts a step with a given arrangement like [`predict_batch`]."""
    # A program that was arranged without sizes does not depend on them.
    known, sizes = arranged.sizes, arranged.sizes if sizes is None else sizes
    assert sizes is not None
    simulation = _replayed(planner, arranged, sizes, known).simulation()
    memory = memory_per_rank(planner.costs, planner.plan, arranged.step, sizes, simulation.peak_in_flight)
    update_ms = optimizer_ms(planner.costs, planner.plan, planner.sync_groups) if planner.training else 0.0
    utilisation = planner.utilisation(sizes, simulation.iteration_ms + update_ms)
    return Prediction(planner.plan, arranged, sizes, simulation, memory, utilisation, update_ms)


def iteration_ms(planner: StepPlanner, arranged: PlannedStep) -> float:
    """Returns the time of [`predict_arranged`] before the optimizer step, faster; the step needs sizes."""
    assert arranged.sizes is not None
    return _replayed(planner, arranged, arranged.sizes, arranged.sizes).iteration_ms


def _replayed(planner: StepPlanner, arranged: PlannedStep, sizes: SampleSizes, known: SampleSizes | None) -> Replay:
    """Replays a step with the costs of `sizes`, ordered by those of the sizes known in advance, if any."""
    costs, plan, step = planner.costs, planner.plan, arranged.step
    cost = StepCost(costs, plan, step, sizes, planner.sum_costs, planner.stage_costs)
    fitting = None
    if known is not None and plan.policy.fills_memory and planner.training:
        fitting = fitting_in_flight(costs, plan, step, known, planner.memory_bytes)
    order_cost = (
        default_cost
        if known is None
        else cost
        if known is sizes
        else StepCost(costs, plan, step, known, (), planner.stage_costs)
    )
    return simulate_parts(
        planner.representatives,
        step,
        cost,
        cost.messages_ms,
        cost.sync_ms,
        order_cost=order_cost,
        training=planner.training,
        fitting_in_flight=fitting,
    )


def simulate_arranged(planner: StepPlanner, arranged: PlannedStep) -> Simulation:
    """Replays a step on all ranks without sizes of samples: a forward takes 1 ms and a backward 2 ms."""
    replay = simulate_parts(planner.representatives, arranged.step, training=planner.training)
    return on_plan(replay.simulation(), planner.plan)


# Default arrangement of a run's steps, by predicted step time.

DEFAULT_ARRANGEMENT = ARRANGEMENT_CANDIDATES[0]  # used without a prediction, if sizes of samples are unknown

AS_FAST = 0.001  # relative difference of predicted times up to which steps are reported as equally fast


@dataclass(frozen=True)
class ArrangementChoice:
    """A chosen arrangement with the reason."""

    arrangement: str = DEFAULT_ARRANGEMENT
    step_ms: Mapping[str, float] = field(default_factory=dict)  # compared arrangement -> predicted time of a step

    def __str__(self) -> str:
        """The reason as text."""
        chosen_ms = self.step_ms[self.arrangement]
        others = sorted((ms, name) for name, ms in self.step_ms.items() if name != self.arrangement)
        slower = [(ms, name) for ms, name in others if ms > chosen_ms * (1 + AS_FAST)]
        times = ", ".join(f"`{name}` {ms:,.4g}" for ms, name in slower or others)
        if others and not slower:
            return (
                f"all are predicted to take {chosen_ms:,.4g} ms a step within {100 * AS_FAST:g} %, so that it hardly "
                f"matters which ({times})"
            )
        equal = ", ".join(f"`{name}`" for _, name in others[: len(others) - len(slower)])
        also = f", {equal} as fast within {100 * AS_FAST:g} %" if equal else ""
        return f"predicted to be fastest, {chosen_ms:,.4g} ms a step{also} ({times})"


def choose_arrangement(planner: StepPlanner, batches: Sequence[SampleSizes]) -> ArrangementChoice:
    """Chooses the candidate with the shortest predicted step, and alike on ranks that are given the same batches."""
    step_ms: dict[str, float] = {}
    update_ms = optimizer_ms(planner.costs, planner.plan, planner.sync_groups) if planner.training else 0.0
    for arrangement in ARRANGEMENT_CANDIDATES:
        # the planner's own arrangement does not matter
        tried = planner.with_arrangement(arrangement)
        arranged = (tried.arrange(range(batch.num_samples), batch) for batch in batches)
        times = [iteration_ms(tried, step) + update_ms for step in arranged]
        step_ms[arrangement] = sum(times) / len(times)
    # among equally fast ones the first candidate
    return ArrangementChoice(min(step_ms, key=lambda arrangement: round(step_ms[arrangement], 6)), step_ms)
