"""The sampler's own order: consecutive samples make up a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from ..plan.step_plan import Slots, turn_of
from .tracks import microbatch_counts

Replicas = tuple[tuple[Slots, ...], ...]


def num_microbatches(num_samples: int, microbatch_size: int, dp_size: int) -> int:
    """Microbatches of each language-model replica for a batch of `num_samples`, on average."""
    return max(1, -(-num_samples // (microbatch_size * dp_size)))


def counts_of(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> list[int]:
    """Microbatches of each language-model replica, see [`microbatch_counts`]."""
    dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    count = num_microbatches(workloads.num_samples, microbatch_size, dp_size)
    return microbatch_counts(plan, workloads, count).tolist()


def in_turns(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(replica, index) of all microbatches as their turns come, those of one turn by replica."""
    turns = max(counts)
    places = [(replica, index) for replica, count in enumerate(counts) for index in range(count)]
    return sorted(places, key=lambda place: (turn_of(place[1], counts[place[0]], turns), place[0]))


def contiguous(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> dict[str, Replicas]:
    """
    Cuts a global batch into consecutive microbatches of `microbatch_size` samples.

    The replicas of the language model take them in turns; the last ones may be smaller or empty. The samples that all
    replicas take in one turn are shared evenly among the replicas of each encoder; in groups, see [`coupled`], where
    replicas have unlike numbers of microbatches.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): Only the number of samples is used, and where replicas have unlike stages all work.
        microbatch_size (`int`): Samples of a microbatch of one language-model replica.
    """
    counts = counts_of(plan, workloads, microbatch_size)
    language: list[list[Slots]] = [[()] * count for count in counts]
    starts = range(0, workloads.num_samples, microbatch_size)
    for start, (replica, index) in zip(starts, in_turns(counts), strict=False):
        language[replica][index] = tuple(range(start, min(start + microbatch_size, workloads.num_samples)))
    return coupled(plan, language, in_groups=len(set(counts)) > 1)


def coupled(plan: ParallelPlan, language: Sequence[Sequence[Slots]], in_groups: bool = True) -> dict[str, Replicas]:
    """
    Gives the encoders the microbatches of the language model.

    `gcd(dp, dp')` groups of replicas stay among themselves: what the language-model replicas of a group take in one
    turn is shared evenly among the encoder replicas of the same group, which take turns in who gets one more. With
    equal sizes encoder replica `d` takes exactly what language-model replica `d` takes.

    Args:
        plan (`ParallelPlan`): The plan.
        language (`Sequence[Sequence[tuple[int, ...]]]`): Replica -> microbatch -> slots of the language model.
        in_groups (`bool`, *optional*, defaults to `True`): Otherwise all replicas are one group.
    """
    result: dict[str, Replicas] = {}
    for name in plan.encoders:
        dp_size = plan.modules[name].dp_size
        groups = gcd(dp_size, len(language)) if in_groups else 1
        sources, takers = len(language) // groups, dp_size // groups
        replicas = []
        for group in range(groups):
            pooled = _pooled(language[group * sources : (group + 1) * sources])
            for part in range(takers):
                replicas.append(tuple(share(slots, part, takers, turn) for turn, slots in enumerate(pooled)))
        result[name] = tuple(replicas)
    result[LANGUAGE_MODEL] = tuple(tuple(replica) for replica in language)
    return result


def _pooled(members: Sequence[Sequence[Slots]]) -> list[Slots]:
    """What some replicas take in each turn."""
    counts = [len(replica) for replica in members]
    pooled: list[Slots] = [()] * max(counts)
    for replica, index in in_turns(counts):
        pooled[turn_of(index, counts[replica], len(pooled))] += members[replica][index]
    return pooled


def share(slots: Sequence[int], index: int, count: int, turn: int) -> Slots:
    """Consecutive part `index` of `count`; who gets one more moves on by one each turn."""
    size, rest = divmod(len(slots), count)

    def start(part: int) -> int:
        """Parts in front have `size` slots, and one more those whose number in the turn is below `rest`."""
        rounds = [(place // count) * rest + min(place % count, rest) for place in (turn, turn + part)]
        return size * part + rounds[1] - rounds[0]

    return tuple(slots[start(index) : start(index + 1)])
