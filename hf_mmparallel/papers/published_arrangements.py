"""Published arrangements: transformers' sampler, DistTrain's reordering, DIP's, and Entrain's algorithm 4."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arrange.arrangements import contiguous, couple_encoders, in_turns
from ..arrange.assigned_batch import deal_samples
from ..arrange.colocated_modules import colocated_encoders, group_by_microbatch
from ..arrange.deferral import bottleneck_matching, possible_pairs
from ..arrange.microbatch_counts import counts_of
from ..plan import LANGUAGE_MODEL, ParallelPlan, Workloads
from ..plan.step_plan import BatchIndices, Replicas


def batch_rebalance(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> dict[str, Replicas]:
    """
    The algorithm of transformers' `BatchRebalanceSampler` on the samples of one global batch.

    The samples, longest first (by language model tokens), are split into as many groups as there are microbatches, and
    the boundaries are moved until the cost of padded tokens is as even as possible. The most expensive groups are the
    first microbatches of the replicas. Encoders have the same microbatches, see [`couple_encoders`].
    """
    lengths = workloads.tokens[LANGUAGE_MODEL]
    counts = counts_of(plan, workloads, microbatch_size)
    order = np.argsort(-lengths, kind="stable")
    groups = _PaddedGroups(lengths[order].astype(float), len(counts), sum(counts))
    sizes = groups.balance()
    parts = np.split(order, np.cumsum(sizes)[:-1])
    language: list[list[BatchIndices]] = [[()] * count for count in counts]
    for group, (replica, index) in zip(groups.ranking(groups.costs(sizes)), in_turns(counts), strict=True):
        language[replica][index] = tuple(parts[group].tolist())
    return couple_encoders(plan, language)


class _PaddedGroups:
    """
    Consecutive groups of samples in order of decreasing length, defined by the number of samples in each.

    Each iteration moves one sample from the most to the least expensive group, which moves all boundaries between
    them. It ends when a state repeats, and returns the state with the smallest spread.
    """

    def __init__(self, lengths: np.ndarray, dp_size: int, size: int):
        self.dp_size = dp_size
        self.size = size
        # An empty group may begin after the last sample.
        self.lengths = np.append(lengths, 0.0)
        self.active = np.ones(self.size, dtype=bool)

    def costs(self, counts: np.ndarray) -> np.ndarray:
        """Padded tokens, plus the cost of attention (transformers' `QUADRATIC_COST_COEF`), `[groups]`."""
        longest = self.lengths[np.cumsum(counts) - counts]
        return counts * longest + 0.001 * counts * longest * longest

    @staticmethod
    def ranking(costs: np.ndarray) -> list[int]:
        """Groups from the most to the least expensive."""
        return np.argsort(-costs, kind="stable").tolist()

    def balance(self) -> np.ndarray:
        """Number of samples of each group."""
        num_samples = len(self.lengths) - 1
        counts = np.array([num_samples // self.size + (i < num_samples % self.size) for i in range(self.size)])
        if num_samples <= self.size:
            return counts
        best, best_spread, seen = counts.copy(), np.inf, set()
        for _ in range(max(30 * self.size, num_samples)):
            key = counts.tobytes()
            if key in seen or self.active.sum() <= 1:
                break
            seen.add(key)
            costs = self.costs(counts)
            high = int(np.argmax(np.where(self.active, costs, -np.inf)))
            low = int(np.argmin(np.where(self.active, costs, np.inf)))
            if costs[high] - costs[low] < best_spread:
                best, best_spread = counts.copy(), costs[high] - costs[low]
            if costs[high] == costs[low]:
                break
            if counts[high] > 1:
                counts[high] -= 1
                counts[low] += 1
            else:
                self._fill_and_freeze(counts, costs, high)
        return best

    def _fill_and_freeze(self, counts: np.ndarray, costs: np.ndarray, high: int) -> None:
        """Fills the groups that run at the same time as `high`, a single sample, up to its cost; freezes all."""
        ranking, limit = self.ranking(costs), costs[high]
        position = ranking.index(high) // self.dp_size * self.dp_size
        # Not a list: the iteration order of a set of ints decides which group is filled first, as in transformers.
        concurrent = set(ranking[position : position + self.dp_size])
        outside = self.active.copy()
        outside[list(concurrent)] = False
        for group in concurrent:
            if group == high or not self.active[group]:
                continue
            while True:
                longest = self.lengths[counts[:group].sum()] if counts[group] else 0.0
                more = int(counts[group]) + 1
                donors = outside & (counts > 1)
                if more * longest + 0.001 * more * longest * longest > limit or not donors.any():
                    break
                counts[np.argmin(np.where(donors, self.costs(counts), np.inf))] -= 1
                counts[group] += 1
        self.active[list(concurrent)] = False


def disttrain(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> dict[str, Replicas]:
    """
    DistTrain's reordering of samples over replicas (its algorithm 2) and of microbatches (algorithm 3).

    Each sample is assigned to the replica with the smallest sum, smallest samples first as in the paper, although the
    bound that it cites is that of largest first. A replica's samples are split in this order into microbatches of
    nearly `microbatch_size` samples. Encoders have the same microbatches, see [`couple_encoders`].
    """
    # the size of a sample: forward time through all modules
    sizes = np.sum([workloads.forward_ms[name] for name in plan.modules], axis=0)
    counts = counts_of(plan, workloads, microbatch_size)
    pipeline = _Pipeline.longest(plan, workloads)
    # algorithm 2, in ascending order; replicas with fewer microbatches get less work
    order = np.argsort(sizes, kind="stable")
    owners = deal_samples(sizes, order, max(counts) / np.array(counts))
    groups = [order[owners == replica].tolist() for replica in range(len(counts))]
    cuts = [_even_cuts(len(batch_indices), count) for batch_indices, count in zip(groups, counts, strict=True)]
    starts = np.repeat(np.cumsum([0, *map(len, groups)])[:-1], [len(bounds) for bounds in cuts])
    measures = np.vstack([pipeline.stage_ms, sizes])[
        :, [batch_index for batch_indices in groups for batch_index in batch_indices]
    ]
    sums = np.diff(np.cumsum(np.pad(measures, ((0, 0), (1, 0))), axis=1)[:, np.concatenate(cuts) + starts])
    language, first = [], 0
    for batch_indices, bounds, count in zip(groups, cuts, counts, strict=True):
        parts = sums[:, first : first + count]
        order = interleaved_order(parts[:-1].T, pipeline.backward_ratio, parts[-1])
        language.append([tuple(batch_indices[bounds[index] : bounds[index + 1]]) for index in order])
        first += count + 1  # skips the difference across the boundary of two replicas
    return couple_encoders(plan, language)


def _even_cuts(num_samples: int, count: int) -> list[int]:
    """Boundaries of `count` groups of nearly the same size, larger ones first."""
    size, rest = divmod(num_samples, count)
    return [size * group + min(group, rest) for group in range(count + 1)]


@dataclass(frozen=True)
class _Pipeline:
    """The longest path of stages through the model, and the forward time of each sample on its stages."""

    stage_ms: np.ndarray  # [stages, samples]
    backward_ratio: np.ndarray  # [stages]

    @classmethod
    def longest(cls, plan: ParallelPlan, workloads: Workloads) -> _Pipeline:
        """The path from the encoder with the most stages to the end of the generator with the most stages."""
        encoders, generators = (
            sorted(names, key=lambda name: -len(plan.modules[name].replicas[0]))[:1]
            for names in (plan.encoders, plan.generators)
        )
        num_replicas = plan.modules[LANGUAGE_MODEL].dp_size
        times, ratios = [], []
        for name in (*encoders, LANGUAGE_MODEL, *generators):
            module = plan.modules[name]
            for stage in module.replicas[0]:
                # Fewer replicas than the language model's mean more samples per replica; more replicas mean fewer.
                share_of_time = stage.num_layers / module.num_layers * num_replicas / module.dp_size
                times.append(workloads.forward_ms[name] * share_of_time / len(stage.all_ranks))
                ratios.append(workloads.backward_ratio.get(name, 2.0))
        return cls(np.array(times), np.array(ratios))


def interleaved_order(
    forward_ms: np.ndarray,  # [microbatches, stages]
    backward_ratio: np.ndarray,  # [stages] backward over forward time
    sizes: np.ndarray,  # [microbatches]
) -> list[int]:
    """
    Orders microbatches by DistTrain's algorithm 3, for 1F1B over `p` stages.

    The smallest microbatch is first and the `p - 1` smallest of the others are last, in ascending order. The first gap
    of the first stage is filled by `p - 1` microbatches, each later one by one: those whose forward times on the first
    stage come closest to the gap.
    """
    num_stages, stages_ms = forward_ms.shape[1], forward_ms.tolist()
    smallest = sorted(range(len(stages_ms)), key=sizes.tolist().__getitem__)
    order, rear, pending = smallest[:1], smallest[1:num_stages], smallest[num_stages:]
    # The paper does not say how to find the `p - 1` microbatches in linear time; here it is the best run of neighbors
    # in the order of forward times.
    pending.sort(key=lambda index: stages_ms[index][0])
    gaps = _Gaps(stages_ms, backward_ratio.tolist(), order)
    width = max(1, num_stages - 1)
    while pending:
        width = min(width, len(pending))
        start = _closest([stages_ms[index][0] for index in pending], width, gaps.next())
        order.extend(pending[start : start + width])
        del pending[start : start + width]
        gaps.fill()
        width = 1
    return order + rear


def _closest(times_ms: list[float], width: int, gap_ms: float) -> int:
    """Start of the run of `width` ascending times with the sum closest to the gap."""
    if width > 1:
        # Summed from left to right, so that ranks with other processors get the same result.
        times_ms = [sum(times_ms[start : start + width]) for start in range(len(times_ms) - width + 1)]
    position = bisect.bisect_left(times_ms, gap_ms)
    if position and (position == len(times_ms) or gap_ms - times_ms[position - 1] <= times_ms[position] - gap_ms):
        position -= 1
    return position


class _Gaps:
    """
    The recursion of GETINTERVAL: a task starts when its stage is free and its inputs have arrived.

    Stage `s` of `p` runs `p - s` forwards, then alternates backwards and forwards. Each round advances the pipeline to
    the next backward of the first stage; the gap is the time that the first stage waits for it.
    """

    def __init__(self, forward_ms: list[list[float]], backward_ratio: list[float], order: list[int]):
        self.forward_ms = forward_ms
        self.ratio = backward_ratio
        self.order = order
        self.free = [0.0] * len(backward_ratio)
        self.done: list[list[float]] = [[] for _ in backward_ratio]
        self.round = 0
        self.ready = 0.0

    def _forwards(self, stage: int, count: int) -> None:
        """Runs the known forwards of the stage until it has run `count`."""
        done, before = self.done[stage], self.done[stage - 1]
        for position in range(len(done), min(count, len(self.order))):
            arrival = before[position] if stage else 0.0
            self.free[stage] = max(arrival, self.free[stage]) + self.forward_ms[self.order[position]][stage]
            done.append(self.free[stage])

    def _backwards(self) -> None:
        """Runs the next backward on all stages but the first, after the forwards before it."""
        num_stages = len(self.free)
        for stage in range(1, num_stages):
            self._forwards(stage, self.round + num_stages - stage)
        microbatch = self.forward_ms[self.order[self.round]]
        self.ready = 0.0
        for stage in range(num_stages - 1, 0, -1):
            self.free[stage] = max(self.ready, self.free[stage]) + self.ratio[stage] * microbatch[stage]
            self.ready = self.free[stage]

    def next(self) -> float:
        """The gap before the next backward of the first stage, without any forward in it."""
        if self.round:
            self._backwards()
            return max(0.0, self.ready - self.free[0])
        # Only the first microbatch is known, which passes an empty pipeline.
        first = self.forward_ms[self.order[0]]
        return sum((1 + ratio) * time_ms for ratio, time_ms in zip(self.ratio[1:], first[1:], strict=True))

    def fill(self) -> None:
        """Runs the forwards in the gap, and the backward."""
        self._forwards(0, len(self.order))
        if not self.round:
            self._backwards()
        backward_ms = self.ratio[0] * self.forward_ms[self.order[self.round]][0]
        self.free[0] = max(self.ready, self.free[0]) + backward_ms
        self.round += 1


def sub_microbatches(
    plan: ParallelPlan, workloads: Workloads, microbatch_size: int, per_microbatch: int = 2
) -> dict[str, Replicas]:
    """
    Splits the sampler's microbatches into smaller ones for the encoders, in the manner of DIP.

    According to Entrain (sections 4.2.3 and 4.7.2), DIP splits a microbatch into sub-microbatches of one modality that
    stay inside of it. Their number and the rule are not described; here there are `per_microbatch`, and samples go
    largest first to the one with the least encoder work. Sub-microbatch `s` of microbatch `k` is the encoder's
    microbatch `k * per_microbatch + s`. DIP also colocates the modules and runs all encoder forwards first, which is
    up to the plan and its schedule.
    """
    whole = couple_encoders(plan, contiguous(plan, workloads, microbatch_size)[LANGUAGE_MODEL])
    return {
        name: replicas
        if name == LANGUAGE_MODEL
        else tuple(
            tuple(
                sub_microbatch
                for batch_indices in replica
                for sub_microbatch in _sub_microbatches(batch_indices, workloads.forward_ms[name], per_microbatch)
            )
            for replica in replicas
        )
        for name, replicas in whole.items()
    }


def _sub_microbatches(batch_indices: BatchIndices, forward_ms: np.ndarray, count: int) -> list[BatchIndices]:
    """Splits samples largest first, each to the one with the least work, then to the one with the fewest samples."""
    result: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for batch_index in sorted(batch_indices, key=lambda batch_index: (-forward_ms[batch_index], batch_index)):
        lightest = min(range(count), key=lambda index: (loads[index], len(result[index])))
        result[lightest].append(batch_index)
        loads[lightest] += float(forward_ms[batch_index])
    return [tuple(sorted(members)) for members in result]


def entrain(
    plan: ParallelPlan,
    workloads: Workloads,
    microbatch_size: int,  # mean samples of a microbatch of one language model replica
    deferral: bool = True,  # whether to run lines 7 to 15
) -> dict[str, Replicas]:
    """
    Arranges encoders and the language model by Entrain's algorithm 4 (sections 4.3, 4.5.1 and 4.5.2), line by line.

    The paper leaves some cases open. Here all encoders count as one, with the sum of their forward times; samples
    without encoder work come last, to the microbatch with the least work in the language model; with an odd number of
    microbatches the middle one has no partner and comes last; and if an encoder has another number of replicas than
    the language model, these split microbatches as in `hierarchical`. Token limits are ignored.
    """
    language = np.asarray(workloads.forward_ms[LANGUAGE_MODEL], dtype=float)
    encoder = np.zeros(len(language))
    for name in plan.encoders:
        encoder += workloads.forward_ms[name]
    counts = np.array(counts_of(plan, workloads, microbatch_size))
    long_first = np.where(encoder > 0, 0.0, -language)
    # lines 1 and 2: by decreasing encoder work, each to the replica with the least work in the language model
    order, replica = np.lexsort((long_first, -encoder)), np.zeros(len(language), np.int64)
    replica[order] = deal_samples(language, order, 1 / counts)
    bins = np.zeros(len(replica), np.int64)
    for index in range(len(counts)):
        members = np.flatnonzero(replica == index)
        counts[index] = effective_count(encoder[members], int(counts[index]))
        bins[members] = stratified(encoder[members], language[members], int(counts[index]))
    late_bins = bins.copy()
    for count in np.unique(counts).tolist() if deferral else ():  # replicas with equal counts together
        equal = np.flatnonzero(counts == count)
        members = np.flatnonzero(np.isin(replica, equal))
        flat_bins = np.searchsorted(equal, replica[members]) * count + bins[members]
        bins[members], late_bins[members] = deferred_pairs(flat_bins, language[members], len(equal), count)
    result: dict[str, Replicas] = {}
    for colocated in colocated_encoders(plan, workloads, dict.fromkeys(plan.modules, 1.0)):
        turn = colocated.turn(replica, bins, counts)
        copy = colocated.copies(replica, turn, int(counts.max()), None)
        result.update(dict.fromkeys(colocated.modules, colocated.microbatches(copy, turn, counts)))
    result[LANGUAGE_MODEL] = group_by_microbatch(np.arange(len(replica)), replica, late_bins, counts)
    return result


def effective_count(encoder: NDArray, count: int) -> int:
    """Effective number of microbatches (line 3): at most `count`, and `count` without encoder work."""
    # at most the encoder work divided by that of the largest sample
    largest = float(encoder.max(initial=0.0))
    return max(1, min(count, int(encoder.sum() / largest * (1 + 1e-12)))) if largest else count


def stratified(
    encoder: NDArray,  # [num_samples] workload in the encoders
    language: NDArray,  # [num_samples] workload in the language model
    count: int,
) -> NDArray:
    """Lines 4 to 6: microbatches `[num_samples]` of a replica, the largest within `2 - 1 / count` of the optimum."""
    # Samples above the median of the language model come first, then the others, each by decreasing encoder work.
    fine = np.ones(len(language), dtype=bool)
    fine[np.argsort(-language, kind="stable")[: (len(language) + 1) // 2]] = False
    order = np.lexsort((-encoder, fine))
    bins, some, paces = np.zeros(len(language), np.int64), encoder > 0, np.ones(count)
    order = order[some[order]]
    bins[order] = deal_samples(encoder, order, paces)
    texts = np.argsort(-language, kind="stable")
    texts = texts[~some[texts]]
    bins[texts] = deal_samples(language, texts, paces, np.bincount(bins[some], language[some], count))
    return bins


def deferred_pairs(
    flat_bins: NDArray,  # [num_samples] `replica * count + microbatch`
    language: NDArray,  # [num_samples] workload in the language model
    num_replicas: int,
    count: int,  # microbatches of each replica
) -> tuple[NDArray, NDArray]:
    """
    Lines 7 to 15: pairs of microbatches whose work in the language model is balanced by one deferral.

    Returns for each sample the new index of its microbatch in encoders and in the language model, in the order
    `(ol_0, ul_0, ol_1, ul_1, ...)` of overloaded and underloaded microbatches.
    """
    loads = np.bincount(flat_bins, language, num_replicas * count).reshape(num_replicas, count)
    half = count // 2
    late = np.zeros(len(flat_bins), dtype=bool)
    if not half:
        return flat_bins % count, flat_bins % count
    pairs = possible_pairs(flat_bins, language, loads)
    partner = bottleneck_matching(pairs.costs)
    reached = np.take_along_axis(pairs.costs, partner[:, :, None], 2)[:, :, 0]
    alone = np.take_along_axis(loads, pairs.over, 1)
    # The threshold is the lowest one that each overloaded microbatch meets alone or together with its partner; those
    # that meet it alone defer nothing.
    critical = alone > reached.max(axis=1, keepdims=True) * (1 + 1e-12)
    for problem, number in np.argwhere(critical).tolist():
        late[pairs.items_to_defer(problem, number, int(partner[problem, number]))] = True
    under = np.take_along_axis(pairs.under, partner, 1)
    order = np.stack([pairs.over, under], axis=2).reshape(num_replicas, 2 * half)
    order = np.append(order, np.argsort(-loads, axis=1, kind="stable")[:, half : count - half], axis=1)
    position = np.empty_like(order)
    np.put_along_axis(position, order, np.broadcast_to(np.arange(count), order.shape), 1)
    bins = position.ravel()[flat_bins]
    return bins, bins + late
