"""Time of a task from operation counts: parameters times tokens, and attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from ..plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModuleSpec,
    ParallelPlan,
    ParameterSpec,
    SampleSizes,
    Stage,
    StepPlan,
    stage_holds,
)
from ..schedule import GradientFlow, Task
from ..schedule.actions import Message, StageKey
from .hardware import Hardware

BYTES_PER_VALUE = 2
ChunkKey = tuple[str, int, int, int]


def is_lookup(parameter: ParameterSpec) -> bool:
    """Whether the parameter is read by index, as embeddings are, so that it multiplies nothing."""
    return parameter.layer == -1 and len(parameter.shape) == 2 and "embed" in parameter.name


def held_parameters(spec: ModelSpec, module: str, stage: Stage) -> list[tuple[ParameterSpec, bool]]:
    """Parameters of a stage, each with whether it multiplies activations there. Tied ones are held at both places."""
    num_layers = spec.modules[module].num_layers
    found = []
    for parameter in spec.modules[module].parameters:
        first = stage_holds(stage.layers, num_layers, parameter.layer)
        second = spec.tied.get(parameter.name)
        again = second is not None and second[0] == module and stage_holds(stage.layers, num_layers, second[1])
        if first or again:
            found.append((parameter, len(parameter.shape) > 1 and (again or not is_lookup(parameter))))
    return found


def stage_flops(spec: ModelSpec, module: str, stage: Stage) -> tuple[float, float]:
    """
    Operations of a stage's forward: for each token, and for each squared token of a sequence.

    A token takes two for each parameter of a matrix; the attention of a layer over `n` tokens of width `h` takes
    `4 n^2 h`, half of it where it is causal. Every expert of a mixture counts, since a [`ModelSpec`] does not say how
    many a token meets.
    """
    matrices = sum(p.num_elements for p, multiplies in held_parameters(spec, module, stage) if multiplies)
    attention = 4.0 * spec.modules[module].hidden_size * stage.num_layers
    return 2.0 * matrices, attention / 2 if module == LANGUAGE_MODEL else attention


def flops_per_token(spec: ModelSpec, module: str, stage: Stage, sequence_length: int) -> float:
    """Operations of a stage's forward for one token of a sequence of `sequence_length`, see [`stage_flops`]."""
    per_token, per_square = stage_flops(spec, module, stage)
    return per_token + per_square * sequence_length


@dataclass(frozen=True)
class StageCost:
    """
    What a chunk takes on a stage, as a function of its tokens and of the squares of its sequences.

    Args:
        token_ms (`float`): Forward of a token.
        square_ms (`float`): Forward of a squared token.
        backward_ratio (`float`): Time of a backward over that of a forward, 0 without one.
        gather_token_ms (`float`): Time in which the keys and values of a token come from the other rows of ranks.
        gather_square_ms (`float`): Time of the attention that is computed meanwhile, for each squared token.
    """

    token_ms: float
    square_ms: float
    backward_ratio: float
    gather_token_ms: float = 0.0
    gather_square_ms: float = 0.0

    def forward_ms(self, tokens: float, squares: float) -> float:
        """
        Args:
            tokens (`float`): Tokens of the chunk.
            squares (`float`): Sum of the squared lengths of its sequences.
        """
        # What travels costs only the time that attention does not hide.
        exposed = self.gather_token_ms * tokens - self.gather_square_ms * squares
        return self.token_ms * tokens + self.square_ms * squares + (exposed if exposed > 0 else 0.0)


def backward_ratio(spec: ModelSpec, plan: ParallelPlan, flow: GradientFlow, key: StageKey) -> float:
    """
    How many times its forward the backward of a stage takes: once for the gradients of the inputs of its layers, as
    far as something trainable lies before them, once more for the gradients of the weights that are trainable
    (Cornstarch, section 4.3), and once more where activations are recomputed. 0 where no backward runs.
    """
    if not flow.has_backward(*key):
        return 0.0
    held = held_parameters(spec, key[0], plan.stage(*key))
    matrices = [p for p, multiplies in held if multiplies]
    total = sum(p.num_elements for p in matrices)
    first = min((p.layer for p, _ in held if p.trainable), default=math.inf)
    data = total if flow.input_needs_grad(*key) else sum(p.num_elements for p in matrices if p.layer > first)
    weights = sum(p.num_elements for p in matrices if p.trainable)
    return (data + weights) / max(1, total) + plan.modules[key[0]].activation_checkpointing


def stage_costs(spec: ModelSpec, plan: ParallelPlan, device: Hardware) -> dict[StageKey, StageCost]:
    """
    The cost of every stage of a plan.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        plan (`ParallelPlan`): The layout.
        device (`Hardware`): What each rank is.

    Returns:
        `dict[tuple[str, int, int], StageCost]`: (module, replica, stage) -> its cost.
    """
    flow = GradientFlow(plan)
    known: dict[tuple, StageCost] = {}
    result = {}
    for name, module in plan.modules.items():
        for replica, index, stage in module.stages():
            key = (name, replica, index)
            grid = (len(stage.ranks), len(stage.ranks[0]))
            kind = (name, stage.layers, grid, flow.has_backward(*key), flow.input_needs_grad(*key))
            if kind not in known:
                known[kind] = _stage_cost(spec, name, stage, device, backward_ratio(spec, plan, flow, key))
            result[key] = known[kind]
    return result


def _stage_cost(spec: ModelSpec, module: str, stage: Stage, device: Hardware, ratio: float) -> StageCost:
    """The cost of one stage."""
    part, num_rows, tp_size = spec.modules[module], len(stage.ranks), len(stage.ranks[0])
    flops_per_ms = device.flops_per_ms * len(stage.all_ranks)
    per_token, per_square = stage_flops(spec, module, stage)
    cost = StageCost(per_token / flops_per_ms, per_square / flops_per_ms, ratio)
    if num_rows == 1:
        return cost
    width = 2 * part.num_kv_heads * (part.hidden_size // part.num_heads) / tp_size
    received = BYTES_PER_VALUE * width * (num_rows - 1) / num_rows / (device.link_gb_per_s * 1e6)
    attention = 2 * part.hidden_size / flops_per_ms
    return replace(cost, gather_token_ms=stage.num_layers * received, gather_square_ms=stage.num_layers * attention)


class AnalyticCost:
    """
    Milliseconds of each task of a step, for [`build_program`] and [`simulate`], from the tokens of its samples; see
    [`StageCost`] and [`backward_ratio`].

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.
        device (`Hardware`): What each rank is.
    """

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes, device: Hardware):
        self.spec, self.plan, self.step, self.sizes, self.device = spec, plan, step, sizes, device
        self.stages = stage_costs(spec, plan, device)
        self.chunks = chunk_sizes(step, sizes)

    def __call__(self, task: Task) -> float:
        cost = self.stages[task.module, task.replica, task.stage]
        time_ms = cost.forward_ms(*self.chunks[task.module, task.replica, task.microbatch, task.chunk])
        return time_ms if task.kind == "fwd" else cost.backward_ratio * time_ms

    def message_ms(self, message: Message) -> float:
        """Time that a message travels: two bytes a value, over one link for each rank of the smaller grid."""
        before, after = message.source, message.target
        if message.kind == "grad":
            before, after = after, before
        num_tokens = self.chunks[before.module, before.replica, before.microbatch, before.chunk][0]
        if message.crosses_boundary:
            num_tokens = message_tokens(self.step, self.sizes, before, after)
        num_bytes = BYTES_PER_VALUE * num_tokens * self.spec.modules[after.module].hidden_size
        links = min(len(self.plan.stage(*task.stage_key).all_ranks) for task in (before, after))
        return num_bytes / links / (self.device.link_gb_per_s * 1e6)


def message_tokens(step: StepPlan, sizes: SampleSizes, before: Task, after: Task) -> int:
    """
    At most so many rows of features go from the chunk of `before` to that of `after`: a row for each token of the
    encoder's layers, which may merge into fewer, and no more than the module that takes them has tokens for.
    """
    slots = step.chunks[before.module, before.replica, before.microbatch][before.chunk]
    taken = step.chunks[after.module, after.replica, after.microbatch][after.chunk]
    shared = sorted(set(slots) & set(taken))
    return int(np.minimum(sizes.tokens[before.module][shared], sizes.tokens[after.module][shared]).sum())


def chunk_sizes(step: StepPlan, sizes: SampleSizes) -> dict[ChunkKey, tuple[float, float]]:
    """(module, replica, microbatch, chunk) -> its tokens, and the sum of the squares of its sequences."""
    result = {}
    for name in step.microbatches:
        chunks = {
            (*key, number): slots
            for key, found in step.chunks.items()
            if key[0] == name
            for number, slots in enumerate(found)
        }
        if not chunks:
            continue
        starts = np.cumsum([0, *map(len, chunks.values())])[:-1]
        order = np.fromiter(chain.from_iterable(chunks.values()), np.int64)
        sums = (np.add.reduceat(values[name][order], starts) for values in (sizes.tokens, sizes.squares))
        result.update(zip(chunks, zip(*(found.astype(float).tolist() for found in sums), strict=True), strict=True))
    return result


def layer_width(module: ModuleSpec) -> int:
    """Values that a layer keeps of a token for its backward: norms, attention, feed-forward."""
    return 8 * module.hidden_size + 3 * module.intermediate_size
