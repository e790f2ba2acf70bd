"""The fastest candidates on several batches."""

from __future__ import annotations

from ..steps.step_planner import Prediction
from .large_samples import runs_large_samples_alone
from .problem import RankedPlan
from .ranking import distinct_sizes, in_order, sizes_of
from .simulations import Simulated, Simulations

_SPREAD = 1.05  # ratio to the best mean up to which plans run the next batch as well


def finalists(simulations: Simulations, share: float, least: int) -> list[RankedPlan]:
    """
    The fastest candidates over all batches, within a share of the effort and at least `least` diverse ones. Step times
    differ between batches, so that all candidates within [`_SPREAD`] of the best mean run the next batch.
    """
    num_tasks = 0
    racing: list[tuple[Simulated, list[Prediction]]] = [(simulated, []) for simulated in simulations.whole()]
    for number in range(1, len(simulations.batches)):
        racing.sort(key=_mean_ms)
        slowest_ms = _SPREAD * _mean_ms(racing[0]) if racing else 0.0
        ahead: list[tuple[Simulated, list[Prediction]]] = []
        for simulated, predictions in racing:
            could_win = _mean_ms((simulated, predictions)) <= slowest_ms and num_tasks < share * simulations.effort
            diverse = distinct_sizes(other for other, _ in ahead)
            is_new = all(sizes_of(other.candidate) != sizes_of(simulated.candidate) for other in diverse)
            if not could_win and len(diverse) >= least:
                break
            if could_win or is_new:
                num_tasks += simulated.candidate.num_tasks
                prediction = simulations.on_later_batch(simulated.candidate, number)
                if prediction is None:
                    simulations.drop(simulated.candidate)
                else:
                    ahead.append((simulated, [*predictions, prediction]))
        racing = ahead
    return in_order(_ranked(simulations, simulated, predictions) for simulated, predictions in racing)


def _mean_ms(racer: tuple[Simulated, list[Prediction]]) -> float:
    """Mean step time over the batches so far."""
    simulated, others = racer
    return (simulated.step_ms + sum(other.step_ms for other in others)) / (1 + len(others))


def _ranked(simulations: Simulations, simulated: Simulated, others: list[Prediction]) -> RankedPlan:
    """A candidate with the predictions of all batches."""
    candidate, limit = simulated.candidate, simulations.problem.memory_bytes
    first = simulated.prediction or simulations.predict(candidate, simulations.batches[0], limit)
    return RankedPlan(candidate, first.plan, (first, *others), simulated.estimated.step_ms)


def with_large_samples(simulations: Simulations, least: int) -> list[RankedPlan]:
    """
    Plans that exceed the memory only by samples larger than a microbatch may be, up to `least` diverse ones, smallest
    memory first. Such a sample has a microbatch of its own, whose memory is an estimate.
    """
    result: list[RankedPlan] = []
    limit = simulations.problem.memory_bytes
    for _, candidate in sorted(simulations.over.values(), key=lambda entry: entry[0]):
        if limit is None or len(distinct_sizes(result)) >= least:
            break
        try:
            predictions = [simulations.predict(candidate, batch, limit) for batch in simulations.batches]
        except ValueError:  # its state leaves no memory for one of the batches
            continue
        if all(p.peak_memory_bytes <= limit or runs_large_samples_alone(p) for p in predictions):
            result.append(RankedPlan(candidate, predictions[0].plan, tuple(predictions), 0.0))
    return sorted(result, key=lambda plan: plan.peak_memory_bytes)
