"""Balance of the microbatches of a step: their times, and deferred samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from ..schedule import Span, microbatch_forward_ms
from .arrangements import arrange_step

Times = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Balance:
    """Forward times of all microbatches of a step, estimated or measured."""

    # module -> replica -> float64 [microbatches], through the whole module; 0 if empty
    forward_ms: Mapping[str, Times]
    # the part of deferred samples, which an encoder processes in an earlier microbatch, if known; only of the language
    # model
    deferred_ms: Mapping[str, Times]
    deferred_fraction: float = 0.0  # of the step's samples

    @property
    def num_microbatches(self) -> int:
        """Maximum number of microbatches of a replica of the language model."""
        return max(len(times) for times in self.forward_ms[LANGUAGE_MODEL])

    def std_ms(self, module: str) -> float:
        """Standard deviation over the microbatches of a replica, averaged over replicas."""
        return float(np.mean([times.std() for times in self.forward_ms[module]]))

    def microbatch_excess(self, module: str) -> float:
        """Relative excess of the largest microbatch over the mean, averaged over replicas."""
        return float(np.mean([excess(times) for times in self.forward_ms[module]]))

    def replica_excess(self, module: str) -> float:
        """Relative excess of the replica with the most work over the mean."""
        return excess([times.sum() for times in self.forward_ms[module]])


def excess(values: Iterable[float]) -> float:
    """Relative excess of the maximum over the mean."""
    numbers = np.fromiter(values, float)
    mean = float(numbers.mean())
    return float(numbers.max()) / mean - 1 if mean else 0.0


def step_balance(step: StepPlan, workloads: Workloads) -> Balance:
    """Estimates the balance of an arrangement from the workloads of its samples."""
    times = {name: _microbatch_ms(step, name, workloads) for name in step.microbatches}
    late = is_deferred(step)
    deferred = _sums(step, LANGUAGE_MODEL, workloads.forward_ms[LANGUAGE_MODEL] * late)
    return Balance(times, {LANGUAGE_MODEL: deferred}, float(late.mean()) if len(late) else 0.0)


def is_deferred(step: StepPlan) -> np.ndarray:
    """bool `[samples]`: whether the language model processes a sample in a later microbatch than an encoder."""
    late = np.zeros(len(step.samples), dtype=bool)
    for name, targets in step.targets.items():
        if LANGUAGE_MODEL not in targets:
            continue
        for replica, microbatches in enumerate(step.microbatches[name]):
            due = step.consumer_turns(name, replica, LANGUAGE_MODEL)
            for index, batch_indices in enumerate(microbatches):
                late[[batch_index for batch_index in batch_indices if index < due.get(batch_index, index)]] = True
    return late


def deferred_fraction(step: StepPlan) -> float:
    """Share of a step's samples that are deferred."""
    return float(is_deferred(step).mean()) if step.samples else 0.0


def measured_balance(step: StepPlan, spans: Iterable[Span]) -> Balance:
    """Measures the balance of a step that ran from the spans of its tasks, see [`microbatch_forward_ms`]."""
    forward_ms = microbatch_forward_ms(spans)
    times: dict[str, Times] = {}
    for name, replicas in step.microbatches.items():
        times[name] = tuple(np.zeros(len(microbatches)) for microbatches in replicas)
        for replica, all_times in enumerate(times[name]):
            # Microbatches without samples may have empty tasks, also behind the last one with samples.
            ran = forward_ms.get((name, replica), np.zeros(0))[: len(all_times)]
            has_samples = np.array(list(map(len, replicas[replica][: len(ran)])), np.int64) > 0
            all_times[: len(ran)] = np.where(has_samples, ran, 0.0)
    return Balance(times, {}, deferred_fraction(step))


def compare_with_contiguous(
    plan: ParallelPlan, step: StepPlan, workloads: Workloads, microbatch_size: int
) -> tuple[Balance, Balance]:
    """Estimates the balance of a step's samples in the sampler's order, and in the step's order."""
    before = arrange_step(plan, step.samples, workloads, microbatch_size, "contiguous", step.epoch)
    return step_balance(before, workloads), step_balance(step, workloads)


def _microbatch_indices(step: StepPlan, module: str) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """For each replica: its samples, their microbatches, and the number of microbatches."""
    for microbatches in step.microbatches[module]:
        batch_indices = np.fromiter(chain.from_iterable(microbatches), np.int64)
        counts = [len(microbatch) for microbatch in microbatches]
        yield batch_indices, np.repeat(np.arange(len(microbatches)), counts), len(microbatches)


def _microbatch_ms(step: StepPlan, module: str, workloads: Workloads) -> Times:
    """Replica -> float64 `[microbatches]`: forward times."""
    return tuple(workloads.microbatch_ms(module, *replica) for replica in _microbatch_indices(step, module))


def _sums(step: StepPlan, module: str, values: np.ndarray) -> Times:
    """Replica -> float64 `[microbatches]`: sums of values of samples."""
    return tuple(
        np.bincount(microbatch, values[batch_indices], count).astype(float)
        for batch_indices, microbatch, count in _microbatch_indices(step, module)
    )
