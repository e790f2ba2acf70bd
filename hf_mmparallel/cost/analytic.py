"""Time of a task from operation counts: parameters times tokens, and attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParallelPlan, ParameterSpec, Stage, StepPlan, stage_holds
from ..schedule import GradientFlow, Task
from ..schedule.actions import Message
from .hardware import Hardware

BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Tokens:
    """
    How many tokens a sample has.

    Args:
        language_model (`int`): Length of a sample's sequence in the language model.
        encoder (`int`): Tokens that an encoder's layers see of a sample, unless `encoders` says otherwise.
        encoders (`Mapping[str, int]`, *optional*): Encoder -> its tokens of a sample.
    """

    language_model: int
    encoder: int
    encoders: Mapping[str, int] = field(default_factory=dict)

    def per_sample(self, module: str) -> int:
        """Tokens of one sample in `module`."""
        return self.language_model if module == LANGUAGE_MODEL else self.encoders.get(module, self.encoder)


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


def flops_per_token(spec: ModelSpec, module: str, stage: Stage, sequence_length: int) -> float:
    """
    Operations of a stage's forward for one token: two for each parameter of a matrix, and `4 n h` for the attention of
    each layer over `n` tokens of width `h` (half of it where attention is causal).

    Every expert of a mixture counts, since a [`ModelSpec`] does not say how many a token meets.
    """
    matrices = sum(p.num_elements for p, multiplies in held_parameters(spec, module, stage) if multiplies)
    attention = 4 * sequence_length * spec.modules[module].hidden_size * stage.num_layers
    return 2.0 * matrices + (attention / 2 if module == LANGUAGE_MODEL else attention)


class AnalyticCost:
    """
    Milliseconds of each task of a step, for [`build_program`] and [`simulate`].

    A backward takes as long as a forward for the gradients of the inputs of its layers, as far as something trainable
    lies before them, once more for the gradients of the weights that are trainable (Cornstarch, section 4.3), and
    once more where activations are recomputed.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement, for the number of samples of each task.
        tokens (`Tokens`): Tokens of a sample.
        device (`Hardware`): What each rank is.
    """

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, step: StepPlan, tokens: Tokens, device: Hardware):
        self.spec, self.plan, self.step, self.tokens, self.device = spec, plan, step, tokens, device
        self._stage_ms: dict[tuple[str, tuple[int, int], int, bool], tuple[float, float]] = {}

    @cached_property
    def _flow(self) -> GradientFlow:
        return GradientFlow(self.plan)

    def __call__(self, task: Task) -> float:
        samples = len(self.step.chunks[task.module, task.replica, task.microbatch][task.chunk])
        stage = self.plan.stage(task.module, task.replica, task.stage)
        needs_input = self._flow.input_needs_grad(task.module, task.replica, task.stage)
        key = (task.module, stage.layers, len(stage.all_ranks), needs_input)
        if key not in self._stage_ms:
            self._stage_ms[key] = self._sample_ms(task.module, stage, needs_input)
        return samples * self._stage_ms[key][task.kind == "bwd"]

    def _sample_ms(self, module: str, stage: Stage, needs_input: bool) -> tuple[float, float]:
        """Forward and backward of one sample on a stage."""
        tokens = self.tokens.per_sample(module)
        forward = flops_per_token(self.spec, module, stage, tokens) * tokens
        forward /= self.device.flops_per_ms * len(stage.all_ranks)
        forward += self._gather_ms(module, stage, tokens)
        matrices = [p for p, multiplies in held_parameters(self.spec, module, stage) if multiplies]
        total = sum(p.num_elements for p in matrices)
        trained = [p for p, _ in held_parameters(self.spec, module, stage) if p.trainable]
        first = min((p.layer for p in trained), default=math.inf)
        data = total if needs_input else sum(p.num_elements for p in matrices if p.layer > first)
        weights = sum(p.num_elements for p in matrices if p.trainable)
        factor = (data + weights) / max(1, total) + self.plan.modules[module].activation_checkpointing
        return forward, factor * forward

    def _gather_ms(self, module: str, stage: Stage, tokens: int) -> float:
        """
        What the keys and values of one sample take longer to come from the other rows of ranks than the attention that
        is computed at the same time.
        """
        part, num_rows, tp_size = self.spec.modules[module], len(stage.ranks), len(stage.ranks[0])
        width = 2 * part.num_kv_heads * (part.hidden_size // part.num_heads) / tp_size
        received = BYTES_PER_VALUE * width * tokens * (num_rows - 1) / num_rows
        attention = 2 * tokens**2 * part.hidden_size / (self.device.flops_per_ms * len(stage.all_ranks))
        return stage.num_layers * max(0.0, received / (self.device.link_gb_per_s * 1e6) - attention)

    def message_ms(self, message: Message) -> float:
        """Time that a message travels: two bytes a value, over one link for each rank of the smaller grid."""
        forward = message.source if message.kind == "act" else message.target
        other = message.target if message.kind == "act" else message.source
        slots = self.step.chunks[forward.module, forward.replica, forward.microbatch][forward.chunk]
        width = self.spec.modules[other.module].hidden_size
        taken = self.step.chunks[other.module, other.replica, other.microbatch][other.chunk]
        samples = len(set(slots) & set(taken))
        num_bytes = BYTES_PER_VALUE * samples * self.tokens.per_sample(forward.module) * width
        links = min(
            len(self.plan.stage(t.module, t.replica, t.stage).all_ranks) for t in (message.source, message.target)
        )
        return num_bytes / links / (self.device.link_gb_per_s * 1e6)


def layer_width(module: ModuleSpec) -> int:
    """Values that a layer keeps of a token for its backward: norms, attention, feed-forward."""
    return 8 * module.hidden_size + 3 * module.intermediate_size
