"""Times of the tasks, messages and gradient all-reduces of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ModulePlan, ParallelPlan, SampleSizes, StageKey, StepPlan, SyncGroup
from ..plan.step_plan import ChunkTable
from ..schedule import Task, TaskGraph
from ..schedule.kinds import KINDS
from .gradient_sums import GradientSumCosts, SumTimes
from .layers import CostModel
from .row_sizes import NO_TOKENS, ChunkKey, ChunkSize, RowLayout, chunk_sizes
from .sharded_passes import TimedTransfer
from .stage_times import StageCost, stage_costs


class StepCost:
    """
    Milliseconds of each task of a step, for [`build_program`] and [`simulate`], from the sizes of its chunks.

    `sync_groups` may be what is known of gradient sums for all steps, and `stages` precomputed [`stage_costs`] of the
    plan or of a larger plan that it is a part of.
    """

    def __init__(
        self,
        costs: CostModel,
        plan: ParallelPlan,
        step: StepPlan,
        sizes: SampleSizes,
        sync_groups: Sequence[SyncGroup] | GradientSumCosts = (),
        stages: Mapping[StageKey, StageCost] | None = None,
    ):
        self.costs, self.plan, self.step, self.sizes = costs, plan, step, sizes
        is_known = isinstance(sync_groups, GradientSumCosts)
        self.sums = sync_groups if is_known else GradientSumCosts(costs, plan, sync_groups)
        self.sync_groups = self.sums.sync_groups
        self.stages = stage_costs(costs, plan) if stages is None else stages
        self._transfers: dict[Task, list[TimedTransfer]] = {}  # by the first of joint tasks

    @cached_property
    def chunks(self) -> dict[ChunkKey, ChunkSize]:
        """See [`chunk_sizes`]."""
        return chunk_sizes(self.costs, self.plan, self.step, self.sizes)

    def _rows(self, name: str, module: ModulePlan) -> RowLayout:
        """How the samples of a chunk are laid out in a module."""
        return RowLayout.of(self.costs, name, module)

    @cached_property
    def _module_chunks(self) -> dict[str, tuple[ChunkTable, NDArray]]:
        """Module -> its chunks, and their tokens and squared sequence lengths `[2, chunks]`."""
        result = {}
        for name, module in self.plan.modules.items():
            table = self.step.chunk_table(name, self.step.replicas(name))
            if len(table.replica):
                sizes = self._rows(name, module).of_chunks(self.sizes, name, table)
                result[name] = table, sizes[:, :2].T
        return result

    def of_graph(self, graph: TaskGraph) -> NDArray:
        """float64 `[tasks]`: times of all tasks of the step's graph, equal to those of single calls."""
        kinds = {id(cost): cost for cost in (self.stages[key] for key in graph.stages)}
        numbers = {key: number for number, key in enumerate(kinds)}
        kind = np.array([numbers[id(self.stages[key])] for key in graph.stages])[graph.columns[0]]
        result = np.zeros(graph.num_tasks)
        tokens, squares = self._chunk_sizes(graph)[:, graph.first]
        rows, places = list(KINDS.values()), np.unique(graph.kind).tolist()
        for number, cost in enumerate(kinds.values()):
            for place in places:
                wanted = np.flatnonzero((kind == number) & (graph.kind == place))
                result[wanted] = cost.times_ms(tokens[wanted], squares[wanted], rows[place])
        return result

    def _chunks_of(self, graph: TaskGraph) -> NDArray:
        """
        int64 `[tasks]`: the index of the chunk of each task that is the first of its chunk and stage among the chunks
        of its module, -1 for empty tasks and for others.
        """
        first = np.flatnonzero(graph.after < 0)
        stage, microbatch, chunk = graph.columns[:, first]
        modules, replicas = (np.array([key[i] for key in graph.stages])[stage] for i in range(2))
        result = np.full(graph.num_tasks, -1)
        for name, (table, _) in self._module_chunks.items():
            wanted = np.flatnonzero(modules == name)
            result[first[wanted]] = table.find(replicas[wanted], microbatch[wanted], chunk[wanted])
        return result

    def _chunk_sizes(self, graph: TaskGraph) -> NDArray:
        """float64 `[2, tasks]`: tokens and squared sequence lengths of the chunks of [`~StepCost._chunks_of`]."""
        modules = np.array([key[0] for key in graph.stages])[graph.columns[0]]
        chunk = self._chunks_of(graph)
        result = np.zeros((2, graph.num_tasks))
        for name, (_, sizes) in self._module_chunks.items():
            wanted = np.flatnonzero((modules == name) & (chunk >= 0))
            result[:, wanted] = sizes[:, chunk[wanted]]
        return result

    def __call__(self, task: Task) -> float:
        cost = self.stages[task.module, task.replica, task.stage]
        chunk = self.chunks.get((task.module, task.replica, task.microbatch, task.chunk), NO_TOKENS)
        return cost.task_ms(chunk.tokens, chunk.squares, task.row)

    def messages_ms(self, graph: TaskGraph) -> list[float]:
        """Times of all messages of the step's graph, with one link for each rank of the smaller mesh."""
        before, after = graph.first[np.where(graph.is_gradient, graph.links[::-1], graph.links)]
        ends = graph.columns[0, np.stack([before, after])]
        pairs, kind = np.unique(ends, axis=1, return_inverse=True)
        keys = [(graph.stages[a], graph.stages[b]) for a, b in pairs.T.tolist()]
        latency_ms, rate = np.array([self._link(*key) for key in keys]).reshape(-1, 2)[kind.ravel()].T
        crosses = np.array([a[0] != b[0] for a, b in keys], bool)[kind.ravel()]
        width = np.array([self._width(*key) for key in keys], np.int64)[kind.ravel()]
        num_tokens = self._chunk_sizes(graph)[0][before]
        num_tokens[crosses] = self._all_crossing(graph, before[crosses], after[crosses])
        times_ms = latency_ms + self.costs.value_bytes * num_tokens * width / rate
        if self.costs.engine.blocking_messages:
            times_ms[~crosses] = 0.0  # part of the stages' times, see [`StageCost`]
        return times_ms.tolist()

    def _all_crossing(self, graph: TaskGraph, before: NDArray, after: NDArray) -> NDArray:
        """
        Most tokens, of [`ModelSpec.edge_width`] values each, that are sent from forwards of one module to those of
        another, for many pairs: from an encoder one feature token per token of its layers (merging may leave fewer),
        at most the language model tokens of the samples; to a generator the hidden states of all of these.
        """
        modules = np.array([key[0] for key in graph.stages])[graph.columns[0]]
        chunk = self._chunks_of(graph)
        result = np.zeros(len(before))
        for edge in self.plan.edges:
            wanted = np.flatnonzero((modules[before] == edge.source) & (modules[after] == edge.target))
            if not len(wanted):
                continue
            producer, consumer = self._module_chunks[edge.source][0], self._module_chunks[edge.target][0]
            batch_indices, sent, received = np.intersect1d(
                producer.batch_indices, consumer.batch_indices, assume_unique=True, return_indices=True
            )
            tokens = np.minimum(
                self.sizes.tokens[edge.source][batch_indices], self.sizes.tokens[LANGUAGE_MODEL][batch_indices]
            )
            count = len(consumer.replica)
            pairs, place = np.unique(
                producer.chunk_of[sent] * count + consumer.chunk_of[received], return_inverse=True
            )
            sums = np.bincount(place, tokens, len(pairs))
            result[wanted] = sums[np.searchsorted(pairs, chunk[before[wanted]] * count + chunk[after[wanted]])]
        return result

    def _width(self, before: StageKey, after: StageKey) -> int:
        """Values of a token that crosses between two stages."""
        width, module = self.costs.spec.edge_width(before[0], after[0]), self.costs.spec.modules[after[0]]
        return width if before[0] != after[0] else width * module.states_before(self.plan.stage(*after).layers[0])

    def _link(self, before: StageKey, after: StageKey) -> tuple[float, float]:
        """Latency in ms, and combined bandwidth in bytes/ms, of the links between two stages."""
        grids = [self.plan.stage(*key).all_ranks for key in (before, after)]
        ranks = list(chain(*grids))
        rate = self.costs.engine.message_bytes_per_ms(self.costs.device, ranks)
        return self.costs.device.latency_us(ranks) / 1e3, rate * min(map(len, grids))

    def sync_ms(self, index: int) -> float:
        """Time that a gradient sum adds to the step, of which a part runs beside the last backward."""
        # an all-reduce, or under ZeRO a reduce-scatter in each shard group, unless backwards reduce their gradients
        # themselves, and an all-reduce of the slices between shard groups
        times = self.sums.times(index, self._last_chunks)
        return float(times.exposed_ms[times.index == index].sum()) + self.sums.after_ms(index)

    def timed_transfers(self, task: Task) -> list[TimedTransfer]:
        """When weights are gathered and gradients reduced in a task."""
        size = self.plan.modules[task.module].joint_replicas
        # of joint tasks the longest one decides, with which all others communicate
        first = replace(task, replica=task.replica // size * size)
        if first not in self._transfers:
            joint = [replace(task, replica=replica) for replica in range(first.replica, first.replica + size)]
            self._transfers[first] = self._timed_transfers(max(joint, key=self) if size > 1 else task)
        return self._transfers[first]

    def _timed_transfers(self, task: Task) -> list[TimedTransfer]:
        """See [`~StepCost.timed_transfers`], of a task by itself."""
        chunk = self.chunks.get((task.module, task.replica, task.microbatch, task.chunk), NO_TOKENS)
        return self.stages[task.stage_key].timed_transfers(chunk.tokens, chunk.squares, task.row)

    def sum_times(self, index: int) -> SumTimes:
        """Times of the buckets of a gradient sum, and of other ones of its first rank for the same stages."""
        return self.sums.times(index, self._last_chunks)

    def _last_chunks(self, module: str, replicas: NDArray) -> NDArray:
        """Tokens and squared lengths `[2, chunks]` of the chunks of replicas that run backwards last."""
        if module not in self._module_chunks:
            return np.zeros((2, 0))
        table, sizes = self._module_chunks[module]
        return sizes[:, last_chunks(table, replicas)]


def last_chunks(table: ChunkTable, replicas: NDArray) -> NDArray:
    """Indices of the last chunks of replicas, whose backwards come last, without replicas that have none."""
    # in some layouts with deferred samples or replicas of unequal speed another chunk's backward comes last
    last = np.searchsorted(table.replica, replicas, side="right") - 1
    return last[(last >= 0) & (table.replica[last] == replicas)]
