"""Oobleck's planner as the dissertation has it (section 2.4), with its misprints corrected: a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class Part:
    """
    The best stages that were found for some layers on some ranks.

    Args:
        stages_ms (`tuple[float, ...]`): Time of a forward and a backward in each stage.
        cuts (`tuple[int, ...]`): One past the last layer of each stage.
    """

    stages_ms: tuple[float, ...]
    cuts: tuple[int, ...]

    @property
    def estimate_ms(self) -> float:
        """
        `T1 + T2 + T3`: all stages once, then the slowest stage with four microbatches for each stage, then the stages
        from the slowest on once more. Stages are counted from 0 here.
        """
        num_stages, slowest_ms = len(self.stages_ms), max(self.stages_ms)
        slowest = self.stages_ms.index(slowest_ms)
        count = MICROBATCHES_PER_STAGE * num_stages
        return sum(self.stages_ms) + (count - num_stages + slowest - 1) * slowest_ms + sum(self.stages_ms[slowest:])


def divided(layer_ms: np.ndarray, num_stages: int, num_nodes: int, node_size: int) -> Part | None:
    """
    Divides and conquers: the best of all ways to cut layers, stages and ranks in two, each part of which is the best
    one by its own estimate, with one cache for all parts. Nodes are divided before the ranks of a node.

    Args:
        layer_ms (`np.ndarray` of shape `[node_size, layers]`): Time of each layer, by number of ranks from 1 on.
        num_stages, num_nodes, node_size (`int`): Stages, nodes, and ranks of a node.
    """
    prefix = np.concatenate([np.zeros((len(layer_ms), 1)), np.cumsum(layer_ms, axis=1)], axis=1)

    @cache
    def best(stages: int, first: int, stop: int, nodes: int, ranks: int) -> Part | None:
        if stages > min(stop - first, nodes * ranks) or stages < nodes:
            return None
        if stages == 1:
            return Part((float(prefix[ranks - 1, stop] - prefix[ranks - 1, first]),), (stop,))
        total = nodes if nodes > 1 else ranks
        found, found_ms = None, np.inf
        for left_count, left_stages in product(range(1, total), range(1, stages)):
            sizes = ((left_count, ranks), (total - left_count, ranks))
            if nodes == 1:
                sizes = ((1, left_count), (1, total - left_count))
            for middle in range(first + left_stages, stop - (stages - left_stages) + 1):
                left = best(left_stages, first, middle, *sizes[0])
                right = None if left is None else best(stages - left_stages, middle, stop, *sizes[1])
                if left is None or right is None:
                    break  # whether there is one depends on the numbers of stages alone
                both = Part(left.stages_ms + right.stages_ms, left.cuts + right.cuts)
                if both.estimate_ms < found_ms:
                    found, found_ms = both, both.estimate_ms
        return found

    return best(num_stages, 0, layer_ms.shape[1], num_nodes, node_size)


def exhaustive(layer_ms: np.ndarray, num_stages: int, num_nodes: int, node_size: int) -> Part | None:
    """The stages with the smallest estimate of all, for small sizes."""
    num_layers = layer_ms.shape[1]

    def every(first: int, stages: int, ranks_left: int) -> list[Part]:
        if stages == 0:
            return [Part((), ())] if first == num_layers and ranks_left == 0 else []
        result = []
        in_node = (ranks_left - 1) % node_size + 1
        for ranks in range(1, min(in_node, ranks_left) + 1):
            for stop in range(first + 1, num_layers + 1):
                own = float(layer_ms[ranks - 1, first:stop].sum())
                result += [
                    Part((own, *rest.stages_ms), (stop, *rest.cuts))
                    for rest in every(stop, stages - 1, ranks_left - ranks)
                ]
        return result

    return min(every(0, num_stages, num_nodes * node_size), key=lambda part: part.estimate_ms, default=None)


def deviating_least(pace_ms: Sequence[float], num_microbatches: int) -> list[int]:
    """
    Microbatches of each pipeline with the smallest sum of squared deviations of `count * pace` (equation 2.6), at
    least one each: from shares by pace, single microbatches move as long as that helps.

    Args:
        pace_ms (`Sequence[float]`): Time of a microbatch in each pipeline.
        num_microbatches (`int`): Microbatches of all pipelines, at least as many as pipelines.
    """
    pace = np.asarray(pace_ms, float)
    shares = num_microbatches / pace / (1 / pace).sum()
    counts = np.maximum(shares.astype(int), 1)
    while counts.sum() != num_microbatches:
        gap = np.where(counts > 1, counts - shares, -np.inf) if counts.sum() > num_microbatches else shares - counts
        counts[int(np.argmax(gap))] += 1 if counts.sum() < num_microbatches else -1

    def deviation(chosen: np.ndarray) -> float:
        times = chosen * pace
        return float(((times - times.mean()) ** 2).sum())

    while True:
        moves = [
            moved
            for source, target in product(range(len(pace)), repeat=2)
            if source != target and counts[source] > 1
            for moved in [counts + np.eye(len(pace), dtype=int)[target] - np.eye(len(pace), dtype=int)[source]]
        ]
        better = min(moves, key=deviation, default=counts)
        if deviation(better) >= deviation(counts) - 1e-9:
            return counts.tolist()
        counts = better
