"""Stages are those of exhaustive search."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from benchmarks.shared_partition import partition_shared
from hf_mmparallel.search.partition import Partition, partition_all

WHOLE = st.lists(st.integers(0, 12), min_size=1, max_size=8)
REAL = st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=8)


def partition_layers(costs_ms: ArrayLike, num_stages: int) -> Partition:
    """The best partition into a number of stages."""
    return partition_all(costs_ms, num_stages).partition(num_stages)


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """The layers of each stage, in every possible way."""
    bounds = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(np.diff((0, *inner, num_layers)).tolist()) for inner in bounds]


def stage_sums(costs, layers) -> np.ndarray:
    bounds = np.cumsum((0, *layers))
    return np.array([sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)], dtype=float)


@given(WHOLE)
def test_whole_costs_give_the_evenest_of_the_best_partitions_with_light_first_stages(costs):
    table = partition_all(costs, len(costs))
    for num_stages in range(1, len(costs) + 1):

        def order(layers):
            sums = stage_sums(costs, layers)
            return sums.max(), (sums**2).sum(), layers

        best = min(cuts(len(costs), num_stages), key=order)
        found = table.partition(num_stages)
        assert found.layers == best
        assert found.slowest_stage_ms == table.slowest_stages_ms[num_stages - 1] == order(best)[0]


@given(REAL)
def test_real_costs_give_the_best_bottleneck(costs):
    table = partition_all(costs, len(costs))
    for num_stages in range(1, len(costs) + 1):
        best = min(stage_sums(costs, layers).max() for layers in cuts(len(costs), num_stages))
        found = table.partition(num_stages)
        assert found.slowest_stage_ms == pytest.approx(best, rel=1e-9)
        assert stage_sums(costs, found.layers).max() == pytest.approx(best, rel=1e-8)
        assert min(found.layers) >= 1 and found.num_stages == num_stages
        np.testing.assert_allclose(found.stage_costs(costs), stage_sums(costs, found.layers), atol=1e-9)


@given(WHOLE, st.sampled_from([0.1, 1 / 3, 7e-5, 2.0**40]), st.data())
def test_a_scale_changes_nothing_and_the_reverse_has_the_same_bottleneck(costs, scale, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    plain = partition_layers(costs, num_stages)
    scaled = partition_layers(np.array(costs) * scale, num_stages)
    assert scaled.layers == plain.layers
    assert scaled.slowest_stage_ms == pytest.approx(scale * plain.slowest_stage_ms)
    assert partition_layers(costs[::-1], num_stages).slowest_stage_ms == plain.slowest_stage_ms


def test_rounding_does_not_decide_between_partitions():
    for num_layers in range(10, 70, 7):
        for num_stages in range(2, 10):
            even = partition_layers(np.ones(num_layers), num_stages).layers
            assert partition_layers(np.full(num_layers, 0.1), num_stages).layers == even == tuple(sorted(even))
            assert max(even) - min(even) <= 1


def test_more_stages_are_never_slower_and_none_beats_the_mean_or_the_largest_layer():
    costs = np.random.default_rng(0).gamma(1.0, size=128)
    bottlenecks = partition_all(costs, 64).slowest_stages_ms
    assert (np.diff(bottlenecks) <= 0).all()
    assert (bottlenecks >= np.maximum(costs.max(), costs.sum() / np.arange(1, 65)) - 1e-9).all()


def test_work_at_both_ends_moves_layers_away_from_them():
    costs = np.ones(12)
    assert partition_layers(costs, 4).layers == (3, 3, 3, 3)
    costs[-1] += 2  # a head
    assert partition_layers(costs, 4).layers == (3, 3, 4, 2)
    costs[0] += 1  # embeddings
    assert partition_layers(costs, 4).layers == (2, 4, 4, 2)
    assert partition_layers(costs * 0.1, 4).layers == (2, 4, 4, 2)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="3 stages need at least one layer each; there are 2"):
        partition_layers([1.0, 2.0], 3)
    with pytest.raises(ValueError, match="0 stages"):
        partition_layers([1.0], 0)
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="Layer 1 costs"):
            partition_layers([1.0, wrong], 1)
    with pytest.raises(ValueError, match="4 stages need"):
        partition_all([1.0, 2.0, 3.0], 3).partition(4)


SHARED = st.lists(st.lists(st.integers(0, 1000), min_size=2, max_size=6), min_size=1, max_size=3).filter(
    lambda modules: np.prod([len(costs) for costs in modules]) <= 72
)


@given(SHARED, st.data())
def test_modules_on_shared_ranks_are_cut_as_exhaustive_search_cuts_them(modules, data):
    num_stages = data.draw(st.integers(1, min(map(len, modules))))
    found = partition_shared(modules, num_stages)
    choices = product(*(cuts(len(costs), num_stages) for costs in modules))
    sums = [sum(stage_sums(c, layers) for c, layers in zip(modules, choice, strict=True)) for choice in choices]
    best = min(float(own.max()) for own in sums)
    assert found.slowest_stage_ms == pytest.approx(best, rel=1e-9)
    together = sum(stage_sums(c, layers) for c, layers in zip(modules, found.layers, strict=True))
    assert together.max() == pytest.approx(best, rel=1e-9)
    assert all(len(layers) == num_stages and min(layers) >= 1 for layers in found.layers)
    swapped = partition_shared(modules[::-1], num_stages)
    assert swapped.slowest_stage_ms == pytest.approx(best, rel=1e-9)


def test_cutting_together_beats_cutting_each_on_its_own():
    vision, audio = np.full(32, 1.0), np.full(24, 0.7)
    own = sum(partition_layers(costs, 10).stage_costs(costs) for costs in (vision, audio))
    together = partition_shared([vision, audio], 10)
    assert together.slowest_stage_ms == pytest.approx(5.1) and own.max() == pytest.approx(6.1)
