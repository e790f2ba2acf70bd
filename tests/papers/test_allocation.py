"""Ranks in proportion to work are those of exhaustive search."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.papers.allocation import proportional_allocation, proportional_allocations

WORKS = st.lists(st.floats(0.01, 100), min_size=1, max_size=4)


def splits(num_ranks: int, num_modules: int, minimum: int) -> np.ndarray:
    """int `[num_splits, num_modules]`: every way to give all ranks away."""
    spare = num_ranks - num_modules * (minimum - 1)
    bounds = combinations(range(1, spare), num_modules - 1)
    return np.array([np.diff((0, *inner, spare)) for inner in bounds]) + minimum - 1


@given(WORKS, st.integers(1, 2), st.integers(0, 12))
def test_no_split_is_faster_and_none_is_nearer(work, minimum, more):
    num_ranks = len(work) * minimum + more
    every, values = splits(num_ranks, len(work), minimum), np.array(work)
    named = {f"m{index}": value for index, value in enumerate(work)}
    fastest, nearest = (
        np.array(list(proportional_allocation(named, num_ranks, minimum, rounding).values()))
        for rounding in ("fastest", "nearest")
    )
    for found in (fastest, nearest):
        assert found.sum() == num_ranks and found.min() >= minimum
    assert (values / fastest).max() == pytest.approx((values / every).max(axis=1).min())
    shares = values / values.sum() * num_ranks
    assert ((nearest - shares) ** 2).sum() == pytest.approx(((every - shares) ** 2).sum(axis=1).min())


@given(WORKS, st.integers(0, 60), st.sampled_from(["fastest", "nearest"]))
def test_the_unit_does_not_matter(work, more, rounding):
    values, num_ranks = np.array([work]), len(work) + more
    found, other = (proportional_allocations(values * unit, num_ranks, 1, rounding) for unit in (1, 1024))
    assert other.tolist() == found.tolist()


def test_many_at_once_are_each_on_its_own():
    works = np.random.default_rng(0).gamma(1.0, size=(200, 3))
    for num_ranks in (3, 7, 64, 1296):
        for rounding in ("fastest", "nearest"):
            found = proportional_allocations(works, num_ranks, 1, rounding)
            assert (found.sum(axis=1) == num_ranks).all() and found.min() >= 1
            for row, work in zip(found[:20].tolist(), works[:20].tolist(), strict=True):
                alone = proportional_allocation(dict(zip("abc", work, strict=True)), num_ranks, 1, rounding)
                assert list(alone.values()) == row


def test_what_has_no_share_is_refused():
    with pytest.raises(ValueError, match="3 ranks are not 2 "):
        proportional_allocation({"a": 1.0, "b": 1.0}, 3, 2)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="`b`"):
            proportional_allocation({"a": 1.0, "b": wrong}, 4)
    for wrong in ([0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="Works"):
            proportional_allocations(np.array([[1.0, 2.0], wrong]), 4)
