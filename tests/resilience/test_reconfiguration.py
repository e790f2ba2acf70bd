"""Random losses of nodes: every node that is left has work, and the guaranteed copies are kept."""

import random
from collections.abc import Collection, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.resilience.pipelines import Nodes, TooFewNodesError, without_nodes
from hf_mmparallel.resilience.templates import node_counts


def pipelines_of(num_nodes: int, counts: range, failures: int, rng: random.Random) -> list[Nodes]:
    """Random pipelines that use all nodes."""
    while True:
        sizes, left = [counts[0]] * (failures + 1), num_nodes - counts[0] * (failures + 1)
        while left:
            if left >= counts[0] and rng.random() < 0.5:
                sizes.append(counts[0])
                left -= counts[0]
            else:
                sizes[rng.randrange(len(sizes))] += 1
                left -= 1
        if max(sizes) <= counts[-1]:
            nodes = iter(range(num_nodes))
            return [tuple(next(nodes) for _ in range(size)) for size in sizes]


def left_of(pipelines: Sequence[Nodes], lost: Collection[int], counts: range, failures: int) -> Sequence[Nodes]:
    """The pipelines after a loss, with all nodes that are left; none where these are too few."""
    alive = {node for nodes in pipelines for node in nodes} - set(lost)
    if len(alive) < (failures + 1) * counts[0]:
        with pytest.raises(TooFewNodesError, match=f"{len(alive)} nodes are left"):
            without_nodes(pipelines, lost, counts, failures)
        return ()
    left, _ = without_nodes(pipelines, lost, counts, failures)
    assert sorted(node for nodes in left for node in nodes) == sorted(alive)
    assert len(left) >= failures + 1
    assert all(len(nodes) in counts for nodes in left)
    return left


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 20), st.integers(0, 10**9))
def test_guarantees_hold_until_nodes_are_too_few(fewest: int, failures: int, more: int, seed: int) -> None:
    """Theorem 2, and more: any number of failures, several in a row."""
    rng = random.Random(seed)
    num_nodes = (failures + 1) * fewest + more
    counts = node_counts(num_nodes, fewest, failures)
    pipelines: Sequence[Nodes] = pipelines_of(num_nodes, counts, failures, rng)
    while pipelines:
        alive = sorted(node for nodes in pipelines for node in nodes)
        lost = set(rng.sample(alive, rng.randint(1, min(len(alive), failures + 2))))
        if len(lost) <= failures:  # a copy of every layer is left
            assert any(lost.isdisjoint(nodes) for nodes in pipelines)
        pipelines = left_of(pipelines, lost, counts, failures)


def loss_patterns(most: int, most_each: int) -> Iterator[tuple[int, ...]]:
    """How many nodes each of some pipelines loses, up to `most` together, in falling order."""
    yield ()
    for first in range(1, min(most, most_each) + 1):
        for rest in loss_patterns(most - first, first):
            yield (first, *rest)


@pytest.mark.parametrize("failures", range(1, 4))
@pytest.mark.parametrize("fewest", range(1, 7))
def test_merged_pipelines_have_a_template(fewest: int, failures: int) -> None:
    """Theorem 2 where there are fewest templates and no node to borrow, for all clusters of up to 40 nodes."""
    for num_pipelines in range(failures + 1, 40 // fewest + 1):
        counts = node_counts(num_pipelines * fewest, fewest, failures)
        pipelines = [tuple(range(fewest * index, fewest * (index + 1))) for index in range(num_pipelines)]
        for pattern in loss_patterns(failures, fewest):
            lost = {node for nodes, number in zip(pipelines, pattern, strict=False) for node in nodes[:number]}
            left = left_of(pipelines, lost, counts, failures)
            assert all(len(nodes) < 2 * fewest or len(nodes) == fewest for nodes in left)


@pytest.mark.parametrize(
    ("pipelines", "lost", "fewest", "after", "change"),
    [
        ([(0, 1, 2, 3), (4, 5, 6)], {1}, 2, ((4, 5, 6), (0, 2, 3)), "the pipeline of nodes 0, 2, 3 goes on"),
        ([(0, 1, 2), (3, 4)], {4}, 2, ((0, 1), (3, 2)), "the pipeline of node 3 borrows node 2"),
        ([(0, 1), (2, 3), (4, 5)], {5}, 2, ((2, 3), (4, 0, 1)), "the pipeline of node 4 is merged with nodes 0, 1"),
        # two of three pipelines are gone; the third one has nodes enough for two
        ([(0,), (1, 2, 3), (4,)], {0, 4}, 1, ((1, 2), (3,)), "a new pipeline borrows node 3"),
    ],
)
def test_the_ways_of_the_paper(pipelines, lost, fewest, after, change) -> None:
    """Figure 2.8."""
    left, changes = without_nodes(pipelines, lost, range(fewest, 5), 1)
    assert tuple(left) == after and str(changes[0]) == change


def test_a_damaged_pipeline_can_lend() -> None:
    """The second pipeline lost a node as well, but has more left than the fewest."""
    left, _ = without_nodes([(0, 1), (2, 3, 4, 5), (6, 7)], {0, 2}, range(2, 7), 1)
    assert sorted(map(len, left)) == [2, 2, 2]
