"""Balance of microbatches for the Trainer's log: their workloads as arranged, their forwards as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..arrange.balance import Balance, compare_with_contiguous, measured_balance
from ..runtime.engine import ParallelEngine
from ..runtime.step_result import StepResult
from ..schedule import Span
from ..world import World


@dataclass(frozen=True)
class RanStep:
    """Results of a step on one rank, until the next log."""

    result: StepResult  # times and work of its tasks
    counts: Mapping[str, tuple[int, ...]]  # module -> microbatches of each of its replicas
    forward_ms: np.ndarray  # (microbatches of all replicas of all modules,), of the stages whose first rank this is
    arrangement: Mapping[str, float] = field(default_factory=dict)  # see [`arrangement_metrics`]


def last_balances(engine: ParallelEngine, microbatch_size: int) -> tuple[Balance, Balance] | None:
    """Returns the workloads of the last step in the sampler's order and as arranged; `None` if sizes are not known."""
    step, sizes, workloads = engine.current_step, engine.current_sizes, engine.current_workloads
    if step is None or sizes is None or workloads is None or not sizes.known:
        return None
    return compare_with_contiguous(engine.plan, step, workloads, microbatch_size)


def last_step(engine: ParallelEngine, microbatch_size: int) -> RanStep:
    """The step that an engine ran last. All ranks know the arrangement, so that nothing is communicated."""
    result, step = engine.last_result, engine.current_step
    assert result is not None and step is not None
    spans = [Span(engine.rank, timed.task, timed.start_ms, timed.end_ms) for timed in result.timeline]
    mine = measured_balance(step, [span for span in spans if engine.first_rank(span.task) == engine.rank])
    counts = {name: tuple(map(len, replicas)) for name, replicas in mine.forward_ms.items()}
    forward_ms = np.concatenate([times for replicas in mine.forward_ms.values() for times in replicas])
    balances = last_balances(engine, microbatch_size)
    return RanStep(result, counts, forward_ms, {} if balances is None else arrangement_metrics(*balances))


def arrangement_metrics(before: Balance, after: Balance) -> dict[str, float]:
    """Returns the numbers of an arrangement, with the samples in the sampler's order (`before`) and as arranged."""
    metrics = {}
    # in ms, over the microbatches of a replica
    for module in after.forward_ms:
        metrics[f"parallel/workload_std/{module}"] = after.std_ms(module)
        metrics[f"parallel/workload_std_before/{module}"] = before.std_ms(module)
    return {**metrics, "parallel/deferred_fraction": after.deferred_fraction}


def forward_metrics(balance: Balance) -> dict[str, float]:
    """Returns the numbers of a step's forwards, as all ranks measured them."""
    metrics = {}
    for module in balance.forward_ms:
        metrics[f"parallel/forward_ms_std/{module}"] = balance.std_ms(module)  # over a replica's microbatches
        # largest over mean, minus 1
        metrics[f"parallel/microbatch_imbalance/{module}"] = balance.microbatch_excess(module)
    return metrics


def measure(steps: Sequence[RanStep], world: World) -> list[Balance]:
    """The forwards of some steps, summed over the stages of each replica. Collective."""
    summed = torch.from_numpy(np.concatenate([ran.forward_ms for ran in steps]))
    total = world.all_reduce(summed, activity="metrics of the ranks").numpy()
    every = np.split(total, np.cumsum([len(ran.forward_ms) for ran in steps])[:-1])
    return [_balance_of(times, ran.counts) for times, ran in zip(every, steps, strict=True)]


def _balance_of(forward_ms: np.ndarray, counts: Mapping[str, tuple[int, ...]]) -> Balance:
    """The forwards of all microbatches by module and replica."""
    parts = iter(np.split(forward_ms, np.cumsum([count for replicas in counts.values() for count in replicas])[:-1]))
    return Balance({name: tuple(next(parts) for _ in replicas) for name, replicas in counts.items()}, {})


def mean_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the steps that have it."""
    names = dict.fromkeys(name for numbers in metrics for name in numbers)
    return {name: float(np.mean([numbers[name] for numbers in metrics if name in numbers])) for name in names}
