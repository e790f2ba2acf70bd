"""Templates against all ways to cut a chain, and their numbers against lists of all combinations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recovery_policies import fastest_template, instantiations

from hf_mmparallel.arrange import fastest_counts
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
        for kind, count in enumerate(counts):
            for first in range(num_layers):
                for stop in range(first + 1, num_layers + 1):
                    limits[kind, first, stop] = draw(st.integers(3, 9)) * count // (stop - first)
    chain = LayerChain(counts, layer_ms, limits)
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
    found = (fastest_template(chain, count, node_size, num_microbatches) for count in range(1, 5))
    fewest = next((template.num_nodes for template in found if template is not None), None)
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


def template(num_nodes: int, *stages_ms: float) -> PipelineTemplate:
    stages = (TemplateStage((index, index + 1), 1, time_ms) for index, time_ms in enumerate(stages_ms))
    return PipelineTemplate(num_nodes, tuple(stages))


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
    with pytest.raises(
        ValueError, match=r"3 simultaneous failures need 4 copies .* 8 nodes; there are 7.*add 1 nodes, or guarantee 2"
    ):
        node_counts(7, 2, 3)
    with pytest.raises(ValueError, match=r"there are 1\. To go on, add 3 nodes\.$"):
        node_counts(1, 2, 1)


def test_all_combinations() -> None:
    """The example of figure 2.7: seven nodes in pipelines of two, three and four."""
    assert set(instantiations(7, (2, 3, 4), 1)) == {(2, 1, 0), (0, 1, 1)}
    assert set(instantiations(7, (2, 3, 4), 3)) == {(2, 1, 0)}


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[PipelineTemplate], int, int, int]:
    """Templates, nodes, fewest pipelines and microbatches."""
    fewest, failures = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    most = draw(st.integers((failures + 1) * fewest, 12))
    templates = []
    for count in node_counts(most, fewest, failures):
        slowest_ms = draw(st.one_of(st.integers(1, 30).map(float), st.floats(1, 30)))
        templates.append(template(count, slowest_ms, slowest_ms * draw(st.sampled_from([0.0, 0.5, 1.0]))))
    return templates, draw(st.integers(1, most)), failures + 1, draw(st.integers(1, 24))


@given(clusters())
def test_fastest_of_all_combinations(cluster: tuple[list[PipelineTemplate], int, int, int]) -> None:
    templates, num_nodes, fewest_pipelines, num_microbatches = cluster
    times_ms = []
    for numbers in instantiations(num_nodes, [one.num_nodes for one in templates], fewest_pipelines):
        pipelines = [one for one, number in zip(templates, numbers, strict=True) for _ in range(number)]
        if len(pipelines) <= num_microbatches:
            times_ms.append(Instantiation.of(pipelines, num_microbatches).step_ms)
    best = next(iter(fastest_instantiations(templates, num_nodes, fewest_pipelines, num_microbatches, 1)), None)
    if not times_ms:
        assert best is None
        return
    assert best is not None
    assert best.step_ms == pytest.approx(min(times_ms), rel=1e-9)
    assert sum(one.num_nodes for one in best.pipelines) == num_nodes
    assert len(best.pipelines) >= fewest_pipelines
    assert sum(best.microbatches) == num_microbatches


@given(clusters())
def test_nearly_as_fast_with_other_numbers_of_pipelines(cluster: tuple[list[PipelineTemplate], int, int, int]) -> None:
    """Against all combinations: each number of pipelines that is within 5 %, at most 5 % off its own best one."""
    templates, num_nodes, fewest_pipelines, num_microbatches = cluster
    best_ms: dict[int, float] = {}
    for numbers in instantiations(num_nodes, [one.num_nodes for one in templates], fewest_pipelines):
        pipelines = [one for one, number in zip(templates, numbers, strict=True) for _ in range(number)]
        if len(pipelines) <= num_microbatches:
            step_ms = Instantiation.of(pipelines, num_microbatches).step_ms
            best_ms[len(pipelines)] = min(step_ms, best_ms.get(len(pipelines), np.inf))
    found = fastest_instantiations(*cluster, most=100)
    limit_ms = 1.05 * min(best_ms.values(), default=0.0)
    assert {len(one.pipelines) for one in found} == {
        count for count, step_ms in best_ms.items() if step_ms <= limit_ms * (1 - 1e-9)
    } | {len(one.pipelines) for one in found if one.step_ms >= limit_ms * (1 - 1e-9)}
    for one in found:
        assert sum(own.num_nodes for own in one.pipelines) == num_nodes and sum(one.microbatches) == num_microbatches
        assert best_ms[len(one.pipelines)] * (1 - 1e-9) <= one.step_ms <= limit_ms * (1 + 1e-9)
    assert [one.step_ms for one in found] == pytest.approx(sorted(one.step_ms for one in found), rel=1e-8)
    assert fastest_instantiations(*cluster, most=2) == found[:2]


@given(clusters())
def test_equally_fast_pipelines_are_even(cluster: tuple[list[PipelineTemplate], int, int, int]) -> None:
    """No two pipelines of the fastest ones can exchange nodes to be more even and as fast."""
    templates, _, _, num_microbatches = cluster
    best = next(iter(fastest_instantiations(*cluster, most=1)), None)
    known = {one.num_nodes: one for one in templates}
    sizes = [] if best is None else [one.num_nodes for one in best.pipelines]
    for large in range(len(sizes)):
        for small in range(len(sizes)):
            for moved in range(1, (sizes[large] - sizes[small]) // 2 + 1):
                changed = list(sizes)
                changed[large] -= moved
                changed[small] += moved
                if known.keys() >= set(changed):
                    step_ms = Instantiation.of([known[size] for size in changed], num_microbatches).step_ms
                    assert best is not None and step_ms > best.step_ms * (1 + 1e-12)


def test_the_most_even_of_equally_fast_pipelines() -> None:
    """Two pipelines of six nodes whose one microbatch takes as long with any number of nodes."""
    templates = [template(count, 6.0) for count in range(1, 6)]
    found = fastest_instantiations(templates, 6, 2, 2, 5)
    assert [[one.num_nodes for one in best.pipelines] for best in found] == [[3, 3]]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.5, 9)), min_size=1, max_size=4), st.integers(0, 6))
def test_microbatches_are_divided_as_well_as_possible(paces: list[tuple[float, float]], more: int) -> None:
    fill_ms, slowest_ms = [other + slow for other, slow in paces], [slow for _, slow in paces]
    num_microbatches = len(paces) + more

    def end_ms(counts: tuple[int, ...] | list[int]) -> float:
        return max(fill + (count - 1) * slow for fill, slow, count in zip(fill_ms, slowest_ms, counts, strict=True))

    every = product(range(1, num_microbatches + 1), repeat=len(paces))
    best_ms = min(end_ms(counts) for counts in every if sum(counts) == num_microbatches)
    counts = fastest_counts(fill_ms, slowest_ms, num_microbatches)
    assert sum(counts) == num_microbatches
    assert end_ms(counts) == pytest.approx(best_ms, rel=1e-9)


def test_unequal_pipelines_of_one_cluster() -> None:
    """Pipelines of 4, 3 and 2 stages on nine ranks."""
    pipelines = [template(count, *[120.0 / count] * count) for count in (4, 3, 2)]
    best = Instantiation.of(pipelines, 24)
    assert best.microbatches == (11, 8, 5)
    assert best.step_ms == pytest.approx(420.0)
    assert max(one.step_ms(8) for one in pipelines) == pytest.approx(540.0)  # with equal counts


def test_fewer_microbatches_than_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match="2 microbatches are too few for 3 pipelines"):
        fastest_counts([1.0] * 3, [1.0] * 3, 2)
