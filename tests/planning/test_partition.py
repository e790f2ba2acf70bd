"""Stages are those of exhaustive search."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared_partition import partition_shared
from hf_mmparallel.planning.partition import Partition, partition_all

WHOLE = st.lists(st.integers(0, 12), min_size=1, max_size=8)
REAL = st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=8)


def partition_layers(costs_ms, num_stages: int) -> Partition:
    """The best partition into a number of stages."""
    return partition_all(costs_ms, num_stages).partition(num_stages)


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """The layers of each stage, in every possible way."""
    bounds = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(np.diff((0, *inner, num_layers)).tolist()) for inner in bounds]


def stage_sums(costs, layers) -> np.ndarray:
    bounds = np.cumsum((0, *layers))
    return np.array([sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)], dtype=float)


@given(WHOLE, st.sampled_from([0.1, 1 / 3, 7e-5, 2.0**40]))
def test_whole_costs_give_the_evenest_of_the_best_partitions_with_light_first_stages(costs, scale):
    """Whatever the unit; the reverse has the same bottleneck."""
    table, reverse = partition_all(costs, len(costs)), partition_all(costs[::-1], len(costs))
    scaled = partition_all(np.array(costs) * scale, len(costs))
    for num_stages in range(1, len(costs) + 1):

        def order(layers):
            sums = stage_sums(costs, layers)
            return sums.max(), (sums**2).sum(), layers

        best = min(cuts(len(costs), num_stages), key=order)
        found = table.partition(num_stages)
        assert found.layers == best == scaled.partition(num_stages).layers
        assert found.slowest_stage_ms == table.slowest_stages_ms[num_stages - 1] == order(best)[0]
        assert reverse.slowest_stages_ms[num_stages - 1] == found.slowest_stage_ms
        assert scaled.slowest_stages_ms[num_stages - 1] == pytest.approx(scale * found.slowest_stage_ms)


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


def test_rounding_does_not_decide_between_partitions():
    for num_layers in range(10, 70, 7):
        for num_stages in range(2, 10):
            even = partition_layers(np.ones(num_layers), num_stages).layers
            assert partition_layers(np.full(num_layers, 0.1), num_stages).layers == even == tuple(sorted(even))
            assert max(even) - min(even) <= 1


@pytest.mark.parametrize(
    ("costs", "num_stages", "said"),
    [
        ([1.0, 2.0], 3, "3 stages .* 2"),
        ([1.0], 0, "0 stages"),
        *(([1.0, wrong], 1, "Layer 1 ") for wrong in (-1.0, np.nan, np.inf)),
    ],
)
def test_what_cannot_be_cut_is_refused(costs, num_stages, said):
    with pytest.raises(ValueError, match=said):
        partition_layers(costs, num_stages)
    with pytest.raises(ValueError, match="4 stages"):
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
