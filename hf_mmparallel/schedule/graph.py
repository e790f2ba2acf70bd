"""The tasks of a step, their dependencies, and the flow of gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..plan import Edge, ParallelPlan, StageKey, StepPlan
from ..plan.step_plan import ChunkTable
from .kinds import ADDS_GRADIENTS, BACKWARD, CLOSES, KINDS, OPENS, SENDS_GRADIENTS, Message, Task

_WORDS = tuple(KINDS)
_MESSAGES: tuple[Literal["act", "grad"], ...] = tuple(kind.message or "act" for kind in KINDS.values())


class GradientFlow:
    """
    The stages that run backwards in any step: an input has a gradient iff a trainable parameter lies before it.

    This is Cornstarch, section 4.3. [`build_graph`] decides it for each chunk (a sample without images on a frozen
    language model behind a trainable encoder has no backward), and [`Program.has_backward`] repeats its decision.
    """

    def __init__(self, plan: ParallelPlan):
        self._backward: dict[StageKey, bool] = {}
        features: dict[str, bool] = {}  # of a module for others, which need a gradient
        for name, module in plan.modules.items():
            replicas = [(replica, module.replicas[replica]) for replica in module.with_stages]
            for replica, stages in replicas:
                entry_stages = {
                    index
                    for edge in plan.edges
                    if edge.target == name and features[edge.source]
                    for index in plan.edge_stages(edge, replica)
                }
                has_backward = False
                for index, stage in enumerate(stages):
                    has_backward = has_backward or index in entry_stages or stage.trainable
                    self._backward[name, replica, index] = has_backward
            features[name] = any(self._backward[name, replica, len(stages) - 1] for replica, stages in replicas)

    def has_backward(self, module: str, replica: int, stage: int) -> bool:
        """Whether the stage runs backwards: it is trainable, or one of its inputs needs a gradient."""
        return self._backward[module, replica, stage]


@dataclass(frozen=True)
class TaskGraph:
    """The tasks and messages of a step as arrays, for numpy; `Task` and `Message` objects are made on access only."""

    stages: tuple[StageKey, ...]  # (module, replica, stage) of every stage, in the plan's order
    # [3, tasks]: stage (index in `stages`), microbatch and chunk. Each task comes after its dependencies; the tasks of
    # a stage of one kind are in the order of their chunks.
    columns: NDArray
    kind: NDArray  # int8 [tasks], place in `KINDS`
    after: NDArray  # [tasks], the task of the same chunk and stage that comes before it, -1 for its first one
    links: NDArray  # [2, messages], source and target task
    # [tasks], the first of the tasks that run at the same time because their ranks exchange weights or gradients (see
    # `ModulePlan.joint_replicas`), the task itself if it runs alone; `None` if all do
    joint: NDArray | None = None

    @property
    def num_tasks(self) -> int:
        return len(self.kind)

    @cached_property
    def first(self) -> NDArray:
        """The first task of the same chunk and stage, int64 `[tasks]`."""
        result = np.where(self.after < 0, np.arange(self.num_tasks), self.after)
        for _ in KINDS:
            result = result[result]
        return result

    def join(self) -> tuple[TaskGraph, NDArray]:
        """The graph in which the first of joint tasks stands for all of them, and the place in it of each task."""
        if self.joint is None:
            return self, np.arange(self.num_tasks)
        firsts, place = np.unique(self.joint, return_inverse=True)
        after = self.after[firsts]
        after = np.where(after < 0, -1, place[after])
        columns, kind, links = self.columns[:, firsts], self.kind[firsts], place[self.links]
        return TaskGraph(self.stages, columns, kind, after, links), place

    def longest(self, times: NDArray) -> NDArray:
        """The longest time of the tasks that run jointly with each task, `[tasks]`."""
        if self.joint is None:
            return times
        result = np.zeros(self.num_tasks)
        np.maximum.at(result, self.joint, times)
        return result[self.joint]

    @property
    def num_messages(self) -> int:
        return self.links.shape[1]

    def task(self, index: int) -> Task:
        stage, microbatch, chunk = self.columns[:, index].tolist()
        module, replica, stage_index = self.stages[stage]
        return Task(_WORDS[self.kind[index]], module, replica, stage_index, microbatch, chunk)

    def message(self, index: int) -> Message:
        source, target = self.links[:, index].tolist()
        return Message(_MESSAGES[self.kind[source]], self.task(source), self.task(target))

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(map(self.task, range(self.num_tasks)))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        tasks, kinds = self.tasks, self.kind.tolist()
        return tuple(Message(_MESSAGES[kinds[s]], tasks[s], tasks[t]) for s, t in self.ends)

    @property
    def is_gradient(self) -> NDArray:
        """Whether each message has gradients, bool `[messages]`."""
        return SENDS_GRADIENTS[self.kind[self.links[0]]]

    @cached_property
    def ends(self) -> tuple[tuple[int, int], ...]:
        """Source and target of each message, as indices of tasks."""
        return tuple(zip(*self.links.tolist(), strict=True))


@dataclass(frozen=True)
class TaskCounts:
    """Initial values of the counters of a simulation, in which a *cell* is a microbatch on a stage."""

    missing: NDArray  # [tasks], number of dependencies
    followers: NDArray  # dependents of each task, concatenated over the tasks
    num_followers: NDArray  # [tasks], number of dependents
    cell: NDArray  # [tasks]
    closing: NDArray  # [cells], number of tasks that close it
    holding: NDArray  # [cells], number of tasks after which nothing of it is held
    opens: NDArray  # [tasks], whether it is the first task of a cell that is closed, too

    @classmethod
    def of(cls, graph: TaskGraph) -> TaskCounts:
        count, (stage, microbatch, chunk) = graph.num_tasks, graph.columns
        later = np.flatnonzero(graph.after >= 0)
        sources = np.concatenate([graph.links[0], graph.after[later]])
        targets = np.concatenate([graph.links[1], later])
        cells, cell = np.unique(stage * (microbatch.max(initial=0) + 1) + microbatch, return_inverse=True)
        closing, holding = (
            np.bincount(cell[column[graph.kind]], minlength=len(cells)) for column in (CLOSES, ADDS_GRADIENTS)
        )
        return cls(
            np.bincount(targets, minlength=count),
            targets[np.argsort(sources, kind="stable")],
            np.bincount(sources, minlength=count),
            cell,
            closing,
            holding,
            OPENS[graph.kind] & (chunk == 0) & (closing[cell] > 0),
        )


class StageRanks:
    """The ranks of all stages of a plan, concatenated in one array."""

    def __init__(self, plan: ParallelPlan):
        by_stage = [stage.all_ranks for module in plan.modules.values() for _, _, stage in module.stages()]
        self.starts = np.cumsum([0, *map(len, by_stage)])  # [stages + 1], start of each stage in `ranks`
        self.ranks = np.fromiter(chain.from_iterable(by_stage), np.int64, int(self.starts[-1]))

    def of(self, stages: NDArray) -> tuple[NDArray, NDArray]:
        """Returns an index in `stages` and a rank, for every rank of the stages (indices in the plan)."""
        counts = self.starts[stages + 1] - self.starts[stages]
        owner = np.repeat(np.arange(len(stages)), counts)
        return owner, self.ranks[concatenate_ranges(self.starts[stages], counts)]


def concatenate_ranges(starts: NDArray, counts: NDArray) -> NDArray:
    """Concatenation of the ranges `starts[i], ..., starts[i] + counts[i] - 1` over all `i`."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


def build_graph(plan: ParallelPlan, step: StepPlan, training: bool = True) -> TaskGraph:
    """
    Builds the tasks and messages of a step; without training it has no backwards.

    Microbatches without samples have none, but for *empty tasks*: replicas whose tasks run jointly all have the chunks
    that one of them has, so that their ranks meet.
    """
    modules = _forwards(plan, step)
    stages = tuple((name, d, index) for name, module in plan.modules.items() for d, index, _ in module.stages())
    forwards = np.concatenate([module.columns for module in modules.values()], axis=1)
    is_joint = any(module.joint_replicas > 1 for module in plan.modules.values())
    joint = np.concatenate([module.joint for module in modules.values()]) if is_joint else None
    order = np.concatenate([np.repeat(-i, module.columns.shape[1]) for i, module in enumerate(modules.values())])
    messages, runs_back, splits = _links(plan, modules, forwards.shape[1])
    runs_of = {"all": np.ones(len(runs_back), bool), "whole": runs_back & ~splits, "split": runs_back & splits}
    tasks_of: dict[str | None, NDArray] = {None: np.full(forwards.shape[1], -1)}  # word -> task of each forward, or -1
    sending = {name: np.full(forwards.shape[1], -1) for name in ("act", "grad")}  # message -> the same of its kinds
    chosen, after, joints, num_tasks = [], [], [], 0  # one of each kind
    for row in KINDS.values():
        own = np.flatnonzero(runs_of[row.of] & (training or row.after is None))
        if row.direction == BACKWARD:
            # In reverse order of modules and stages, and so after what they wait for; within a stage the chunks keep
            # their order.
            replica, index = np.array([key[1:] for key in stages]).reshape(-1, 2)[forwards[0, own]].T
            own = own[np.lexsort((own, -index, replica, order[own]))]
        tasks = np.full(forwards.shape[1], -1)
        tasks[own] = num_tasks + np.arange(len(own))
        tasks_of[row.word], num_tasks = tasks, num_tasks + len(own)
        if row.message is not None:
            sending[row.message][own] = tasks[own]
        chosen.append(own)
        after.append(tasks_of[row.after][own])
        joints += [] if joint is None else [tasks[joint[own]]]
    kind = np.repeat(np.arange(len(KINDS), dtype=np.int8), list(map(len, chosen)))
    ends = (sending["act"][messages], sending["grad"][messages[::-1]])
    links = [tasks[:, (tasks >= 0).all(axis=0)] for tasks in ends]
    return TaskGraph(
        stages,
        forwards[:, np.concatenate(chosen)],
        kind,
        np.concatenate(after),
        np.concatenate(links, axis=1),
        np.concatenate(joints) if joints else None,
    )


@dataclass(frozen=True)
class _Forwards:
    """The forwards of a module, ordered by chunk and then by stage."""

    columns: NDArray
    index: NDArray  # [tasks], stage index within the replica
    trainable: NDArray  # [tasks], whether the stage is
    splits: NDArray  # [tasks], whether the stage may split its backwards
    first: NDArray  # [chunks], index of the chunk's first task in the graph
    count: NDArray  # [chunks], number of stages of the chunk's replica
    replica: NDArray  # [chunks]
    batch_indices: NDArray  # of all chunks, concatenated
    chunk_of: NDArray  # chunk of each batch index
    joint: NDArray
    is_empty: NDArray  # [tasks], whether the chunk has no samples


def _forwards(plan: ParallelPlan, step: StepPlan) -> dict[str, _Forwards]:
    """Module -> its forwards, in the order of the graph."""
    result: dict[str, _Forwards] = {}
    num_stages = num_tasks = 0
    for name, module in plan.modules.items():
        table = step.chunk_table(name, module.with_stages)
        size = module.joint_replicas
        if size > 1:
            table = _with_empty_chunks(table, size)
        counts = np.zeros(module.dp_size, np.int64)
        counts[list(module.with_stages)] = [len(module.replicas[replica]) for replica in module.with_stages]
        count = counts[table.replica]
        index = concatenate_ranges(np.zeros_like(count), count)
        stage = (num_stages + np.cumsum(counts) - counts)[table.replica].repeat(count) + index
        flags = [(stage.trainable, stage.splits_backward) for _, _, stage in module.stages()]
        trainable, splits = np.array(flags, bool).reshape(-1, 2)[stage - num_stages].T
        columns = np.stack([stage, table.microbatch.repeat(count), table.chunk.repeat(count)])
        first = num_tasks + np.cumsum(count) - count
        joint = num_tasks + np.arange(len(index))
        if size > 1 and len(index):
            joint = (
                first[table.find(table.replica // size * size, table.microbatch, table.chunk)].repeat(count) + index
            )
        is_empty = (np.bincount(table.chunk_of, minlength=len(table.chunk)) == 0).repeat(count)
        result[name] = _Forwards(
            columns,
            index,
            trainable,
            splits,
            first,
            count,
            table.replica,
            table.batch_indices,
            table.chunk_of,
            joint,
            is_empty,
        )
        num_stages += int(counts.sum())
        num_tasks += len(index)
    return result


def _with_empty_chunks(table: ChunkTable, size: int) -> ChunkTable:
    """Adds to each of `size` consecutive replicas, empty, the chunks that any of them has."""
    if not len(table.chunk):
        return table
    cells = np.unique(np.stack([table.replica // size, table.microbatch, table.chunk]), axis=1)
    replica = (cells[0, :, None] * size + np.arange(size)).reshape(-1)
    microbatch, chunk = cells[1].repeat(size), cells[2].repeat(size)
    order = np.lexsort((chunk, microbatch, replica))
    result = replace(table, replica=replica[order], microbatch=microbatch[order], chunk=chunk[order])
    return replace(result, chunk_of=result.find(table.replica, table.microbatch, table.chunk)[table.chunk_of])


def _links(plan: ParallelPlan, modules: dict[str, _Forwards], num_tasks: int) -> tuple[NDArray, NDArray, NDArray]:
    """Returns the messages between forwards, `[2, links]`, which forwards have a backward, and which a split one."""
    runs_back = np.zeros(num_tasks, bool)
    entering: dict[str, list[NDArray]] = {}
    links: list[NDArray] = []
    start = 0
    for name, forwards in modules.items():
        inner = start + np.flatnonzero((forwards.index > 0) & ~forwards.is_empty)
        links.append(np.stack([inner - 1, inner]))
        # A forward has a backward if its stage is trainable, or if a forward that feeds it or runs jointly with it has
        # one.
        needs = runs_back[start : start + len(forwards.index)]  # a view
        needs |= forwards.trainable
        for source, target in entering.get(name, ()):
            np.logical_or.at(runs_back, target, runs_back[source])
        joint = forwards.joint - start
        for index in range(int(forwards.index.max(initial=0)) + 1):
            tasks = np.flatnonzero(forwards.index == index)
            if index:
                needs[tasks] |= needs[tasks - 1]
            np.logical_or.at(needs, joint[tasks], needs[tasks])
            needs[tasks] = needs[joint[tasks]]
        for edge in plan.edges:
            if edge.source == name:
                crossing = _crossing(plan, edge, forwards, modules[edge.target])
                entering.setdefault(edge.target, []).append(crossing)
                links.append(crossing)
        start += len(forwards.index)
    messages = np.concatenate(links, axis=1)
    # A backward is split if a gradient that others wait for comes before those of weights, on any of its joint tasks.
    joint = np.concatenate([forwards.joint for forwards in modules.values()])
    sends = np.zeros(num_tasks, bool)
    sends[joint[messages[1, runs_back[messages[0]]]]] = True
    splits = np.concatenate([forwards.splits for forwards in modules.values()])
    return messages, runs_back, (sends & splits)[joint]


def _crossing(plan: ParallelPlan, edge: Edge, source: _Forwards, target: _Forwards) -> NDArray:
    """Messages from forwards of one module to those of another that share samples, `[2, links]`."""
    _, at_source, at_target = np.intersect1d(
        source.batch_indices, target.batch_indices, assume_unique=True, return_indices=True
    )
    pairs = np.unique(np.stack([source.chunk_of[at_source], target.chunk_of[at_target]]), axis=1)
    module = plan.modules[edge.target]
    entries: list[tuple[int, ...]] = [()] * module.dp_size
    for replica in module.with_stages:
        entries[replica] = tuple(plan.edge_stages(edge, replica))
    starts = np.cumsum([0, *map(len, entries)])
    flat = np.fromiter(chain.from_iterable(entries), np.int64, int(starts[-1]))
    replica = target.replica[pairs[1]]
    counts = starts[replica + 1] - starts[replica]
    last = source.first + source.count - 1
    entered = target.first[pairs[1]].repeat(counts) + flat[concatenate_ranges(starts[replica], counts)]
    return np.stack([last[pairs[0]].repeat(counts), entered])
