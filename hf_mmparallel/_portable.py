"""
Arithmetic with one result on every processor, since all ranks plan each step for themselves and must decide alike.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Number = TypeVar("Number", float, NDArray)


def on_grid(values: Any, largest: float | None = None, bits: int = 32) -> Any:
    """Rounds a float or an array to `bits` significant bits, with `largest` to those of it."""
    # Results that differ in their last bit become equal, unless a bound between two points of the grid lies between
    # them: with 32 bits, a relative error below 2e-10, once in two million. More bits are for results that are the
    # same on every processor, but not in each order of a sum.
    exponent = np.frexp(values if largest is None else largest)[1] - bits
    rounded = np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent)
    return rounded if isinstance(values, np.ndarray) else float(rounded)


# Sums, products, quotients and square roots of numpy are the same on every processor. Matrix products (BLAS),
# exponentials, logarithms and powers (vector units) and fits by least squares differ in their last bit.
def weighted_sum(values: ArrayLike, weights: ArrayLike) -> NDArray:
    """Returns `values @ weights` for weights of one dimension: the sum along the last axis, in one order."""
    return (np.asarray(values) * np.asarray(weights)).sum(axis=-1)


def exp(values: Number) -> Number:
    """Exponentials on the grid."""
    return on_grid(np.exp(values))


def expm1(values: Number) -> Number:
    """Exponentials minus 1 on the grid."""
    return on_grid(np.expm1(values))


def log(values: Number) -> Number:
    """Natural logarithms on the grid."""
    return on_grid(np.log(values))


def smallest(values: NDArray, count: int) -> NDArray:
    """Returns flat indices of the `count` smallest values, or of all, ascending by value; equal ones by index."""
    flat = values.ravel()
    if count >= len(flat):
        return np.argsort(flat, kind="stable")
    # `argsort` and `argpartition` order equal values as the vector unit likes, so a stable sort decides
    candidates = np.flatnonzero(flat <= np.partition(flat, count - 1)[count - 1])
    return candidates[np.argsort(flat[candidates], kind="stable")[:count]]
