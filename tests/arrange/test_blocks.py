"""Work of blocks against a dense count, and their balance against bounds and the exact optimum."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.arrange.token_assignment import block_counts, block_workloads, distribute
from tests.arrange.token_rows import packed_row

METHODS = ["lpt", "zigzag", "contiguous", "random"]


def intervals(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Random intervals inside the row, about one in ten of them empty."""
    first = rng.integers(0, length, length)
    last = np.minimum(first + rng.integers(-1, 10, length), length - 1)
    return first, last


@given(st.integers(1, 150), st.sampled_from([1, 4, 8, 16]), st.integers(0, 2**32))
def test_counts_equal_those_of_a_dense_map(length, block, seed):
    rng = np.random.default_rng(seed)
    first, last = intervals(rng, length)
    if rng.random() < 0.5:  # sorted ones, of which some blocks are full
        first, last = np.zeros(length, np.int64), np.sort(last)
    visited, partial = block_counts(first.astype(np.int32), last.astype(np.int32), block)
    places = np.arange(length)
    for index in range(-(-length // block)):
        rows = slice(index * block, (index + 1) * block)
        seen = (places >= first[rows, None]) & (places <= last[rows, None])
        columns = np.flatnonzero(seen.any(axis=0)) // block
        between = range(columns.min(), columns.max() + 1) if len(columns) else range(0)
        full = [b for b in between if (b + 1) * block <= length and seen[:, b * block : (b + 1) * block].all()]
        assert (visited[index], partial[index]) == (len(between), len(between) - len(full))


def test_the_work_of_a_causal_row_is_a_triangle():
    first, last = np.zeros(512, np.int64), np.arange(512)
    assert block_workloads(first, last, 128).tolist() == pytest.approx([1.3, 2.3, 3.3, 4.3])


@given(st.sampled_from(METHODS), st.integers(1, 9), st.integers(0, 60), st.integers(0, 2**32))
def test_every_block_goes_to_one_rank_and_all_get_as_many(method, num_ranks, num_blocks, seed):
    work = np.random.default_rng(seed).integers(0, 50, num_blocks)
    blocks = distribute(work, num_ranks, method, seed)
    assert blocks.shape == (num_ranks, -(-num_blocks // num_ranks))
    assert sorted(blocks.reshape(-1)) == list(range(blocks.size))
    assert (np.diff(blocks, axis=1) > 0).all()
    assert (distribute(work, num_ranks, method, seed) == blocks).all()


def test_the_order_of_the_baselines():
    work = np.ones(12)
    assert distribute(work, 3, "contiguous").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert distribute(work, 3, "zigzag").tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert distribute(work[:6], 2, "zigzag").tolist() == [[0, 1, 5], [2, 3, 4]]
    assert (distribute(work, 3, "random", 1) != distribute(work, 3, "random", 2)).any()


def most(work: np.ndarray, blocks: np.ndarray) -> float:
    """Work of the heaviest rank."""
    return np.append(work, np.zeros(blocks.size - len(work)))[blocks].sum(axis=1).max()


@given(st.integers(1, 8), st.integers(1, 10), st.booleans(), st.integers(0, 2**32))
def test_no_rank_is_above_the_mean_by_more_than_a_round_differs(num_ranks, rounds, skewed, seed):
    rng = np.random.default_rng(seed)
    work = rng.pareto(1.0, num_ranks * rounds) if skewed else rng.uniform(0, 1, num_ranks * rounds)
    by_round = -np.sort(-work).reshape(rounds, num_ranks)
    widest = (by_round[:, 0] - by_round[:, -1]).max()
    assert most(work, distribute(work, num_ranks)) <= work.sum() / num_ranks + widest + 1e-9


def optimum(work: np.ndarray, num_ranks: int) -> float:
    """The least work of the heaviest rank by trying all ways; the first block is on the first rank."""
    if num_ranks == 1:
        return work.sum()
    ways = ([0, *others] for others in combinations(range(1, len(work)), len(work) // num_ranks - 1))
    return min(max(work[own].sum(), optimum(np.delete(work, own), num_ranks - 1)) for own in ways)


@pytest.mark.parametrize(("num_ranks", "num_blocks", "cases"), [(2, 10, 40), (3, 9, 20)])
def test_lpt_is_near_the_optimum_of_small_cases(num_ranks, num_blocks, cases):
    ratios = []
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        work = rng.integers(10, 200, num_blocks) / 10
        ratios.append(most(work, distribute(work, num_ranks)) / optimum(work, num_ranks))
    assert min(ratios) > 1 - 1e-6  # or the optimum is none
    assert max(ratios) <= 4 / 3 - 1 / (3 * num_ranks)
    assert np.mean(ratios) <= 1.02


@pytest.mark.parametrize(("length", "goal"), [(8192, 1.02), (65536, 1.002)])
def test_packed_rows_are_balanced(length, goal):
    for seed in range(20):
        first, last, _ = packed_row(length, seed)
        work = block_workloads(first, last)
        assert most(work, distribute(work, 8)) <= goal * work.mean() * len(work) / 8
        assert most(work, distribute(work, 8)) < most(work, distribute(work, 8, "zigzag"))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`num_ranks=0`"):
        distribute([1.0], 0)
    with pytest.raises(ValueError, match=r"`method='snake'`.*lpt, zigzag"):
        distribute([1.0], 1, "snake")  # type: ignore[arg-type]
