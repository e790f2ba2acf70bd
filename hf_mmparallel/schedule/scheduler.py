"""From a task graph to an order: list scheduling, which is a simulation of the ranks under a policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..plan import ParallelPlan, StepPlan, encoders_of
from .actions import StageKey, Task
from .graph import TaskGraph

Cost = Callable[[Task], float]


@dataclass(frozen=True)
class Timeline:
    """
    When each task of a graph runs in the simulation. Events are numbered in the order in which they happen, so that
    the numbers also order what happens at one time.

    Args:
        start_ms (`tuple[float, ...]`): Of each task, in the order of the graph.
        end_ms (`tuple[float, ...]`): Of each task.
        started (`tuple[int, ...]`): Number of the event that each task starts.
        finished (`tuple[int, ...]`): Number of the event that each task is done.
    """

    start_ms: tuple[float, ...]
    end_ms: tuple[float, ...]
    started: tuple[int, ...]
    finished: tuple[int, ...]


def default_cost(task: Task) -> float:
    """1 ms for a forward, 2 ms for a backward."""
    return 1.0 if task.kind == "fwd" else 2.0


def stage_depths(plan: ParallelPlan) -> dict[StageKey, int]:
    """
    The number of stages from each one to the end of the longest way through the model, which is how many microbatches
    1F1B keeps in flight there (Cornstarch, section 4.4: `N - p`).

    Args:
        plan (`ParallelPlan`): The layout.

    Returns:
        `dict[tuple[str, int, int], int]`: (module, replica, stage) -> its depth.
    """
    depths: dict[StageKey, int] = {}
    for name in reversed(list(plan.modules)):
        targets = [edge.target for edge in plan.edges if edge.source == name]
        behind = max((depths[t, d, 0] for t in targets for d in range(plan.modules[t].dp_size)), default=0)
        for replica, stages in enumerate(plan.modules[name].replicas):
            for index in range(len(stages)):
                depths[name, replica, index] = len(stages) - index + behind
    return depths


def live_caps(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """
    How many microbatches may be in flight on each stage under 1F1B.

    In generators and the language model that is [`stage_depths`]. An encoder must be ahead by all that the
    microbatches in flight behind it take, while it keeps all whose last gradient comes from them: when every sample is
    taken in its own microbatch that is the depth again, one more when some are taken a microbatch later, and more
    where an encoder has more microbatches than the module behind it.

    Args:
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.

    Returns:
        `dict[tuple[str, int, int], float]`: (module, replica, stage) -> microbatches.
    """
    indices = {name: _microbatch_of_slot(replicas, len(step.samples)) for name, replicas in step.microbatches.items()}
    caps: dict[StageKey, float] = {}
    for name in reversed(list(plan.modules)):
        targets = [edge.target for edge in plan.edges if edge.source == name]
        for replica, stages in enumerate(plan.modules[name].replicas):
            slots = np.fromiter(chain.from_iterable(step.microbatches[name][replica]), np.int64)
            behind = 0
            for target in targets:
                depth = max(caps[target, d, 0] for d in range(plan.modules[target].dp_size))
                behind = max(behind, _most_ahead(indices[name][slots], indices[target][slots], int(depth)))
            for index in range(len(stages)):
                caps[name, replica, index] = len(stages) - index + behind
    return caps


def _microbatch_of_slot(replicas: Sequence[Sequence[Sequence[int]]], num_slots: int) -> np.ndarray:
    """For each slot the index of the microbatch that takes it, in whatever replica; -1 where none does."""
    result = np.full(num_slots, -1)
    for microbatches in replicas:
        for index, slots in enumerate(microbatches):
            result[list(slots)] = index
    return result


def _most_ahead(indices: np.ndarray, takers: np.ndarray, depth: int) -> int:
    """
    The most microbatches that a module must be ahead of `depth` microbatches behind it, at any time.

    Args:
        indices (`np.ndarray`): int64 `[num_slots]`: for each of its samples, the microbatch that it is in.
        takers (`np.ndarray`): int64 `[num_slots]`: the microbatch that takes it, -1 for none.
        depth (`int`): Microbatches in flight behind it.
    """
    indices, takers = indices[takers >= 0], takers[takers >= 0]
    if not len(takers):
        return depth
    indices = np.unique(indices, return_inverse=True)[1]  # microbatches without samples have no tasks
    wanted = np.zeros(takers.max() + 1, dtype=np.int64)  # how many microbatches each taker waits for
    np.maximum.at(wanted, takers, indices + 1)
    wanted = np.maximum.accumulate(wanted)
    last = np.zeros(indices.max() + 1, dtype=np.int64)  # the taker that the last gradient of each comes from
    np.maximum.at(last, indices, takers)
    first = np.arange(len(wanted))
    done = np.searchsorted(np.sort(last), first)
    ahead = wanted[np.minimum(first + depth - 1, len(wanted) - 1)] - done
    return max(depth, int(ahead.max()))


def ahead_caps(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """
    The caps of the schedule `"eager"` where no limit of memory is known: those of 1F1B, two more in encoders.

    With the sizes of the published datasets that gives most of what unlimited memory gives, with a fifth more of it
    rather than nearly twice as much. More in the language model gives nothing once encoders have these.

    Args:
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
    """
    encoders = encoders_of(plan)
    return {key: cap + 2 * (key[0] in encoders) for key, cap in live_caps(plan, step).items()}


def policy_caps(
    plan: ParallelPlan, step: StepPlan, caps: Mapping[StageKey, float] | None = None
) -> dict[StageKey, float]:
    """
    How many microbatches may be in flight on each stage under the plan's schedule.

    Args:
        plan (`ParallelPlan`): The layout and the name of its schedule.
        step (`StepPlan`): The arrangement.
        caps (`Mapping[tuple[str, int, int], float]`, *optional*):
            Of the schedule `"eager"`: what memory allows, see [`eager_caps`]; [`ahead_caps`] when left out. Fewer than
            1F1B has are raised to those, without which ranks would wait for ever.

    Returns:
        `dict[tuple[str, int, int], float]`: (module, replica, stage) -> microbatches; empty under GPipe.
    """
    if plan.schedule == "gpipe":
        return {}
    least = live_caps(plan, step)
    if plan.schedule == "1f1b":
        return least
    allowed = ahead_caps(plan, step) if caps is None else caps
    return {key: max(cap, allowed.get(key, cap)) for key, cap in least.items()}


class _Stage:
    """The queues of one stage during the simulation."""

    __slots__ = ("backwards", "cap", "forward_due", "forwards", "island", "live", "next", "number", "ranks")

    def __init__(self, number: int, ranks: tuple[int, ...], cap: float):
        self.number = number
        self.ranks = ranks
        self.cap = cap
        self.island = 0
        self.forwards: list[int] = []
        self.next = 0
        self.backwards: list[int] = []
        self.live = 0.0
        self.forward_due = False  # what ran last was a backward


class _Scheduler:
    """A discrete-event simulation: ranks run the best task that they can, tasks end, others become possible."""

    def __init__(self, plan: ParallelPlan, graph: TaskGraph, cost: Cost, caps: Mapping[StageKey, float]):
        self.tasks = graph.tasks
        self.cost = cost
        self.gpipe = plan.schedule == "gpipe"
        self.stages: list[_Stage] = []
        by_key: dict[StageKey, _Stage] = {}
        for name, module in plan.modules.items():
            for replica, index, stage in module.stages():
                key = (name, replica, index)
                by_key[key] = _Stage(len(self.stages), stage.all_ranks, caps.get(key, math.inf))
                self.stages.append(by_key[key])
        self.islands = _islands(self.stages)
        self.stage_of = [by_key[task.stage_key] for task in self.tasks]
        self._read(graph)
        self.busy = [False] * plan.world_size
        self.running: list[tuple[float, int]] = []
        self.now = 0.0
        self.events = 0
        count = len(self.tasks)
        self.start_ms, self.end_ms = [0.0] * count, [0.0] * count
        self.started, self.finished = [0] * count, [0] * count

    def _read(self, graph: TaskGraph) -> None:
        """Fills the queues: what each task waits for, its share of its microbatch, the forwards of each stage."""
        chunks: dict[tuple[int, int], int] = {}
        count = len(self.tasks)
        self.missing = [len(found) for found in graph.predecessors]
        self.successors: list[list[int]] = [[] for _ in range(count)]
        self.has_backward = [False] * count
        for index, (task, found) in enumerate(zip(self.tasks, graph.predecessors, strict=True)):
            for other in found:
                self.successors[other].append(index)
            if task.kind == "fwd":
                stage = self.stage_of[index]
                stage.forwards.append(index)
                key = (stage.number, task.microbatch)
                chunks[key] = chunks.get(key, 0) + 1
            else:
                self.has_backward[found[0]] = True
        self.share = [
            1.0 / chunks[stage.number, task.microbatch] for stage, task in zip(self.stage_of, self.tasks, strict=True)
        ]

    def run(self) -> Timeline:
        """Simulates until every task is done."""
        left = len(self.tasks)
        for island in range(len(self.islands)):
            self._dispatch(island)
        while left:
            assert self.running, "caps below those of `live_caps` leave nothing to run"
            dirty: set[int] = set()
            limit = self.running[0][0] * (1 + 1e-12) + 1e-9
            while self.running and self.running[0][0] <= limit:
                self.now, index = heapq.heappop(self.running)
                self._finish(index, dirty)
                left -= 1
            for island in sorted(dirty):
                self._dispatch(island)
        return Timeline(tuple(self.start_ms), tuple(self.end_ms), tuple(self.started), tuple(self.finished))

    def _candidate(self, stage: _Stage) -> tuple[int, int, int, int, int] | None:
        """The task that the stage would run next, with its priority in front."""
        forward = None
        if stage.next < len(stage.forwards):
            index = stage.forwards[stage.next]
            task = self.tasks[index]
            if not self.missing[index] and (
                task.chunk or not self.has_backward[index] or stage.live + 1e-6 < stage.cap
            ):
                forward = (0 if stage.forward_due else 1, task.microbatch, task.chunk, stage.number, index)
        if self.gpipe and stage.next < len(stage.forwards):
            return forward
        if stage.backwards and not (forward and stage.forward_due):
            index = stage.backwards[0]
            return (2 if self.gpipe else 0, self.tasks[index].microbatch, self.tasks[index].chunk, stage.number, index)
        return forward

    def _dispatch(self, island: int) -> None:
        """Starts tasks on the island's free ranks, the best first, until none can start."""
        stages = self.islands[island]
        while True:
            best = None
            for stage in stages:
                if any(self.busy[rank] for rank in stage.ranks):
                    continue
                candidate = self._candidate(stage)
                if candidate is not None and (best is None or candidate < best):
                    best = candidate
            if best is None:
                return
            self._start(best[-1])

    def _start(self, index: int) -> None:
        stage = self.stage_of[index]
        stage.forward_due = self.tasks[index].kind == "bwd"
        if self.tasks[index].kind == "fwd":
            stage.next += 1
            if self.has_backward[index]:
                stage.live += self.share[index]
        else:
            heapq.heappop(stage.backwards)
        for rank in stage.ranks:
            self.busy[rank] = True
        self.started[index] = self.events
        self.events += 1
        self.start_ms[index] = self.now
        self.end_ms[index] = self.now + self.cost(self.tasks[index])
        heapq.heappush(self.running, (self.end_ms[index], index))

    def _finish(self, index: int, dirty: set[int]) -> None:
        stage = self.stage_of[index]
        if self.tasks[index].kind == "bwd":
            stage.live -= self.share[index]
        for rank in stage.ranks:
            self.busy[rank] = False
        self.finished[index] = self.events
        self.events += 1
        dirty.add(stage.island)
        for other in self.successors[index]:
            self.missing[other] -= 1
            if not self.missing[other]:
                target = self.stage_of[other]
                dirty.add(target.island)
                if self.tasks[other].kind == "bwd":
                    heapq.heappush(target.backwards, other)


def _islands(stages: list[_Stage]) -> list[list[_Stage]]:
    """Groups stages that share ranks, directly or through others."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for stage in stages:
        first = root(stage.ranks[0])
        for rank in stage.ranks[1:]:
            parent[root(rank)] = first
    groups: dict[int, list[_Stage]] = {}
    for stage in stages:
        groups.setdefault(root(stage.ranks[0]), []).append(stage)
    for island, members in enumerate(groups.values()):
        for stage in members:
            stage.island = island
    return list(groups.values())


def schedule_tasks(
    plan: ParallelPlan, graph: TaskGraph, cost: Cost | None = None, caps: Mapping[StageKey, float] | None = None
) -> Timeline:
    """
    Orders the tasks of a graph.

    A stage runs a forward after each backward, else backwards first, and holds at most as many microbatches in flight
    as its cap says; under `gpipe` it runs all of its forwards first. (Backwards come in bunches where samples are
    deferred. If all of them went first, the stages behind would run out of work.) Forwards of a stage run in the order
    of its chunks, backwards as their gradients arrive.
    The order is read off a simulation that has happened, so that it can't deadlock.

    Args:
        plan (`ParallelPlan`): The layout and the name of the policy.
        graph (`TaskGraph`): The tasks.
        cost (`Callable[[Task], float]`, *optional*): Task -> milliseconds; [`default_cost`] when left out.
        caps (`Mapping[tuple[str, int, int], float]`, *optional*):
            (module, replica, stage) -> the most microbatches in flight, such as [`policy_caps`] gives; a stage that
            is not in it has no cap.

    Returns:
        `Timeline`: When each task runs.
    """
    return _Scheduler(plan, graph, cost or default_cost, caps or {}).run()
