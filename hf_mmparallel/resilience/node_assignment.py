"""Which node plays which part of changed pipelines, such that as little as possible is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from .state_copies import Part

Holdings = Mapping[int, Mapping[Part, int]]


def kept_bytes(held: Holdings, needed: Holdings, nodes: Sequence[int], node_size: int) -> NDArray:
    """
    Bytes that each node would have already in each place; its processes keep their order.

    Args:
        held (`Mapping[int, Mapping[tuple[str, Slice], int]]`): What each member holds, see [`holdings`].
        needed (`Mapping[int, Mapping[tuple[str, Slice], int]]`):
            What each member needs where each node takes its own place, of which the nodes are to be permuted.
        nodes (`Sequence[int]`): The nodes.
        node_size (`int`): Processes of a node.

    Returns:
        `np.ndarray` of shape `[nodes, nodes]`: Bytes by node and place.
    """
    result = np.zeros((len(nodes), len(nodes)))
    for row, node in enumerate(nodes):
        for column, place in enumerate(nodes):
            for index in range(node_size):
                parts = held.get(node * node_size + index, {})
                wanted = needed[place * node_size + index]
                result[row, column] += sum(wanted[part] for part in parts.keys() & wanted.keys())
    return result


def assigned_nodes(kept: NDArray, nodes: Sequence[int]) -> list[int]:
    """
    The node of each place such that the bytes that are kept are the most.

    Args:
        kept (`np.ndarray` of shape `[nodes, nodes]`): Bytes by node and place, see [`kept_bytes`].
        nodes (`Sequence[int]`): The nodes.
    """
    rows, columns = linear_sum_assignment(kept, maximize=True)
    return [nodes[row] for row in rows[np.argsort(columns)].tolist()]
