"""Arrangements over ranks that hold the whole model: equal numbers of microbatches, alike turns, even ranks."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_mmparallel.arrange.rank_batches import (
    RANK_ARRANGEMENTS,
    arrange_for_ranks,
    turn_costs,
    unlike_turn,
    whole_model_workloads,
)
from hf_mmparallel.plan import LANGUAGE_MODEL, Workloads
from tests.arrange.builders import batch_indices_of


def workloads_of(times: np.ndarray, padded: bool = False) -> Workloads:
    tokens = (100 * times).astype(np.int64) + 1
    return Workloads(
        {LANGUAGE_MODEL: times}, {LANGUAGE_MODEL: 0.0}, {LANGUAGE_MODEL: tokens}, {}, times if padded else None
    )


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4)),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(RANK_ARRANGEMENTS),
    st.integers(0, 2**20),
)
@example((3, 3, 2), 0.3, True, "hierarchical", 750)  # an input that no sample of a late turn can take the place of
def test_every_rank_has_as_many_microbatches_and_turns_are_alike(sizes, share, padded, arrangement, seed):
    num_ranks, count, size = sizes
    generator, num_samples = np.random.default_rng(seed), num_ranks * count * size
    has = {"vision": generator.random(num_samples) < share}
    workloads = workloads_of(generator.lognormal(0, 1.5, num_samples), padded)
    ranks = arrange_for_ranks(workloads, has, num_ranks, size, arrangement)
    assert [len(replica) for replica in ranks] == [count] * num_ranks
    assert sorted(batch_indices_of(ranks)) == list(range(num_samples))
    assert all(microbatch for replica in ranks for microbatch in replica)
    num_inputs = int(has["vision"].sum())
    if arrangement != "contiguous" and (num_inputs == 0 or num_inputs >= num_ranks):
        assert unlike_turn(ranks, has) is None


@pytest.mark.parametrize("size", [2, 3, 5])
def test_two_encoders_are_aligned(size: int):
    generator = np.random.default_rng(1)
    num_samples = 4 * 4 * size
    has = {name: np.arange(num_samples) % 2 == number for number, name in enumerate(("vision", "audio"))}
    ranks = arrange_for_ranks(workloads_of(generator.lognormal(0, 1, num_samples)), has, 4, size)
    assert unlike_turn(ranks, has) is None


def test_contiguous_is_the_order_of_the_stock_trainer():
    ranks = arrange_for_ranks(workloads_of(np.ones(12)), {}, 2, 3, "contiguous")
    assert ranks == (((0, 1, 2), (6, 7, 8)), ((3, 4, 5), (9, 10, 11)))


def test_an_unlike_turn_is_found():
    has = {"vision": np.array([True, False, True, True])}
    assert unlike_turn((((2,), (0,)), ((3,), (1,))), has) == (1, "vision")
    assert unlike_turn((((0,),), ((2,),)), has) is None


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_are_more_even_than_in_the_samplers_order(padded: bool):
    generator = np.random.default_rng(0)
    excess = {}
    for arrangement in ("contiguous", "hierarchical"):
        costs = [
            turn_costs(arrange_for_ranks(workloads, {}, 4, 8, arrangement), workloads)
            for workloads in [workloads_of(generator.lognormal(0, 0.7, 4 * 4 * 8), padded) for _ in range(5)]
        ]
        excess[arrangement] = np.mean([cost.max(axis=0).sum() / (cost.sum() / 4) - 1 for cost in costs])
    assert excess["hierarchical"] < 0.3 * excess["contiguous"]


def test_a_sample_costs_the_forward_and_backward_of_all_modules():
    workloads = Workloads(
        {"vision": np.array([1.0, 0.0]), LANGUAGE_MODEL: np.array([2.0, 3.0])},
        {"vision": 0.5, LANGUAGE_MODEL: 2.0},
        {"vision": np.array([4, 0]), LANGUAGE_MODEL: np.array([8, 9])},
        {"vision": 7},
        np.array([4.0, 6.0]),
    )
    whole = whole_model_workloads(workloads)
    assert whole.forward_ms[LANGUAGE_MODEL].tolist() == [1.5 + 6, 9]
    assert whole.row_ms is not None and whole.row_ms.tolist() == [1.5 + 12, 18]
    assert list(whole.tokens) == [LANGUAGE_MODEL] and not whole.token_limits
