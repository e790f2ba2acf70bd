"""Memory of a rank: weights, gradients, optimizer state, and the activations in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, SampleSizes, Stage, StepPlan, stage_parameters
from ..schedule.actions import StageKey
from .analytic import DTYPE_BYTES
from .layers import CostModel

GIB = 2**30


@dataclass(frozen=True)
class RankMemory:
    """
    Estimated bytes of one rank.

    Args:
        weights (`float`): Parameters, in the dtype of the model.
        gradients (`float`): Of the trainable parameters, in float32 where they accumulate.
        optimizer (`float`): AdamW: two float32 values for each trainable parameter.
        activations (`float`): What the microbatches in flight keep for their backwards.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total_gib(self) -> float:
        return self.total / GIB

    def __add__(self, other: RankMemory) -> RankMemory:
        return RankMemory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
        )


def stage_state(spec: ModelSpec, module: str, stage: Stage) -> RankMemory:
    """Weights, gradients and optimizer state of a stage on each of its ranks. Vectors are not divided over them."""
    tp_size = len(stage.ranks[0])
    weights = trainable = 0.0
    for parameter in stage_parameters(spec, module, stage):
        share = parameter.num_elements / (tp_size if len(parameter.shape) > 1 else 1)
        weights += share * DTYPE_BYTES.get(parameter.dtype, 4)
        trainable += share if parameter.trainable else 0.0
    return RankMemory(weights, 4 * trainable, 8 * trainable)


def activation_bytes(costs: CostModel, plan: ParallelPlan, module: str, stage: Stage) -> float:
    """
    What one token keeps on each rank of a stage between its forward and its backward; each row of ranks has its share
    of the tokens.

    With activation checkpointing that is the input of each layer, and one layer in full. Logits count in float32,
    with their gradient.
    """
    part, tp_size = costs.spec.modules[module], len(stage.ranks[0])
    kept = [costs.layers.layer(module, layer, tp_size).activations.token for layer in range(*stage.layers)]
    num_bytes = sum(kept)
    if plan.modules[module].activation_checkpointing:
        num_bytes = costs.value_bytes * stage.num_layers * part.hidden_size + max(kept)
    if module == LANGUAGE_MODEL and stage.layers[1] == part.num_layers:
        heads = [use.parameter for use in costs.spec.uses.get((module, part.num_layers), ()) if use.multiplies]
        num_bytes += sum(8 * p.shape[0] / tp_size for p in heads)
    return num_bytes / len(stage.ranks)


@dataclass(frozen=True)
class StageMemory:
    """
    What a stage needs on each of its ranks.

    Args:
        state (`RankMemory`): Weights, gradients and optimizer state.
        bytes_per_token (`float`): Activations of a token in flight.
    """

    state: RankMemory
    bytes_per_token: float


def stage_memories(costs: CostModel, plan: ParallelPlan) -> dict[StageKey, StageMemory]:
    """
    The memory of every stage of a plan.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.

    Returns:
        `dict[tuple[str, int, int], StageMemory]`: (module, replica, stage) -> its memory.
    """
    known: dict[tuple, StageMemory] = {}
    result = {}
    for name, module in plan.modules.items():
        for replica, index, stage in module.stages():
            kind = (name, stage.layers, len(stage.ranks), len(stage.ranks[0]))
            if kind not in known:
                state = stage_state(costs.spec, name, stage)
                known[kind] = StageMemory(state, activation_bytes(costs, plan, name, stage))
            result[name, replica, index] = known[kind]
    return result


def state_per_rank(plan: ParallelPlan, memories: Mapping[StageKey, StageMemory]) -> dict[int, RankMemory]:
    """Rank -> weights, gradients and optimizer state of all of its stages."""
    result = {rank: RankMemory() for rank in range(plan.world_size)}
    for key, memory in memories.items():
        for rank in plan.stage(*key).all_ranks:
            result[rank] += memory.state
    return result


def largest_microbatches(step: StepPlan, sizes: SampleSizes) -> dict[tuple[str, int], int]:
    """(module, replica) -> tokens of its largest microbatch."""
    return {
        (name, replica): max((int(sizes.tokens[name][list(slots)].sum()) for slots in microbatches), default=0)
        for name, replicas in step.microbatches.items()
        for replica, microbatches in enumerate(replicas)
    }


def memory_per_rank(
    costs: CostModel,
    plan: ParallelPlan,
    step: StepPlan,
    sizes: SampleSizes,
    in_flight: Mapping[StageKey, float],
) -> dict[int, RankMemory]:
    """
    Bounds the memory of every rank at its peak: all microbatches in flight count as much as the largest one.

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
    largest = largest_microbatches(step, sizes)
    for key, memory in memories.items():
        kept = memory.bytes_per_token * largest[key[0], key[1]] * in_flight.get(key, 0.0)
        for rank in plan.stage(*key).all_ranks:
            result[rank] += RankMemory(activations=kept)
    return result
