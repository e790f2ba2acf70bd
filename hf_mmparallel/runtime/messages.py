"""What the messages of a step carry: which samples, which features, how many rows, of which shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ParallelPlan, StepPlan
from ..schedule.actions import Message, Task
from .boundary import RowSpace

BatchKey = tuple[str, int, int, int]
StageKey = tuple[str, int, int]


class MessageGeometry:
    """
    Sizes of the messages of one step on one rank, all derived from the plan, the step and this rank's inputs.

    Args:
        plan (`ParallelPlan`): The plan.
        spec (`ModelSpec`): The model.
        step (`StepPlan`): Which sample is where.
        batches (`Mapping[BatchKey, Mapping[str, Any]]`): Inputs of this rank's chunks.
        stages (`Mapping[StageKey, ModuleStage]`): The stages of this rank.
        count_rows (`Callable`): (inputs, spec) -> modality -> rows of each sample.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        spec: ModelSpec,
        step: StepPlan,
        batches: Mapping[BatchKey, Mapping[str, Any]],
        stages: Mapping[StageKey, Any],
        count_rows: Callable[[Mapping[str, Any], ModelSpec], dict[str, list[int]]],
    ):
        self.plan = plan
        self.spec = spec
        self.step = step
        self.batches = batches
        self._stages = stages
        self._count_rows = count_rows
        self._rows: dict[BatchKey, dict[str, list[int]]] = {}
        self._shapes: dict[tuple, list[torch.Size]] = {}

    def grid(self, task: Task) -> tuple[int, ...]:
        return self.plan.stage(task.module, task.replica, task.stage).ranks[0]

    def slots(self, task: Task) -> tuple[int, ...]:
        return self.step.chunks[task.module, task.replica, task.microbatch][task.chunk]

    def rows(self, task: Task) -> dict[str, list[int]]:
        """Rows of each sample of a task of this rank, by modality."""
        key = (task.module, task.replica, task.microbatch, task.chunk)
        if key not in self._rows:
            self._rows[key] = self._count_rows(self.batches[key], self.spec)
        return self._rows[key]

    def features(self, message: Message) -> list[tuple[int, FeatureSpec]]:
        """The features (place in the encoder's outputs, spec) that a boundary message carries."""
        encoder, taker = self.ends(message)
        edge = next(e for e in self.plan.edges if (e.source, e.target) == (encoder.module, taker.module))
        chosen = self.plan.edge_stages(edge, taker.replica)[taker.stage]
        return [(index, self.spec.modules[encoder.module].features[index]) for index in chosen]

    @staticmethod
    def ends(message: Message) -> tuple[Task, Task]:
        """(task before, task after) in the direction of the forward."""
        if message.kind == "act":
            return message.source, message.target
        return message.target, message.source

    def shared_slots(self, message: Message) -> list[int]:
        encoder, taker = self.ends(message)
        taken = set(self.slots(taker))
        return [slot for slot in self.slots(encoder) if slot in taken]

    def space(self, message: Message, task: Task) -> RowSpace:
        """The rows of `task` (one end of a boundary message) that the message's features have."""
        return RowSpace([spec for _, spec in self.features(message)], self.slots(task), self.rows(task))

    def shapes(self, task: Task) -> list[torch.Size]:
        """Shapes of the hidden states that the stage of `task` receives."""
        key = task.key
        if key not in self._shapes:
            stage = self._stages[task.module, task.replica, task.stage]
            self._shapes[key] = stage.input_shapes(self.batch(task))
        return self._shapes[key]

    def batch(self, task: Task) -> Mapping[str, Any]:
        return self.batches[task.module, task.replica, task.microbatch, task.chunk]

    def is_last(self, task: Task) -> bool:
        """Whether the task's stage ends in the logits."""
        replica = self.plan.modules[task.module].replicas[task.replica]
        return task.module == LANGUAGE_MODEL and task.stage == len(replica) - 1

    def message_width(self, message: Message) -> int:
        if message.crosses_boundary:
            return self.spec.language_model.hidden_size
        return self.shapes(message.target)[0][-1]


def num_rows_of(shape: Sequence[int]) -> int:
    """Rows of a hidden state whose last dimension is its width."""
    count = 1
    for size in shape[:-1]:
        count *= size
    return count
