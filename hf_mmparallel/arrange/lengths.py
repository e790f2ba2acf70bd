"""Microbatches of samples of similar length, whose padded rows cost about what their tokens do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .deferral import pair_order
from .greedy import NoRoomError
from .microbatch_sizes import Sizes

NUM_ORDERS = 3
_CLOSE = 1e-3  # of a microbatch: how near its cost comes to the least possible
_EQUAL = 0.02  # of their size: by how much microbatches that change places may differ


def group_by_length(
    row_ms: NDArray, tokens: NDArray, sizes: Sequence[NDArray], work: NDArray, limit: float | None = None
) -> tuple[NDArray, NDArray]:
    """
    Cuts samples into microbatches whose padded rows cost what they should, and deals these out to replicas.

    Samples in order of falling length are cut where the microbatch that is furthest above its size is as cheap as can
    be; a sample that alone is above it is a microbatch of its own. The longest samples go into the largest
    microbatches. Of microbatches of one size, the one with most work in the encoders goes to the replica with least.

    Args:
        row_ms (`np.ndarray` of shape `[num_samples]`): Forward of a sample in a row as long as itself.
        tokens (`np.ndarray` of shape `[num_samples]`): Its tokens.
        sizes (`Sequence[np.ndarray]`): For each replica, how large its microbatches should be, relative to each other.
        work (`np.ndarray` of shape `[num_samples, num_encoders]`): Workload in encoders.
        limit (`float`, *optional*): Most tokens of a microbatch, padding included.

    Returns:
        The replica and the microbatch of each sample, int64 `[num_samples]` each.

    Raises:
        `NoRoomError`: If the limit needs more microbatches.
    """
    places = [(-size, index, replica) for replica, own in enumerate(sizes) for index, size in enumerate(own.tolist())]
    places.sort()
    order = np.lexsort((-tokens, -row_ms))
    stops = _cuts(row_ms[order], tokens[order], np.array([-size for size, _, _ in places]), limit)
    group = np.searchsorted(stops, np.arange(len(order)), side="right")
    shares = work[order] / np.maximum(work.sum(axis=0), 1e-300)
    loads = np.bincount(group, shares.sum(axis=1), len(places))
    taker = _dealt(loads, [place[:2] for place in places], np.array([place[2] for place in places]), sizes)
    replica, microbatch = np.empty((2, len(order)), np.int64)
    replica[order] = taker[group]
    microbatch[order] = np.array([place[1] for place in places])[group]
    return replica, microbatch


def _cuts(row_ms: NDArray, tokens: NDArray, sizes: NDArray, limit: float | None) -> list[int]:
    """Where each group of samples in falling order ends, for the smallest cost of a group of size 1."""
    costs, wanted, count = row_ms.tolist(), sizes.tolist(), len(row_ms)
    most = [len(costs)] * len(costs) if limit is None else (limit // np.maximum(tokens, 1)).astype(int).tolist()

    def stops_for(cost: float) -> list[int] | None:
        stops, place = [], 0
        for size in wanted:  # comparisons, since this is where large batches spend their time
            if place < count:
                row = costs[place]
                fits = int(cost * size / row) if row else count
                if fits > most[place]:
                    fits = most[place]
                place = place + fits if fits > 1 else place + 1
                if place > count:
                    place = count
            stops.append(place)
        return stops if place == count else None

    high = sum(costs) / sum(wanted)
    best, low = stops_for(high), 0.0  # below the mean, where single samples are above it
    while best is None:
        low, high = high, 1.25 * high
        best = stops_for(high)
        if best is None and high >= costs[0] * len(costs) / min(wanted):
            raise NoRoomError
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        found = stops_for(middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best


def _dealt(loads: NDArray, kinds: Sequence[tuple], replicas: NDArray, sizes: Sequence[NDArray]) -> NDArray:
    """The replica of each group: of groups of one kind, the heaviest goes to the replica with the least so far."""
    taken, paces = np.zeros(len(sizes)), 1 / np.array([own.sum() for own in sizes])
    taker = np.empty(len(loads), np.int64)
    starts = [place for place in range(len(kinds)) if not place or kinds[place] != kinds[place - 1]]
    for start, stop in zip(starts, [*starts[1:], len(kinds)], strict=True):
        groups = start + np.argsort(-loads[start:stop], kind="stable")
        own = replicas[start:stop][np.argsort((taken * paces)[replicas[start:stop]], kind="stable")]
        taker[groups] = own
        taken[own] += loads[groups]
    return taker


def possible_orders(replica: NDArray, microbatch: NDArray, language: NDArray, work: NDArray, sizes: Sizes) -> NDArray:
    """
    Orders of microbatches that may suit the pipeline. Only the largest, which are equal, change places.

    In pairs, the one with less work in the encoders before the one with more, so that encoders can compute some of the
    second one early; the same pairs by falling work in the language model, so that neighbours are alike; and single
    microbatches by falling work.

    Args:
        replica (`np.ndarray` of shape `[num_samples]`): Of each sample.
        microbatch (`np.ndarray` of shape `[num_samples]`): Of each sample.
        language (`np.ndarray` of shape `[replicas, count]`): Forward of the microbatches in the language model.
        work (`np.ndarray` of shape `[num_samples, num_encoders]`): Workload in encoders.
        sizes ([`Sizes`]): How large the microbatches should be.

    Returns:
        `np.ndarray`: int64 `[NUM_ORDERS, num_samples]`, the microbatch of each sample.
    """
    dp_size, count = language.shape
    wanted = np.array(sizes.language)
    full = np.flatnonzero(wanted >= (1 - _EQUAL) * wanted.max())
    half, odd = divmod(len(full), 2)
    encoders = (work / np.maximum(work.sum(axis=0), 1e-300)).sum(axis=1)
    loads = np.bincount(replica * count + microbatch, encoders, dp_size * count).reshape(-1, count)
    surplus = loads - loads.sum(axis=1, keepdims=True) * np.array(sizes.encoder) / count
    number = np.full(count, -1)
    number[full] = np.arange(len(full))
    rows = np.where(number[microbatch] >= 0, replica * len(full) + number[microbatch], dp_size * len(full))
    # What deferral is for the language model, computing early is for encoders, from the last microbatch to the first.
    backwards = pair_order(rows, encoders, surplus[:, full], surplus[:, full[-1] + 1 :].sum(axis=1))
    paired = backwards[:, ::-1]
    pairs, rest = paired[:, odd:].reshape(dp_size, half, 2), paired[:, :odd]
    means = np.take_along_axis(language[:, full], paired[:, odd:], 1).reshape(dp_size, half, 2).mean(axis=2)
    falling = np.take_along_axis(pairs, np.argsort(-means, axis=1, kind="stable")[:, :, None], 1)
    by_work = np.argsort(-language[:, full], axis=1, kind="stable")
    result = []
    for order in (paired, np.append(falling.reshape(dp_size, 2 * half), rest, axis=1), by_work):
        place = np.tile(np.arange(count), (dp_size, 1))
        np.put_along_axis(place, full[order], np.broadcast_to(full, order.shape), 1)
        result.append(place[replica, microbatch])
    return np.stack(result)
