"""Memory of a rank: weights, gradients, optimizer state, and an upper bound of the activations in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SampleSizes, StageKey, StepPlan
from ..schedule import Task, build_graph
from ..schedule.kinds import KINDS
from .activations import grouped_copies
from .layers import CostModel
from .row_sizes import ChunkKey, chunk_sizes
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
    spec, result = costs.spec, {}
    # Of a rank that has most of the heads.
    copies = {
        name: grouped_copies(spec.modules[name], spec.uses.get((name, 0), ()), module.tp_sizes[0])
        for name, module in plan.modules.items()
    }
    for key, size in chunk_sizes(costs, plan, step, sizes).items():
        # with a stored mask, repeated keys and values are stored, too, and count like its entries
        pairs = size.scores + (copies[key[0]] if size.scores else 0) * size.tokens
        result[key] = np.array([pairs, size.tokens, float(size.tokens > 0)])
    return result


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
    use, last = StepUse(costs, plan, step, sizes), _last_slices(plan, memories)
    live, transient, host = (dict.fromkeys(result, 0.0) for _ in range(3))
    for key, memory in memories.items():
        fixed, per_microbatch, running = use.of_stage(key, memory)
        count, put_off = in_flight.get(key, 0.0), use.put_off_bytes(key, memory)
        more = put_off * (max(count, (held or {}).get(key, count)) - count)
        moved = use.moved_bytes(key, memory) * count
        for rank in plan.stage(*key).all_ranks:
            live[rank] += fixed + max(per_microbatch, put_off) * count + more
            transient[rank] = max(transient[rank], running)
            host[rank] += moved
    # where they are more, the summed slices of gradients under ZeRO take the place of activations
    beside = {rank: max(live[rank] + transient[rank], last.get(rank, 0.0)) for rank in result}
    return {rank: own + RankMemory(activations=beside[rank], host=host[rank]) for rank, own in result.items()}


class StepUse:
    """Sizes of the microbatches and chunks of a step in each replica."""

    def __init__(self, costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes):
        self.plan = plan
        activations = activation_sizes(costs, plan, step, sizes)
        self.microbatches: dict[tuple[str, int], list[NDArray]] = {}
        self.chunks: dict[tuple[str, int], list[NDArray]] = {}
        for (name, replica, index), chunks in step.chunks.items():
            parts = [activations[name, replica, index, number] for number in range(len(chunks))]
            self.microbatches.setdefault((name, replica), []).append(sum(parts, np.zeros(3)))
            self.chunks.setdefault((name, replica), []).extend(parts)
        self.received, self.sent = self._features(costs, plan, step, sizes)

    def _features(self, costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes) -> tuple[dict, dict]:
        """
        (encoder, replica of the consumer) -> bytes of the features in the consumer's largest microbatch, and
        (encoder, replica) -> bytes of all features that this replica sends.
        """
        received: dict[tuple[str, int], float] = {}
        sent: dict[tuple[str, int], float] = {}
        for edge in plan.edges:
            if not costs.spec.modules[edge.source].is_encoder:
                continue
            values = sample_features(costs, sizes, edge.source)
            for replica, microbatches in enumerate(step.microbatches[edge.target]):
                received[edge.source, replica] = max((values[list(m)].sum() for m in microbatches), default=0.0)
            for replica, microbatches in enumerate(step.microbatches[edge.source]):
                sent[edge.source, replica] = sum(values[list(m)].sum() for m in microbatches)
        return received, sent

    def put_off_bytes(self, key: StageKey, memory: StageMemory) -> float:
        """Maximum bytes of a microbatch that stay for weight gradients."""
        return max(map(memory.put_off_bytes, self.microbatches.get(key[:2], ())), default=0.0)

    def moved_bytes(self, key: StageKey, memory: StageMemory) -> float:
        """Maximum bytes of a microbatch in host memory."""
        return max(map(memory.moved_bytes, self.microbatches.get(key[:2], ())), default=0.0)

    def of_stage(self, key: StageKey, memory: StageMemory) -> tuple[float, float, float]:
        """Constant bytes of a stage, maximum bytes per microbatch in flight, and transient bytes of a task."""
        name, replica, stage = key
        microbatches = np.array(self.microbatches.get((name, replica), [np.zeros(3)]))
        per_microbatch = memory.most_saved_bytes(microbatches)
        for edge in self.plan.edges:
            if edge.target == name and stage in self.plan.edge_stages(edge, replica):
                per_microbatch += self.received.get((edge.source, replica), 0.0) / memory.cp_size
        fixed = memory.kept_bytes + memory.input_bytes * float(microbatches[:, 1].sum())
        if memory.frees_features:
            fixed += self.sent.get((name, replica), 0.0)
        chunks = np.array(self.chunks.get((name, replica)) or [np.zeros(3)])
        return fixed, per_microbatch, memory.most_running_bytes(chunks)


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
            saved = memory.saved_bytes(size)
            if task.row.opens:
                self.allocate(task.stage_key, start_ms, end_ms, memory.forward_bytes(size) - saved)
                self.allocate(task.stage_key, start_ms, self.released_ms(task), saved)
            is_first = with_gradients and first.get(task.stage_key) == task
            if task.row.closes:
                self.allocate(task.stage_key, start_ms, end_ms, memory.backward_bytes(size, is_first) - saved)
                after = self._later(task)
                if after is not None:
                    self.allocate(task.stage_key, end_ms, self.times[after][1], memory.put_off_bytes(size))
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
