"""Which node plays which part of changed pipelines, such that as little as possible is copied."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from .state_copies import Part

Holdings = Mapping[int, Mapping[Part, int]]


def kept_bytes(held: Holdings, needed: Holdings, nodes: Sequence[int], node_size: int) -> NDArray:
    """
    Bytes `[nodes, nodes]` that each node would have already in each place; its processes keep their order. `needed` is
    what each member needs where each node takes its own place, of which the nodes are to be permuted.
    """
    members = [range(node * node_size, (node + 1) * node_size) for node in nodes]
    rows = _kinds([tuple(frozenset(held.get(member, ())) for member in own) for own in members])
    columns = _kinds([tuple(frozenset(needed[member].items()) for member in own) for own in members])
    result = np.array([[sum(map(_shared_bytes, parts, wanted)) for wanted in columns[0]] for parts in rows[0]], float)
    return result[np.ix_(rows[1], columns[1])]


T = TypeVar("T", bound=Hashable)


def _kinds(values: Sequence[T]) -> tuple[list[T], list[int]]:
    """The different ones of some values, and which of these each value is."""
    numbers: dict[T, int] = {}
    indices = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), indices


def _shared_bytes(parts: frozenset[Part], wanted: frozenset[tuple[Part, int]]) -> int:
    """Bytes of the wanted parts that are there."""
    return sum(num_bytes for part, num_bytes in wanted if part in parts)


def assigned_nodes(kept: NDArray, nodes: Sequence[int]) -> list[int]:
    """The node of each place such that most bytes are kept, of those by node and place in [`kept_bytes`]."""
    rows, columns = linear_sum_assignment(kept, maximize=True)
    return [nodes[row] for row in rows[np.argsort(columns, kind="stable")].tolist()]
