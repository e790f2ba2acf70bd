"""Microbatches of samples of similar length, where rows are padded."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.arrange.greedy import CapacityError
from hf_mmparallel.arrange.lengths import NUM_ORDERS, group_by_length, possible_orders
from hf_mmparallel.arrange.microbatch_counts import Sizes
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin
from tests.arrange.builders import loads, plan_of, workloads_of


def grouped(row_ms, sizes, limit=None):
    """Cost of each microbatch `[replica][microbatch]`."""
    row_ms = np.asarray(row_ms, dtype=float)
    found = group_by_length(row_ms, row_ms.astype(int), list(map(np.asarray, sizes)), row_ms[:, None] * 0, limit)
    costs = [np.zeros(len(own)) for own in sizes]
    for replica, index in set(zip(*(part.tolist() for part in found), strict=True)):
        members = row_ms[(found[0] == replica) & (found[1] == index)]
        costs[replica][index] = len(members) * members.max()
    return costs, found


def best_possible(lengths: list[int], count: int) -> float:
    """The least largest cost of `count` groups, whatever they hold."""
    best = np.inf
    for places in itertools.product(range(count), repeat=len(lengths)):
        groups = [[n for n, place in zip(lengths, places, strict=True) if place == own] for own in range(count)]
        best = min(best, max(len(group) * max(group, default=0) for group in groups))
    return best


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_no_division_into_groups_has_a_cheaper_largest_one(lengths: list[int], count: int):
    costs, _ = grouped(lengths, [np.ones(count)])
    assert costs[0].max() <= best_possible(lengths, count) * 1.002


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=60),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 2**16),
)
def test_every_sample_has_one_place_and_neighbours_by_length_stay_together(lengths, counts, seed):
    rng = np.random.default_rng(seed)
    sizes = [np.ones(count) for count in counts]
    row_ms = np.array(lengths, float)
    work = rng.random((len(lengths), 2))
    replica, microbatch = group_by_length(row_ms, np.array(lengths), sizes, work)
    assert (microbatch < np.array(counts)[replica]).all() and (microbatch >= 0).all()
    order = np.argsort(-row_ms, kind="stable")
    places = list(zip(replica[order].tolist(), microbatch[order].tolist(), strict=True))
    runs = [place for place, _ in itertools.groupby(places)]
    assert len(runs) == len(set(runs))


def test_sizes_are_kept_to_and_long_samples_go_to_large_microbatches():
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(5, 0.5, 400)).astype(int) + 1
    sizes = np.array([0.5, 1.0, 1.25, 1.25, 1.0])
    (costs,), (_, microbatch) = grouped(lengths, [sizes])
    shares = costs / costs.sum() * sizes.sum()
    assert shares == pytest.approx(sizes, rel=0.15)
    assert lengths[microbatch == 0].max() < lengths[microbatch == 1].min() < lengths[microbatch == 2].min()


def test_a_limit_counts_padding_and_asks_for_more_microbatches():
    (costs,), _ = grouped([10, 9, 3, 3, 3, 3], [np.ones(3)], limit=20)
    assert max(costs) <= 20
    with pytest.raises(CapacityError):
        grouped([10, 9, 3, 3, 3, 3], [np.ones(2)], limit=12)


def test_a_sample_above_the_rest_does_not_make_the_others_uneven():
    costs, _ = grouped([1000] + [10] * 30, [np.ones(4)])
    assert sorted(costs[0]) == [100, 100, 100, 1000]


def test_replicas_have_even_work_in_encoders():
    rng = np.random.default_rng(1)
    lengths = rng.integers(50, 800, 128)
    work = lengths[:, None] * rng.uniform(0.2, 2.0, (128, 1))
    replica, _ = group_by_length(lengths.astype(float), lengths, [np.ones(8)] * 4, work)
    totals = np.bincount(replica, work[:, 0])
    assert totals.max() / totals.mean() < 1.05


def test_orders_move_only_the_largest_microbatches():
    rng = np.random.default_rng(2)
    replica, microbatch = np.repeat([0, 1], 48), np.tile(np.repeat(np.arange(6), 8), 2)
    sizes = (0.5, 1.1, 1.1, 1.1, 1.1, 1.1)
    orders = possible_orders(replica, microbatch, rng.random((2, 6)), rng.random((96, 1)), Sizes(sizes, sizes))
    assert orders.shape == (NUM_ORDERS, 96)
    for order in orders:
        moved = set(zip(replica.tolist(), microbatch.tolist(), order.tolist(), strict=True))
        assert len(moved) == 2 * 6, "each microbatch of a replica as a whole"
        assert (order[microbatch == 0] == 0).all() and set(order.tolist()) == set(range(6))


PADDED = {
    "alike": plan_of(vision=2, language_model=ModulePlugin(2, pp_size=2)),
    "a shared encoder": plan_of(vision=1, language_model=ModulePlugin(2, pp_size=2)),
    "several encoder replicas": plan_of(vision=3, language_model=ModulePlugin(1, pp_size=3)),
}


@pytest.mark.parametrize("arrangement", ["hierarchical", "tapered"])
@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize("limits", [{}, {LANGUAGE_MODEL: 2500, "vision": 6000}], ids=["no limit", "limits"])
def test_a_padded_batch_is_arranged_in_every_layout(arrangement, layout, limits):
    rng = np.random.default_rng(3)
    tokens = rng.integers(20, 900, 64)
    images = np.where(rng.random(64) < 0.7, rng.integers(20, 900, 64), 0)
    packed = replace(workloads_of(vision=images, language_model=tokens), token_limits=limits)
    computed = []  # tokens with padding
    for workloads in (replace(packed, row_ms=1.1 * tokens), packed):
        step = arrange_step(PADDED[layout], range(64), workloads, 4, arrangement)
        rows = [tokens[list(own)] for replica in step.microbatches[LANGUAGE_MODEL] for own in replica]
        computed.append([len(own) * own.max(initial=0) for own in rows])
        assert not limits or loads(step.microbatches["vision"], images).max() <= limits["vision"]
    assert not limits or max(computed[0]) <= limits[LANGUAGE_MODEL]
    assert sum(computed[0]) < 0.8 * sum(computed[1])
