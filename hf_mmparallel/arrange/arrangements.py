"""Arrangements of a global batch, by name: the names that the argument `microbatch_assignment` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from ..plan.methods import published_method
from ..plan.step_plan import BatchIndices, Replicas, turn_of
from .assigned_batch import Batch, SamplePlacement
from .colocated_modules import arrange_generators
from .greedy import CapacityError
from .lengths import NUM_ORDERS, group_by_length, possible_orders
from .microbatch_counts import Sizes, counts_of, num_microbatches

# The hierarchical arrangement: every microbatch has its target load in each module.
#
# Samples are assigned to replicas of the language model, then to microbatches by their cost in the encoders, and the
# language model defers some of them by one microbatch, so that its microbatches are even as well (Entrain, sections
# 4.3 and 4.5).

# The hierarchical arrangement with padded rows: microbatches of samples of similar length.


def arrange_by_length(
    batch: Batch,
    counts: NDArray,  # [replicas] number of microbatches
    taper: bool,  # whether microbatches have different sizes
    spread: bool,  # whether to order them such that the limits of shared encoders hold
) -> SamplePlacement:
    """
    [`arrange_batch`] with language model microbatches formed first, each of samples of similar length, assigned to
    replicas anew; encoders process samples a microbatch earlier if that balances them.
    """
    wanted = {count: batch.sizes(count) if taper else Sizes.even(count) for count in np.unique(counts).tolist()}
    sizes = [np.array(wanted[count].language) for count in counts.tolist()]
    tokens, limit = batch.workloads.tokens[LANGUAGE_MODEL], batch.token_limits.get(LANGUAGE_MODEL)
    replica, microbatch = group_by_length(batch.language, tokens, sizes, batch.work, limit)
    batch = batch.with_replicas(replica)
    orders = np.tile(microbatch, (1 if spread else NUM_ORDERS, 1))
    for count in wanted:
        subset, chosen = batch.of_replicas(np.flatnonzero(counts == count))
        bins = microbatch[chosen]
        if spread:
            orders[:, chosen] = subset.align_replicas(bins, count)
        else:
            language = microbatch_ms(subset, LANGUAGE_MODEL, bins, count)
            orders[:, chosen] = possible_orders(subset.replica, bins, language, subset.work, wanted[count])
    placements = [batch.place_modules(bins, bins, counts, wanted) for bins in orders]
    return placements[int(estimates_ms(batch, placements).argmin())]


def microbatch_ms(batch: Batch, module: str, microbatch: NDArray, count: int) -> NDArray:
    """Forward time of each microbatch `[replicas, count]`."""
    bins = batch.replica * count + microbatch
    times = batch.workloads.microbatch_ms(module, np.arange(len(bins)), bins, batch.dp_size * count)
    return times.reshape(-1, count)


def estimates_ms(batch: Batch, placements: Sequence[SamplePlacement]) -> NDArray:
    """Estimates step times `[placements]` of the slowest replica; all placements have the same replicas."""
    slowest, counts = np.zeros(len(placements)), placements[0].counts
    for count in np.unique(counts).tolist():
        subset, chosen = batch.of_replicas(np.flatnonzero(counts == count))
        microbatches_ms: dict[str, list[NDArray]] = {name: [] for name in batch.plan.modules}
        for placement in placements:
            turns = dict.fromkeys(microbatches_ms, placement.microbatch)
            for colocated, turn in zip(batch.encoders, placement.encoder, strict=True):
                turns |= dict.fromkeys(colocated.modules, np.minimum(turn, count - 1))
            for name, module in batch.plan.modules.items():
                scale = batch.all_replicas / module.dp_size
                microbatches_ms[name].append(scale * microbatch_ms(subset, name, turns[name][chosen], count))
        times = batch.pipeline.iteration_ms({name: np.concatenate(loads) for name, loads in microbatches_ms.items()})
        slowest = np.maximum(slowest, times.reshape(len(placements), -1).max(axis=1))
    return slowest


_LANGUAGE_WEIGHT = 0.5  # weight of the language model in exchanges, relative to encoders


def arrange_batch(
    batch: Batch,
    total: int,
    taper: bool = False,  # different sizes, with equal weights of encoders and the language model
    spread: bool = False,  # order microbatches such that the limits of encoders shared by several replicas hold
) -> SamplePlacement:
    """Splits a batch into `total` microbatches of all replicas; raises [`CapacityError`] if the limits need more."""
    counts = batch.counts(total)
    if (counts < batch.fewest).any():
        raise CapacityError
    if batch.workloads.row_ms is not None:
        return arrange_by_length(batch, counts, taper, spread)
    bins, microbatch = np.zeros((2, len(batch.replica)), np.int64)
    wanted = {}
    for own_count in np.unique(counts).tolist():  # replicas with equal numbers together
        subset, chosen = batch.of_replicas(np.flatnonzero(counts == own_count))
        wanted[own_count] = subset.sizes(own_count) if taper else Sizes.even(own_count)
        bins[chosen], microbatch[chosen] = subset.divide(wanted[own_count], 1.0 if taper else _LANGUAGE_WEIGHT, spread)
    return batch.place_modules(bins, microbatch, counts, wanted)


def hierarchical(
    plan: ParallelPlan,
    workloads: Workloads,
    microbatch_size: int,  # mean samples of a microbatch of one language model replica
    taper: bool = False,
) -> dict[str, Replicas]:
    """
    Arranges encoders and the language model such that each microbatch takes about its target time in every module.

    1. Samples are assigned to replicas of the language model such that all have similar work in each module.
    2. Each replica splits its samples into microbatches whose work in the encoders is close to a target, and close to
       one in the language model as far as that allows. Samples without encoder work fill up the language model.
    3. Microbatches are ordered in pairs of which the first has more work in the language model than the second, and
       the language model defers some samples by one microbatch. Encoders on separate ranks then decide again for each
       sample between its microbatch in the language model and the one before.

    Targets are equal, and those of the encoders come first, as in Entrain (sections 4.3 and 4.5). With `taper`, they
    are those with the fastest warm-up and cool-down of the pipeline ([`best_sizes`]) and all modules weigh the same:
    the step is shorter, but the microbatches in its middle are larger. Generators have the microbatches of the
    language model; their work counts in steps 1 and 2 like that of encoders. A sample is in its microbatch of the
    language model or the one before in every encoder that has work for it; one above the token limit has a microbatch
    of its own.
    """
    total = num_microbatches(workloads.num_samples, microbatch_size)
    batch = Batch(plan, workloads, total)
    dp_size = batch.dp_size
    # fewer if single samples are so large that fewer are faster by an estimate of the step time
    total = min(total, dp_size * batch.best_count(-(-total // dp_size)))
    if (batch.counts(total) < batch.fewest).any():
        total = max(total, dp_size * int(batch.fewest.max()))
    while True:
        for spread in (False, True):  # not in pairs if microbatches of replicas that share an encoder do not fit
            with suppress(CapacityError):
                return batch.microbatches(arrange_batch(batch, total, taper and not spread, spread))
        if batch.counts(total).min() > workloads.num_samples:
            # Replicas share encoder replicas such that the encoder's limit can't hold.
            limits = {name: limit for name, limit in workloads.token_limits.items() if name == LANGUAGE_MODEL}
            return hierarchical(plan, replace(workloads, token_limits=limits), microbatch_size, taper)
        total += dp_size * max(1, -(-total // dp_size) // 16)  # token limits require more microbatches


def tapered(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> dict[str, Replicas]:
    """[`hierarchical`] with small microbatches at the start and the end, where the pipeline fills and drains."""
    return hierarchical(plan, workloads, microbatch_size, taper=True)


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
