"""Memory of a rank: weights, gradients, optimizer state, and an upper bound of the activations in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SampleSizes, StageKey, StepPlan
from ..plan.step_plan import ChunkTable
from ..schedule import Task, build_graph
from ..schedule.kinds import KINDS
from .activations import grouped_copies
from .layers import CostModel
from .row_sizes import ChunkKey, RowLayout
from .stage_memory import RankMemory, StageMemory, feature_bytes, stage_memories


def state_per_rank(plan: ParallelPlan, memories: Mapping[StageKey, StageMemory]) -> dict[int, RankMemory]:
    """Rank -> weights, optimizer state, and gradients with the bucket of their sums, of all of its stages."""
    on_rank: list[tuple[int, ...]] = [()] * plan.world_size  # the ids of the memories of its stages
    for key, memory in memories.items():
        for rank in plan.stage(*key).all_ranks:
            on_rank[rank] += (id(memory),)
    known = {id(memory): memory for memory in memories.values()}
    states = {ids: _summed_state([known[number] for number in ids]) for ids in set(on_rank)}
    return {rank: states[ids] for rank, ids in enumerate(on_rank)}


def _summed_state(memories: Sequence[StageMemory]) -> RankMemory:
    """What a rank with some stages has besides activations, see [`state_per_rank`]."""
    result = RankMemory()
    for memory in memories:
        # summed slices exist beside activations, but for those of the stage that ends its backwards last
        result += memory.state + RankMemory(gradients=memory.bucket_bytes + memory.slice_bytes)
    return result + RankMemory(gradients=-min((memory.slice_bytes for memory in memories), default=0.0))


def _last_slices(plan: ParallelPlan, memories: Mapping[StageKey, StageMemory]) -> dict[int, float]:
    """Rank -> minimum bytes of the summed slices of the stage that ends its backwards last."""
    result: dict[int, float] = {}
    for key, memory in memories.items():
        for rank in plan.stage(*key).all_ranks:
            result[rank] = min(result.get(rank, memory.slice_bytes), memory.slice_bytes)
    return result


def activation_sizes(
    costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes
) -> dict[ChunkKey, NDArray]:
    """For each chunk `[stored token pairs, tokens, 1]`, see [`chunk_sizes`]."""
    result: dict[ChunkKey, NDArray] = {}
    for name in plan.modules:
        table, values = _activations_of(costs, plan, step, sizes, name)
        keys = zip(*(column.tolist() for column in (table.replica, table.microbatch, table.chunk)), strict=True)
        result |= {(name, *key): size for key, size in zip(keys, values, strict=True)}
    return result


def _activations_of(
    costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes, name: str
) -> tuple[ChunkTable, NDArray]:
    """The chunks of a module, with [`activation_sizes`] of each `[chunks, 3]`."""
    spec, module, table = costs.spec, plan.modules[name], step.chunk_table(name, step.replicas(name))
    if not len(table.replica):
        return table, np.zeros((0, 3))
    tokens, _, scores = RowLayout.of(costs, name, module).of_chunks(sizes, name, table).T
    # of a rank that has most of the heads: with a stored mask, repeated keys and values are stored, too, and count
    # like its entries
    copies = grouped_copies(spec.modules[name], spec.uses.get((name, 0), ()), module.tp_sizes[0])
    return table, np.stack([scores + np.where(scores > 0, copies, 0) * tokens, tokens, tokens > 0], axis=1)


def sample_features(costs: CostModel, sizes: SampleSizes, encoder: str) -> NDArray:
    """Bytes of the features of each sample `[samples]`."""
    consumer = costs.spec.language_model
    per_token = feature_bytes(costs, costs.spec.modules[encoder])
    row_bytes = feature_bytes(costs, costs.spec.modules[encoder], merged=False)
    tokens = sizes.tokens.get(consumer.name, sizes.tokens[encoder])
    # one feature token per encoder token after merging, at most one per language model token
    return np.minimum(per_token * sizes.tokens[encoder], row_bytes * tokens)


def memory_per_rank(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    in_flight: Mapping[StageKey, float],
    held: Mapping[StageKey, float] | None = None,
) -> dict[int, RankMemory]:
    """
    Upper bound of the peak memory of every rank: all microbatches in flight, and those that wait for weight gradients
    (such as `peak_in_flight` and `peak_held` of a [`Timeline`]; no others wait by default), count as the largest one,
    all gradients are allocated, and the running task is that with the largest transient memory.
    """
    memories = stage_memories(costs, plan)
    result = state_per_rank(plan, memories)
    last = _last_slices(plan, memories)
    live, transient, host = (dict.fromkeys(result, 0.0) for _ in range(3))
    for key, use in stage_uses(costs, plan, step, sizes, memories).items():
        count = in_flight.get(key, 0.0)
        more = use.put_off * (max(count, (held or {}).get(key, count)) - count)
        for rank in plan.stage(*key).all_ranks:
            live[rank] += use.fixed + max(use.per_microbatch, use.put_off) * count + more
            transient[rank] = max(transient[rank], use.running)
            host[rank] += use.moved * count
    # where they are more, the summed slices of gradients under ZeRO take the place of activations
    beside = {rank: max(live[rank] + transient[rank], last.get(rank, 0.0)) for rank in result}
    return {rank: own + RankMemory(activations=beside[rank], host=host[rank]) for rank, own in result.items()}


class StageUse(NamedTuple):
    """Bytes of the microbatches of a step on a stage."""

    fixed: float  # whatever is in flight
    per_microbatch: float  # most of a microbatch in flight
    running: float  # transient ones of a task
    put_off: float  # most of a microbatch that stay for weight gradients
    moved: float  # most of a microbatch in host memory


def stage_uses(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    memories: Mapping[StageKey, StageMemory],
) -> dict[StageKey, StageUse]:
    """(module, replica, stage) -> what the microbatches of its replica need there."""
    received, sent = _features(costs, plan, step, sizes)
    activations = {name: _activations_of(costs, plan, step, sizes, name) for name in plan.modules}
    # stages of several replicas with one memory are computed together
    known: dict[tuple[str, int], list[StageUse]] = {}
    result = {}
    for key, memory in memories.items():
        name, replica, _ = key
        if (name, id(memory)) not in known:
            table, values = activations[name]
            entering = np.zeros(plan.modules[name].dp_size)
            for edge in plan.edges:
                if edge.target == name and edge.source in sent and any(map(plan.stage(*key).has_layer, edge.layers)):
                    entering += received[edge.source, name]
            known[name, id(memory)] = replica_uses(
                memory, table.replica, table.microbatch, values, entering, sent.get(name, entering)
            )
        result[key] = known[name, id(memory)][replica]
    return result


def replica_uses(
    memory: StageMemory,
    replica: NDArray,  # of each chunk, in order
    microbatch: NDArray,  # of its replica
    sizes: NDArray,  # `[chunks, 3]`, see `activation_sizes`
    received: NDArray,  # bytes of features `[replicas]` that enter with the largest microbatch
    sent: NDArray,  # of all features of a step `[replicas]`
) -> list[StageUse]:
    """What the microbatches of each replica need on a stage."""
    result = np.zeros((5, len(received)))
    result[0] = memory.kept_bytes + memory.frees_features * sent
    if len(sizes):
        chunks = np.flatnonzero(np.diff(replica, prepend=-1))  # the first of each replica
        replicas = replica[chunks]
        is_first = (np.diff(replica, prepend=-1) != 0) | (np.diff(microbatch, prepend=-1) != 0)
        microbatches = np.add.reduceat(sizes, np.flatnonzero(is_first))
        starts = (np.cumsum(is_first) - 1)[chunks]
        result[0, replicas] += memory.input_bytes * np.add.reduceat(microbatches[:, 1], starts)
        result[1, replicas] = np.maximum.reduceat(memory.saved_bytes(microbatches), starts)
        result[2, replicas] = memory.most_running_bytes(sizes, chunks)
        result[3, replicas] = np.maximum.reduceat(memory.put_off_bytes(microbatches), starts)
        result[4, replicas] = np.maximum.reduceat(memory.moved_bytes(microbatches), starts)
    result[1] += received / memory.cp_size
    return list(map(StageUse._make, result.T.tolist()))


def _features(
    costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes
) -> tuple[dict[tuple[str, str], NDArray], dict[str, NDArray]]:
    """
    (encoder, consumer) -> bytes of the features in the largest microbatch of each replica of the consumer, and encoder
    -> bytes of all features that each of its replicas sends.
    """
    received, sent = {}, {}
    for edge in plan.edges:
        if costs.spec.modules[edge.source].is_encoder:
            values = sample_features(costs, sizes, edge.source)
            sent[edge.source] = np.array(
                [sum(values[list(m)].sum() for m in own) for own in step.microbatches[edge.source]]
            )
            received[edge.source, edge.target] = np.array(
                [max((values[list(m)].sum() for m in own), default=0.0) for own in step.microbatches[edge.target]]
            )
    return received, sent


# Memory of each rank over the time of a step, and its peak.


def memory_timeline(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    times: Mapping[Task, tuple[float, float]],
) -> dict[int, tuple[NDArray, NDArray]]:
    """
    Bytes of the tensors on each rank over a step, with optimizer state already allocated.

    A chunk has saved activations from its forward to the end of its backward, and what weight gradients need that are
    put off until they are done; a running task counts with its peak.
    Gradients exist from the first backward of a stage on, the buffers of their all-reduces from the last one on.

    Returns:
        `dict[int, tuple[np.ndarray, np.ndarray]]`: Rank -> times in ms `[changes]`, in order, and the bytes
        `[changes]` from each of them until the next one.
    """
    timeline = _MemoryEvents(costs, plan, step, sizes, times)
    timeline.add_activations(with_gradients=True)
    timeline.add_state()
    return {rank: _levels(events) for rank, events in timeline.events.items()}


def activation_peaks(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    times: Mapping[Task, tuple[float, float]],
) -> dict[int, float]:
    """Peak bytes of each rank besides weights, gradients and optimizer state, see [`memory_timeline`]."""
    timeline = _MemoryEvents(costs, plan, step, sizes, times)
    timeline.add_activations(with_gradients=False)
    return {rank: float(_levels(events)[1].max()) for rank, events in timeline.events.items()}


class _MemoryEvents:
    """Allocations and frees on each rank, with their times."""

    def __init__(
        self,
        costs: CostModel,
        plan: ParallelPlan,
        step: StepPlan,
        sizes: SampleSizes,
        times: Mapping[Task, tuple[float, float]],  # start and end
    ):
        self.costs, self.plan, self.step, self.sizes = costs, plan, step, sizes
        self.times = times
        self.end_ms = max((end for _, end in self.times.values()), default=0.0)
        self.memories = stage_memories(costs, plan)
        self.activations = activation_sizes(costs, plan, step, sizes)
        self.events: dict[int, list[tuple[float, float]]] = {rank: [(0.0, 0.0)] for rank in range(plan.world_size)}

    def allocate(self, key: StageKey, start_ms: float, end_ms: float, num_bytes: float) -> None:
        """Adds an allocation on all ranks of a stage, and its free."""
        if num_bytes:
            for rank in self.plan.stage(*key).all_ranks:
                self.events[rank] += [(start_ms, num_bytes), (end_ms, -num_bytes)]

    def released_ms(self, task: Task) -> float:
        """Time when the saved activations of a task are freed."""
        closing = (self.times.get(Task(kind.word, *task.key)) for kind in KINDS.values() if kind.closes)
        return next((times[1] for times in closing if times is not None), self.times[task][1])

    def add_activations(self, with_gradients: bool) -> None:
        """Adds activations of tasks, features, and the inputs of the step."""
        first: dict[StageKey, Task] = {}
        for task in sorted(self.times, key=lambda task: self.times[task]):
            if task.row.adds_gradients:
                first.setdefault(task.stage_key, task)
        for task, (start_ms, end_ms) in self.times.items():
            if not self._batch_indices(task):  # only takes part in collectives
                continue
            memory = self.memories[task.stage_key]
            size = self.activations[task.key[0], task.key[1], *task.key[3:]]
            saved = float(memory.saved_bytes(size))
            if task.row.opens:
                self.allocate(task.stage_key, start_ms, end_ms, memory.forward_bytes(size) - saved)
                self.allocate(task.stage_key, start_ms, self.released_ms(task), saved)
            is_first = with_gradients and first.get(task.stage_key) == task
            if task.row.closes:
                self.allocate(task.stage_key, start_ms, end_ms, memory.backward_bytes(size, is_first) - saved)
                after = self._later(task)
                if after is not None:
                    self.allocate(task.stage_key, end_ms, self.times[after][1], float(memory.put_off_bytes(size)))
            elif task.row.adds_gradients:
                self.allocate(task.stage_key, start_ms, end_ms, float(memory.largest.max()))
            if is_first:
                # those of layers come one by one in a whole backward, see `backward_bytes`
                at_ms = end_ms if task.row.closes else start_ms
                self.allocate(task.stage_key, at_ms, np.inf, memory.state.gradients)
        self._add_features()
        tokens: dict[tuple[str, int], float] = defaultdict(float)
        for chunk, size in self.activations.items():
            tokens[chunk[:2]] += size[1]
        for key, memory in self.memories.items():
            self.allocate(key, 0.0, np.inf, memory.kept_bytes + memory.input_bytes * tokens[key[:2]])

    def _later(self, task: Task) -> Task | None:
        """The task that computes the weight gradients that a task has put off; `None` if it puts off none."""
        kinds = (kind.word for kind in KINDS.values() if kind.adds_gradients and kind.after == task.kind)
        return next((other for other in (Task(word, *task.key) for word in kinds) if other in self.times), None)

    def _add_features(self) -> None:
        """Adds features at the producer and at the consumer."""
        features = {name: sample_features(self.costs, self.sizes, name) for name in self.costs.spec.encoders}
        for message in build_graph(self.plan, self.step, training=False).messages:
            source, target = message.source, message.target
            if not message.crosses_boundary or source.module not in features:
                continue
            if not {source, target} <= self.times.keys():
                continue
            received = set(self._batch_indices(target))
            num_bytes = features[source.module][
                [batch_index for batch_index in self._batch_indices(source) if batch_index in received]
            ].sum()
            # until they are sent, which is later for deferred samples; else they stay for the encoder's backward
            if self.memories[source.stage_key].frees_features:
                self.allocate(source.stage_key, self.times[source][1], self.times[target][0], num_bytes)
            cp_size = self.memories[target.stage_key].cp_size
            self.allocate(target.stage_key, self.times[target][0], self.released_ms(target), num_bytes / cp_size)

    def _batch_indices(self, task: Task) -> tuple[int, ...]:
        return self.step.chunk(task.module, task.replica, task.microbatch, task.chunk)

    def add_state(self) -> None:
        """Adds weights, optimizer state, and the buckets and slices of gradient sums."""
        last_ms: dict[tuple[str, int], float] = {}  # of the copies of a stage
        for task, (_, end_ms) in self.times.items():
            if task.row.adds_gradients:
                copies = task.module, task.stage
                last_ms[copies] = max(end_ms, last_ms.get(copies, 0.0))
        for key, memory in self.memories.items():
            self.allocate(key, 0.0, np.inf, memory.state.weights + memory.state.optimizer)
            start_ms = last_ms.get((key[0], key[2]), self.end_ms)
            self.allocate(key, start_ms, np.inf, memory.bucket_bytes + memory.slice_bytes)


def _levels(changes: list[tuple[float, float]]) -> tuple[NDArray, NDArray]:
    """Times of changes, and bytes from each on; frees come before allocations at the same time."""
    times, deltas = np.array(sorted(change for change in changes if np.isfinite(change[0]))).T
    return times, np.cumsum(deltas)
