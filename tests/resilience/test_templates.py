"""Templates against all ways to cut a chain, and their numbers against lists of all combinations."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recovery_policies import fastest_template, instantiations

from hf_mmparallel.resilience.templates import (
    Instantiation,
    LayerChain,
    PipelineTemplate,
    TemplateStage,
    fastest_instantiations,
    fewest_nodes,
    node_counts,
)

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
    limits = None
    if draw(st.booleans()):
        limits = np.zeros((len(counts), num_layers, num_layers + 1), int)
        for kind, first, stop in np.ndindex(limits.shape):
            if first < stop:
                limits[kind, first, stop] = draw(st.integers(3, 9)) * counts[kind] // (stop - first)
    chain = LayerChain(counts, layer_ms, limits)
    return chain, draw(st.integers(1, 3)), node_size, draw(st.integers(1, 11))


@given(problems())
def test_fastest_of_all_cuts(problem: tuple[LayerChain, int, int, int]) -> None:
    chain, num_nodes, node_size, num_microbatches = problem
    cuts = [one for one in all_cuts(chain, num_nodes * node_size, node_size) if fits(chain, one, num_microbatches)]
    template = fastest_template(chain, num_nodes, node_size, num_microbatches)
    assert (template is not None) == bool(cuts)
    if template is not None:
        best_ms = min(time_ms(chain, one, num_microbatches) for one in cuts)
        mine = [(chain.rank_counts.index(stage.num_ranks), *stage.layers) for stage in template.stages]
        assert mine in cuts
        assert template.step_ms(num_microbatches) == pytest.approx(best_ms, rel=1e-9)
        assert time_ms(chain, mine, num_microbatches) == pytest.approx(best_ms, rel=1e-9)


@given(problems())
def test_fewest_nodes_are_the_first_with_a_template(problem: tuple[LayerChain, int, int, int]) -> None:
    chain, _, node_size, num_microbatches = problem
    found = (fastest_template(chain, count, node_size, num_microbatches) for count in range(1, 5))
    fewest = next((template.num_nodes for template in found if template is not None), None)
    assert fewest_nodes(chain, node_size, 4, num_microbatches) == fewest


def test_sums_of_equal_layers_are_equal_and_as_exact_as_the_times() -> None:
    stage_ms = LayerChain([1], np.full((1, 12), 2 ** (1 / 3))).stage_ms[0]
    for num_layers in range(1, 13):
        times = {float(stage_ms[first, first + num_layers]) for first in range(13 - num_layers)}
        assert len(times) == 1 and times.pop() == pytest.approx(num_layers * 2 ** (1 / 3), rel=1e-11)


@pytest.mark.parametrize("failures", range(4))
@pytest.mark.parametrize("fewest", range(1, 7))
def test_all_numbers_of_nodes_can_be_used(fewest: int, failures: int) -> None:
    """Theorem 1, for all clusters of up to 40 nodes."""
    for num_nodes in range((failures + 1) * fewest, 41):
        counts = node_counts(num_nodes, fewest, failures)
        most = np.full(num_nodes + 1, -np.inf)  # pipelines of a number of nodes
        most[0] = 0
        for nodes in range(1, num_nodes + 1):
            most[nodes] = max((most[nodes - count] + 1 for count in counts if count <= nodes), default=-np.inf)
        assert (most[(failures + 1) * fewest :] >= failures + 1).all()


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 copies .* 8 nodes; there are 7.*add 1 nodes, or guarantee 2"):
        node_counts(7, 2, 3)
    with pytest.raises(ValueError, match=r"there are 1\. To go on, add 3 nodes\.$"):
        node_counts(1, 2, 1)


Cluster = tuple[list[PipelineTemplate], int, int, int]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Templates, nodes, fewest pipelines and microbatches."""
    fewest, failures = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    most = draw(st.integers((failures + 1) * fewest, 12))
    templates = []
    for count in node_counts(most, fewest, failures):
        slowest_ms = draw(st.one_of(st.integers(1, 30).map(float), st.floats(1, 30)))
        stages_ms = (slowest_ms, slowest_ms * draw(st.sampled_from([0.0, 0.5, 1.0])))
        stages = (TemplateStage((index, index + 1), 1, stage_ms) for index, stage_ms in enumerate(stages_ms))
        templates.append(PipelineTemplate(count, tuple(stages)))
    return templates, draw(st.integers(1, most)), failures + 1, draw(st.integers(1, 24))


@given(clusters())
def test_fastest_of_all_combinations_and_nearly_as_fast_ones(cluster: Cluster) -> None:
    """Against all combinations: each number of pipelines that is within 5 %, at most 5 % off its own best one."""
    templates, num_nodes, fewest_pipelines, num_microbatches = cluster
    best_ms: dict[int, float] = {}
    for numbers in instantiations(num_nodes, [one.num_nodes for one in templates], fewest_pipelines):
        pipelines = [one for one, number in zip(templates, numbers, strict=True) for _ in range(number)]
        if len(pipelines) <= num_microbatches:
            step_ms = Instantiation.of(pipelines, num_microbatches).step_ms
            best_ms[len(pipelines)] = min(step_ms, best_ms.get(len(pipelines), np.inf))
    found = fastest_instantiations(*cluster, most=100)
    assert [one.step_ms for one in found[:1]] == pytest.approx(sorted(best_ms.values())[:1], rel=1e-9)
    limit_ms = 1.05 * min(best_ms.values(), default=0.0)
    at_limit = {len(one.pipelines) for one in found if one.step_ms >= limit_ms * (1 - 1e-9)}
    within = {count for count, step_ms in best_ms.items() if step_ms <= limit_ms * (1 - 1e-9)}
    assert {len(one.pipelines) for one in found} == within | at_limit
    for one in found:
        assert sum(own.num_nodes for own in one.pipelines) == num_nodes and sum(one.microbatches) == num_microbatches
        assert len(one.pipelines) >= fewest_pipelines
        assert best_ms[len(one.pipelines)] * (1 - 1e-9) <= one.step_ms <= limit_ms * (1 + 1e-9)
    assert [one.step_ms for one in found] == pytest.approx(sorted(one.step_ms for one in found), rel=1e-8)
    assert fastest_instantiations(*cluster, most=2) == found[:2]


@given(clusters())
def test_equally_fast_pipelines_are_even(cluster: Cluster) -> None:
    """No two pipelines of the fastest ones can exchange nodes to be more even and as fast."""
    templates, _, _, num_microbatches = cluster
    known = {one.num_nodes: one for one in templates}
    for best in fastest_instantiations(*cluster, most=1):
        sizes = [one.num_nodes for one in best.pipelines]
        for large, small in np.ndindex(len(sizes), len(sizes)):
            for moved in range(1, (sizes[large] - sizes[small]) // 2 + 1):
                changed = list(sizes)
                changed[large] -= moved
                changed[small] += moved
                if known.keys() >= set(changed):
                    step_ms = Instantiation.of([known[size] for size in changed], num_microbatches).step_ms
                    assert step_ms > best.step_ms * (1 + 1e-12)
