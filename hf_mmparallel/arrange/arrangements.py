"""Arrangements of a global batch, by name: the names that the argument `microbatch_assignment` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np

from ..plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from ..plan.methods import published_method
from ..plan.step_plan import BatchIndices, Replicas, turn_of
from .colocated_modules import arrange_generators
from .hierarchical import hierarchical, tapered
from .microbatch_counts import counts_of

# The sampler's order: consecutive samples form a microbatch.


def in_turns(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(replica, index) of all microbatches in the order of their turns, those of one turn by replica."""
    turns = max(counts)
    microbatches = [(replica, index) for replica, count in enumerate(counts) for index in range(count)]
    return sorted(microbatches, key=lambda at: (turn_of(at[1], counts[at[0]], turns), at[0]))


def contiguous(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> dict[str, Replicas]:
    """
    Splits a global batch into consecutive microbatches of `microbatch_size` samples.

    The replicas of the language model get them in turns; the last ones may be smaller or empty. The samples of all
    replicas in one turn are split evenly over the replicas of each encoder, or within groups if replicas have
    different numbers of microbatches, see [`couple_encoders`]. Workloads only matter if replicas have unlike stages.
    """
    counts = counts_of(plan, workloads, microbatch_size)
    language: list[list[BatchIndices]] = [[()] * count for count in counts]
    starts = range(0, workloads.num_samples, microbatch_size)
    for start, (replica, index) in zip(starts, in_turns(counts), strict=False):
        language[replica][index] = tuple(range(start, min(start + microbatch_size, workloads.num_samples)))
    return couple_encoders(plan, language, in_groups=len(set(counts)) > 1)


def couple_encoders(
    plan: ParallelPlan, language: Sequence[Sequence[BatchIndices]], in_groups: bool = True
) -> dict[str, Replicas]:
    """
    Gives the encoders the microbatches of the language model.

    Replicas form `gcd(dp, dp')` groups (one group if not `in_groups`): the samples of the language model replicas of a
    group in one turn are split evenly over the encoder replicas of the same group, which take turns in getting one
    more. With equal sizes, encoder replica `d` has exactly the samples of language model replica `d`.
    """
    result: dict[str, Replicas] = {}
    for name in plan.encoders:
        dp_size = plan.modules[name].dp_size
        groups = gcd(dp_size, len(language)) if in_groups else 1
        sources, consumers = len(language) // groups, dp_size // groups
        replicas = []
        for group in range(groups):
            pooled = _pooled(language[group * sources : (group + 1) * sources])
            for consumer in range(consumers):
                replicas.append(
                    tuple(share(batch_indices, consumer, consumers, turn) for turn, batch_indices in enumerate(pooled))
                )
        result[name] = tuple(replicas)
    result[LANGUAGE_MODEL] = tuple(tuple(replica) for replica in language)
    return result


def _pooled(members: Sequence[Sequence[BatchIndices]]) -> list[BatchIndices]:
    """The batch indices of some replicas in each turn."""
    counts = [len(replica) for replica in members]
    pooled: list[BatchIndices] = [()] * max(counts)
    for replica, index in in_turns(counts):
        pooled[turn_of(index, counts[replica], len(pooled))] += members[replica][index]
    return pooled


def share(batch_indices: Sequence[int], index: int, count: int, turn: int) -> BatchIndices:
    """Consecutive share `index` of `count`; the shares with one more batch index shift by one each turn."""
    size, rest = divmod(len(batch_indices), count)

    def start(number: int) -> int:
        """Earlier shares have `size` batch indices, plus one for those whose number in the turn is below `rest`."""
        rounds = [(n // count) * rest + min(n % count, rest) for n in (turn, turn + number)]
        return size * number + rounds[1] - rounds[0]

    return tuple(batch_indices[start(index) : start(index + 1)])


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
    arranged = {**arranged, **arrange_generators(plan, workloads, arranged[LANGUAGE_MODEL])}
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
