"""Greedy filling of bins against exact solutions, and exchanges, which make loads more even and never less."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import greedy
from hf_mmparallel.arrange.greedy import Capacity, CapacityError, exchange, fill_bins, stable_order


def least_largest_load(weights, num_bins: int) -> float:
    """Over all ways to put the items into bins."""
    ways = np.array(list(itertools.product(range(num_bins), repeat=len(weights))))
    return min(np.bincount(way, weights, num_bins).max() for way in ways)


def fill(weights, order, shares, **limits) -> np.ndarray:
    """The bins of the items of one problem with one weight."""
    weights = np.asarray(weights, dtype=float)
    return fill_bins(np.zeros(len(weights), np.int64), weights[:, None], order, np.asarray(shares, float), **limits)


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.integers(1, 3), st.randoms())
def test_loads_are_within_grahams_bounds(weights, num_bins, random):
    best = least_largest_load(weights, num_bins)
    any_order = list(range(len(weights)))
    random.shuffle(any_order)
    found = fill(weights, np.array(any_order), np.ones(num_bins))
    assert np.bincount(found, weights).max() <= (2 - 1 / num_bins) * best * (1 + 1e-9)
    found = fill(weights, np.argsort(-np.array(weights)), np.ones(num_bins))
    assert np.bincount(found, weights).max() <= (4 / 3 - 1 / (3 * num_bins)) * best * (1 + 1e-9)


@given(st.lists(st.lists(st.floats(0.1, 10), max_size=9), min_size=1, max_size=4), st.integers(1, 4))
def test_problems_side_by_side_are_as_each_by_itself(problems, num_bins):
    problem = np.repeat(np.arange(len(problems)), [len(own) for own in problems])
    weights = np.array([weight for own in problems for weight in own])
    order = np.argsort(-weights, kind="stable")
    loads = np.zeros((len(problems), num_bins, 1))
    found = fill_bins(problem, weights[:, None], order, np.ones(num_bins), loads)
    for number, own in enumerate(problems):
        alone = fill(own, np.argsort(-np.array(own), kind="stable"), np.ones(num_bins)) if own else []
        assert found[problem == number].tolist() == list(alone)


def test_bins_fill_up_to_their_shares():
    found = fill(np.ones(60), np.arange(60), [1, 2, 3])
    assert np.bincount(found).tolist() == [10, 20, 30]


def test_the_largest_load_that_an_item_adds_to_decides():
    weights = np.array([[3.0, 0], [0, 3], [1, 1], [0, 1]])
    found = fill_bins(np.zeros(4, np.int64), weights, np.arange(4), np.ones(2))
    # The second does not add to the first weight, and goes to the first bin all the same.
    assert found.tolist() == [0, 0, 1, 1]


def test_loads_at_the_start_count():
    loads = np.array([[[5.0], [0.0]]])
    found = fill_bins(np.zeros(3, np.int64), np.ones((3, 1)), np.arange(3), np.ones(2), loads)
    assert found.tolist() == [1, 1, 1] and loads.tolist() == [[[5.0], [0.0]]]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 5))
def test_limits_hold_or_there_is_no_room(sizes, num_bins):
    capacity = Capacity(np.array(sizes, dtype=float)[:, None], np.array([7.0]))
    try:
        found = fill(np.ones(len(sizes)), np.arange(len(sizes)), np.ones(num_bins), capacity=capacity)
    except CapacityError:
        assert sum(sizes) > 7 * num_bins - (num_bins - 1) * max(sizes) or max(sizes) > 7
    else:
        assert np.bincount(found, sizes).max() <= 7


def test_what_is_taken_already_counts_for_limits():
    capacity, used = Capacity(np.ones((1, 1)), np.array([2.0])), np.array([[[2.0], [1.0]]])
    assert fill([1.0], np.arange(1), np.ones(2), capacity=capacity, used=used).tolist() == [1]
    with pytest.raises(CapacityError):
        fill([1.0], np.arange(1), np.ones(2), capacity=capacity, used=used + 1)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 3), st.integers(1, 9), st.sampled_from([1.0, 1 / 3, 7.0]))
def test_bins_that_are_alike_get_what_a_look_at_all_of_them_gives(data, num_problems, num_bins, share):
    """With ties, and with loads that only rounding makes alike."""
    weight = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 1.0]), st.floats(0, 1e-15), st.floats(0, 10))
    weights = np.array(data.draw(st.lists(weight, min_size=1, max_size=30)))
    problem = np.array(
        data.draw(st.lists(st.integers(0, num_problems - 1), min_size=len(weights), max_size=len(weights)))
    )
    order = np.array(data.draw(st.permutations(range(len(weights)))))
    start = st.lists(weight, min_size=num_problems * num_bins, max_size=num_problems * num_bins)
    loads = np.array(data.draw(start)).reshape(num_problems, num_bins, 1)
    found = []
    for few in (-1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(greedy, "_FEW_PROBLEMS", few)
            found.append(fill_bins(problem, weights[:, None], order, np.full(num_bins, share), loads).tolist())
    assert found[0] == found[1]


def distances(bins, weights, targets) -> np.ndarray:
    """Sum of squared distances from the targets, for each problem."""
    num_problems, per_problem, num_weights = targets.shape
    loads = np.stack([np.bincount(bins, column, num_problems * per_problem) for column in weights.T], axis=1)
    return ((loads.reshape(targets.shape) - targets) ** 2).sum(axis=(1, 2))


def random_items(seed: int, num_problems: int, per_problem: int, num_weights: int, num_items: int):
    """Random items in random bins, and even targets."""
    rng = np.random.default_rng(seed)
    bins = rng.integers(0, num_problems * per_problem, num_items)
    weights = rng.lognormal(0, 1, (num_items, num_weights))
    totals = np.stack([np.bincount(bins // per_problem, column, num_problems) for column in weights.T], axis=1)
    return bins, weights, np.repeat(totals[:, None], per_problem, axis=1) / per_problem


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 7), st.integers(1, 3), st.integers(0, 60))
def test_problems_keep_their_items_and_their_limits_and_get_no_worse(
    seed, num_problems, per_problem, num_weights, num_items
):
    bins, weights, targets = random_items(seed, num_problems, per_problem, num_weights, num_items)
    found = exchange(bins, weights, targets, 10)
    assert (found // per_problem == bins // per_problem).all()
    assert (distances(found, weights, targets) <= distances(bins, weights, targets) * (1 + 1e-9)).all()
    sizes = np.random.default_rng(seed).integers(1, 9, (num_items, 1)).astype(float)
    limit = np.bincount(bins, sizes[:, 0]).max(initial=0)
    found = exchange(bins, weights, targets, 20, Capacity(sizes, np.array([limit])))
    assert np.bincount(found, sizes[:, 0]).max(initial=0) <= limit


def test_many_items_end_close_to_their_targets():
    bins, weights, targets = random_items(0, 2, 8, 2, 1000)
    found = exchange(bins, weights, targets, 60)
    loads = np.stack([np.bincount(found, column) for column in weights.T], axis=1).reshape(targets.shape)
    assert (np.abs(loads / targets - 1) < 0.01).all()


def test_a_problem_that_no_single_exchange_helps_is_left_alone():
    bins, weights = np.array([0, 0, 1, 1]), np.array([[3.0], [1.0], [2.0], [2.0]])
    targets = np.full((1, 2, 1), 4.0)
    assert exchange(bins, weights, targets, 10).tolist() == [0, 0, 1, 1]
    assert exchange(np.zeros(4, np.int64), weights, np.full((1, 1, 1), 8.0), 10).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("limit", [1, 7, 1 << 16, (1 << 16) + 1, 1 << 20])
def test_whole_numbers_are_put_in_order_and_equal_ones_stay(limit):
    numbers = np.random.default_rng(0).integers(0, limit, 5000)
    numbers[:3] = limit - 1
    assert stable_order(numbers, limit).tolist() == np.argsort(numbers, kind="stable").tolist()
