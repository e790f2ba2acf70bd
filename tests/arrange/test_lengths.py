"""Microbatches of samples of similar length, where rows are padded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.arrange.greedy import CapacityError
from hf_mmparallel.arrange.lengths import NUM_ORDERS, group_by_length, possible_orders
from hf_mmparallel.arrange.microbatch_sizes import Sizes
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, Workloads, resolve_plan
from tests.plan.specs import model_spec

VISION = "vision"


def grouped(row_ms, sizes, tokens=None, limit=None):
    """Cost of each microbatch `[replica][microbatch]`."""
    row_ms = np.asarray(row_ms, dtype=float)
    tokens = row_ms.astype(int) if tokens is None else np.asarray(tokens)
    found = group_by_length(row_ms, tokens, [np.asarray(own, float) for own in sizes], row_ms[:, None] * 0, limit)
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
    lengths = [10, 9, 3, 3, 3, 3]
    _, (_, microbatch) = grouped(lengths, [np.ones(3)], limit=20)
    for index in range(3):
        own = np.array(lengths)[microbatch == index]
        assert len(own) * own.max() <= 20
    with pytest.raises(CapacityError):
        grouped(lengths, [np.ones(2)], limit=12)


def test_a_sample_above_the_rest_does_not_make_the_others_uneven():
    costs, _ = grouped([1000] + [10] * 30, [np.ones(4)])
    assert sorted(costs[0]) == [100, 100, 100, 1000]


def test_replicas_have_even_work_in_encoders():
    rng = np.random.default_rng(1)
    lengths = rng.integers(50, 800, 128)
    work = lengths[:, None] * rng.uniform(0.2, 2.0, (128, 1))
    replica, _ = group_by_length(lengths.astype(float), lengths, [np.ones(8)] * 4, work)
    loads = np.bincount(replica, work[:, 0])
    assert loads.max() / loads.mean() < 1.05


def test_orders_move_only_the_largest_microbatches():
    rng = np.random.default_rng(2)
    replica, microbatch = np.repeat([0, 1], 48), np.tile(np.repeat(np.arange(6), 8), 2)
    sizes = Sizes((0.5, 1.1, 1.1, 1.1, 1.1, 1.1), (0.5, 1.1, 1.1, 1.1, 1.1, 1.1))
    orders = possible_orders(replica, microbatch, rng.random((2, 6)), rng.random((96, 1)), sizes)
    assert orders.shape == (NUM_ORDERS, 96)
    for order in orders:
        assert (order[microbatch == 0] == 0).all() and set(order.tolist()) == set(range(6))
        for index in range(6):
            for own in range(2):
                assert len(set(order[(microbatch == index) & (replica == own)].tolist())) == 1


@pytest.mark.parametrize("arrangement", ["hierarchical", "tapered"])
@pytest.mark.parametrize(
    "sizes",
    [
        {VISION: ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)},
        {VISION: ModulePlugin(dp_size=1), LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)},
        {VISION: ModulePlugin(dp_size=3), LANGUAGE_MODEL: ModulePlugin(dp_size=1, pp_size=3)},
    ],
    ids=["alike", "a shared encoder", "several encoder replicas"],
)
@pytest.mark.parametrize("limits", [{}, {LANGUAGE_MODEL: 2500, VISION: 6000}], ids=["no limit", "limits"])
def test_a_padded_batch_is_arranged_in_every_layout(arrangement, sizes, limits):
    plan = resolve_plan(model_spec(), sizes)
    rng = np.random.default_rng(3)
    tokens = rng.integers(20, 900, 64)
    images = np.where(rng.random(64) < 0.7, rng.integers(20, 900, 64), 0)
    workloads = Workloads(
        {VISION: images.astype(float), LANGUAGE_MODEL: tokens.astype(float)},
        {VISION: 2.0, LANGUAGE_MODEL: 2.0},
        {VISION: images, LANGUAGE_MODEL: tokens},
        limits,
        row_ms=1.1 * tokens,
    )
    step = arrange_step(plan, range(64), workloads, 4, arrangement)
    for replica in step.microbatches[LANGUAGE_MODEL]:
        for batch_indices in replica:
            own = tokens[list(batch_indices)]
            assert not limits or len(own) * own.max(initial=0) <= limits[LANGUAGE_MODEL]
    for replica in step.microbatches[VISION]:
        for batch_indices in replica:
            assert not limits or images[list(batch_indices)].sum() <= limits[VISION]
    packed = arrange_step(plan, range(64), replace(workloads, row_ms=None), 4, arrangement)
    padding = [_computed(tokens, own) for own in (step, packed)]
    assert padding[0] < 0.8 * padding[1]


def _computed(tokens: np.ndarray, step) -> int:
    """Tokens with padding."""
    batch_indices = [list(own) for replica in step.microbatches[LANGUAGE_MODEL] for own in replica if own]
    return sum(len(own) * int(tokens[own].max()) for own in batch_indices)
