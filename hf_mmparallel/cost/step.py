"""What the tasks, messages and gradient sums of a step take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, SampleSizes, StepPlan, SyncGroup
from ..plan.step_plan import ChunkCuts
from ..schedule import Task, TaskGraph
from ..schedule.actions import Message, StageKey
from .collectives import all_reduce
from .kept import DTYPE_BYTES, FULL, held_shares
from .layers import CostModel
from .row_sizes import ChunkKey, ChunkSize, RowLayout, chunk_sizes
from .stage_times import StageCost, stage_costs


class StepCost:
    """
    Milliseconds of each task of a step, for [`build_program`] and [`simulate`], from what its chunks compute, see
    [`chunk_sizes`] and [`StageCost`].

    Args:
        costs (`CostModel`): What layers cost.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.
        groups (`Sequence[SyncGroup]`, *optional*): The gradient sums, for [`~StepCost.sync_ms`].
        stages (`Mapping[tuple[str, int, int], StageCost]`, *optional*):
            [`stage_costs`] of the plan, or of one that it is a part of, where they are known.
    """

    def __init__(
        self,
        costs: CostModel,
        plan: ParallelPlan,
        step: StepPlan,
        sizes: SampleSizes,
        groups: Sequence[SyncGroup] = (),
        stages: Mapping[StageKey, StageCost] | None = None,
    ):
        self.costs, self.plan, self.step, self.sizes, self.groups = costs, plan, step, sizes, groups
        self.stages = stage_costs(costs, plan) if stages is None else stages
        self._links: dict[tuple[StageKey, StageKey], tuple[float, float]] = {}
        self._crossing: dict[tuple, int] = {}

    @cached_property
    def chunks(self) -> dict[ChunkKey, ChunkSize]:
        """See [`chunk_sizes`]."""
        return chunk_sizes(self.costs, self.plan, self.step, self.sizes)

    @cached_property
    def _computed(self) -> dict[str, tuple[ChunkCuts, NDArray]]:
        """Module -> its chunks, and their tokens and squares `[2, chunks]`."""
        found = {}
        for name, module in self.plan.modules.items():
            cuts = self.step.cut_chunks(name, self.step.replicas(name))
            if len(cuts.replica):
                sizes = RowLayout.of(self.costs, name, module).of_chunks(self.sizes, name, cuts)
                found[name] = cuts, sizes[:, :2].T
        return found

    def of_graph(self, graph: TaskGraph) -> NDArray:
        """float64 `[tasks]`: what each task of the step's graph takes, the same as one by one."""
        kinds = {id(cost): cost for cost in (self.stages[key] for key in graph.stages)}
        numbers = {key: number for number, key in enumerate(kinds)}
        kind = np.array([numbers[id(self.stages[key])] for key in graph.stages])[graph.columns[0]]
        result = np.empty(graph.num_tasks)
        is_backward = graph.forward >= 0
        tokens, squares = self._forward_sizes(graph)[
            :, np.where(is_backward, graph.forward, np.arange(graph.num_tasks))
        ]
        for number, cost in enumerate(kinds.values()):
            for back in (False, True):
                own = np.flatnonzero((kind == number) & (is_backward == back))
                result[own] = cost.times_ms(tokens[own], squares[own], back)
        return result

    def _chunk_of_forwards(self, graph: TaskGraph) -> NDArray:
        """int64 `[forwards]`: the place of the chunk of each among those of its module."""
        stage, microbatch, chunk = graph.columns[:, : graph.num_forwards]
        modules, replicas = (np.array([key[i] for key in graph.stages])[stage] for i in range(2))
        result = np.zeros(graph.num_forwards, np.int64)
        for name, (cuts, _) in self._computed.items():
            own = np.flatnonzero(modules == name)
            result[own] = cuts.find(replicas[own], microbatch[own], chunk[own])
        return result

    def _forward_sizes(self, graph: TaskGraph) -> NDArray:
        """float64 `[2, forwards]`: tokens and squares of the chunk of each forward."""
        modules = np.array([key[0] for key in graph.stages])[graph.columns[0, : graph.num_forwards]]
        chunk = self._chunk_of_forwards(graph)
        result = np.empty((2, graph.num_forwards))
        for name, (_, found) in self._computed.items():
            own = np.flatnonzero(modules == name)
            result[:, own] = found[:, chunk[own]]
        return result

    def __call__(self, task: Task) -> float:
        cost = self.stages[task.module, task.replica, task.stage]
        chunk = self.chunks[task.module, task.replica, task.microbatch, task.chunk]
        time_ms = cost.forward_ms if task.kind == "fwd" else cost.backward_ms
        return time_ms(chunk.tokens, chunk.squares)

    def message_ms(self, message: Message) -> float:
        """Time that a message travels, over one link for each rank of the smaller grid."""
        before, after = message.source, message.target
        if self.costs.engine.blocking_messages and not message.crosses_boundary:
            return 0.0  # both stages stand still meanwhile, see [`StageCost`]
        if message.kind == "grad":
            before, after = after, before
        num_tokens = self.chunks[before.module, before.replica, before.microbatch, before.chunk].tokens
        part = self.costs.spec.modules[before.module]
        if message.crosses_boundary:
            num_tokens, part = self._crossing_tokens(before, after), self.costs.spec.language_model
        num_bytes = self.costs.value_bytes * num_tokens * part.hidden_size
        ends = before.stage_key, after.stage_key
        if ends not in self._links:
            self._links[ends] = self._link(*ends)
        latency_ms, rate = self._links[ends]
        return latency_ms + num_bytes / rate

    def messages_ms(self, graph: TaskGraph) -> list[float]:
        """[`~StepCost.message_ms`] of all messages of the step's graph."""
        first = graph.num_forwards
        is_grad = graph.links[0] >= first
        before, after = np.where(is_grad, graph.forward[graph.links[::-1]], graph.links)
        ends = graph.columns[0, np.stack([before, after])]
        pairs, kind = np.unique(ends, axis=1, return_inverse=True)
        keys = [(graph.stages[a], graph.stages[b]) for a, b in pairs.T.tolist()]
        latency_ms, rate = np.array([self._link(*key) for key in keys]).reshape(-1, 2)[kind.ravel()].T
        crosses = np.array([a[0] != b[0] for a, b in keys], bool)[kind.ravel()]
        modules = {name: self.costs.spec.modules[name].hidden_size for name in self.plan.modules}
        width = np.array([modules[key[0]] for key in graph.stages])[ends[0]]
        width[crosses] = self.costs.spec.language_model.hidden_size
        num_tokens = self._forward_sizes(graph)[0][before]
        num_tokens[crosses] = self._all_crossing(graph, before[crosses], after[crosses])
        times_ms = latency_ms + self.costs.value_bytes * num_tokens * width / rate
        if self.costs.engine.blocking_messages:
            times_ms[~crosses] = 0.0  # both stages stand still meanwhile, see [`StageCost`]
        return times_ms.tolist()

    def _all_crossing(self, graph: TaskGraph, before: NDArray, after: NDArray) -> NDArray:
        """[`message_tokens`] between many forwards."""
        modules = np.array([key[0] for key in graph.stages])[graph.columns[0]]
        chunk = self._chunk_of_forwards(graph)
        result = np.zeros(len(before))
        for edge in self.plan.edges:
            wanted = np.flatnonzero((modules[before] == edge.source) & (modules[after] == edge.target))
            if not len(wanted):
                continue
            own, taking = self._computed[edge.source][0], self._computed[edge.target][0]
            slots, mine, its = np.intersect1d(own.slots, taking.slots, assume_unique=True, return_indices=True)
            tokens = np.minimum(self.sizes.tokens[edge.source][slots], self.sizes.tokens[LANGUAGE_MODEL][slots])
            count = len(taking.replica)
            pairs, place = np.unique(own.of_slot[mine] * count + taking.of_slot[its], return_inverse=True)
            sums = np.bincount(place, tokens, len(pairs))
            result[wanted] = sums[np.searchsorted(pairs, chunk[before[wanted]] * count + chunk[after[wanted]])]
        return result

    def _link(self, before: StageKey, after: StageKey) -> tuple[float, float]:
        """Latency in ms and bytes/ms of all links between two stages."""
        grids = [self.plan.stage(*key).all_ranks for key in (before, after)]
        ranks = list(chain(*grids))
        rate = self.costs.engine.message_bytes_per_ms(self.costs.device, ranks)
        return self.costs.device.latency_us(ranks) / 1e3, rate * min(map(len, grids))

    def _crossing_tokens(self, before: Task, after: Task) -> int:
        """[`message_tokens`], which is the same for all stages that take a chunk, and for its gradient."""
        key = (before.module, before.replica, before.microbatch, before.chunk)
        key += (after.module, after.replica, after.microbatch, after.chunk)
        if key not in self._crossing:
            self._crossing[key] = message_tokens(self.step, self.sizes, before, after)
        return self._crossing[key]

    def sync_ms(self, index: int) -> float:
        """Time of a gradient sum."""
        group = self.groups[index]
        module = group.stages[0][0]
        held = _gradient_bytes(self.costs, module, self.plan.modules[module].tp_size)
        num_bytes = sum(held[name] for name in group.parameters)
        return all_reduce(self.costs.device, num_bytes, group.ranks)(1.0, 0.0)


@lru_cache(maxsize=256)
def _gradient_bytes(costs: CostModel, module: str, tp_size: int) -> dict[str, float]:
    """Parameter -> bytes of its gradient, in float32 at least, on each of a module's tensor-parallel ranks."""
    held = {}
    for index in range(-1, costs.spec.modules[module].num_layers + 1):
        shares = held_shares(costs.spec, module, index, tp_size)
        for use in costs.spec.uses.get((module, index), ()):
            p = use.parameter
            held[p.name] = shares[p.name] * p.num_elements * max(DTYPE_BYTES.get(p.dtype, FULL), FULL)
    return held


def message_tokens(step: StepPlan, sizes: SampleSizes, before: Task, after: Task) -> int:
    """
    At most so many rows, as wide as the language model, go from the chunk of `before` to that of `after`. From an
    encoder that is a row for each token of its layers, which may merge into fewer, and no more than the language model
    has tokens for; to a generator the hidden states of all tokens that the language model has of the samples.
    """
    slots = step.chunks[before.module, before.replica, before.microbatch][before.chunk]
    taken = step.chunks[after.module, after.replica, after.microbatch][after.chunk]
    shared = sorted(set(slots) & set(taken))
    own, language = (sizes.tokens[name][shared] for name in (before.module, LANGUAGE_MODEL))
    return int(np.minimum(own, language).sum())
