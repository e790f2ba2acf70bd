"""The arrangements of a global batch by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from ..plan.step_plan import Slots
from .baselines import batch_rebalance, disttrain, sub_microbatches
from .contiguous import contiguous
from .entrain import entrain
from .generators import generated
from .hierarchical import hierarchical, tapered

Microbatches = Mapping[str, tuple[tuple[Slots, ...], ...]]
Arrangement = Callable[[ParallelPlan, Workloads, int], Microbatches]

ARRANGEMENTS: Mapping[str, Arrangement] = {
    "hierarchical": hierarchical,
    "tapered": tapered,
    "entrain": entrain,
    "contiguous": contiguous,
    "batch_rebalance": batch_rebalance,
    "disttrain": disttrain,
    "sub_microbatches": sub_microbatches,
}


def arrange_step(
    plan: ParallelPlan,
    samples: Sequence[int],
    workloads: Workloads,
    microbatch_size: int,
    method: str | Arrangement = "hierarchical",
    epoch: int = 0,
) -> StepPlan:
    """
    Arranges a global batch. Its samples and its gradient are the same whatever the method, only the order differs.

    The method arranges encoders and language model; generators take what the language model takes, see [`generated`].

    Args:
        plan (`ParallelPlan`): The plan.
        samples (`Sequence[int]`): Dataset indices of the global batch, in the sampler's order.
        workloads (`Workloads`): What each of them costs.
        microbatch_size (`int`): Samples of a microbatch of one language-model replica, on average.
        method (`str` or `Callable`, *optional*, defaults to `"hierarchical"`):
            A name in [`ARRANGEMENTS`], or a function like those.
        epoch (`int`, *optional*, defaults to 0): The epoch that the samples are drawn in.

    Raises:
        `ValueError`: If a workload is negative or no finite number.
    """
    _check_workloads(samples, workloads)
    arrange = ARRANGEMENTS[method] if isinstance(method, str) else method
    found = arrange(plan, workloads, microbatch_size)
    found = {**found, **generated(plan, workloads, found[LANGUAGE_MODEL])}
    microbatches = {name: _with_work(found[name], workloads.forward_ms[name], name) for name in plan.modules}
    targets: dict[str, tuple[str, ...]] = {}
    for edge in plan.edges:
        targets[edge.source] = (*targets.get(edge.source, ()), edge.target)
    step = StepPlan(tuple(samples), microbatches, targets, epoch)
    step.check(plan)
    return step


def _with_work(replicas: tuple[tuple[Slots, ...], ...], forward_ms: np.ndarray, name: str) -> Any:
    """The microbatches of a module without the samples that it has nothing to do for; the language model has all."""
    busy = np.asarray(forward_ms) > 0
    if name == LANGUAGE_MODEL or busy.all():
        return replicas
    kept = busy.tolist()
    return tuple(tuple(tuple(slot for slot in slots if kept[slot]) for slots in replica) for replica in replicas)


def _check_workloads(samples: Sequence[int], workloads: Workloads) -> None:
    """Refuses what no arrangement can weigh, before an encoder loses such a sample as one without work."""
    for name, forward_ms in workloads.forward_ms.items():
        wrong = np.flatnonzero(~(np.isfinite(forward_ms) & (np.asarray(forward_ms) >= 0)))
        if len(wrong):
            raise ValueError(
                f"Sample {samples[wrong[0]]} has a workload of {forward_ms[wrong[0]]} ms in `{name}`; a workload is a "
                f"finite number of at least 0. Correct the sizes that are given for it."
            )


def contiguous_step(plan: ParallelPlan, samples: Sequence[int], microbatch_size: int, epoch: int = 0) -> StepPlan:
    """The sampler's own order, see [`contiguous`]."""
    workloads = Workloads.alike(plan.modules, len(samples))
    return arrange_step(plan, samples, workloads, microbatch_size, "contiguous", epoch)
