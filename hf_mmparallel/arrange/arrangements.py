"""Arrangements of a global batch, by name: the names that the argument `microbatch_assignment` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from ..plan.methods import published_method
from ..plan.step_plan import Replicas
from .contiguous import contiguous
from .generators import generated
from .hierarchical import hierarchical, tapered

# (plan, workloads of the samples, mean samples of a microbatch of one language model replica)
# -> encoder and language model -> replica -> microbatch -> batch indices; pure, with the same result on every rank
Arrangement = Callable[[ParallelPlan, Workloads, int], Mapping[str, Replicas]]

_OWN: Mapping[str, Arrangement] = {
    "hierarchical": hierarchical,
    "tapered": tapered,
    "contiguous": contiguous,
}


def find_arrangement(arrangement: str | Arrangement) -> Arrangement:
    """Return the function of a name in `ARRANGEMENTS`; a function stays as it is."""
    if callable(arrangement):
        return arrangement
    return _OWN[arrangement] if arrangement in _OWN else published_method(arrangement)


def arrange_step(
    plan: ParallelPlan,
    samples: Sequence[int],  # dataset indices of the global batch, in the sampler's order
    workloads: Workloads,
    microbatch_size: int,  # mean samples of a microbatch of one language model replica
    arrangement: str | Arrangement = "hierarchical",  # a name in `ARRANGEMENTS`, or a function
    epoch: int = 0,
) -> StepPlan:
    """
    Arranges a global batch; only the order of its samples depends on the arrangement, not the gradient.

    Raises `ValueError` if a workload is negative or not finite.
    """
    _check_workloads(samples, workloads)
    arranged = find_arrangement(arrangement)(plan, workloads, microbatch_size)
    # Arrangements know encoders and the language model only; generators have the language model's microbatches.
    arranged = {**arranged, **generated(plan, workloads, arranged[LANGUAGE_MODEL])}
    microbatches = {name: _with_work(arranged[name], workloads.forward_ms[name], name) for name in plan.modules}
    targets: dict[str, tuple[str, ...]] = {}
    for edge in plan.edges:
        targets[edge.source] = (*targets.get(edge.source, ()), edge.target)
    step = StepPlan(tuple(samples), microbatches, targets, epoch)
    step.check(plan)
    return step


def _with_work(replicas: Replicas, forward_ms: np.ndarray, name: str) -> Any:
    """Drops the samples that have no work in a module from its microbatches; the language model has all samples."""
    busy = np.asarray(forward_ms) > 0
    if name == LANGUAGE_MODEL or busy.all():
        return replicas
    is_busy = busy.tolist()
    return tuple(
        tuple(tuple(batch_index for batch_index in batch_indices if is_busy[batch_index]) for batch_indices in replica)
        for replica in replicas
    )


def _check_workloads(samples: Sequence[int], workloads: Workloads) -> None:
    """Raises `ValueError` for invalid workloads, before an encoder drops such a sample as one without work."""
    for name, forward_ms in workloads.forward_ms.items():
        wrong = np.flatnonzero(~(np.isfinite(forward_ms) & (np.asarray(forward_ms) >= 0)))
        if len(wrong):
            raise ValueError(
                f"Sample {samples[wrong[0]]} has a workload of {forward_ms[wrong[0]]} ms in `{name}`; a workload is a "
                f"finite number of at least 0. Correct the sizes that are given for it."
            )


def contiguous_step(plan: ParallelPlan, samples: Sequence[int], microbatch_size: int, epoch: int = 0) -> StepPlan:
    """A step in the sampler's order, see [`contiguous`]."""
    workloads = Workloads.alike(plan.modules, len(samples))
    return arrange_step(plan, samples, workloads, microbatch_size, "contiguous", epoch)
