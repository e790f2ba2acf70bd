"""How many ranks each module gets in proportion to its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rounding = Literal["fastest", "nearest"]


def _fastest(shares: NDArray, ranks: NDArray) -> NDArray:
    """A module that is slow with the ranks it has needs one most."""
    return shares / ranks


def _nearest(shares: NDArray, ranks: NDArray) -> NDArray:
    """A module that is far below its share needs one most."""
    return shares - ranks


_NEEDS: Mapping[Rounding, Callable[[NDArray, NDArray], NDArray]] = {"fastest": _fastest, "nearest": _nearest}


def proportional_allocation(
    work: Mapping[str, float], num_ranks: int, minimum: int = 1, rounding: Rounding = "fastest"
) -> dict[str, int]:
    """
    Gives each module ranks in proportion to its work (Entrain, section 4.4.2 and algorithm 2, line 5).

    Args:
        work (`Mapping[str, float]`): Module -> its work, in any unit, above 0.
        num_ranks (`int`): Ranks of one replica; all of them are given away.
        minimum (`int`, *optional*, defaults to 1): What each module has at least.
        rounding (`str`, *optional*, defaults to `"fastest"`):
            `"fastest"` makes the largest work for a rank as small as whole ranks can. `"nearest"` gives the whole
            numbers that are nearest to the shares (least squares), which is what the paper says. They differ near
            the borders: of 16 ranks, 0.595 of the work gets 10 by the latter, since the share is 9.52, and 9 by the
            former, since 0.405 / 6 is more than 0.595 / 9. With two modules only the module with the larger share
            can get fewer.

    Returns:
        `dict[str, int]`: Module -> ranks.

    Raises:
        `ValueError`: If there are too few ranks or a work is not a number above 0.
    """
    shares = np.array([list(work.values())], float)
    for name, value in work.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"The work of `{name}` is {value}, which has no share. Leave out modules without work.")
    found = proportional_allocations(shares, num_ranks, minimum, rounding)[0]
    return dict(zip(work, found.tolist(), strict=True))


def proportional_allocations(
    work: NDArray, num_ranks: int, minimum: int = 1, rounding: Rounding = "fastest"
) -> NDArray:
    """
    The same for many works at once.

    Ranks are handed out one by one to the module that needs one most, which is optimal for both roundings: for
    `"fastest"` since a better allocation has to give the slowest module more, for `"nearest"` since the squares are
    convex. All but a few of them are handed out at once.

    Args:
        work (`numpy.ndarray` of shape `[num_works, num_modules]`): Each at least 0, with a sum above 0.
        num_ranks, minimum, rounding: See [`proportional_allocation`].

    Returns:
        `numpy.ndarray`: int64 `[num_works, num_modules]`.

    Raises:
        `ValueError`: If there are too few ranks.
    """
    num_modules = work.shape[1]
    if minimum < 1 or num_ranks < num_modules * minimum:
        raise ValueError(
            f"{num_ranks} ranks are not {max(minimum, 1)} for each of {num_modules} modules. "
            "Use more ranks for a replica, or a smaller `dp_size`."
        )
    shares = work * (num_ranks / work.sum(axis=1, keepdims=True))
    taken = num_modules * minimum
    # Both are on the way that one by one takes: what all have when the need has come down to some level.
    if rounding == "fastest":
        start = np.ceil(shares * ((num_ranks - taken) / num_ranks))
    else:
        start = np.ceil(shares - taken - 1)
    ranks = np.maximum(start, minimum).astype(np.int64)
    left = num_ranks - ranks.sum(axis=1)
    while (rows := np.flatnonzero(left)).size:
        neediest = _NEEDS[rounding](shares[rows], ranks[rows]).argmax(axis=1)
        ranks[rows, neediest] += 1
        left[rows] -= 1
    return ranks
