"""
Every microbatch as heavy as it should be, in each module: the hierarchical arrangement.

Samples go to replicas of the language model, then to microbatches by what they cost in the encoders, and the language
model takes some of them one microbatch later, so that its microbatches are even, too (Entrain, sections 4.3 and 4.5).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from ..plan.step_plan import Slots
from .contiguous import num_microbatches
from .global_batch import Batch, Placement
from .greedy import NoRoomError
from .length_arrangement import arrange_by_length
from .microbatch_sizes import Sizes

_LANGUAGE_EVEN = 0.5  # what the language model counts between microbatches, where encoders come first and count 1


def arrange_batch(batch: Batch, count: int, taper: bool = False, spread: bool = False) -> Placement:
    """
    Cuts a batch into microbatches.

    Args:
        batch ([`Batch`]): The batch.
        count (`int`): Microbatches of each replica, on average. Replicas that have as many are arranged together.
        taper (`bool`, *optional*, defaults to `False`):
            Have microbatches of unlike sizes, with encoders and language model counting alike.
        spread (`bool`, *optional*, defaults to `False`):
            Order microbatches such that limits of encoders hold that several replicas share.

    Raises:
        `NoRoomError`: If the limits need more microbatches.
    """
    counts = batch.counts(count)
    if (counts < batch.fewest).any():
        raise NoRoomError
    if batch.workloads.row_ms is not None:
        return arrange_by_length(batch, counts, taper, spread)
    bins, microbatch = np.zeros((2, len(batch.replica)), np.int64)
    wanted = {}
    for own in np.unique(counts).tolist():
        part, chosen = batch.part(np.flatnonzero(counts == own))
        wanted[own] = part.sizes(own) if taper else Sizes.even(own)
        bins[chosen], microbatch[chosen] = part.divide(wanted[own], 1.0 if taper else _LANGUAGE_EVEN, spread)
    return batch.placed(bins, microbatch, counts, wanted)


def hierarchical(
    plan: ParallelPlan, workloads: Workloads, microbatch_size: int, taper: bool = False
) -> dict[str, tuple[tuple[Slots, ...], ...]]:
    """
    Arranges a global batch such that each microbatch takes about the time that it should, in every module.

    1. Samples go to replicas of the language model such that all have about as much work in each module.
    2. Each replica divides its samples into microbatches whose work in the encoders is near a target, and near one in
       the language model as far as that allows. Samples without work in encoders fill up the language model.
    3. Microbatches are ordered in pairs of which the first has more work in the language model than the second, and
       the language model takes some samples one microbatch later. Encoders on ranks of their own then choose anew for
       each sample between its microbatch in the language model and the one before.

    The number of microbatches is that of the contiguous arrangement, more where limits of tokens need it, fewer where
    single samples are so large that an estimate of the step's time says so; replicas whose stages are faster than
    those of others have more. Targets are equal, and those of the
    encoders come first, as in Entrain (sections 4.3 and 4.5). Where replicas share an encoder and do not fit beside
    each other in it, microbatches are ordered by that instead of in pairs. Generators take what the language model
    takes; their work counts in steps 1 and 2 as that of encoders does.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): What the samples cost.
        microbatch_size (`int`): Samples of a microbatch of one language-model replica, on average.
        taper (`bool`, *optional*, defaults to `False`):
            Have the targets with which the pipeline fills and drains soonest, see [`best_sizes`], those of all
            modules alike. The step is shorter, but the microbatches in its middle are larger.

    Returns:
        `dict[str, tuple[tuple[tuple[int, ...], ...], ...]]`: Module -> replica -> microbatch -> the slots it takes, of
        encoders and language model. A sample is in its microbatch of the language model or one before in every encoder
        that has work for it.

    A sample with more tokens than a microbatch may have gets a microbatch of its own. Where replicas share replicas of
    an encoder such that its limit can't hold, only that of the language model does.
    """
    count = num_microbatches(workloads.num_samples, microbatch_size, plan.modules[LANGUAGE_MODEL].dp_size)
    batch = Batch(plan, workloads, count)
    count = batch.best_count(count)
    count = max(count, int(batch.fewest.max())) if (batch.counts(count) < batch.fewest).any() else count
    while True:
        for spread in (False, True):
            with suppress(NoRoomError):
                return batch.microbatches(arrange_batch(batch, count, taper and not spread, spread))
        if count > workloads.num_samples:
            kept = {name: limit for name, limit in workloads.max_tokens.items() if name == LANGUAGE_MODEL}
            return hierarchical(plan, replace(workloads, max_tokens=kept), microbatch_size, taper)
        count += max(1, count // 16)


def tapered(
    plan: ParallelPlan, workloads: Workloads, microbatch_size: int
) -> dict[str, tuple[tuple[Slots, ...], ...]]:
    """[`hierarchical`] with small microbatches at the start and the end, where the pipeline fills and drains."""
    return hierarchical(plan, workloads, microbatch_size, taper=True)
