"""How large the microbatches of a step should be, one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .estimate import Pipeline

LARGEST = 1.25  # of the mean: what a microbatch may grow to, so that memory stays near that of equal ones
_STARTS = (0.25, 0.4, 0.55, 0.7, 0.85)
_FEWER = (1, 0.75, 0.5, 0.375, 0.25)
_WORTH = 0.02  # what fewer microbatches must save
_GOLDEN = (math.sqrt(5) - 1) / 2
_RAMPS = (0, 0.5, 1, 1.5, 2)  # in lengths of the pipeline


@lru_cache(maxsize=64)
def shapes(count: int, num_stages: int) -> NDArray:
    """
    Candidates `[num_shapes, count]` for the sizes of `count` microbatches, 1 on average; the first has equal ones.

    Sizes rise in a line at the start, while the pipeline fills, and fall at the end, while it drains: what a stage
    waits for then is small.
    """
    place = np.arange(count)
    found = [np.ones(count)]
    for start in _STARTS:
        for rise in _RAMPS:
            for fall in _RAMPS:
                lengths = (rise * num_stages, fall * num_stages)
                if not any(lengths) or sum(lengths) > count:
                    continue
                left, right = (
                    np.minimum(1, start + (1 - start) * there / length) if length else np.ones(count)
                    for there, length in zip((place, place[::-1]), lengths, strict=True)
                )
                sizes = np.minimum(left, right)
                sizes *= count / sizes.sum()
                if sizes.max() <= LARGEST:
                    found.append(sizes)
    return np.stack(found)


def best_shape(pipeline: Pipeline, totals: Mapping[str, float], count: int, smallest: float) -> tuple[NDArray, float]:
    """
    The sizes for which a step would end first if samples could be divided at will.

    Args:
        pipeline ([`Pipeline`]): The stages.
        totals (`Mapping[str, float]`): Module -> milliseconds of one replica's samples in it.
        count (`int`): Microbatches.
        smallest (`float`): The least size that samples can make up, as a share of the mean.

    Returns:
        `tuple[numpy.ndarray, float]`: Sizes `[count]`, 1 on average, and the estimated time.
    """
    candidates = shapes(count, pipeline.num_stages)
    candidates = candidates[np.append(True, candidates[1:].min(axis=1) >= smallest)]
    times = pipeline.iteration_ms({name: candidates * (total / count) for name, total in totals.items()})
    best = int(times.argmin())
    return candidates[best], float(times[best])


def best_count(pipeline: Pipeline, totals: Mapping[str, float], count: int, heaviest: Mapping[str, NDArray]) -> int:
    """
    How many microbatches to make, at most `count`, when single samples are heavier than a microbatch should be.

    With fewer microbatches such a sample weighs less beside the others, but the pipeline takes longer to fill and to
    drain; which counts more is estimated. (Entrain, section 4.5.1, takes the work of all samples over that of the
    largest, whatever the pipeline.)

    Args:
        pipeline ([`Pipeline`]): The stages.
        totals (`Mapping[str, float]`): Module -> milliseconds of one replica's samples in it.
        count (`int`): Most microbatches.
        heaviest (`Mapping[str, numpy.ndarray]`): Encoder -> milliseconds `[replicas, any]` of the heaviest samples of
            each replica, descending.

    Returns:
        `int`: Microbatches.
    """
    best, best_ms = count, math.inf
    for share in _FEWER:
        trial = max(1, round(share * count))
        loads = {name: np.full((1, trial), total / trial) for name, total in totals.items()}
        loads |= {name: _around(samples, totals[name], trial) for name, samples in heaviest.items()}
        rows = max(map(len, loads.values()))
        loads = {name: np.broadcast_to(values, (rows, trial)) for name, values in loads.items()}
        time_ms = float(pipeline.iteration_ms(loads).max())
        if time_ms < (1 - _WORTH) * best_ms:
            best, best_ms = trial, time_ms
    return best


def _around(samples: NDArray, total: float, count: int) -> NDArray:
    """Loads `[replicas, count]` when samples above the mean have microbatches of their own and all others are even."""
    samples = samples[:, : count - 1]
    rest = total - np.pad(np.cumsum(samples, axis=1), ((0, 0), (1, 0)))
    level = np.maximum(rest, 0) / (count - np.arange(rest.shape[1]))
    alone = np.pad(np.cumprod(samples > level[:, :-1], axis=1), ((0, 0), (0, 1)))
    even = np.take_along_axis(level, alone.sum(axis=1, keepdims=True), 1)
    loads = np.repeat(even, count, axis=1)
    loads[:, : samples.shape[1]] = np.where(alone[:, :-1] > 0, samples, even)
    # Evenly spread, so that they do not stand at the start, where they would count most.
    return loads[:, np.argsort((np.arange(count) * _GOLDEN + 0.5) % 1, kind="stable")]
