"""The paper's planner, a baseline of the benchmarks, against exhaustive search."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oobleck_planner import Part, deviating_least, divided, exhaustive

from hf_mmparallel.resilience.templates import LayerChain, TemplateSearch


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_equal_stages_take_the_time_of_1f1b(num_stages: int) -> None:
    """Four microbatches for each stage, whichever stage counts as the slowest."""
    part = Part((3.0,) * num_stages, tuple(range(1, num_stages + 1)))
    assert part.estimate_ms == pytest.approx((4 * num_stages + num_stages - 1) * 3.0)


@given(st.integers(1, 3), st.integers(1, 2), st.integers(3, 8), st.integers(0, 1000))
def test_parts_are_stages_of_all_layers_and_never_better_than_the_best(nodes, size, layers, seed):
    costs = np.random.default_rng(seed).uniform(1, 3, layers)
    layer_ms = np.array([costs / count**0.7 for count in range(1, size + 1)])
    for stages in range(nodes, nodes * size + 1):
        part, best = (plan(layer_ms, stages, nodes, size) for plan in (divided, exhaustive))
        assert (part is None) == (best is None) == (stages > layers)
        if part is None or best is None:
            continue
        assert part.cuts[-1] == layers and sorted(set(part.cuts)) == list(part.cuts)
        assert best.estimate_ms <= part.estimate_ms * (1 + 1e-12)
        if size == 1:
            assert part.estimate_ms <= 1.05 * best.estimate_ms
            chain = LayerChain([1], layer_ms)
            template = TemplateSearch(chain, 1, nodes, 4 * stages).fastest(nodes, 4 * stages)
            assert template is not None
            closed_ms = sum(part.stages_ms) + (4 * stages - 1) * max(part.stages_ms)
            assert template.step_ms(4 * stages) <= closed_ms * (1 + 1e-9)


@given(st.lists(st.floats(1, 9), min_size=1, max_size=4), st.integers(0, 7))
def test_microbatches_deviate_as_little_as_possible(paces: list[float], more: int) -> None:
    """Within a percent of brute force: single moves may stop at a local optimum."""
    total = len(paces) + more

    def deviation(counts: tuple[int, ...]) -> float:
        return float(np.var([count * pace for count, pace in zip(counts, paces, strict=True)]))

    every = (counts for counts in product(range(1, total + 1), repeat=len(paces)) if sum(counts) == total)
    chosen = deviating_least(paces, total)
    assert sum(chosen) == total and min(chosen) >= 1
    assert deviation(tuple(chosen)) == pytest.approx(min(map(deviation, every)), rel=0.01, abs=1e-9)
