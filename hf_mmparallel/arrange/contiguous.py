"""The sampler's own order: consecutive samples make up a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads, encoders_of
from ..plan.step_plan import Slots


def num_microbatches(num_samples: int, microbatch_size: int, dp_size: int) -> int:
    """Microbatches of each language-model replica for a batch of `num_samples`."""
    return max(1, -(-num_samples // (microbatch_size * dp_size)))


def contiguous(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> dict[str, tuple]:
    """
    Cuts a global batch into consecutive microbatches of `microbatch_size` samples.

    Microbatch `b` goes to language-model replica `b mod dp`; the last ones may be smaller or empty. The samples that
    all replicas take at the same place are shared evenly among the replicas of each encoder, which take turns in who
    gets one more.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): Only the number of samples is used.
        microbatch_size (`int`): Samples of a microbatch of one language-model replica.
    """
    num_samples = workloads.num_samples
    dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    count = num_microbatches(num_samples, microbatch_size, dp_size)
    language: list[list[Slots]] = [[() for _ in range(count)] for _ in range(dp_size)]
    for block, start in enumerate(range(0, num_samples, microbatch_size)):
        stop = min(start + microbatch_size, num_samples)
        language[block % dp_size][block // dp_size] = tuple(range(start, stop))
    microbatches: dict[str, tuple[tuple[Slots, ...], ...]] = {}
    by_index = [[slot for replica in language for slot in replica[index]] for index in range(count)]
    for name in encoders_of(plan):
        copies = plan.modules[name].dp_size
        microbatches[name] = tuple(
            tuple(share(slots, replica, copies, turn) for turn, slots in enumerate(by_index))
            for replica in range(copies)
        )
    microbatches[LANGUAGE_MODEL] = tuple(tuple(replica) for replica in language)
    return microbatches


def share(slots: Sequence[int], index: int, count: int, turn: int) -> Slots:
    """Consecutive part `index` of `count`; who gets one more moves on by one each turn."""
    size, rest = divmod(len(slots), count)

    def start(part: int) -> int:
        """Parts in front have `size` slots, and one more those whose number in the turn is below `rest`."""
        rounds = [(place // count) * rest + min(place % count, rest) for place in (turn, turn + part)]
        return size * part + rounds[1] - rounds[0]

    return tuple(slots[start(index) : start(index + 1)])
