"""Exchanges make loads more even, and never less."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange.greedy import Capacity, exchange, padded, stable_order


def squares(bins, weights, targets) -> np.ndarray:
    """Sum of squared distances from the targets, for each problem."""
    num_problems, per_problem, num_weights = targets.shape
    loads = np.stack([np.bincount(bins, column, num_problems * per_problem) for column in weights.T], axis=1)
    return ((loads.reshape(targets.shape) - targets) ** 2).sum(axis=(1, 2))


def make(seed: int, num_problems: int, per_problem: int, num_weights: int, num_items: int):
    """Random items in random bins, and even targets."""
    rng = np.random.default_rng(seed)
    bins = rng.integers(0, num_problems * per_problem, num_items)
    weights = rng.lognormal(0, 1, (num_items, num_weights))
    totals = np.stack([np.bincount(bins // per_problem, column, num_problems) for column in weights.T], axis=1)
    return bins, weights, np.repeat(totals[:, None], per_problem, axis=1) / per_problem


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 7), st.integers(1, 3), st.integers(0, 60))
def test_problems_keep_their_items_and_get_no_worse(seed, num_problems, per_problem, num_weights, num_items):
    bins, weights, targets = make(seed, num_problems, per_problem, num_weights, num_items)
    found = exchange(bins, weights, targets, 10)
    assert (found // per_problem == bins // per_problem).all()
    assert (squares(found, weights, targets) <= squares(bins, weights, targets) * (1 + 1e-9)).all()


def test_many_items_end_close_to_their_targets():
    bins, weights, targets = make(0, 2, 8, 2, 1000)
    found = exchange(bins, weights, targets, 60)
    loads = np.stack([np.bincount(found, column) for column in weights.T], axis=1).reshape(targets.shape)
    assert (np.abs(loads / targets - 1) < 0.01).all()


def test_a_problem_that_no_single_exchange_helps_is_left_alone():
    bins, weights = np.array([0, 0, 1, 1]), np.array([[3.0], [1.0], [2.0], [2.0]])
    targets = np.full((1, 2, 1), 4.0)
    assert exchange(bins, weights, targets, 10).tolist() == [0, 0, 1, 1]
    assert exchange(np.zeros(4, np.int64), weights, np.full((1, 1, 1), 8.0), 10).tolist() == [0, 0, 0, 0]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 40))
def test_limits_that_held_still_hold(seed, per_problem, num_items):
    bins, weights, targets = make(seed, 1, per_problem, 1, num_items)
    sizes = np.random.default_rng(seed).integers(1, 9, (num_items, 1)).astype(float)
    limit = np.bincount(bins, sizes[:, 0]).max()
    found = exchange(bins, weights, targets, 20, Capacity(sizes, np.array([limit])))
    assert np.bincount(found, sizes[:, 0]).max() <= limit


def test_items_of_each_bin_are_side_by_side():
    found = padded(np.array([2, 0, 2, 0, 2]), 4, spare=1)
    assert found.tolist() == [[1, 3, 5, 5], [5, 5, 5, 5], [0, 2, 4, 5], [5, 5, 5, 5]]


@pytest.mark.parametrize("seed", range(3))
def test_the_same_inputs_give_the_same_bins(seed):
    bins, weights, targets = make(seed, 3, 5, 2, 90)
    weights = np.round(weights)  # with ties
    assert exchange(bins, weights, targets, 20).tolist() == exchange(bins, weights, targets, 20).tolist()


@pytest.mark.parametrize("limit", [1, 7, 1 << 16, (1 << 16) + 1, 1 << 20])
def test_whole_numbers_are_put_in_order_and_equal_ones_stay(limit):
    numbers = np.random.default_rng(0).integers(0, limit, 5000)
    numbers[:3] = limit - 1
    assert stable_order(numbers, limit).tolist() == np.argsort(numbers, kind="stable").tolist()
