"""
The plain way to the lists of ranks, task by task over objects: what the arrays of `schedule/` are tested against.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import numpy as np

from hf_mmparallel.plan import LANGUAGE_MODEL, ParallelPlan, StageKey, StepPlan, SyncGroup
from hf_mmparallel.plan.step_plan import turn_of
from hf_mmparallel.schedule import Action, Message, Program, Task
from hf_mmparallel.schedule.in_flight import task_phases
from hf_mmparallel.schedule.scheduler import Timeline


@dataclass(frozen=True)
class PlainGraph:
    tasks: tuple[Task, ...]
    predecessors: tuple[tuple[int, ...], ...]
    messages: tuple[Message, ...]
    ends: tuple[tuple[int, int], ...]


def build_graph(plan: ParallelPlan, step: StepPlan, training: bool = True) -> PlainGraph:
    """The tasks and messages of a step."""
    tasks, index_of = _forwards(plan, step)
    links = [(source, target) for module in plan.modules for source, target in _links(plan, step, index_of, module)]
    sources: list[list[int]] = [[] for _ in tasks]
    for source, target in links:
        sources[target].append(source)

    backward: dict[int, int] = {}
    if training:
        for index, task in enumerate(tasks):
            trainable = plan.stage(task.module, task.replica, task.stage).trainable
            if trainable or any(source in backward for source in sources[index]):
                backward[index] = -1

    # A backward stands after all that it waits for when the forwards are walked from the last to the first; within a
    # stage the chunks keep their order.
    predecessors = [tuple(forwards) for forwards in sources]
    forward_links = list(links)
    grads: list[list[int]] = [[] for _ in tasks]
    for source, target in links:
        if source in backward:
            grads[source].append(target)
    num_forwards = len(tasks)
    for index in _reversed_stages(plan, tasks[:num_forwards]):
        if index not in backward:
            continue
        task = tasks[index]
        backward[index] = len(tasks)
        tasks.append(Task("bwd", *task.key))
        predecessors.append((index, *(backward[target] for target in grads[index])))
    ends = forward_links + [(backward[target], backward[source]) for source, target in links if source in backward]
    messages = tuple(
        Message("act" if source < num_forwards else "grad", tasks[source], tasks[target]) for source, target in ends
    )
    return PlainGraph(tuple(tasks), tuple(predecessors), messages, tuple(ends))


def consumer_turns(step: StepPlan, module: str, replica: int, target: str) -> dict[int, int]:
    """Batch index -> the turn in which `target` consumes what a replica of `module` makes of it."""
    takers = {
        batch_index: (taker, index)
        for taker, microbatches in enumerate((step.whole or step).microbatches[target])
        for index, batch_indices in enumerate(microbatches)
        for batch_index in batch_indices
    }
    own = [i for batch_indices in step.microbatches[module][replica] for i in batch_indices if i in takers]
    counts = {taker: len((step.whole or step).microbatches[target][taker]) for taker, _ in takers.values()}
    turns = max((counts[takers[i][0]] for i in own), default=0)
    return {i: turn_of(takers[i][1], counts[takers[i][0]], turns) for i in own}


def chunks_of_replica(step: StepPlan, module: str, replica: int) -> list[list[list[int]]]:
    """The chunks of each microbatch of a replica: its samples by the turn in which they are consumed last."""
    targets = step.targets.get(module, ()) if module != LANGUAGE_MODEL else ()
    turns = [consumer_turns(step, module, replica, target) for target in targets]
    result = []
    for index, batch_indices in enumerate(step.microbatches[module][replica]):
        by_turn: dict[int, list[int]] = {}
        for i in batch_indices:
            by_turn.setdefault(max((turn[i] for turn in turns if i in turn), default=index), []).append(i)
        result.append([by_turn[turn] for turn in sorted(by_turn)])
    return result


def _forwards(plan: ParallelPlan, step: StepPlan) -> tuple[list[Task], dict[tuple[str, int, int, int, int], int]]:
    """The forwards of every module in turn, and where the forward of each key is in the list."""
    tasks: list[Task] = []
    index_of: dict[tuple[str, int, int, int, int], int] = {}
    for name, module in plan.modules.items():
        for replica in module.with_stages:
            num_stages = len(module.replicas[replica])
            for microbatch, own_chunks in enumerate(chunks_of_replica(step, name, replica)):
                for chunk in range(len(own_chunks)):
                    for stage in range(num_stages):
                        task = Task("fwd", name, replica, stage, microbatch, chunk)
                        index_of[task.key] = len(tasks)
                        tasks.append(task)
    return tasks, index_of


def _links(
    plan: ParallelPlan, step: StepPlan, index_of: dict[tuple[str, int, int, int, int], int], name: str
) -> list[tuple[int, int]]:
    """Which forwards of module `name` feed which forwards, in this module and behind its edges."""
    edges = [edge for edge in plan.edges if edge.source == name]
    consumers: dict[tuple[str, int], tuple[int, int, int]] = {}
    entries = {}
    for edge in edges:
        for replica in step.replicas(edge.target):
            entries[edge.target, replica] = tuple(plan.edge_stages(edge, replica))
            for microbatch, chunks in enumerate(chunks_of_replica(step, edge.target, replica)):
                for chunk, batch_indices in enumerate(chunks):
                    for batch_index in batch_indices:
                        consumers[edge.target, batch_index] = (replica, microbatch, chunk)
    links = []
    for replica in plan.modules[name].with_stages:
        last = len(plan.modules[name].replicas[replica]) - 1
        for microbatch, chunks in enumerate(chunks_of_replica(step, name, replica)):
            for chunk, batch_indices in enumerate(chunks):
                first = index_of[name, replica, 0, microbatch, chunk]
                links.extend((first + stage, first + stage + 1) for stage in range(last))
                for edge in edges:
                    consuming = {
                        consumers[edge.target, batch_index]
                        for batch_index in batch_indices
                        if (edge.target, batch_index) in consumers
                    }
                    for target_replica, target_microbatch, target_chunk in sorted(consuming):
                        start = index_of[edge.target, target_replica, 0, target_microbatch, target_chunk]
                        links.extend((first + last, start + stage) for stage in entries[edge.target, target_replica])
    return links


def _reversed_stages(plan: ParallelPlan, forwards: list[Task]) -> list[int]:
    """Places of the forwards, modules and stages from the last to the first, chunks of a stage in order."""
    order = {name: index for index, name in enumerate(plan.modules)}
    return sorted(
        range(len(forwards)),
        key=lambda i: (-order[forwards[i].module], forwards[i].replica, -forwards[i].stage, i),
    )


class _Stage:
    """The queues of one stage during the simulation."""

    def __init__(self, number: int, ranks: tuple[int, ...], max_in_flight: float):
        self.number = number
        self.ranks = ranks
        self.max_in_flight = max_in_flight
        self.island = 0
        self.forwards: list[int] = []
        self.next = 0
        self.backwards: list[int] = []
        self.in_flight = 0  # microbatches of which a backward is left
        self.forward_due = False  # what ran last was a backward


class _Scheduler:
    """A discrete-event simulation: ranks run the best task that they can, tasks end, others become possible."""

    def __init__(
        self,
        plan: ParallelPlan,
        graph: PlainGraph,
        times_ms: Sequence[float],
        max_in_flight: Mapping[StageKey, float],
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
                by_key[key] = _Stage(len(self.stages), stage.all_ranks, max_in_flight.get(key, math.inf))
                self.stages.append(by_key[key])
        self.islands = _islands(self.stages)
        self.one_at_a_time = [len({stage.ranks for stage in island}) == 1 for island in self.islands]
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

    def _read(self, graph: PlainGraph) -> None:
        """Fills the queues: what each task waits for, the backwards of each microbatch, the forwards of each stage."""
        self.backwards_left: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> how many
        count = len(self.tasks)
        self.missing = [len(waits_for) for waits_for in graph.predecessors]
        self.successors: list[list[int]] = [[] for _ in range(count)]
        for index, (task, waits_for) in enumerate(zip(self.tasks, graph.predecessors, strict=True)):
            for other in waits_for:
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
            assert self.running, "limits below those of `in_flight_1f1b` leave nothing to run"
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
                or stage.in_flight < stage.max_in_flight
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
        if self.one_at_a_time[island] and self.busy[stages[0].ranks[0]]:
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
            if self.one_at_a_time[island]:  # all stages are on the same ranks
                return

    def _start(self, index: int) -> None:
        stage = self.stage_of[index]
        stage.forward_due = self.tasks[index].kind == "bwd"
        if self.tasks[index].kind == "fwd":
            stage.next += 1
            if not self.tasks[index].chunk and (stage.number, self.tasks[index].microbatch) in self.backwards_left:
                stage.in_flight += 1
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
            stage.in_flight -= not self.backwards_left[key]
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
        for phase, task_ranks in zip(self.of_task, ranks, strict=True):
            for rank in task_ranks:
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


def order_tasks(
    plan: ParallelPlan,
    graph: PlainGraph,
    times_ms: Sequence[float],
    max_in_flight: Mapping[StageKey, float],
    alternate: bool = False,
) -> Timeline:
    """Orders the tasks of a graph."""
    scheduler = _Scheduler(plan, graph, times_ms, max_in_flight)
    timeline = scheduler.run()
    assert timeline is not None
    if alternate and scheduler.could_wait:
        end_ms = max(timeline.end_ms, default=0.0)
        timeline = _Scheduler(plan, graph, times_ms, max_in_flight, True, end_ms).run() or timeline
    return timeline


def lower(plan: ParallelPlan, graph: PlainGraph, timeline: Timeline, groups: Sequence[SyncGroup]) -> Program:
    """The list of every rank."""
    by_rank: list[list[int]] = [[] for _ in range(plan.world_size)]
    ranks = _ranks(plan, graph)
    for index in sorted(range(len(graph.tasks)), key=timeline.started.__getitem__):
        for rank in ranks[index]:
            by_rank[rank].append(index)

    order = sorted(
        range(len(graph.messages)),
        key=lambda i: (timeline.finished[graph.ends[i][0]], timeline.started[graph.ends[i][1]]),
    )
    outgoing: list[list[int]] = [[] for _ in graph.tasks]
    incoming: list[list[int]] = [[] for _ in range(plan.world_size)]
    for message in order:
        source, target = graph.ends[message]
        outgoing[source].append(message)
        for rank in ranks[target]:
            incoming[rank].append(message)

    runs = [Action.run(task) for task in graph.tasks]
    sends = [Action("send", message=message) for message in graph.messages]
    recvs = [Action("recv", message=message) for message in graph.messages]
    syncs = _syncs_of_ranks(plan, graph, timeline, groups)
    actions: dict[int, tuple[Action, ...]] = {}
    for rank in range(plan.world_size):
        lanes = _Lanes(incoming[rank], graph, ranks)
        actions_of_rank: list[Action] = []
        waiting = iter([*syncs[rank], (math.inf, -1)])
        instant, group = next(waiting)
        for index in by_rank[rank]:
            while instant < timeline.started[index]:
                actions_of_rank.append(Action("sync", index=group))
                instant, group = next(waiting)
            actions_of_rank.extend(recvs[message] for message in lanes.take(index))
            actions_of_rank.append(runs[index])
            actions_of_rank.extend(sends[message] for message in outgoing[index])
        while group >= 0:
            actions_of_rank.append(Action("sync", index=group))
            instant, group = next(waiting)
        actions[rank] = tuple(actions_of_rank)
    times = {task: (timeline.start_ms[i], timeline.end_ms[i]) for i, task in enumerate(graph.tasks)}
    return Program(actions, times)


def _ranks(plan: ParallelPlan, graph: PlainGraph) -> list[tuple[int, ...]]:
    """The ranks of each task of the graph."""
    by_stage: dict[StageKey, tuple[int, ...]] = {
        (name, replica, index): stage.all_ranks
        for name, module in plan.modules.items()
        for replica, index, stage in module.stages()
    }
    return [by_stage[task.stage_key] for task in graph.tasks]


def sync_instants(graph: PlainGraph, timeline: Timeline, groups: Sequence[SyncGroup]) -> list[int]:
    """For each gradient sum, the event behind which it comes."""
    last: dict[StageKey, int] = {}
    for index, task in enumerate(graph.tasks):
        if task.kind == "bwd":
            last[task.stage_key] = max(last.get(task.stage_key, -1), timeline.finished[index])
    instants = [max((last.get(stage, -1) for stage in group.stages), default=-1) for group in groups]
    following = 2 * len(graph.tasks)
    for number in reversed(range(len(groups))):
        following = instants[number] = following if instants[number] < 0 else instants[number]
    return list(accumulate(instants, max))


def _syncs_of_ranks(
    plan: ParallelPlan, graph: PlainGraph, timeline: Timeline, groups: Sequence[SyncGroup]
) -> list[list[tuple[float, int]]]:
    """For each rank, (instant, group) of its gradient sums in order."""
    result: list[list[tuple[float, int]]] = [[] for _ in range(plan.world_size)]
    for number, instant in enumerate(sync_instants(graph, timeline, groups)):
        for rank in groups[number].ranks:
            result[rank].append((instant, number))
    return result


class _Lanes:
    """
    The messages to one rank, cut into lanes whose sources share no rank. Posting each lane in the order of its sends
    keeps the order between every two ranks.
    """

    def __init__(self, messages: Iterable[int], graph: PlainGraph, ranks: Sequence[tuple[int, ...]]):
        self.queues: list[list[int]] = []
        self.posted: list[int] = []
        self.wanted: dict[int, list[tuple[int, int]]] = {}
        messages = list(messages)
        lane_of = self._receive_queues({ranks[graph.ends[message][0]] for message in messages})
        for message in messages:
            source, target = graph.ends[message]
            lane = lane_of[ranks[source]]
            self.wanted.setdefault(target, []).append((lane, len(self.queues[lane])))
            self.queues[lane].append(message)

    def _receive_queues(self, sources: set[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Gives each set of source ranks the lane of all sets that it overlaps with."""
        lanes: list[tuple[set[int], list[tuple[int, ...]]]] = []
        for ranks in sorted(sources):
            merged: tuple[set[int], list[tuple[int, ...]]] = (set(ranks), [ranks])
            apart = []
            for lane in lanes:
                if lane[0].isdisjoint(merged[0]):
                    apart.append(lane)
                else:
                    merged = (merged[0] | lane[0], merged[1] + lane[1])
            lanes = [*apart, merged]
        self.queues = [[] for _ in lanes]
        self.posted = [0] * len(lanes)
        return {ranks: number for number, (_, members) in enumerate(lanes) for ranks in members}

    def take(self, target: int) -> list[int]:
        """The messages to post before `target`: its own, and those sent before them in their lanes."""
        result = []
        for lane, index in self.wanted.get(target, ()):
            result.extend(self.queues[lane][self.posted[lane] : index + 1])
            self.posted[lane] = max(self.posted[lane], index + 1)
        return result


def in_flight_1f1b(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """How many microbatches may be in flight on each stage under 1F1B."""
    max_in_flight: dict[StageKey, float] = {}
    for name in reversed(list(plan.modules)):
        targets = [edge.target for edge in plan.edges if edge.source == name]
        for replica in plan.modules[name].with_stages:
            stages = plan.modules[name].replicas[replica]
            indices = {
                batch_index: i
                for i, batch_indices in enumerate(step.microbatches[name][replica])
                for batch_index in batch_indices
            }
            behind = 0
            for target in targets:
                turn_of = consumer_turns(step, name, replica, target)
                if not turn_of:  # nobody waits for what it makes
                    continue
                depth = _turns_in_flight(
                    step, target, np.unique(step.locations[target][0][list(turn_of)]), max_in_flight
                )
                microbatch_of = np.fromiter((indices[batch_index] for batch_index in turn_of), np.int64, len(turn_of))
                behind = max(
                    behind, _most_ahead(microbatch_of, np.fromiter(turn_of.values(), np.int64, len(turn_of)), depth)
                )
            for index in range(len(stages)):
                max_in_flight[name, replica, index] = len(stages) - index + behind
    return max_in_flight


def _turns_in_flight(step: StepPlan, target: str, fed: np.ndarray, max_in_flight: Mapping[StageKey, float]) -> int:
    """The most turns that some replicas of `target` have in flight at once."""
    counts = {consumer: len(step.microbatches[target][consumer]) for consumer in fed.tolist()}
    turns = max(counts.values())
    return max(ceil(max_in_flight[target, consumer, 0] * turns / count) for consumer, count in counts.items())


def _most_ahead(indices: np.ndarray, turns_of_samples: np.ndarray, depth: int) -> int:
    """The most microbatches that a module must be ahead of `depth` microbatches behind it."""
    indices = np.unique(indices, return_inverse=True)[1]  # microbatches without samples have no tasks
    wanted = np.zeros(turns_of_samples.max() + 1, dtype=np.int64)  # how many microbatches each consumer waits for
    np.maximum.at(wanted, turns_of_samples, indices + 1)
    wanted = np.maximum.accumulate(wanted)
    last = np.zeros(indices.max() + 1, dtype=np.int64)  # the consumer that the last gradient of each comes from
    np.maximum.at(last, indices, turns_of_samples)
    first = np.arange(len(wanted))
    done = np.searchsorted(np.sort(last), first)
    ahead = wanted[np.minimum(first + depth - 1, len(wanted) - 1)] - done
    return max(depth, int(ahead.max()))
