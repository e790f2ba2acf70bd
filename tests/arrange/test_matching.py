"""The matching with the cheapest worst pair against all matchings."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from hf_mmparallel.arrange.deferral import bottleneck_matching


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


def test_many_problems_in_step_are_each_at_their_own_optimum():
    costs = np.random.default_rng(0).integers(0, 12, (400, 4, 4)).astype(float)
    matched = bottleneck_matching(costs)
    values = np.take_along_axis(costs, matched[:, :, None], 2)[:, :, 0]
    found = list(zip(values.max(axis=1).tolist(), (values**2).sum(axis=1).tolist(), strict=True))
    assert found == [brute(problem) for problem in costs]


def test_large_problems_agree_with_thresholds_tried_one_by_one():
    costs = np.random.default_rng(0).random((3, 20, 20))
    matched = bottleneck_matching(costs)
    for problem, columns in zip(costs, matched, strict=True):

        def possible(limit, problem=problem):
            rows, chosen = linear_sum_assignment(problem > limit)
            return not (problem > limit)[rows, chosen].any()

        least = next(value for value in np.sort(problem.ravel()) if possible(value))
        assert problem[np.arange(20), columns].max() == least


def test_no_rows_have_no_columns():
    assert bottleneck_matching(np.zeros((4, 0, 0))).shape == (4, 0)
