"""Sums of subsets against all subsets."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange.deferral import MAX_ITEMS, subset_sums

REALS = st.lists(st.lists(st.floats(0, 100), min_size=7, max_size=7), min_size=1, max_size=4)


def reachable(weights) -> np.ndarray:
    """All sums of subsets."""
    sums = np.zeros(1)
    for weight in weights:
        sums = np.concatenate([sums, sums + weight])
    return sums


def bits(subsets, num_items: int) -> np.ndarray:
    return (subsets[..., None] >> np.arange(num_items)) & 1


@given(REALS)
def test_all_sums_are_there_when_the_list_is_long_enough(weights):
    weights = np.array(weights)
    table = subset_sums(weights, 128)
    for row, sums in zip(weights, table.sums, strict=True):
        np.testing.assert_allclose(np.sort(sums), np.sort(reachable(row)))


@given(REALS, st.sampled_from([4, 16, 64]))
def test_sums_are_those_of_their_subsets(weights, max_sums):
    weights, extra = np.array(weights), np.arange(7.0) + np.zeros((len(weights), 1))
    table = subset_sums(weights, max_sums, extra)
    assert table.sums.shape[1] <= max_sums
    chosen = bits(table.subsets, 7)
    there = np.isfinite(table.sums)
    np.testing.assert_allclose((chosen * weights[:, None]).sum(axis=2)[there], table.sums[there])
    np.testing.assert_allclose((chosen * extra[:, None]).sum(axis=2)[there], table.extra[there])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 20), min_size=10, max_size=12), st.data())
def test_whole_numbers_are_exact_up_to_the_length_of_the_list(weights, data):
    weights = np.array([weights], dtype=float)
    length = 1 << math.ceil(math.log2(weights.sum() + 2))
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


def plain_subset_sums(weights: np.ndarray, max_sums: int, extra: np.ndarray) -> tuple[np.ndarray, ...]:
    """The same with all tables at every item, and cells by row and column."""
    width = np.maximum(weights.sum(axis=1), 1e-300) / (max_sums - 1)
    tables = [np.zeros((len(weights), 1)), np.zeros((len(weights), 1), np.int64), np.zeros((len(weights), 1))]
    in_cells = False
    for item in range(min(weights.shape[1], MAX_ITEMS)):
        more, beside, bit = weights[:, item : item + 1], extra[:, item : item + 1], np.int64(1 << item)
        after = [tables[0] + more, tables[1] | bit, tables[2] + beside]
        if 2 * tables[0].shape[1] <= max_sums:
            tables = [np.concatenate(both, axis=1) for both in zip(tables, after, strict=True)]
            continue
        grow = np.flatnonzero(more[:, 0] > 0)
        if not len(grow):
            continue
        parts = [[own[grow] for own in after]]
        cells = [own[grow] for own in tables]
        if not in_cells:
            parts.insert(0, cells)
            cells = [np.full_like(cells[0], np.inf), np.zeros_like(cells[1]), np.zeros_like(cells[2])]
            in_cells = True
        for part in parts:
            row, column = np.nonzero(np.isfinite(part[0]))
            cell = (part[0][row, column] / width[grow][row] + 1e-9).astype(np.int64)
            for table, own in zip(cells, part, strict=True):
                table[row, cell] = own[row, column]
        for table, own in zip(tables, cells, strict=True):
            table[grow] = own
    return tuple(tables)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 24), st.sampled_from([2, 8, 32]), st.booleans())
def test_tables_are_those_of_plain_loops(seed, num_sets, num_items, max_sums, is_whole):
    rng = np.random.default_rng(seed)
    weights = rng.random((num_sets, num_items)) * (rng.random((num_sets, num_items)) < 0.8)
    weights = np.rint(9 * weights) if is_whole else weights
    extra = rng.random((num_sets, num_items))
    sums, subsets, extras = plain_subset_sums(weights, max_sums, extra)
    found = subset_sums(weights, max_sums, extra)
    assert found.sums.tolist() == sums.tolist() and found.subsets.tolist() == subsets.tolist()
    assert found.extra.tolist() == extras.tolist()
    alone = subset_sums(weights, max_sums)
    assert alone.sums.tolist() == sums.tolist() and alone.subsets.tolist() == subsets.tolist()
    assert not alone.extra.any() and alone.extra.shape == sums.shape
