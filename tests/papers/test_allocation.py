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
    every = splits(num_ranks, len(work), minimum)
    values = np.array(work)
    named = {f"m{index}": value for index, value in enumerate(work)}

    fastest = np.array(list(proportional_allocation(named, num_ranks, minimum).values()))
    assert fastest.sum() == num_ranks and fastest.min() >= minimum
    assert (values / fastest).max() == pytest.approx((values / every).max(axis=1).min())

    nearest = np.array(list(proportional_allocation(named, num_ranks, minimum, "nearest").values()))
    shares = values / values.sum() * num_ranks
    assert nearest.sum() == num_ranks and nearest.min() >= minimum
    assert ((nearest - shares) ** 2).sum() == pytest.approx(((every - shares) ** 2).sum(axis=1).min())


@given(WORKS, st.integers(0, 60), st.sampled_from(["fastest", "nearest"]), st.randoms())
def test_neither_unit_nor_order_matters(work, more, rounding, random):
    num_ranks = len(work) + more
    values = np.array([work])
    found = proportional_allocations(values, num_ranks, 1, rounding)
    assert proportional_allocations(values * 1024, num_ranks, 1, rounding).tolist() == found.tolist()
    order = random.sample(range(len(work)), len(work))
    permuted = proportional_allocations(values[:, order], num_ranks, 1, rounding)
    loads, other = np.sort(values / found), np.sort(values[:, order] / permuted)
    if rounding == "fastest":  # equal loads may change places, and all loads together stay
        np.testing.assert_allclose(loads.max(), other.max())
    elif len(set(work)) == len(work):
        shares = values / values.sum() * num_ranks
        np.testing.assert_allclose(
            ((found - shares) ** 2).sum(), ((permuted - shares[:, order]) ** 2).sum(), atol=1e-9
        )


def test_many_at_once_are_each_on_its_own():
    works = np.random.default_rng(0).gamma(1.0, size=(200, 3))
    for num_ranks in (3, 7, 64, 1296):
        for rounding in ("fastest", "nearest"):
            found = proportional_allocations(works, num_ranks, 1, rounding)
            assert (found.sum(axis=1) == num_ranks).all() and found.min() >= 1
            for row, work in zip(found[:20].tolist(), works[:20].tolist(), strict=True):
                alone = proportional_allocation(dict(zip("abc", work, strict=True)), num_ranks, 1, rounding)
                assert list(alone.values()) == row


def test_the_two_roundings_differ_between_their_borders():
    work = {"vision": 0.595, "language_model": 0.405}
    assert proportional_allocation(work, 16) == {"vision": 9, "language_model": 7}
    assert proportional_allocation(work, 16, rounding="nearest") == {"vision": 10, "language_model": 6}
    assert proportional_allocation({"vision": 0.6251, "language_model": 0.3749}, 16)["vision"] == 10


@given(st.floats(0.5, 0.999), st.integers(2, 64))
def test_of_two_modules_only_the_larger_gets_fewer_ranks_for_speed(share, num_ranks):
    work = {"a": share, "b": 1 - share}
    fastest, nearest = (proportional_allocation(work, num_ranks, rounding=way)["a"] for way in ("fastest", "nearest"))
    assert nearest - 1 <= fastest <= nearest


def test_what_has_no_share_is_refused():
    with pytest.raises(ValueError, match="3 ranks are not 2 for each of 2 modules"):
        proportional_allocation({"a": 1.0, "b": 1.0}, 3, 2)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="The work of `b`"):
            proportional_allocation({"a": 1.0, "b": wrong}, 4)
    for wrong in ([0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="Works are between"):
            proportional_allocations(np.array([[1.0, 2.0], wrong]), 4)
