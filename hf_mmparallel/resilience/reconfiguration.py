"""What becomes of pipelines that lose nodes (Oobleck, section 2.5.1): a pure decision that every rank makes alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Nodes = tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """One step of a reconfiguration."""

    # "reinstantiate": a pipeline goes on with the nodes that it has left; "borrow": it takes a node of another
    # pipeline; "merge": it becomes one with another pipeline; "divide": its nodes, and others that were in no
    # pipeline, are divided among new pipelines
    op: Literal["reinstantiate", "borrow", "merge", "divide"]
    nodes: Nodes  # of the pipeline before
    others: Nodes = ()  # that it takes or is joined with

    def __str__(self) -> str:
        names = {"reinstantiate": "goes on", "borrow": "borrows", "merge": "is merged with", "divide": "is divided"}
        others = f" {_listed(self.others)}" if self.others else ""
        pipeline = f"the pipeline of {_listed(self.nodes)}" if self.nodes else "a new pipeline"
        return f"{pipeline} {names[self.op]}{others}"


class TooFewNodesError(RuntimeError):
    """The nodes that are left can't hold as many copies of the model as are guaranteed."""


def without_nodes(
    pipelines: Sequence[Nodes], lost: Collection[int], counts: range, failures: int
) -> tuple[list[Nodes], list[Change]]:
    """
    The pipelines of all nodes that are left after a loss, and how they came about, in order, where templates have
    `counts` of nodes ([`node_counts`]) and `failures` are guaranteed again; raises [`TooFewNodesError`] if fewer nodes
    are left than `failures + 1` copies need.

    A pipeline with nodes lost goes on with what it has left if a template has this number of nodes. Otherwise it
    borrows nodes, one by one, of the pipeline that has the most of those above the fewest nodes; if none has more, it
    is merged with the smallest pipeline, until it has enough. Whatever comes of it has a template (theorem 2).
    """
    left = [tuple(node for node in nodes if node not in lost) for nodes in pipelines]
    num_left, needed = sum(map(len, left)), (failures + 1) * counts[0]
    if num_left < needed:
        raise TooFewNodesError(
            f"{num_left} nodes are left; {failures + 1} copies of the model need {needed}, {counts[0]} each. Add "
            f"{needed - num_left} nodes, or go on from a checkpoint with fewer copies."
        )
    whole = [nodes for nodes, before in zip(left, pipelines, strict=True) if len(nodes) == len(before)]
    damaged = [nodes for nodes, before in zip(left, pipelines, strict=True) if 0 < len(nodes) < len(before)]
    changes = list(_mend(whole, damaged, counts[0]))
    # New pipelines, in place of those that lost all nodes, borrow all of theirs, which the paper does not say.
    while len(whole) < failures + 1:
        changes += _mend(whole, [()], counts[0])
    return whole, changes


def _mend(whole: list[Nodes], damaged: list[Nodes], fewest: int) -> Iterator[Change]:
    """Moves damaged pipelines to the whole ones, which change with them; those that can lend nodes first."""
    damaged.sort(key=len, reverse=True)
    while damaged:
        nodes = damaged.pop(0)
        if len(nodes) >= fewest:
            yield Change("reinstantiate", nodes)
        while len(nodes) < fewest:
            lender: Nodes = max(whole, key=len, default=())
            if len(lender) > fewest:
                whole[whole.index(lender)] = lender[:-1]
                yield Change("borrow", nodes, lender[-1:])
                nodes += lender[-1:]
                continue
            others = min([*damaged, *whole], key=len)
            (damaged if others in damaged else whole).remove(others)
            yield Change("merge", nodes, others)
            nodes += others
        whole.append(nodes)


def _listed(nodes: Nodes) -> str:
    """Nodes as text."""
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, nodes))
