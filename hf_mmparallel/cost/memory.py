"""Memory of a rank: weights, gradients, optimizer state, and the activations in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..plan import ModelSpec, ParallelPlan, Stage, StepPlan
from ..schedule.actions import StageKey
from .analytic import BYTES_PER_VALUE, Tokens, held_parameters, layer_width

GIB = 2**30
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


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
    for parameter, _ in held_parameters(spec, module, stage):
        share = parameter.num_elements / (tp_size if len(parameter.shape) > 1 else 1)
        weights += share * DTYPE_BYTES.get(parameter.dtype, 4)
        trainable += share if parameter.trainable else 0.0
    return RankMemory(weights, 4 * trainable, 8 * trainable)


def sample_activation_bytes(spec: ModelSpec, plan: ParallelPlan, module: str, stage: Stage, tokens: int) -> float:
    """
    What one sample keeps on each rank of a stage between its forward and its backward, two bytes a value; each row of
    ranks has its share of the tokens.

    With activation checkpointing that is the input of each layer, and one layer in full. Logits count in float32,
    with their gradient.
    """
    part = spec.modules[module]
    tokens = -(-tokens // len(stage.ranks))
    full = layer_width(part) / len(stage.ranks[0])
    if plan.modules[module].activation_checkpointing:
        values = stage.num_layers * part.hidden_size + full
    else:
        values = stage.num_layers * full
    num_bytes = BYTES_PER_VALUE * values * tokens
    if not part.is_encoder and stage.layers[1] == part.num_layers:
        behind = [p for p, _ in held_parameters(spec, module, stage) if len(p.shape) == 2]
        tied = [p for p in behind if p.name in spec.tied]
        heads = tied or [p for p in behind if p.layer == part.num_layers]
        num_bytes += sum(8 * p.shape[0] * tokens / len(stage.ranks[0]) for p in heads)
    return num_bytes


def memory_per_rank(
    spec: ModelSpec,
    plan: ParallelPlan,
    step: StepPlan,
    tokens: Tokens,
    in_flight: Mapping[StageKey, float],
) -> dict[int, RankMemory]:
    """
    Estimates the memory of every rank at its peak.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement, for the size of microbatches.
        tokens (`Tokens`): Tokens of a sample.
        in_flight (`Mapping[tuple[str, int, int], float]`):
            (module, replica, stage) -> microbatches in flight, such as [`Simulation`]'s `peak_in_flight`.

    Returns:
        `dict[int, RankMemory]`: Rank -> its memory.
    """
    result = {rank: RankMemory() for rank in range(plan.world_size)}
    known: dict[tuple[str, tuple[int, int], int], tuple[RankMemory, float]] = {}
    for name, module in plan.modules.items():
        for replica, index, stage in module.stages():
            key = (name, stage.layers, len(stage.all_ranks))
            if key not in known:
                kept = sample_activation_bytes(spec, plan, name, stage, tokens.per_sample(name))
                known[key] = (stage_state(spec, name, stage), kept)
            state, kept = known[key]
            samples = max((len(slots) for slots in step.microbatches[name][replica]), default=0)
            memory = state + RankMemory(activations=kept * samples * in_flight.get((name, replica, index), 0.0))
            for rank in stage.all_ranks:
                result[rank] += memory
    return result
