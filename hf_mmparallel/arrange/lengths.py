"""Microbatches of samples of similar length, with little padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .deferral import pair_order
from .greedy import CapacityError
from .microbatch_counts import Sizes

NUM_ORDERS = 3
_COST_TOLERANCE = 1e-3  # relative tolerance of the minimum cost
_SWAP_TOLERANCE = 0.02  # maximum relative difference of microbatches that may swap positions


def group_by_length(
    row_ms: NDArray,  # [num_samples] forward time in a row of its own length
    tokens: NDArray,  # [num_samples]
    sizes: Sequence[NDArray],  # for each replica: relative target sizes of its microbatches
    work: NDArray,  # [num_samples, num_encoders]
    limit: float | None = None,  # tokens of a microbatch, including padding
) -> tuple[NDArray, NDArray]:
    """
    Splits samples into microbatches with target costs of padded rows, and assigns these to replicas.

    Samples in order of decreasing length are split such that the maximum ratio of cost to target size is as small as
    possible; a sample above it forms a microbatch of its own. The longest samples go into the largest microbatches. Of
    microbatches of the same size, the one with the most encoder work goes to the replica with the least. Raises
    [`CapacityError`] if the limit needs more microbatches.
    """
    largest_first = [
        (-size, i, replica) for replica, values in enumerate(sizes) for i, size in enumerate(values.tolist())
    ]
    largest_first.sort()
    order = np.lexsort((-tokens, -row_ms))
    stops = _cuts(row_ms[order], tokens[order], np.array([-size for size, _, _ in largest_first]), limit)
    group = np.searchsorted(stops, np.arange(len(order)), side="right")
    shares = work[order] / np.maximum(work.sum(axis=0), 1e-300)
    loads = np.bincount(group, shares.sum(axis=1), len(largest_first))
    owner = _assigned(
        loads, [key[:2] for key in largest_first], np.array([replica for _, _, replica in largest_first]), sizes
    )
    replica, microbatch = np.empty((2, len(order)), np.int64)
    replica[order] = owner[group]
    microbatch[order] = np.array([index for _, index, _ in largest_first])[group]
    return replica, microbatch


def _cuts(row_ms: NDArray, tokens: NDArray, sizes: NDArray, limit: float | None) -> list[int]:
    """End of each group of samples in decreasing order, for the smallest maximum ratio of cost to size."""
    costs, wanted, count = row_ms.tolist(), sizes.tolist(), len(row_ms)
    max_samples = [len(costs)] * len(costs) if limit is None else (limit // np.maximum(tokens, 1)).astype(int).tolist()

    def stops_for(cost: float) -> list[int] | None:
        stops, position = [], 0
        for size in wanted:  # plain comparisons for speed: large batches spend their time here
            if position < count:
                sample_cost = costs[position]
                fits = int(cost * size / sample_cost) if sample_cost else count
                if fits > max_samples[position]:
                    fits = max_samples[position]
                position = position + fits if fits > 1 else position + 1
                if position > count:
                    position = count
            stops.append(position)
        return stops if position == count else None

    if count <= len(wanted):
        return stops_for(0.0) or []  # every cost suffices: the search for the smallest would halve it down to 0
    high = sum(costs) / sum(wanted)
    best, low = stops_for(high), 0.0  # the minimum is below the mean, unless single samples are above it
    while best is None:
        low, high = high, 1.25 * high
        best = stops_for(high)
        if best is None and high >= costs[0] * len(costs) / min(wanted):
            raise CapacityError
    while high - low > _COST_TOLERANCE * high:
        middle = (low + high) / 2
        stops = stops_for(middle)
        low, high, best = (middle, high, best) if stops is None else (low, middle, stops)
    return best


def _assigned(loads: NDArray, kinds: Sequence[tuple], replicas: NDArray, sizes: Sequence[NDArray]) -> NDArray:
    """The replica of each group: of groups of one kind, the heaviest goes to the replica with the least load."""
    total, paces = np.zeros(len(sizes)), 1 / np.array([values.sum() for values in sizes])
    owner = np.empty(len(loads), np.int64)
    starts = [position for position in range(len(kinds)) if not position or kinds[position] != kinds[position - 1]]
    for start, stop in zip(starts, [*starts[1:], len(kinds)], strict=True):
        groups = start + np.argsort(-loads[start:stop], kind="stable")
        ordered = replicas[start:stop][np.argsort((total * paces)[replicas[start:stop]], kind="stable")]
        owner[groups] = ordered
        total[ordered] += loads[groups]
    return owner


def possible_orders(
    replica: NDArray,  # [num_samples]
    microbatch: NDArray,  # [num_samples]
    language: NDArray,  # [replicas, count] forward times of the microbatches in the language model
    work: NDArray,  # [num_samples, num_encoders]
    sizes: Sizes,  # targets of the microbatches
) -> NDArray:
    """
    Candidates for the order of microbatches, int64 `[NUM_ORDERS, num_samples]`. Only the largest ones, which are
    equal, change positions.

    In pairs, the one with less encoder work first, so that encoders can process some of the second one early; the same
    pairs by decreasing work in the language model, so that neighbors are similar; and single microbatches by
    decreasing work.
    """
    dp_size, count = language.shape
    wanted = np.array(sizes.language)
    full = np.flatnonzero(wanted >= (1 - _SWAP_TOLERANCE) * wanted.max())
    half, odd = divmod(len(full), 2)
    encoders = (work / np.maximum(work.sum(axis=0), 1e-300)).sum(axis=1)
    loads = np.bincount(replica * count + microbatch, encoders, dp_size * count).reshape(-1, count)
    surplus = loads - loads.sum(axis=1, keepdims=True) * np.array(sizes.encoder) / count
    number = np.full(count, -1)
    number[full] = np.arange(len(full))
    in_full = np.where(number[microbatch] >= 0, replica * len(full) + number[microbatch], dp_size * len(full))
    # Early encoding is deferral in reverse, from the last microbatch to the first.
    backwards = pair_order(in_full, encoders, surplus[:, full], surplus[:, full[-1] + 1 :].sum(axis=1))
    paired = backwards[:, ::-1]
    pairs, rest = paired[:, odd:].reshape(dp_size, half, 2), paired[:, :odd]
    means = np.take_along_axis(language[:, full], paired[:, odd:], 1).reshape(dp_size, half, 2).mean(axis=2)
    falling = np.take_along_axis(pairs, np.argsort(-means, axis=1, kind="stable")[:, :, None], 1)
    by_work = np.argsort(-language[:, full], axis=1, kind="stable")
    result = []
    for order in (paired, np.append(falling.reshape(dp_size, 2 * half), rest, axis=1), by_work):
        position = np.tile(np.arange(count), (dp_size, 1))
        np.put_along_axis(position, full[order], np.broadcast_to(full, order.shape), 1)
        result.append(position[replica, microbatch])
    return np.stack(result)
