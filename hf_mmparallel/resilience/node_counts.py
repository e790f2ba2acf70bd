"""How many nodes pipelines have, such that every number of nodes that failures leave can be used whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def node_counts(num_nodes: int, fewest: int, failures: int) -> range:
    """
    The numbers of nodes of the pipeline templates of a cluster (Oobleck, section 2.4.1.1); raises `ValueError` if the
    nodes are too few for `failures + 1` copies of `fewest` nodes.

    With all counts from `fewest` to what is left when `failures` pipelines have the fewest nodes, every number of
    nodes from `(failures + 1) * fewest` to `num_nodes` is a sum of at least `failures + 1` counts (theorem 1): as many
    pipelines of the fewest nodes as failures, and one of the rest.
    """
    check_guarantee(num_nodes, fewest, failures)
    return range(fewest, num_nodes - failures * fewest + 1)


def check_guarantee(num_nodes: int, fewest: int, failures: int) -> None:
    """Raises `ValueError` if the nodes are too few to survive this many failures, or a number is not possible."""
    if fewest < 1:
        raise ValueError(f"A pipeline of {fewest} nodes does not exist. Give it at least one node.")
    if failures < 0:
        raise ValueError(f"{failures} failures can't be guaranteed. Give a number of at least 0.")
    needed = (failures + 1) * fewest
    if num_nodes >= needed:
        return
    possible = num_nodes // fewest - 1
    advice = f"add {needed - num_nodes} nodes"
    if possible >= 0:
        advice += f", or guarantee {possible} failures"
    raise ValueError(
        f"{failures} simultaneous failures need {failures + 1} copies of the model on {fewest} nodes each, {needed} "
        f"nodes; there are {num_nodes}. To go on, {advice}."
    )


def instantiations(num_nodes: int, counts: Sequence[int], fewest_pipelines: int) -> Iterator[tuple[int, ...]]:
    """
    Yields the number of pipelines of each template for all ways to use all nodes (Oobleck, equation 2.5). There are as
    many as partitions of `num_nodes`, which grow fast; [`best_instantiation`] finds the fastest without listing them.
    """

    def extend(index: int, nodes: int) -> Iterator[tuple[int, ...]]:
        if index == len(counts):
            if nodes == 0:
                yield ()
            return
        for number in range(nodes // counts[index] + 1):
            for rest in extend(index + 1, nodes - number * counts[index]):
                yield (number, *rest)

    return (numbers for numbers in extend(0, num_nodes) if sum(numbers) >= fewest_pipelines)
