"""Pairs of microbatches, their order, what the language model takes later, and the sums and matchings behind it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange.deferral import MAX_ITEMS, bottleneck_matching, defer, pair_order, subset_sums
from hf_mmparallel.arrange.greedy import Capacity


def squares(places, late, weights, targets) -> np.ndarray:
    loads = np.bincount(places + late, weights, targets.size).reshape(targets.shape)
    return ((loads - targets) ** 2).sum(axis=1)


def make(seed: int, num_problems: int, count: int, num_items: int):
    """Items at places, some of them late, and even targets."""
    rng = np.random.default_rng(seed)
    places, weights = rng.integers(0, num_problems * count, num_items), rng.lognormal(0, 1, num_items)
    late = (rng.random(num_items) < 0.3) & (places % count < count - 1)
    totals = np.bincount(places // count, weights, num_problems)
    return places, weights, late, np.repeat(totals[:, None] / count, count, axis=1)


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 6), st.integers(0, 40))
def test_nobody_goes_past_the_end_limits_hold_and_loads_get_no_less_even(seed, num_problems, count, num_items):
    places, weights, late, targets = make(seed, num_problems, count, num_items)
    found = defer(places, weights, late, targets, 4)
    assert found.shape == late.shape and not found[places % count == count - 1].any()
    before, after = squares(places, late, weights, targets), squares(places, found, weights, targets)
    assert (after <= before * (1 + 1e-9) + 1e-9).all()
    sizes = np.random.default_rng(seed).integers(1, 9, num_items).astype(float)
    limit = np.bincount(places + late, sizes).max(initial=0)
    found = defer(places, weights, late, targets, 3, Capacity(sizes[:, None], np.array([limit])))
    assert np.bincount(places + found, sizes).max(initial=0) <= limit


@pytest.mark.parametrize("seed", range(20))
def test_two_microbatches_share_as_well_as_they_can(seed):
    places, weights, late, targets = make(seed, 1, 2, 9)
    found = defer(places, weights, late & False, targets, 1)
    mine = np.flatnonzero(places == 0)
    ways = [np.isin(np.arange(9), mine[list(way)]) for way in itertools.product([False, True], repeat=len(mine))]
    assert squares(places, found, weights, targets)[0] == pytest.approx(
        min(squares(places, way, weights, targets)[0] for way in ways)
    )


def order_of(rows, weights, count: int) -> list[int]:
    surplus = np.bincount(rows, weights, count)[None] - weights.sum() / count
    return pair_order(rows, weights, surplus, np.zeros(1))[0].tolist()


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
    assert order_of(np.arange(3), np.array([9.0, 5.0, 1.0]), 3) == [0, 2, 1]


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 40))
def test_orders_hold_every_microbatch_once(seed, count, num_items):
    rng = np.random.default_rng(seed)
    rows, weights = rng.integers(0, 2 * count + 1, num_items), rng.random(num_items)
    surplus = np.bincount(rows, weights, 2 * count + 1)[:-1].reshape(2, count)
    order = pair_order(rows, weights, surplus, np.zeros(2))
    assert np.sort(order, axis=1).tolist() == [list(range(count))] * 2


def test_what_pairs_leave_over_stays_small_in_the_running_sum():
    weights = np.random.default_rng(0).lognormal(0, 1, 16)  # one sample each: nothing can be deferred in part
    pairs = (weights - weights.mean())[order_of(np.arange(16), weights, 16)].reshape(-1, 2).sum(axis=1)
    running, worse = np.cumsum(pairs), np.cumsum(np.sort(pairs))
    assert np.abs(running).max() < np.abs(worse).max() and running.min() > worse.min()


def brute(costs) -> tuple[float, float]:
    """The least largest cost, and the least sum of squares under it."""
    rows = np.arange(len(costs))
    found = [costs[rows, list(order)] for order in itertools.permutations(range(len(costs)))]
    limit = min(values.max() for values in found)
    return limit, min((values**2).sum() for values in found if values.max() <= limit)


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
def test_the_largest_cost_is_least_and_then_the_squares(num_problems, size, whole, seed):
    rng = np.random.default_rng(seed)
    costs = rng.random((num_problems, size, size)) * 10
    costs = np.round(costs) if whole else costs
    matched = bottleneck_matching(costs)
    for problem, columns in zip(costs, matched, strict=True):
        assert sorted(columns) == list(range(size))
        values = problem[np.arange(size), columns]
        assert (values.max(), (values**2).sum()) == pytest.approx(brute(problem))


def test_no_rows_have_no_columns():
    assert bottleneck_matching(np.zeros((4, 0, 0))).shape == (4, 0)


REALS = st.lists(st.lists(st.floats(0, 100), min_size=7, max_size=7), min_size=1, max_size=4)


def reachable(weights) -> np.ndarray:
    """All sums of subsets."""
    sums = np.zeros(1)
    for weight in weights:
        sums = np.concatenate([sums, sums + weight])
    return sums


@given(REALS, st.sampled_from([4, 16, 64, 128]))
def test_sums_are_those_of_their_subsets_and_all_where_the_list_is_long_enough(weights, max_sums):
    weights, extra = np.array(weights), np.arange(7.0) + np.zeros((len(weights), 1))
    table = subset_sums(weights, max_sums, extra)
    assert table.sums.shape[1] <= max_sums
    chosen = (table.subsets[..., None] >> np.arange(7)) & 1
    there = np.isfinite(table.sums)
    np.testing.assert_allclose((chosen * weights[:, None]).sum(axis=2)[there], table.sums[there])
    np.testing.assert_allclose((chosen * extra[:, None]).sum(axis=2)[there], table.extra[there])
    if max_sums == 128:
        np.testing.assert_allclose(np.sort(table.sums), np.sort(list(map(reachable, weights))))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 20), min_size=10, max_size=12), st.data())
def test_whole_numbers_are_exact_up_to_the_length_of_the_list(weights, data):
    length = 1 << math.ceil(math.log2(sum(weights) + 2))
    weights = np.array([[*weights, length - 1 - sum(weights)]], dtype=float)  # as long as the largest sum asks for
    table = subset_sums(weights, length)
    assert set(table.sums[np.isfinite(table.sums)]) == set(reachable(weights[0]))
    target = data.draw(st.floats(0, 250))
    best = np.abs(reachable(weights[0]) - target).min()
    found = table.sums[0, table.nearest(np.array([[target]]))[0, 0]]
    assert abs(found - target) == pytest.approx(best)


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=14), st.sampled_from([16, 32, 64]))
def test_shorter_lists_miss_a_sum_by_no_more_than_their_bound(weights, max_sums):
    row = np.array([weights])
    table = subset_sums(row, max_sums)
    bound = row.sum() / (max_sums - 1) * max(0, len(weights) - math.log2(max_sums))
    missed = np.abs(reachable(weights)[:, None] - table.sums[0]).min(axis=1)
    assert missed.max() <= bound * (1 + 1e-9) + 1e-9


def test_a_subset_has_at_most_62_items():
    table = subset_sums(np.ones((1, 70)), 256)
    sums = table.sums[np.isfinite(table.sums)]
    assert set(sums) == set(range(MAX_ITEMS + 1))


def test_sets_without_items_reach_nothing():
    table = subset_sums(np.zeros((3, 0)), 32)
    assert table.sums.tolist() == [[0.0]] * 3
    table = subset_sums(np.array([[0.0, 0.0], [2.0, 3.0]]), 4)
    assert set(table.sums[0]) == {0.0} and set(table.sums[1]) == {0.0, 2.0, 3.0, 5.0}
    assert table.take(np.array([1])).sums.tolist() == table.sums[1:].tolist()
