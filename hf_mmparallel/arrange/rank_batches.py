"""
Arrangement of a global batch for ranks that each hold the whole model, as under DDP, FSDP and DeepSpeed.

Every rank has the same number of microbatches, none of them empty. In each turn either all ranks run an encoder or
none does, since sharded weights are gathered by all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ModulePlan, ParallelPlan, Stage, Workloads
from ..plan.methods import arrangement_name
from ..plan.step_plan import BatchIndices, Replicas
from .arrangements import Arrangement, find_arrangement

# the names of arrangements that do without stages; the others order microbatches for a pipeline
RANK_ARRANGEMENTS = ("hierarchical", "batch_rebalance", "disttrain", "contiguous")


def whole_model_workloads(workloads: Workloads) -> Workloads:
    """Adds up forward and backward times of all modules, as those of one module."""
    times = {name: ms * (1 + workloads.backward_ratio[name]) for name, ms in workloads.forward_ms.items()}
    total = np.sum(list(times.values()), axis=0)
    row_ms = workloads.row_ms
    if row_ms is not None:
        row_ms = total - times[LANGUAGE_MODEL] + row_ms * (1 + workloads.backward_ratio[LANGUAGE_MODEL])
    tokens = {LANGUAGE_MODEL: workloads.tokens[LANGUAGE_MODEL]}
    return Workloads({LANGUAGE_MODEL: total}, {LANGUAGE_MODEL: 0.0}, tokens, {}, row_ms)


def arrange_for_ranks(
    workloads: Workloads,  # see `whole_model_workloads`
    has_input: Mapping[str, NDArray],  # encoder -> bool [samples]: whether a sample has an input for it
    num_ranks: int,
    microbatch_size: int,  # mean; there are at least as many samples as microbatches
    arrangement: str | Arrangement = "hierarchical",  # in `RANK_ARRANGEMENTS`, or a function
) -> Replicas:
    """
    Arranges a global batch over data-parallel ranks and gradient accumulation steps.

    The microbatches of a rank are in ascending order of their cost, those with inputs of encoders last, so that those
    of one turn are alike on all ranks.
    """
    replicas = tuple((Stage((0, 1), ((rank,),)),) for rank in range(num_ranks))
    plan = ParallelPlan({LANGUAGE_MODEL: ModulePlan(replicas)})
    arranged = find_arrangement(arrangement)(plan, workloads, microbatch_size)[LANGUAGE_MODEL]
    counts = [len(microbatches) for microbatches in arranged]
    if len(set(counts)) > 1:
        raise ValueError(
            f"`microbatch_assignment={arrangement_name(arrangement)}` has {counts} microbatches on {num_ranks} ranks, "
            "which all need the same number without `parallel`. Give each rank as many."
        )
    if arrangement == "contiguous":  # the order of the stock Trainer stays as it is
        return tuple(map(tuple, arranged))
    times, count = workloads.forward_ms[LANGUAGE_MODEL], counts[0]
    bins = _bins(arranged, workloads.num_samples)
    _fill(bins, times, num_ranks * count)
    kinds = [np.bincount(bins[has], minlength=num_ranks * count) > 0 for has in has_input.values()]
    costs = workloads.microbatch_ms(LANGUAGE_MODEL, np.arange(len(bins)), bins, num_ranks * count)
    order = np.lexsort((costs, np.sum(kinds, axis=0) if kinds else costs, np.arange(len(costs)) // count))
    bins = np.argsort(order, kind="stable")[bins]
    aligned: list[NDArray] = []
    for has in has_input.values():
        _align(bins, has, aligned, times, (num_ranks, count))
        aligned.append(has)
    members = [tuple(np.flatnonzero(bins == number).tolist()) for number in range(num_ranks * count)]
    return tuple(tuple(members[start : start + count]) for start in range(0, len(members), count))


def unlike_turn(ranks: Sequence[Sequence[BatchIndices]], has_input: Mapping[str, NDArray]) -> tuple[int, str] | None:
    """The first turn, and an encoder, that has inputs on some ranks and not on others; `None` if there is none."""
    for turn, microbatches in enumerate(zip(*ranks, strict=True)):
        for name, has in has_input.items():
            if len({bool(has[list(microbatch)].any()) for microbatch in microbatches}) > 1:
                return turn, name
    return None


def turn_costs(ranks: Sequence[Sequence[BatchIndices]], workloads: Workloads) -> NDArray:
    """Forward and backward time of each microbatch `[ranks, microbatches]`, by [`whole_model_workloads`]."""
    bins, shape = _bins(ranks, workloads.num_samples), (len(ranks), len(ranks[0]))
    return workloads.microbatch_ms(LANGUAGE_MODEL, np.arange(len(bins)), bins, shape[0] * shape[1]).reshape(shape)


def _bins(ranks: Sequence[Sequence[BatchIndices]], num_samples: int) -> NDArray:
    """The microbatch of each sample, int64 `[samples]`; those of rank `r` start at `r * microbatches_per_rank`."""
    bins = np.zeros(num_samples, np.int64)
    for number, batch_indices in enumerate(chain.from_iterable(ranks)):
        bins[list(batch_indices)] = number
    return bins


def _fill(bins: NDArray, times: NDArray, num_bins: int) -> None:
    """Gives each empty microbatch the cheapest sample of the one with the most samples, in place."""
    for empty in np.flatnonzero(np.bincount(bins, minlength=num_bins) == 0):
        members = np.flatnonzero(bins == np.bincount(bins).argmax())
        bins[members[times[members].argmin()]] = empty


def _align(
    bins: NDArray,  # [samples], see `_bins`; changed in place
    has: NDArray,  # [samples] whether a sample has an input for the encoder
    aligned: Sequence[NDArray],  # the same of encoders whose inputs stay where they are
    times: NDArray,  # [samples]; samples with the closest times are exchanged
    shape: tuple[int, int],  # ranks, and microbatches of each
) -> None:
    """
    Exchanges samples such that, if possible, the last turns have an encoder's inputs on all ranks, others on none.
    """
    num_ranks, count = shape
    num_turns = min(count, int(has.sum()) // num_ranks)
    if not num_turns:
        return
    is_late = np.arange(num_ranks * count) % count >= count - num_turns
    late, early = np.flatnonzero(is_late), np.flatnonzero(~is_late)

    def exchange(mine: NDArray, theirs: NDArray) -> bool:
        """Exchanges the two samples with the closest times of two sets; false if there are none."""
        apart = np.abs(times[mine][:, None] - times[theirs])
        for values in aligned:
            apart[values[mine][:, None] != values[theirs]] = np.inf
        if not np.isfinite(apart).any():
            return False
        row, column = divmod(int(apart.argmin()), len(theirs))
        one, other = mine[row], theirs[column]
        bins[one], bins[other] = bins[other], bins[one]
        return True

    for early_bin in early:
        while len(inputs := np.flatnonzero(has & (bins == early_bin))):
            if exchange(inputs, np.flatnonzero(~has & is_late[bins])):
                continue
            if (bins == early_bin).sum() == 1:  # a sample without an input takes the place of its only one
                counts = np.bincount(bins, minlength=len(is_late))
                spare = np.flatnonzero(~has & (counts[bins] > 1))
                if not len(spare):
                    break
                bins[spare[0]] = early_bin
            loads = np.bincount(bins, times, len(is_late))
            bins[inputs[0]] = late[loads[late].argmin()]
    for late_bin in late:
        counts = np.bincount(bins[has], minlength=len(is_late))
        spare = has & is_late[bins] & (counts[bins] > 1)
        if counts[late_bin] or exchange(np.flatnonzero(bins == late_bin), np.flatnonzero(spare)):
            continue
        for values in aligned:  # moving a sample must not change where the other encoders run
            others = np.bincount(bins[values], minlength=len(is_late))
            spare &= ~values | ((others[bins] > 1) & (others[late_bin] > 0))
        if spare.any():
            bins[np.flatnonzero(spare)[times[spare].argmin()]] = late_bin
