"""Templates against all ways to cut a chain."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.resilience.templates import LayerChain, fastest_template, fewest_nodes, pipeline_templates

Cut = tuple[int, int, int]  # index of the number of ranks, first layer, one past the last layer


def all_cuts(chain: LayerChain, num_ranks: int, node_size: int, first: int = 0, used: int = 0) -> Iterator[list[Cut]]:
    """All ways to cut the layers into stages that use all ranks, none of them over two nodes."""
    if first == chain.num_layers:
        if used == num_ranks:
            yield []
        return
    for kind, ranks in enumerate(chain.rank_counts):
        if used + ranks > num_ranks or used % node_size + ranks > node_size:
            continue
        for stop in range(first + 1, chain.num_layers + 1):
            if any(first < start < stop for start in chain.starts):
                continue
            for rest in all_cuts(chain, num_ranks, node_size, stop, used + ranks):
                yield [(kind, first, stop), *rest]


def fits(chain: LayerChain, cuts: list[Cut], num_microbatches: int) -> bool:
    """Whether each stage has memory for its microbatches in flight: one for each stage from it to the last."""
    if chain.fits_in_flight is None:
        return True
    limits = np.asarray(chain.fits_in_flight)
    in_flight = [min(num_microbatches, len(cuts) - index) for index in range(len(cuts))]
    return all(number <= limits[cut] for number, cut in zip(in_flight, cuts, strict=True))


def time_ms(chain: LayerChain, cuts: list[Cut], num_microbatches: int) -> float:
    costs = np.asarray(chain.layer_ms)
    stages = [float(costs[kind, first:stop].sum()) for kind, first, stop in cuts]
    return sum(stages) + (num_microbatches - 1) * max(stages)


@st.composite
def problems(draw: st.DrawFn) -> tuple[LayerChain, int, int, int]:
    """A chain, a number of nodes, their size, and a number of microbatches."""
    num_layers, node_size = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 4]))
    counts = [count for count in (1, 2, 4) if count <= node_size]
    cost = draw(st.sampled_from([st.integers(1, 9).map(float), st.floats(1, 9)]))
    layers = draw(st.lists(cost, min_size=num_layers, max_size=num_layers))
    speedup = draw(st.floats(0.5, 1))
    layer_ms = [[layer / count**speedup for layer in layers] for count in counts]
    starts = draw(st.sets(st.integers(1, num_layers - 1), max_size=2)) if num_layers > 1 else set()
    limits = None
    if draw(st.booleans()):
        limits = np.zeros((len(counts), num_layers, num_layers + 1), int)
        for kind, count in enumerate(counts):
            for first in range(num_layers):
                for stop in range(first + 1, num_layers + 1):
                    limits[kind, first, stop] = draw(st.integers(3, 9)) * count // (stop - first)
    chain = LayerChain(counts, layer_ms, sorted(starts), limits)
    return chain, draw(st.integers(1, 3)), node_size, draw(st.integers(1, 11))


@given(problems())
def test_fastest_of_all_cuts(problem: tuple[LayerChain, int, int, int]) -> None:
    chain, num_nodes, node_size, num_microbatches = problem
    cuts = [one for one in all_cuts(chain, num_nodes * node_size, node_size) if fits(chain, one, num_microbatches)]
    template = fastest_template(chain, num_nodes, node_size, num_microbatches)
    if not cuts:
        assert template is None
        return
    assert template is not None
    best_ms = min(time_ms(chain, one, num_microbatches) for one in cuts)
    assert template.step_ms(num_microbatches) == pytest.approx(best_ms, rel=1e-9)
    kinds = [chain.rank_counts.index(stage.num_ranks) for stage in template.stages]
    mine = [(kind, *stage.layers) for kind, stage in zip(kinds, template.stages, strict=True)]
    assert fits(chain, mine, num_microbatches)
    assert time_ms(chain, mine, num_microbatches) == pytest.approx(best_ms, rel=1e-9)


@given(problems())
def test_fewest_nodes_are_the_first_with_a_template(problem: tuple[LayerChain, int, int, int]) -> None:
    chain, _, node_size, num_microbatches = problem
    templates = pipeline_templates(chain, range(1, 5), node_size, num_microbatches)
    fewest = min((template.num_nodes for template in templates), default=None)
    assert fewest_nodes(chain, node_size, 4, num_microbatches) == fewest


def test_equal_layers_are_cut_evenly() -> None:
    chain = LayerChain([1], np.full((1, 12), 2.0))
    template = fastest_template(chain, 4, 1, 16)
    assert template is not None
    assert [stage.layers for stage in template.stages] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert template.step_ms(16) == pytest.approx((16 + 4 - 1) * 6.0)


def test_sums_of_equal_layers_are_equal_and_as_exact_as_the_times() -> None:
    layer_ms = np.full((1, 12), 2 ** (1 / 3))
    stage_ms = LayerChain([1], layer_ms).stage_ms[0]
    for num_layers in range(1, 13):
        times = {float(stage_ms[first, first + num_layers]) for first in range(13 - num_layers)}
        assert len(times) == 1 and times.pop() == pytest.approx(num_layers * 2 ** (1 / 3), rel=1e-11)


def test_a_stage_of_several_ranks_stays_in_one_node() -> None:
    chain = LayerChain([2], np.ones((1, 6)))
    assert fastest_template(chain, 3, 3, 8) is None  # one rank of each node would be left
    template = fastest_template(chain, 3, 2, 8)
    assert template is not None
    assert [stage.num_ranks for stage in template.stages] == [2, 2, 2]
