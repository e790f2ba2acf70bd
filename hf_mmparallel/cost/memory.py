"""Memory of a rank: weights, gradients, optimizer state, and a bound of the activations in flight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SampleSizes, StepPlan
from ..schedule.actions import StageKey
from .kept import grouped_copies
from .layers import CostModel
from .row_sizes import ChunkKey, chunk_sizes
from .stage_memory import RankMemory, StageMemory, feature_bytes, stage_memories


def state_per_rank(plan: ParallelPlan, memories: Mapping[StageKey, StageMemory]) -> dict[int, RankMemory]:
    """Rank -> weights, gradients with the bucket of their sums, and optimizer state of all of its stages."""
    result = {rank: RankMemory() for rank in range(plan.world_size)}
    for key, memory in memories.items():
        for rank in plan.stage(*key).all_ranks:
            result[rank] += memory.state + RankMemory(gradients=memory.summed)
    return result


def held_sizes(costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes) -> dict[ChunkKey, NDArray]:
    """
    For each chunk, `[stored pairs of tokens, tokens, 1]` of what its stages compute, see [`chunk_sizes`]. Where a mask
    is stored, so are repeated keys and values, of which each value takes as much as a pair of the mask.
    """
    spec, result = costs.spec, {}
    own = {
        name: grouped_copies(spec.modules[name], spec.uses.get((name, 0), ()), module.tp_size)
        for name, module in plan.modules.items()
    }
    for key, size in chunk_sizes(costs, plan, step, sizes).items():
        copies = own[key[0]] if size.scores else 0
        result[key] = np.array([size.scores + copies * size.tokens, size.tokens, float(size.tokens > 0)])
    return result


def sample_features(costs: CostModel, sizes: SampleSizes, encoder: str) -> NDArray:
    """
    Bytes of the features of each sample `[samples]`: a row for each token of the encoder's layers after neighbours are
    merged, and no more than the language model has tokens for.
    """
    taker = costs.spec.language_model
    per_token = feature_bytes(costs, costs.spec.modules[encoder])
    row_bytes = feature_bytes(costs, costs.spec.modules[encoder], merged=False)
    tokens = sizes.tokens.get(taker.name, sizes.tokens[encoder])
    return np.minimum(per_token * sizes.tokens[encoder], row_bytes * tokens)


def memory_per_rank(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    in_flight: Mapping[StageKey, float],
) -> dict[int, RankMemory]:
    """
    Bounds the memory of every rank at its peak: all microbatches in flight count as much as the largest one, all
    gradients are there, and what runs is what holds most.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.
        in_flight (`Mapping[tuple[str, int, int], float]`):
            (module, replica, stage) -> microbatches in flight, such as [`Simulation`]'s `peak_in_flight`.

    Returns:
        `dict[int, RankMemory]`: Rank -> its memory.
    """
    memories = stage_memories(costs, plan)
    result = state_per_rank(plan, memories)
    use = StepUse(costs, plan, step, sizes)
    held, extra = dict.fromkeys(result, 0.0), dict.fromkeys(result, 0.0)
    for key, memory in memories.items():
        fixed, each, running = use.of_stage(key, memory)
        for rank in plan.stage(*key).all_ranks:
            held[rank] += fixed + each * in_flight.get(key, 0.0)
            extra[rank] = max(extra[rank], running)
    return {rank: state + RankMemory(activations=held[rank] + extra[rank]) for rank, state in result.items()}


class StepUse:
    """The largest microbatches and chunks of a step in each replica."""

    def __init__(self, costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes):
        self.plan = plan
        held = held_sizes(costs, plan, step, sizes)
        self.microbatches: dict[tuple[str, int], list[NDArray]] = {}
        self.chunks: dict[tuple[str, int], NDArray] = {}
        for (name, replica, index), chunks in step.chunks.items():
            own = [held[name, replica, index, number] for number in range(len(chunks))]
            self.microbatches.setdefault((name, replica), []).append(sum(own, np.zeros(3)))
            for at in own:
                largest = self.chunks.get((name, replica), np.zeros(3))
                self.chunks[name, replica] = np.maximum(largest, at)
        self.taken, self.given = self._features(costs, plan, step, sizes)

    def _features(self, costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes) -> tuple[dict, dict]:
        """
        (edge's encoder, replica of its target) -> bytes of the features of the largest microbatch that takes them, and
        (encoder, replica) -> bytes of all that it gives.
        """
        taken: dict[tuple[str, int], float] = {}
        given: dict[tuple[str, int], float] = {}
        for edge in plan.edges:
            if not costs.spec.modules[edge.source].is_encoder:
                continue
            values = sample_features(costs, sizes, edge.source)
            for replica, microbatches in enumerate(step.microbatches[edge.target]):
                taken[edge.source, replica] = max((values[list(m)].sum() for m in microbatches), default=0.0)
            for replica, microbatches in enumerate(step.microbatches[edge.source]):
                given[edge.source, replica] = sum(values[list(m)].sum() for m in microbatches)
        return taken, given

    def of_stage(self, key: StageKey, memory: StageMemory) -> tuple[float, float, float]:
        """What a stage holds all the time, for each microbatch in flight at most, and for the task that runs."""
        name, replica, stage = key
        microbatches = np.array(self.microbatches.get((name, replica), [np.zeros(3)]))
        scale = np.array([1 / memory.num_rows, 1 / memory.num_rows, 1.0])
        each = float((microbatches @ (memory.kept.sum(axis=0) * scale)).max(initial=0.0))
        for edge in self.plan.edges:
            if edge.target == name and stage in self.plan.edge_stages(edge, replica):
                each += self.taken.get((edge.source, replica), 0.0) / memory.num_rows
        fixed = memory.input_bytes * float(microbatches[:, 1].sum())
        if memory.hands_on_only:
            fixed += self.given.get((name, replica), 0.0)
        largest = self.chunks.get((name, replica), np.zeros(3))
        return fixed, each, float((memory.extras @ (scale * largest)).max(initial=0.0))
