"""The hierarchical arrangement with padded rows: microbatches of samples of similar length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL
from .assigned_batch import Batch, SamplePlacement
from .lengths import NUM_ORDERS, group_by_length, possible_orders
from .microbatch_sizes import Sizes


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
            orders[:, chosen] = subset.spread_out(bins, count)
        else:
            language = microbatch_ms(subset, LANGUAGE_MODEL, bins, count)
            orders[:, chosen] = possible_orders(subset.replica, bins, language, subset.work, wanted[count])
    placements = [batch.placed(bins, bins, counts, wanted) for bins in orders]
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
