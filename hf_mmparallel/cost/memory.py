"""Memory of a rank: weights, gradients, optimizer state, and an upper bound of the activations in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .._portable import weighted_sum
from ..plan import ParallelPlan, SampleSizes, StageKey, StepPlan
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
) -> dict[int, RankMemory]:
    """
    Upper bound of the peak memory of every rank: all microbatches in flight (such as `peak_in_flight` of a
    [`Simulation`]) count as the largest one, all gradients are allocated, and the running task is that with the
    largest transient memory.
    """
    memories = stage_memories(costs, plan)
    result = state_per_rank(plan, memories)
    use, last = StepUse(costs, plan, step, sizes), _last_slices(plan, memories)
    live, transient = dict.fromkeys(result, 0.0), dict.fromkeys(result, 0.0)
    for key, memory in memories.items():
        fixed, per_microbatch, running = use.of_stage(key, memory)
        for rank in plan.stage(*key).all_ranks:
            live[rank] += fixed + per_microbatch * in_flight.get(key, 0.0)
            transient[rank] = max(transient[rank], running)
    # where they are more, the summed slices of gradients under ZeRO take the place of activations
    beside = {rank: max(live[rank] + transient[rank], last.get(rank, 0.0)) for rank in result}
    return {rank: state + RankMemory(activations=beside[rank]) for rank, state in result.items()}


class StepUse:
    """Sizes of the largest microbatches and chunks of a step in each replica."""

    def __init__(self, costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes):
        self.plan = plan
        activations = activation_sizes(costs, plan, step, sizes)
        self.microbatches: dict[tuple[str, int], list[NDArray]] = {}
        self.chunks: dict[tuple[str, int], NDArray] = {}
        for (name, replica, index), chunks in step.chunks.items():
            parts = [activations[name, replica, index, number] for number in range(len(chunks))]
            self.microbatches.setdefault((name, replica), []).append(sum(parts, np.zeros(3)))
            for part in parts:
                largest = self.chunks.get((name, replica), np.zeros(3))
                self.chunks[name, replica] = np.maximum(largest, part)
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

    def of_stage(self, key: StageKey, memory: StageMemory) -> tuple[float, float, float]:
        """Constant bytes of a stage, maximum bytes per microbatch in flight, and transient bytes of a task."""
        name, replica, stage = key
        microbatches = np.array(self.microbatches.get((name, replica), [np.zeros(3)]))
        scale = np.array([1 / memory.cp_size, 1 / memory.cp_size, 1.0])
        per_microbatch = float(weighted_sum(microbatches, memory.saved.sum(axis=0) * scale).max(initial=0.0))
        for edge in self.plan.edges:
            if edge.target == name and stage in self.plan.edge_stages(edge, replica):
                per_microbatch += self.received.get((edge.source, replica), 0.0) / memory.cp_size
        fixed = memory.kept_bytes + memory.input_bytes * float(microbatches[:, 1].sum())
        if memory.frees_features:
            fixed += self.sent.get((name, replica), 0.0)
        largest = self.chunks.get((name, replica), np.zeros(3))
        return fixed, per_microbatch, float(weighted_sum(memory.transient, scale * largest).max(initial=0.0))
