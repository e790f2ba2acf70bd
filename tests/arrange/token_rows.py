"""Rows of tokens to cut."""

import numpy as np
from numpy.typing import NDArray


def packed_row(
    length: int, seed: int, sizes: tuple[int, int] = (512, 1536), padding: int = 0
) -> tuple[NDArray, NDArray, NDArray]:
    """First and last visible place, and segment, of the tokens of causal samples packed into a row, then padding."""
    rng, samples = np.random.default_rng(seed), []
    while sum(samples) < length - padding:
        samples.append(min(int(rng.integers(sizes[0], sizes[1] + 1)), length - padding - sum(samples)))
    return causal_row(samples, length)


def causal_row(samples: list[int], length: int | None = None) -> tuple[NDArray, NDArray, NDArray]:
    """The same for samples of given lengths."""
    total = sum(samples)
    padding = (length or total) - total
    start = np.cumsum(samples) - samples
    first = np.append(np.repeat(start, samples), np.ones(padding, np.int64)).astype(np.int32)
    last = np.append(np.arange(total), np.zeros(padding, np.int64)).astype(np.int32)
    ids = np.append(np.repeat(np.arange(len(samples)) + 1, samples), np.zeros(padding, np.int64))
    return first, last, ids
