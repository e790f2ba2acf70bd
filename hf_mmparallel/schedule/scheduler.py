"""From a task graph to an order: list scheduling, which is a simulation of the ranks under a policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..plan import ParallelPlan
from .actions import StageKey, Task
from .graph import TaskGraph
from .policies import task_phases

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
        self.live = 0  # microbatches of which a backward is left
        self.forward_due = False  # what ran last was a backward


class _Scheduler:
    """A discrete-event simulation: ranks run the best task that they can, tasks end, others become possible."""

    def __init__(
        self,
        plan: ParallelPlan,
        graph: TaskGraph,
        times_ms: Sequence[float],
        caps: Mapping[StageKey, float],
        alternate: bool = False,
        limit_ms: float = math.inf,
    ):
        self.tasks = graph.tasks
        self.times_ms = times_ms
        self.alternate, self.limit_ms = alternate, limit_ms
        self.could_wait = False  # whether a stage took another backward, for which it would wait where it alternates
        self.stages: list[_Stage] = []
        by_key: dict[StageKey, _Stage] = {}
        for name, module in plan.modules.items():
            for replica, index, stage in module.stages():
                key = (name, replica, index)
                by_key[key] = _Stage(len(self.stages), stage.all_ranks, caps.get(key, math.inf))
                self.stages.append(by_key[key])
        self.islands = _islands(self.stages)
        self.in_turn = [len({stage.ranks for stage in island}) == 1 for island in self.islands]
        self.stage_of = [by_key[task.stage_key] for task in self.tasks]
        self._read(graph)
        self.phases = _Phases(plan, self.tasks, [stage.ranks for stage in self.stage_of])
        self.busy = [False] * plan.world_size
        self.running: list[tuple[float, int]] = []
        self.now = 0.0
        self.events = 0
        count = len(self.tasks)
        self.start_ms, self.end_ms = [0.0] * count, [0.0] * count
        self.started, self.finished = [0] * count, [0] * count

    def _read(self, graph: TaskGraph) -> None:
        """Fills the queues: what each task waits for, the backwards of each microbatch, the forwards of each stage."""
        self.backwards_left: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> how many
        count = len(self.tasks)
        self.missing = [len(found) for found in graph.predecessors]
        self.successors: list[list[int]] = [[] for _ in range(count)]
        for index, (task, found) in enumerate(zip(self.tasks, graph.predecessors, strict=True)):
            for other in found:
                self.successors[other].append(index)
            stage = self.stage_of[index]
            if task.kind == "fwd":
                stage.forwards.append(index)
            else:
                key = (stage.number, task.microbatch)
                self.backwards_left[key] = self.backwards_left.get(key, 0) + 1

    def run(self) -> Timeline | None:
        """
        Simulates until every task is done; `None` if stages that alternate wait for each other in a circle, or if it
        takes no less than the limit.
        """
        left = len(self.tasks)
        for island in range(len(self.islands)):
            self._dispatch(island)
        while left:
            if self.alternate and not self.running:
                return None
            if self.running and self.running[0][0] >= self.limit_ms:
                return None
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
        forward, fits = None, False
        if stage.next < len(stage.forwards):
            index = stage.forwards[stage.next]
            task = self.tasks[index]
            fits = (
                bool(task.chunk)
                or stage.live < stage.cap
                or (stage.number, task.microbatch) not in self.backwards_left
            )
            if not self.missing[index] and fits and self.phases.is_due(index):
                forward = (0 if stage.forward_due else 1, task.microbatch, task.chunk, stage.number, index)
        waits = stage.forward_due and (fits if self.alternate else forward is not None)
        if stage.backwards and not waits:
            index = stage.backwards[0]
            if self.phases.is_due(index):
                self.could_wait |= stage.forward_due and fits
                return (0, self.tasks[index].microbatch, self.tasks[index].chunk, stage.number, index)
        return forward

    def _dispatch(self, island: int) -> None:
        """Starts tasks on the island's free ranks, the best first, until none can start."""
        stages = self.islands[island]
        if self.in_turn[island] and self.busy[stages[0].ranks[0]]:
            return
        while True:
            best = None
            for stage in stages:
                if any(map(self.busy.__getitem__, stage.ranks)):
                    continue
                candidate = self._candidate(stage)
                if candidate is not None and (best is None or candidate < best):
                    best = candidate
            if best is None:
                return
            self._start(best[-1])
            if self.in_turn[island]:  # all stages are on the same ranks
                return

    def _start(self, index: int) -> None:
        stage = self.stage_of[index]
        stage.forward_due = self.tasks[index].kind == "bwd"
        if self.tasks[index].kind == "fwd":
            stage.next += 1
            if not self.tasks[index].chunk and (stage.number, self.tasks[index].microbatch) in self.backwards_left:
                stage.live += 1
        else:
            heapq.heappop(stage.backwards)
        for rank in stage.ranks:
            self.busy[rank] = True
        self.started[index] = self.events
        self.events += 1
        self.start_ms[index] = self.now
        self.end_ms[index] = self.now + self.times_ms[index]
        heapq.heappush(self.running, (self.end_ms[index], index))

    def _finish(self, index: int, dirty: set[int]) -> None:
        stage = self.stage_of[index]
        if self.tasks[index].kind == "bwd":
            key = (stage.number, self.tasks[index].microbatch)
            self.backwards_left[key] -= 1
            stage.live -= not self.backwards_left[key]
        for rank in stage.ranks:
            self.busy[rank] = False
        self.phases.finish(index)
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


class _Phases:
    """Which phase each rank is in: the earliest that it has a task of left."""

    def __init__(self, plan: ParallelPlan, tasks: Sequence[Task], ranks: Sequence[tuple[int, ...]]):
        phases = task_phases(plan)
        self.is_single = not any(phases.values())
        if self.is_single:
            return
        self.of_task = [phases[task.module, task.kind] for task in tasks]
        self.ranks = ranks
        self.left = [[0] * (1 + max(phases.values())) for _ in range(plan.world_size)]
        for phase, own in zip(self.of_task, ranks, strict=True):
            for rank in own:
                self.left[rank][phase] += 1

    def is_due(self, index: int) -> bool:
        """Whether all earlier phases of the task's ranks are done."""
        if self.is_single:
            return True
        phase = self.of_task[index]
        return not phase or not any(any(self.left[rank][:phase]) for rank in self.ranks[index])

    def finish(self, index: int) -> None:
        """Counts a task as done."""
        if not self.is_single:
            for rank in self.ranks[index]:
                self.left[rank][self.of_task[index]] -= 1


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
    plan: ParallelPlan,
    graph: TaskGraph,
    cost: Cost | None = None,
    caps: Mapping[StageKey, float] | None = None,
    alternate: bool = False,
) -> Timeline:
    """
    Orders the tasks of a graph.

    A stage runs a forward after each backward, else backwards first, and holds at most as many microbatches in flight
    as its cap says. The phases of the policy come one after the other on each rank, see [`task_phases`]. (Backwards
    come in bunches where samples are deferred. If all of them went first, the stages behind would run out of work.)
    Forwards of a stage run in the order of its chunks, backwards as their gradients arrive.

    A stage whose forward after a backward has not come in yet takes another backward, if there is one. The forwards
    then come in bunches, too, and hold up the backwards that the stages before wait for. With `alternate` a second
    order is simulated, in which such a stage waits for its forward as in textbook 1F1B, and the one that ends first is
    taken. Both keep as many microbatches in flight.

    The order is read off a simulation that has happened, so that it can't deadlock.

    Args:
        plan (`ParallelPlan`): The layout and the name of the policy.
        graph (`TaskGraph`): The tasks.
        cost (`Callable[[Task], float]`, *optional*): Task -> milliseconds; [`default_cost`] when left out.
        caps (`Mapping[tuple[str, int, int], float]`, *optional*):
            (module, replica, stage) -> the most microbatches in flight, such as [`policy_caps`] gives; a stage that
            is not in it has no cap.
        alternate (`bool`, *optional*, defaults to `False`): Whether to look at the order that waits, too.

    Returns:
        `Timeline`: When each task runs.
    """
    times_ms = [(cost or default_cost)(task) for task in graph.tasks]
    return order_tasks(plan, graph, times_ms, caps or {}, alternate)


def order_tasks(
    plan: ParallelPlan,
    graph: TaskGraph,
    times_ms: Sequence[float],
    caps: Mapping[StageKey, float],
    alternate: bool = False,
) -> Timeline:
    """[`schedule_tasks`] with the time of each task of the graph."""
    scheduler = _Scheduler(plan, graph, times_ms, caps)
    found = scheduler.run()
    assert found is not None
    if alternate and scheduler.could_wait:
        end_ms = max(found.end_ms, default=0.0)
        found = _Scheduler(plan, graph, times_ms, caps, True, end_ms).run() or found
    return found
