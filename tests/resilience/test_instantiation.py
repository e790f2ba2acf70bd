"""Instantiations against lists of all combinations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.arrange import fastest_counts
from hf_mmparallel.resilience.instantiation import Instantiation, best_instantiation, fastest_instantiations
from hf_mmparallel.resilience.node_counts import instantiations, node_counts
from hf_mmparallel.resilience.templates import PipelineTemplate, TemplateStage


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
    best = best_instantiation(templates, num_nodes, fewest_pipelines, num_microbatches)
    if not times_ms:
        assert best is None
        return
    assert best is not None
    assert best.step_ms == pytest.approx(min(times_ms), rel=1e-9)
    assert best.num_nodes == num_nodes
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
        assert one.num_nodes == num_nodes and sum(one.microbatches) == num_microbatches
        assert best_ms[len(one.pipelines)] * (1 - 1e-9) <= one.step_ms <= limit_ms * (1 + 1e-9)
    assert [one.step_ms for one in found] == pytest.approx(sorted(one.step_ms for one in found), rel=1e-8)
    assert fastest_instantiations(*cluster, most=2) == found[:2]


@given(clusters())
def test_equally_fast_pipelines_are_even(cluster: tuple[list[PipelineTemplate], int, int, int]) -> None:
    """No two pipelines of the fastest ones can exchange nodes to be more even and as fast."""
    templates, _, _, num_microbatches = cluster
    best = best_instantiation(*cluster)
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
