"""Traces of a cluster: when nodes join and when they are lost."""

from __future__ import annotations

import csv
import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ACTIONS = ("add", "remove")


@dataclass(frozen=True)
class NodeEvents:
    """What happens to the nodes of a cluster at one time."""

    time_s: float  # since the start of the trace
    lost: frozenset[int]
    joined: frozenset[int]


@dataclass(frozen=True)
class Trace:
    """When nodes join and when they are lost."""

    events: tuple[NodeEvents, ...]  # in the order of time, one for each time
    end_s: float

    @classmethod
    def of(cls, rows: Iterable[tuple[float, str, str]], end_s: float | None = None) -> Trace:
        """
        Makes a trace of rows with milliseconds, `"add"` or `"remove"`, and the name of a node; raises `ValueError`
        with the number of the row for an action that is neither, a node that is removed and not there, or added and
        there already, and times that go backwards.
        """
        numbers: dict[str, int] = {}
        present: set[str] = set()
        times: dict[float, tuple[set[str], set[str]]] = {}
        last_ms = 0.0
        for number, (time_ms, action, node) in enumerate(rows, start=1):
            if action not in ACTIONS:
                raise ValueError(f"row {number}: `{action}` is no action. Write `add` or `remove`.")
            if time_ms < last_ms:
                raise ValueError(
                    f"row {number}: {time_ms:g} ms comes after {last_ms:g} ms. Sort the rows by time, from 0 on."
                )
            if action == "remove" and node not in present:
                known = "has been removed before" if node in numbers else "was never added"
                raise ValueError(f"row {number}: node `{node}` is removed and {known}. Add it in an earlier row.")
            if action == "add" and node in present:
                raise ValueError(f"row {number}: node `{node}` is added and is there already. Remove it before.")
            last_ms = time_ms
            numbers.setdefault(node, len(numbers))
            lost, joined = times.setdefault(time_ms / 1e3, (set(), set()))
            if action == "add":
                present.add(node)
                joined.add(node)
            else:
                present.discard(node)
                # A node that comes and goes at one time was never there.
                joined.discard(node) if node in joined else lost.add(node)
        if not numbers:
            raise ValueError("there are no rows. Each has milliseconds, `add` or `remove`, and a node.")
        events = tuple(
            NodeEvents(time_s, *(frozenset(numbers[node] for node in nodes) for nodes in both))
            for time_s, both in times.items()
        )
        # By default the trace ends with its last row.
        return cls(events, last_ms / 1e3 if end_s is None else end_s)

    @property
    def most_nodes(self) -> int:
        """Most nodes that are there at once."""
        return max(len(present) for _, present in self.present())

    @property
    def num_losses(self) -> int:
        """Nodes that are lost."""
        return sum(len(event.lost) for event in self.events)

    @property
    def mean_time_between_losses_s(self) -> float | None:
        """Mean time between two losses, of one node or of several at once; `None` without any."""
        num_events = sum(bool(event.lost) for event in self.events)
        return self.end_s / num_events if num_events else None

    def present(self) -> Iterator[tuple[float, frozenset[int]]]:
        """Yields the time of each event, and the nodes that are there from then on."""
        nodes: frozenset[int] = frozenset()
        for event in self.events:
            nodes = nodes - event.lost | event.joined
            yield event.time_s, nodes

    def mean_nodes(self) -> float:
        """Mean number of nodes over time."""
        points = [*((time_s, len(nodes)) for time_s, nodes in self.present()), (self.end_s, 0)]
        area = sum((after - before) * nodes for (before, nodes), (after, _) in zip(points, points[1:], strict=False))
        return area / self.end_s if self.end_s else float(points[0][1])


def read_trace(path: str | Path) -> Trace:
    """
    Reads a trace: rows of milliseconds, `add` or `remove`, and the name of a node, with or without a header. This is
    the format of the public traces of spot instances.

    Args:
        path (`str` or `Path`): A CSV file.

    Raises:
        `ValueError`: For a row that can't be read, with its line, the value, the reason and a remedy.
    """
    with Path(path).open(newline="") as file:
        lines = [(reader.line_num, row) for reader in [csv.reader(file)] for row in reader if any(map(str.strip, row))]
    if lines and not _is_number(lines[0][1][0]) and len(lines[0][1]) == 3 and lines[0][1][1].strip() not in ACTIONS:
        del lines[0]  # a header
    rows = []
    for line, row in lines:
        cells = [cell.strip() for cell in row]
        if len(cells) != 3:
            raise ValueError(
                f"`{path}`, line {line}: `{','.join(row)}` has {len(cells)} values instead of 3. Write milliseconds, "
                "`add` or `remove`, and a node, such as `601200,remove,node5`."
            )
        if not _is_number(cells[0]) or float(cells[0]) < 0:
            raise ValueError(
                f"`{path}`, line {line}: `{cells[0]}` is no time. Write milliseconds since the start, at least 0."
            )
        rows.append((float(cells[0]), cells[1], cells[2]))
    try:
        return Trace.of(rows)
    except ValueError as error:
        text = str(error)
        if text.startswith("row "):
            number, _, rest = text.removeprefix("row ").partition(":")
            text = f"line {lines[int(number) - 1][0]}:{rest}"
        raise ValueError(f"`{path}`, {text}") from error


def _is_number(text: str) -> bool:
    try:
        return float("-inf") < float(text) < float("inf")
    except ValueError:
        return False


def regular_losses(num_nodes: int, every_s: float, num_losses: int, seed: int = 0) -> Trace:
    """A trace in which one node after the other is lost, at equal distances, and none comes back."""
    if num_losses > num_nodes:
        raise ValueError(f"{num_losses} nodes can't be lost: there are {num_nodes}. Lose at most all of them.")
    # The trace ends with the last loss.
    order = random.Random(seed).sample(range(num_nodes), num_losses)
    rows = [(0.0, "add", f"node{node}") for node in range(num_nodes)]
    rows += [(1e3 * every_s * (index + 1), "remove", f"node{node}") for index, node in enumerate(order)]
    return Trace.of(rows)


@dataclass(frozen=True)
class SpotMarket:
    """
    How nodes of spot instances come and go: at random times some are taken away together, and each is replaced after a
    random time.
    """

    num_nodes: int  # that are asked for, all of which are there at the start
    loss_every_s: float  # mean time between two losses
    most_at_once: int  # a loss takes between one and this number of nodes, all equally likely
    replaced_after_s: float  # mean time until a lost node is replaced by another one

    def trace(self, length_s: float, seed: int = 0) -> Trace:
        """Draws a trace of this length."""
        rng = random.Random(seed)
        present, number = list(range(self.num_nodes)), self.num_nodes
        rows = [(0.0, "add", f"node{node}") for node in present]
        joins: list[float] = []
        loss_s = rng.expovariate(1 / self.loss_every_s)
        while min([loss_s, *joins[:1]]) < length_s:
            if joins and joins[0] <= loss_s:
                rows.append((1e3 * heapq.heappop(joins), "add", f"node{number}"))
                present.append(number)
                number += 1
                continue
            for node in rng.sample(present, min(len(present), rng.randint(1, self.most_at_once))):
                present.remove(node)
                rows.append((1e3 * loss_s, "remove", f"node{node}"))
                heapq.heappush(joins, loss_s + rng.expovariate(1 / self.replaced_after_s))
            loss_s += rng.expovariate(1 / self.loss_every_s)
        return Trace.of(rows, length_s)
