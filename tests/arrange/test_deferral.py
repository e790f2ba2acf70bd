"""Pairs of microbatches, their order, and what the language model takes later."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange.deferral import defer, pair_means, pair_order, shuffled_pairs
from hf_mmparallel.arrange.greedy import Capacity


def even_targets(places, weights, num_problems: int, count: int) -> np.ndarray:
    """The mean of each problem."""
    totals = np.bincount(places // count, weights, num_problems)
    return np.repeat(totals[:, None] / count, count, axis=1)


def squares(places, late, weights, targets) -> np.ndarray:
    loads = np.bincount(places + late, weights, targets.size).reshape(targets.shape)
    return ((loads - targets) ** 2).sum(axis=1)


def make(seed: int, num_problems: int, count: int, num_items: int):
    """Items at places, some of them late, and even targets."""
    rng = np.random.default_rng(seed)
    places, weights = rng.integers(0, num_problems * count, num_items), rng.lognormal(0, 1, num_items)
    late = (rng.random(num_items) < 0.3) & (places % count < count - 1)
    return places, weights, late, even_targets(places, weights, num_problems, count)


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 6), st.integers(0, 40))
def test_nobody_goes_past_the_end_and_loads_get_no_less_even(seed, num_problems, count, num_items):
    places, weights, late, targets = make(seed, num_problems, count, num_items)
    found = defer(places, weights, late, targets, 4)
    assert found.shape == late.shape and not found[places % count == count - 1].any()
    before, after = squares(places, late, weights, targets), squares(places, found, weights, targets)
    assert (after <= before * (1 + 1e-9) + 1e-9).all()


@pytest.mark.parametrize("seed", range(20))
def test_two_microbatches_share_as_well_as_they_can(seed):
    places, weights, late, targets = make(seed, 1, 2, 9)
    found = defer(places, weights, late & False, targets, 1)
    mine = np.flatnonzero(places == 0)
    ways = [np.isin(np.arange(9), mine[list(way)]) for way in itertools.product([False, True], repeat=len(mine))]
    assert squares(places, found, weights, targets)[0] == pytest.approx(
        min(squares(places, way, weights, targets)[0] for way in ways)
    )


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 30))
def test_limits_that_held_still_hold(seed, count, num_items):
    places, weights, late, targets = make(seed, 1, count, num_items)
    sizes = np.random.default_rng(seed).integers(1, 9, num_items).astype(float)
    limit = np.bincount(places + late, sizes).max()
    found = defer(places, weights, late, targets, 3, Capacity(sizes[:, None], np.array([limit])))
    assert np.bincount(places + found, sizes).max() <= limit


def test_every_place_but_the_last_can_defer():
    for place in range(3):
        late = defer(np.full(2, place), np.ones(2), np.zeros(2, bool), np.full((1, 4), 0.5), 1)
        assert late.sum() == 1
    assert not defer(np.full(2, 3), np.ones(2), np.zeros(2, bool), np.full((1, 4), 0.5), 1).any()


def test_limits_forbid_what_would_be_best():
    places, weights = np.zeros(2, np.int64), np.array([3.0, 1.0])
    targets = np.array([[2.0, 2.0]])
    assert defer(places, weights, np.zeros(2, bool), targets, 1).sum() == 1
    capacity = Capacity(np.array([[4.0], [4.0]]), np.array([3.0]))
    assert not defer(places, weights, np.zeros(2, bool), targets, 1, capacity).any()


def order_of(rows, weights, count: int, start: float = 0.0) -> list[int]:
    surplus = np.bincount(rows, weights, count)[None] - weights.sum() / count
    return pair_order(rows, weights, surplus, np.array([start]))[0].tolist()


def test_overloaded_microbatches_stand_before_those_that_they_defer_to():
    # 0 can give 4 of its 10 to 3, and 1 can give 2 of its 8 to 2.
    rows = np.array([0, 0, 1, 1, 2, 3])
    weights = np.array([6.0, 4, 6, 2, 4, 2])
    order = order_of(rows, weights, 4)
    assert sorted(order) == [0, 1, 2, 3]
    assert order.index(3) == order.index(0) + 1 and order.index(2) == order.index(1) + 1
    places = np.array([order.index(row) for row in rows])
    late = defer(places, weights, np.zeros(6, bool), np.full((1, 4), 6.0), 2)
    assert np.bincount(places + late, weights).tolist() == [6.0] * 4


def test_the_odd_one_out_is_in_the_middle_by_load_and_last():
    weights = np.array([9.0, 5.0, 1.0])
    assert order_of(np.arange(3), weights, 3) == [0, 2, 1]
    assert order_of(np.zeros(1, np.int64), weights[:1], 1) == [0]


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 40))
def test_orders_hold_every_microbatch_once(seed, count, num_items):
    rng = np.random.default_rng(seed)
    rows, weights = rng.integers(0, 2 * count + 1, num_items), rng.random(num_items)
    surplus = np.bincount(rows, weights, 2 * count + 1)[:-1].reshape(2, count)
    order = pair_order(rows, weights, surplus, np.zeros(2))
    assert np.sort(order, axis=1).tolist() == [list(range(count))] * 2


def test_pairs_stay_together_in_every_order_that_is_tried():
    order = np.array([[3, 1, 0, 4, 2], [0, 1, 2, 3, 4]])
    trials = shuffled_pairs(order, 6)
    assert trials.shape == (6, 2, 5) and trials[0].tolist() == order.tolist()
    assert {tuple(trial[0].tolist()) for trial in trials} == {(3, 1, 0, 4, 2), (0, 4, 3, 1, 2)}
    assert {tuple(trial[1].tolist()) for trial in trials} == {(0, 1, 2, 3, 4), (2, 3, 0, 1, 4)}
    loads = np.array([[1.0, 2, 3, 4, 5], [1, 3, 5, 7, 9]])
    assert pair_means(order, loads).tolist() == [[3, 3, 3, 3, 3], [2, 2, 6, 6, 9]]


def test_what_pairs_leave_over_stays_small_in_the_running_sum():
    rng = np.random.default_rng(0)
    rows, weights = np.arange(16), rng.lognormal(0, 1, 16)  # one sample each: nothing can be deferred in part
    surplus = weights - weights.mean()
    order = pair_order(rows, weights, surplus[None], np.zeros(1))[0]
    running = np.cumsum(surplus[order].reshape(-1, 2).sum(axis=1))
    worse = np.cumsum(np.sort(surplus[order].reshape(-1, 2).sum(axis=1)))
    assert np.abs(running).max() < np.abs(worse).max() and running.min() > worse.min()
