"""Choice of samples that the language model processes one microbatch after the encoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from .greedy import Capacity, members_by_bin

# Subset sums of many small sets of numbers at once.

MAX_ITEMS = 62  # a subset is a bit mask in an int64


@dataclass(frozen=True)
class SubsetSums:
    """Reachable sums, with a subset for each of them; all fields are `[num_sets, num_sums]`."""

    sums: NDArray  # float64, not sorted; infinite padding
    subsets: NDArray  # int64; bit `i` is set if item `i` is in the subset
    extra: NDArray  # float64; the subset's sum of a second set of numbers

    def nearest(self, targets: NDArray) -> NDArray:
        """Index `[num_sets, num_targets]` of the sum closest to each target `[num_sets, num_targets]`."""
        return np.abs(self.sums[:, None, :] - targets[:, :, None]).argmin(axis=2)

    def take(self, sets: NDArray) -> SubsetSums:
        """The sums of the sets at some indices."""
        return SubsetSums(self.sums[sets], self.subsets[sets], self.extra[sets])


def subset_sums(
    weights: NDArray,  # [num_sets, num_items] at least 0; padded with zeros
    max_sums: int,  # maximum length of a list, a power of two
    extra: NDArray | None = None,  # [num_sets, num_items] second numbers to add up for the same subsets
) -> SubsetSums:
    """
    Computes the sums of all subsets of at most the first 62 items by dynamic programming (Entrain, section 4.5.2).

    If a list exceeds `max_sums`, its sums are put into `max_sums` cells of equal width, with one sum per cell, which
    is the exact sum of its subset. With `n` items and cells of width `q = total / (max_sums - 1)`, every reachable sum
    has one in the list at a distance of at most `q max(0, n - log2(max_sums))`. All sums are present if `2^n <=
    max_sums`, and if the weights are integers with a total below `max_sums`.
    """
    num_sets, num_items = weights.shape
    added = [weights] if extra is None else [weights, extra]
    subsets, tables = np.zeros((num_sets, 1), np.int64), [np.zeros((num_sets, 1)) for _ in added]
    width = np.maximum(weights.sum(axis=1), 1e-300) / (max_sums - 1)
    in_cells = False
    for item in range(min(num_items, MAX_ITEMS)):
        more, bit = [values[:, item : item + 1] for values in added], np.int64(1 << item)
        if 2 * subsets.shape[1] <= max_sums:
            subsets = np.concatenate([subsets, subsets | bit], axis=1)
            tables = [np.concatenate([old, old + new], axis=1) for old, new in zip(tables, more, strict=True)]
            continue
        grow = np.flatnonzero(more[0][:, 0] > 0)
        if not len(grow):
            continue
        without = [table[grow] for table in tables], subsets[grow]
        within = [old + new[grow] for old, new in zip(without[0], more, strict=True)], without[1] | bit
        cells = without
        if not in_cells:
            empty = np.full_like(without[0][0], np.inf)
            cells = [empty, *map(np.zeros_like, without[0][1:])], np.zeros_like(without[1])
            _put_into_cells(cells, without, width[grow])
            in_cells = True
        _put_into_cells(cells, within, width[grow])
        subsets[grow] = cells[1]
        for table, cell in zip(tables, cells[0], strict=True):
            table[grow] = cell
    return SubsetSums(tables[0], subsets, tables[1] if extra is not None else np.zeros_like(tables[0]))


def _put_into_cells(
    cells: tuple[list[NDArray], NDArray], entries: tuple[list[NDArray], NDArray], width: NDArray
) -> None:
    """Writes entries into the cells of their sums (the last wins); both are sums, second sums and subsets."""
    sums, count = entries[0][0], entries[1].shape[1]
    index = np.flatnonzero(np.isfinite(sums))
    row = index // count
    cell = (sums.ravel()[index] / width[row] + 1e-9).astype(np.int64)
    cell += row * count
    for table, values in zip((*cells[0], cells[1]), (*entries[0], entries[1]), strict=True):
        table.ravel()[cell] = values.ravel()[index]


# Bipartite matchings that minimize the cost of the worst pair.


def bottleneck_matching(
    costs: NDArray,  # [num_problems, size, size] finite, at least 0
) -> NDArray:
    """
    Matches every row to a different column `[num_problems, size]` such that the largest cost is as small as possible.

    Each trial of a binary search over the costs is one bipartite matching of all problems together (Entrain, section
    4.5.2). Of the optimal matchings, the one with the smallest sum of squares is returned. Entrain's vector `L` is not
    needed: a microbatch that defers nothing has cost `V[i, j] = L[i]`, and the best deferral never costs more, so that
    `V` alone tells whether `i` is within a threshold with any `j`.
    """
    num_problems, size, _ = costs.shape
    if not size:
        return np.zeros((num_problems, 0), np.int64)
    values = np.sort(costs.reshape(num_problems, -1), axis=1)
    # Lower bound: the best entry of each row and column; upper bound: rows matched to columns in reverse order.
    below = np.maximum(costs.min(axis=2).max(axis=1), costs.min(axis=1).max(axis=1))
    above = costs[:, np.arange(size), np.arange(size)[::-1]].max(axis=1)
    low, high = ((values < bound[:, None]).sum(axis=1) for bound in (below, above))
    problems = np.arange(num_problems)
    while (low < high).any():
        middle = (low + high) // 2
        possible = _can_match(costs <= values[problems, middle][:, None, None])
        high = np.where(possible, middle, high)
        low = np.where(possible, low, np.minimum(middle + 1, high))
    limit = values[problems, high]
    # A pair above the limit costs more than any matching within it.
    squares = np.where(costs <= limit[:, None, None], costs**2, size * limit[:, None, None] ** 2 + 1)
    return np.stack([linear_sum_assignment(problem)[1] for problem in squares])


def _can_match(allowed: NDArray) -> NDArray:
    """Whether each problem `[num_problems, size, size]` has a perfect matching of allowed pairs."""
    num_problems, size, _ = allowed.shape
    row, column = np.nonzero(allowed.reshape(num_problems * size, size))
    # scipy 1.13 matches graphs with indices of 32 bits only.
    starts = np.concatenate([[0], np.cumsum(allowed.sum(axis=2).ravel())]).astype(np.int32)
    columns = (row // size * size + column).astype(np.int32)
    graph = csr_array((np.ones(len(row), np.int8), columns, starts), shape=(num_problems * size,) * 2)
    return (maximum_bipartite_matching(graph, "column").reshape(num_problems, size) >= 0).all(axis=1)


_TABLE_SIZE = 1 << 16  # table size: sums of all microbatches together
_FEWEST, _MOST = 32, 256  # limits of the number of sums of one microbatch


def _sums(members: NDArray, weights: NDArray, sizes: NDArray | None = None) -> SubsetSums:
    """Sums of the items `[num_sets, slots]` of sets; `weights` has a final 0 for empty slots."""
    longest = _TABLE_SIZE // max(1, len(members))
    longest = 1 << min(max(longest, _FEWEST), _MOST).bit_length() - 1
    return subset_sums(weights[members], longest, None if sizes is None else sizes[members])


def _heaviest_first(bins: NDArray, weights: NDArray, num_bins: int) -> NDArray:
    """The items of each bin `[num_bins, slots]`, heaviest first, so that empty slots come last."""
    order = np.argsort(-weights[: len(bins)], kind="stable")
    return np.append(order, len(bins))[members_by_bin(bins[order], num_bins)]


@dataclass(frozen=True)
class Pairs:
    """Overloaded and underloaded halves of the microbatches, and the best deferral for each pair."""

    over: NDArray  # [num_problems, half] overloaded microbatches, heaviest first
    under: NDArray  # [num_problems, half] underloaded microbatches, heaviest first
    # [num_problems, half, half] maximum load of the two after the deferral (Entrain, equation 4.3), at least 0
    costs: NDArray
    members: NDArray  # [num_problems * half, slots] items of each overloaded microbatch
    table: SubsetSums  # sums of their subsets
    chosen: NDArray  # [num_problems, half, half] index of the deferred sum in the table

    def items_to_defer(self, problem: int, over: int, under: int) -> NDArray:
        """The items that overloaded microbatch `over` of a problem defers to `under`."""
        index = problem * self.over.shape[1] + over
        bits = self.table.subsets[index, self.chosen[problem, over, under]]
        items = self.members[index]
        return items[(bits >> np.minimum(np.arange(len(items)), 63)) & 1 > 0]


def possible_pairs(
    # [num_items] microbatch; those of problem `p` start at `p * num_microbatches`, those of no problem are larger
    bins: NDArray,
    weights: NDArray,  # [num_items] workload in the language model
    surplus: NDArray,  # [num_problems, num_microbatches] load, or its excess over the target
) -> Pairs:
    """Finds the best deferral for each pair of overloaded and underloaded microbatch (Entrain, section 4.5.2)."""
    num_problems, count = surplus.shape
    half = count // 2
    descending = np.argsort(-surplus, axis=1, kind="stable")
    over, under = descending[:, :half], descending[:, count - half :]
    above, below = np.take_along_axis(surplus, over, 1), np.take_along_axis(surplus, under, 1)
    padded_weights = np.append(weights, 0.0)
    first = np.arange(num_problems)[:, None] * count
    inside = np.flatnonzero(bins < num_problems * count)
    members = _heaviest_first(bins[inside], weights[inside], num_problems * count)[(over + first).ravel()]
    members = np.append(inside, len(bins))[members]
    table = _sums(members, padded_weights)
    # the best subset has the sum closest to half of the difference
    wanted = ((above[:, :, None] - below[:, None, :]) / 2).reshape(num_problems * half, half)
    chosen = table.nearest(wanted)
    moved = np.take_along_axis(table.sums, chosen, 1).reshape(num_problems, half, half)
    costs = np.maximum(above[:, :, None] - moved, below[:, None, :] + moved)
    lowest = min(0.0, costs.min(initial=0.0))
    return Pairs(over, under, costs - lowest, members, table, chosen.reshape(costs.shape))


def pair_order(
    bins: NDArray,  # [num_items], see `possible_pairs`
    weights: NDArray,  # [num_items] workload in the language model
    surplus: NDArray,  # [num_problems, num_microbatches] excess over the target
    start: NDArray,  # [num_problems] surplus of the microbatches before these
) -> NDArray:
    """
    Orders microbatches of each problem such that each overloaded one is directly before the one that it defers to.

    The heavier half is paired with the lighter half such that the heaviest resulting microbatch is as light as
    possible ([`bottleneck_matching`]; Entrain, section 4.5.2). With an odd number of microbatches the middle one
    defers nothing and comes last.
    """
    num_problems, count = surplus.shape
    half = count // 2
    descending = np.argsort(-surplus, axis=1, kind="stable")
    if not half:
        return descending
    candidates = possible_pairs(bins, weights, surplus)
    partner = bottleneck_matching(candidates.costs)
    under = np.take_along_axis(candidates.under, partner, 1)
    totals = np.take_along_axis(surplus, candidates.over, 1) + np.take_along_axis(surplus, under, 1)
    # Later deferrals can pass on the surplus of the pairs before only if it is not negative.
    sequence = _running_order(totals, start)
    pairs = np.stack([candidates.over, under], axis=2)
    pairs = np.take_along_axis(pairs, sequence[:, :, None], 1).reshape(num_problems, 2 * half)
    return np.append(pairs, descending[:, half : count - half], axis=1)


def _running_order(values: NDArray, start: NDArray) -> NDArray:
    """An order `[num_problems, count]` with running sums that stay small and, if possible, not negative."""
    num_problems, count = values.shape
    problems, running, left = np.arange(num_problems), start.astype(float), values.astype(float)
    order = np.empty((num_problems, count), np.int64)
    for position in range(count):
        after = running[:, None] + left
        lowest = np.where(after >= 0, after, np.inf).argmin(axis=1)
        highest = np.where(np.isnan(left), -np.inf, after).argmax(axis=1)
        best = np.where(after[problems, lowest] >= 0, lowest, highest)
        order[:, position] = best
        running = running + values[problems, best]
        left[problems, best] = np.nan
    return order


def pair_means(
    order: NDArray,  # [num_problems, any]
    loads: NDArray,  # [num_problems, num_microbatches]
) -> NDArray:
    """Returns loads `[num_problems, num_microbatches]` as if each pair of [`pair_order`] shares its work evenly."""
    shared = loads.copy()
    for first, second in order[:, : order.shape[1] // 2 * 2].reshape(len(order), -1, 2).transpose(1, 2, 0):
        problems = np.arange(len(order))
        shared[problems, first] = shared[problems, second] = (loads[problems, first] + loads[problems, second]) / 2
    return shared


def shuffled_pairs(
    order: NDArray,  # [num_problems, count], of `pair_order`
    num_trials: int,
) -> NDArray:
    """Returns an order and random orders of the same pairs after it, `[num_trials, num_problems, count]`."""
    half = order.shape[1] // 2
    rng = np.random.default_rng(half)  # the same on every rank
    trials = np.stack([np.arange(half), *(rng.permutation(half) for _ in range(num_trials - 1))])
    positions = (2 * trials[:, :, None] + np.arange(2)).reshape(num_trials, -1)
    rest = np.broadcast_to(np.arange(2 * half, order.shape[1]), (num_trials, order.shape[1] - 2 * half))
    return order[:, np.append(positions, rest, axis=1)].transpose(1, 0, 2)


def defer(
    bins: NDArray,  # [num_items]; those of problem `p` start at `p * num_bins`
    weights: NDArray,  # [num_items] at least 0
    late: NDArray,  # [num_items] whether each item initially goes to the next bin
    targets: NDArray,  # [num_problems, num_bins] loads
    sweeps: int,  # maximum number of decisions per bin
    capacity: Capacity | None = None,  # a single limit, which holds afterwards if it held before
) -> NDArray:
    """
    Decides for each item between its own bin and the next one (true), such that loads come close to their targets.

    Each bin in turn decides which of its items go to the next bin: of all subsets within the limits, the one after
    which both loads are closest to their targets (least squares).
    """
    num_problems, count = targets.shape
    if count < 2 or not len(bins):
        return late
    weights = np.append(weights, 0.0)
    sizes = np.append(capacity.sizes[:, 0], 0.0) if capacity is not None else None
    members = _heaviest_first(bins, weights, num_problems * count)
    table = _sums(members, weights, sizes)
    late = np.append(late, False)

    def by_bin(values: NDArray) -> NDArray:
        return values[members].sum(axis=1).reshape(num_problems, count)

    total, deferred = by_bin(weights), by_bin(weights * late)
    total_size = by_bin(sizes) if sizes is not None else total
    deferred_size = by_bin(sizes * late) if sizes is not None else deferred.copy()
    chosen = np.full((num_problems, count), -1)
    for sweep in range(2 * sweeps):
        here = np.arange(sweep % 2, count - 1, 2)  # bins of equal parity do not interact and decide together
        before = np.pad(deferred, ((0, 0), (1, 0)))[:, here]
        surplus = before + total[:, here] - targets[:, here]
        missing = targets[:, here + 1] - total[:, here + 1] + deferred[:, here + 1]
        wanted = (surplus + missing) / 2
        sets = table.take((here + np.arange(num_problems)[:, None] * count).ravel())
        distance = np.abs(sets.sums - wanted.reshape(-1, 1))
        if capacity is not None and sizes is not None:
            size_here = np.pad(deferred_size, ((0, 0), (1, 0)))[:, here] + total_size[:, here]
            size_next = total_size[:, here + 1] - deferred_size[:, here + 1]
            limit = capacity.limits[0]
            distance[size_here.reshape(-1, 1) - sets.extra > limit] = np.inf
            distance[size_next.reshape(-1, 1) + sets.extra > limit] = np.inf
        best = distance.argmin(axis=1)
        index = np.arange(len(best))
        now = np.abs(deferred[:, here] - wanted).ravel()
        better = distance[index, best] < now - 1e-9 * np.abs(total[:, here]).ravel()
        if not better.any() and sweep:
            break
        shape = (num_problems, len(here))
        changed = better.reshape(shape)
        deferred[:, here] = np.where(changed, sets.sums[index, best].reshape(shape), deferred[:, here])
        deferred_size[:, here] = np.where(changed, sets.extra[index, best].reshape(shape), deferred_size[:, here])
        chosen[:, here] = np.where(changed, best.reshape(shape), chosen[:, here])
    bits = np.take_along_axis(table.subsets, np.maximum(chosen, 0).reshape(-1, 1), 1)
    inside = (bits >> np.minimum(np.arange(members.shape[1]), 63)) & 1 > 0
    decided = np.flatnonzero(chosen.ravel() >= 0)
    late[members[decided]] = inside[decided]
    return late[:-1]
