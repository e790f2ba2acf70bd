"""Bipartite matchings that minimize the cost of the worst pair."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching


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
