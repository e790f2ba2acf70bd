"""The sampler's order: consecutive samples form a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from ..plan.step_plan import BatchIndices, Replicas, turn_of
from .microbatch_counts import counts_of


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
    different numbers of microbatches, see [`coupled`]. Workloads only matter if replicas have different stages.
    """
    counts = counts_of(plan, workloads, microbatch_size)
    language: list[list[BatchIndices]] = [[()] * count for count in counts]
    starts = range(0, workloads.num_samples, microbatch_size)
    for start, (replica, index) in zip(starts, in_turns(counts), strict=False):
        language[replica][index] = tuple(range(start, min(start + microbatch_size, workloads.num_samples)))
    return coupled(plan, language, in_groups=len(set(counts)) > 1)


def coupled(
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
