"""Replays a trace of nodes that are lost and join with the planner of a run that survives failures."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ..cost import Hardware
from .pipelines import ClusterPlan, TooFewNodesError
from .plan_choice import copy_seconds
from .resilient_planner import ResilientPlanner
from .state_copies import LostStateError, state_copies

# What the time of nodes goes to: samples that count, samples that are computed again, copies of missing weights,
# checkpoints, detection and new groups or processes, and nodes that are there and have nothing to do.
Cause = Literal["computing", "lost", "copying", "saving", "restarting", "idle"]
CAUSES: tuple[Cause, ...] = ("computing", "lost", "copying", "saving", "restarting", "idle")
Pauses = list[tuple[Cause, float]]


@dataclass(frozen=True)
class NodeEvents:
    """What happens to the nodes of a cluster at one time."""

    time_s: float  # since the start of the trace
    lost: frozenset[int]
    joined: frozenset[int]


@dataclass(frozen=True)
class Trace:
    events: tuple[NodeEvents, ...]  # in the order of time, one for each time
    end_s: float

    @classmethod
    def of(cls, rows: Iterable[tuple[float, str, str]], end_s: float | None = None) -> Trace:
        """A trace of rows with milliseconds, `"add"` or `"remove"`, and a node; it ends with the last by default."""
        numbers: dict[str, int] = {}
        times: dict[float, tuple[set[int], set[int]]] = {}
        for time_ms, action, name in rows:
            lost, joined = times.setdefault(time_ms / 1e3, (set(), set()))
            node = numbers.setdefault(name, len(numbers))
            if action == "add":
                joined.add(node)
            elif node in joined:  # a node that comes and goes at one time was never there
                joined.remove(node)
            else:
                lost.add(node)
        events = tuple(NodeEvents(time_s, *map(frozenset, both)) for time_s, both in times.items())
        return cls(events, events[-1].time_s if end_s is None else end_s)

    @property
    def most_nodes(self) -> int:
        return max(count for _, count in self.num_present())

    @property
    def num_losses(self) -> int:
        return sum(len(event.lost) for event in self.events)

    @property
    def mean_time_between_losses_s(self) -> float | None:
        """Mean time between two losses, of one node or of several at once; `None` without any."""
        num_events = sum(bool(event.lost) for event in self.events)
        return self.end_s / num_events if num_events else None

    def num_present(self) -> Iterator[tuple[float, int]]:
        """Yields the time of each event, and the number of nodes that are there from then on."""
        count = 0
        for event in self.events:
            count += len(event.joined) - len(event.lost)
            yield event.time_s, count

    def mean_nodes(self) -> float:
        points = [*self.num_present(), (self.end_s, 0)]
        area = sum((after - before) * nodes for (before, nodes), (after, _) in zip(points, points[1:], strict=False))
        return area / self.end_s if self.end_s else float(points[0][1])


def read_trace(path: str | Path) -> Trace:
    """
    Reads a trace: rows of milliseconds, `add` or `remove`, and the name of a node, with or without a header, as in the
    public traces of spot instances. Raises `ValueError` for a wrong row, with its line.
    """
    with Path(path).open(newline="") as file:
        lines = [(reader.line_num, row) for reader in [csv.reader(file)] for row in reader if any(map(str.strip, row))]
    if lines and len(lines[0][1]) == 3 and not _is_number(lines[0][1][0]) and lines[0][1][1].strip() not in _ACTIONS:
        del lines[0]  # a header
    if not lines:
        raise ValueError(f"`{path}`, there are no rows. Each has milliseconds, `add` or `remove`, and a node.")
    rows: list[tuple[float, str, str]] = []
    present: dict[str, bool] = {}  # node -> whether it is there
    for line, row in lines:
        cells = [cell.strip() for cell in row]
        wrong = _why_wrong(cells, rows[-1][0] if rows else 0.0, present)
        if wrong is not None:
            raise ValueError(f"`{path}`, line {line}: {wrong}")
        present[cells[2]] = cells[1] == "add"
        rows.append((float(cells[0]), cells[1], cells[2]))
    return Trace.of(rows)


_ACTIONS = ("add", "remove")


def _why_wrong(cells: Sequence[str], last_ms: float, present: dict[str, bool]) -> str | None:
    """Why a row can't follow others, of which the last is at `last_ms`, with a remedy; `None` if it can."""
    if len(cells) != 3:
        return (
            f"`{','.join(cells)}` has {len(cells)} values instead of 3. Write milliseconds, `add` or `remove`, and a "
            "node, such as `601200,remove,node5`."
        )
    time, action, node = cells
    if not _is_number(time) or float(time) < 0:
        return f"`{time}` is no time. Write milliseconds since the start, at least 0."
    if action not in _ACTIONS:
        return f"`{action}` is no action. Write `add` or `remove`."
    if float(time) < last_ms:
        return f"{float(time):g} ms comes after {last_ms:g} ms. Sort the rows by time, from 0 on."
    if action == "remove" and not present.get(node):
        known = "has been removed before" if node in present else "was never added"
        return f"node `{node}` is removed and {known}. Add it in an earlier row."
    if action == "add" and present.get(node):
        return f"node `{node}` is added and is there already. Remove it before."
    return None


def _is_number(text: str) -> bool:
    try:
        return float("-inf") < float(text) < float("inf")
    except ValueError:
        return False


def regular_losses(num_nodes: int, every_s: float, num_losses: int, seed: int = 0) -> Trace:
    """A trace in which one node after the other is lost, at equal distances, and none comes back."""
    order = random.Random(seed).sample(range(num_nodes), num_losses)
    rows = [(0.0, "add", f"node{node}") for node in range(num_nodes)]
    rows += [(1e3 * every_s * (index + 1), "remove", f"node{node}") for index, node in enumerate(order)]
    return Trace.of(rows)


@dataclass(frozen=True)
class EventCosts:
    """What losses, joins and checkpoints cost: all that a replay assumes besides what the planner predicts."""

    device: Hardware  # whose links carry the copies of weights
    detect_s: float  # from a loss until all other nodes know of it
    regroup_s: float  # until nodes go on in the same processes, without the copies of weights
    restart_s: float  # until new processes have read a checkpoint
    save_s: float  # for which a checkpoint blocks all nodes
    save_every: int | None = None  # steps between two checkpoints; none by default


@dataclass(frozen=True)
class Steps:
    start_s: float
    step_s: float
    count: int
    num_nodes: int  # that compute them

    @property
    def end_s(self) -> float:
        return self.start_s + self.count * self.step_s


@dataclass
class NodeChange:
    """A start of a job, or a change of its plan."""

    start_s: float
    took_s: float  # until the job goes on
    num_nodes: int  # from then on
    label: str  # who was lost or joined


@dataclass(frozen=True)
class Replay:
    """A job under a trace of failures."""

    steps: Sequence[Steps]  # those that were not lost again, in the order of time
    changes: Sequence[NodeChange]  # the first one is the start
    shares: dict[Cause, float]  # of the time of all nodes
    end_s: float
    samples_per_step: int

    @property
    def samples(self) -> int:
        return self.samples_per_step * sum(run.count for run in self.steps)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.end_s if self.end_s else 0.0

    def rates(self, num_windows: int) -> list[float]:
        """Samples per second in windows of equal length."""
        times = [0.0, *(time_s for run in self.steps for time_s in (run.start_s, run.end_s)), self.end_s]
        counts = np.cumsum([0, *(count for run in self.steps for count in (0, run.count)), 0])
        done = np.interp(np.linspace(0.0, self.end_s, num_windows + 1), times, counts)
        return (np.diff(done) * self.samples_per_step * num_windows / (self.end_s or 1.0)).tolist()

    def step_ends_s(self, stride: int) -> list[float]:
        before, ends = 0, []
        for run in self.steps:
            numbers = range(stride - before % stride, run.count + 1, stride)
            ends += [run.start_s + number * run.step_s for number in numbers]
            before += run.count
        return ends


def replay_trace(trace: Trace, planner: ResilientPlanner, costs: EventCosts, samples_per_step: int) -> Replay:
    """
    Replays a trace with the plans of a planner for its most nodes.

    A loss costs the running step, detection, new groups and the copies of what nodes lack; nodes that join are taken
    in at the end of a step. With too few nodes left the job saves a checkpoint, if every layer is held, and waits. If
    a layer is held nowhere, it starts from the last checkpoint, or the beginning.
    """
    job = _Job(planner, costs)
    for event in trace.events:
        job.go_on_until(event.time_s)
        job.change(event.lost, event.joined)
    job.go_on_until(trace.end_s)
    job.end_change()
    kept = sum(run.count * run.step_s * run.num_nodes for run in job.steps)
    seconds = {**job.node_seconds, "computing": kept, "lost": job.node_seconds["computing"] - kept}
    total = sum(seconds.values()) or 1.0
    shares: dict[Cause, float] = {cause: seconds[cause] / total for cause in CAUSES}
    return Replay(job.steps, job.changes, shares, trace.end_s, samples_per_step)


@dataclass(eq=False)
class _Job:
    planner: ResilientPlanner
    costs: EventCosts
    now_s: float = 0.0
    steps: list[Steps] = field(default_factory=list)
    num_saved: int = 0  # of `steps`
    step_start_s: float = 0.0  # of the running step
    node_seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    changes: list[NodeChange] = field(default_factory=list)
    present: frozenset[int] = frozenset()  # nodes that are there
    waiting: frozenset[int] = frozenset()  # those of them that join at the end of the step
    plan: ClusterPlan | None = None  # `None` while there are too few nodes
    step_s: float = np.inf
    pauses: Pauses = field(default_factory=list)  # what it does before it computes
    held: ClusterPlan | None = None  # whose state nodes have until the pauses are over; `None` in new processes
    lost: frozenset[int] = frozenset()  # nodes of `held`

    def go_on_until(self, time_s: float) -> None:
        while self.now_s < time_s:
            if self.pauses:
                self._pause(time_s)
            elif self.waiting and (self.plan is None or self.now_s == self.step_start_s):
                self._take_in()
            elif self.plan is None:
                self._spend("idle", time_s)
            else:
                self._compute(self.plan, time_s)

    def change(self, lost: frozenset[int], joined: frozenset[int]) -> None:
        members = lost - self.waiting
        self.present, self.waiting = self.present - lost | joined, self.waiting - lost | joined
        if members and self.plan is not None:
            self.lost |= members
            self._recover(f"lost {_listed(members)}")

    def end_change(self) -> None:
        """The last change takes no longer than until now."""
        if self.changes:
            last = self.changes[-1]
            last.took_s = min(last.took_s, self.now_s - last.start_s)

    def _recover(self, label: str) -> None:
        """Goes on without the nodes that are lost, if the others have what it takes."""
        plan, pauses = None, []
        try:
            if self.held is None:
                raise LostStateError({}, "The new processes have not read the checkpoint yet.")
            lost = self.lost.intersection(self.held.nodes)
            try:
                plan = self.planner.without(self.held, lost) if lost else self.held
                # nodes that were to be taken in are so afterwards
                self.waiting = self.present.difference(plan.nodes)
                pauses = [("restarting", self.costs.detect_s + self.costs.regroup_s), self._copying(plan)]
            except TooFewNodesError:
                last = replace(self.planner, failures=0).without(self.held, lost)
                # what was about to be taken in starts with the others
                self.waiting = self.present.difference(self.held.nodes)
                pauses = [self._copying(last), ("saving", self.costs.save_s)]
        except (LostStateError, TooFewNodesError):
            del self.steps[self.num_saved :]
            self._start(label)
        else:
            self._use(plan, pauses, label)

    def _start(self, label: str) -> None:
        """Starts with new processes on all nodes that are there, if these are enough."""
        plan, self.waiting = None, frozenset()
        if len(self.present) >= self.planner.fewest_guaranteed:
            nodes, fastest = sorted(self.present), self.planner.fastest(len(self.present))
            pipelines = [one.on(nodes[place] for place in one.nodes) for one in fastest.pipelines]
            plan = self.planner.plans.of(pipelines, fastest.microbatches)
        self.held = None
        if plan is not None or self.plan is not None:
            # the time until the first start is not that of the job
            self._use(plan, [("restarting", self.costs.restart_s)] if plan is not None and self.changes else [], label)

    def _take_in(self) -> None:
        label = f"joined {_listed(self.waiting)}"
        if self.plan is None:
            self._start(label)
            return
        plan, self.waiting = self.planner.with_nodes(self.plan, self.waiting), frozenset()
        self._use(plan, [("restarting", self.costs.regroup_s), self._copying(plan)], label)

    def _copying(self, plan: ClusterPlan) -> tuple[Cause, float]:
        """The time for copies of what nodes lack under a plan; raises [`LostStateError`] if nobody has it."""
        assert self.held is not None
        copies = state_copies(self.planner.plans.chain.spec, self.held, plan)
        return "copying", copy_seconds(copies, self.costs.device, plan.plan.world_size)

    def _use(self, plan: ClusterPlan | None, pauses: Pauses, label: str) -> None:
        """Goes on with a plan after pauses, or waits."""
        self.end_change()
        took_s = sum(seconds for _, seconds in pauses) if plan is not None else np.inf
        self.changes.append(NodeChange(self.now_s, took_s, len(plan.nodes) if plan is not None else 0, label))
        self.plan, self.pauses, self.step_start_s = plan, pauses, self.now_s
        self.step_s = self.planner.step_ms(plan) / 1e3 if plan is not None else np.inf
        if not pauses:
            self.held, self.lost = plan, frozenset()

    def _pause(self, time_s: float) -> None:
        cause, left_s = self.pauses.pop(0)
        end_s = self.now_s + left_s
        self._spend(cause, min(end_s, time_s))
        self.step_start_s = self.now_s
        if end_s > time_s:
            self.pauses.insert(0, (cause, end_s - time_s))
            return
        if cause == "saving":
            self.num_saved = len(self.steps)
        if not self.pauses:
            self.held, self.lost = self.plan, frozenset()

    def _compute(self, plan: ClusterPlan, time_s: float) -> None:
        """Computes whole steps up to the next checkpoint, node that waits or time, or a part of a step."""
        end_s = self.step_start_s + self.step_s
        if end_s > time_s:
            self._spend("computing", time_s)
            return
        count = 1 if self.waiting else 1 + int((time_s - end_s) / self.step_s)
        if self.costs.save_every is not None:
            left = max(1, self.costs.save_every - sum(run.count for run in self.steps[self.num_saved :]))
            count = min(count, left)
            self.pauses = [("saving", self.costs.save_s)] if count == left else []
        self.steps.append(Steps(self.step_start_s, self.step_s, count, len(plan.nodes)))
        self._spend("computing", min(self.steps[-1].end_s, time_s))
        self.step_start_s = self.now_s

    def _spend(self, cause: Cause, end_s: float) -> None:
        num_used = len(self.plan.nodes) if cause == "computing" and self.plan is not None else len(self.present)
        self.node_seconds[cause] += (end_s - self.now_s) * num_used
        self.node_seconds["idle"] += (end_s - self.now_s) * (len(self.present) - num_used)
        self.now_s = end_s


def _listed(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))
