"""What the messages of a step carry: which samples, which features, how many rows, of which shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..data.context_tokens import WORDS, BatchKey
from ..data.loader import StepBatch
from ..modeling import count_feature_tokens
from ..plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ParallelPlan, Stage
from ..schedule.actions import Message, Task
from .boundary import Leg, Placement, RowSpace, spread_legs, straight_legs

StageKey = tuple[str, int, int]


class MessageGeometry:
    """
    Sizes of the messages of one step on one rank, all derived from the plan, the step and this rank's inputs.

    Args:
        plan (`ParallelPlan`): The plan.
        rank (`int`): This rank.
        spec (`ModelSpec`): The model.
        batch (`StepBatch`): The step, the inputs of this rank's chunks, and how tokens are cut.
        groups (`Mapping[tuple[int, ...], ProcessGroup]`): Groups of ranks.
        stages (`Mapping[StageKey, ModuleStage]`): The stages of this rank.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        rank: int,
        spec: ModelSpec,
        batch: StepBatch,
        groups: Mapping[tuple[int, ...], Any],
        stages: Mapping[StageKey, Any],
    ):
        self.plan = plan
        self.rank = rank
        self.spec = spec
        self.step = batch.step
        self.batches = batch.batches
        self.cuts = batch.cuts
        self.groups = groups
        self._stages = stages
        self._rows: dict[BatchKey, dict[str, list[int]]] = {}
        self._shapes: dict[tuple, list[torch.Size]] = {}
        self._local: dict[tuple, Mapping[str, Any]] = {}
        self._placements: dict[tuple, Placement] = {}

    def stage(self, task: Task) -> Stage:
        return self.plan.stage(task.module, task.replica, task.stage)

    def row(self, task: Task) -> tuple[int, ...]:
        """The tensor-parallel ranks of a task of this rank that hold what this rank holds."""
        stage = self.stage(task)
        return stage.ranks[stage.row_of(self.rank)]

    def slots(self, task: Task) -> tuple[int, ...]:
        return self.step.chunks[task.module, task.replica, task.microbatch][task.chunk]

    def rows(self, task: Task) -> Mapping[str, Sequence[int]]:
        """Rows of each sample of a task of this rank, or one whose tokens are cut, by modality."""
        key = _batch_key(task)
        if key in self.cuts:
            return self.cuts[key].rows
        if key not in self._rows:
            self._rows[key] = count_feature_tokens(self.batches[key], self.spec)
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
        """The rows at an end of a boundary message: of all features of an encoder, of those that enter a stage."""
        features = self.spec.modules[task.module].features or [spec for _, spec in self.features(message)]
        return RowSpace(features, self.slots(task), self.rows(task))

    def placement(self, message: Message, task: Task) -> Placement:
        """Where the rows of the features that enter at the stage of `task` are, which takes a boundary message."""
        key = (task.key, self.ends(message)[0].module)
        if key not in self._placements:
            space = self.space(message, task)
            specs = [spec for _, spec in self.features(message)]
            holders = [self._holders(task, spec, size) for spec, size in zip(specs, space.sizes, strict=True)]
            self._placements[key] = Placement(space, holders, len(self.stage(task).ranks))
        return self._placements[key]

    def _holders(self, task: Task, feature: FeatureSpec, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row of a feature, the row of ranks that has its placeholder, and its place there."""
        cut = self.cuts.get(_batch_key(task))
        if cut is None:
            return torch.zeros(num_rows, dtype=torch.int64), torch.arange(num_rows)
        return cut.holders[feature.modality]

    def route(self, message: Message, task: Task, num_hidden: int = 0) -> list[tuple[Leg, torch.Tensor]]:
        """
        The legs of a message that begin or end on this rank.

        Args:
            message (`Message`): The message.
            task (`Task`): The end of the message whose task this rank runs.
            num_hidden (`int`, *optional*, defaults to 0): Rows of hidden states of this rank; for features unused.

        Returns:
            `list[tuple[Leg, torch.Tensor]]`: The legs, each with the places of its rows among those of this rank.
        """
        before, after = self.ends(message)
        is_before = task.key == before.key
        grids = self.stage(before).ranks, self.stage(after).ranks
        if message.crosses_boundary:
            places, owners = self._boundary_rows(message, task, is_before)
            legs = spread_legs(owners, *grids)
        else:
            places = torch.arange(num_hidden)
            legs = straight_legs(num_hidden, *grids)
        return [(leg, places[leg.rows]) for leg in legs if self.rank in (leg.before if is_before else leg.after)]

    def _boundary_rows(self, message: Message, task: Task, is_before: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row of a boundary message, its place on this rank and the row of ranks that takes it."""
        before, after = self.ends(message)
        slots = self.shared_slots(message)
        if is_before:
            chosen = [index for index, _ in self.features(message)]
            places = self.space(message, task).positions(slots, chosen)
            if len(self.stage(after).ranks) == 1:
                return places, torch.zeros_like(places)
        placement = self.placement(message, after)
        rows = placement.space.positions(slots)
        return (places if is_before else placement.places[rows]), placement.owners[rows]

    def shapes(self, task: Task) -> list[torch.Size]:
        """Shapes of the hidden states that the stage of `task` receives."""
        key = task.key
        if key not in self._shapes:
            stage = self._stages[task.module, task.replica, task.stage]
            self._shapes[key] = stage.input_shapes(self.batch(task))
        return self._shapes[key]

    def whole_batch(self, task: Task) -> Mapping[str, Any]:
        """The inputs of a task of this rank, those of all rows of ranks."""
        return self.batches[_batch_key(task)]

    def batch(self, task: Task) -> Mapping[str, Any]:
        """The inputs of a task on this rank: the tokens of its row of ranks."""
        cut = self.cuts.get(_batch_key(task))
        if cut is None:
            return self.whole_batch(task)
        if task.key not in self._local:
            whole, stage = self.whole_batch(task), self.stage(task)
            row = stage.row_of(self.rank)
            column = stage.columns[stage.ranks[row].index(self.rank)]
            shard = cut.shard(row, self.groups[column], whole[WORDS].device)
            self._local[task.key] = {**cut.local(whole, row), WORDS: shard}
        return self._local[task.key]

    def check_encoded(self, task: Task) -> None:
        """Raises `ValueError` for a sample with placeholders of an encoder that has no part of it in this step."""
        slots = self.slots(task)
        for edge in self.plan.edges:
            if edge.target != task.module or task.stage not in self.plan.edge_stages(edge, task.replica):
                continue
            absent = [index for index, slot in enumerate(slots) if (edge.source, slot) not in self.step.places]
            for feature in self.spec.modules[edge.source].features:
                for index in absent:
                    count = self.rows(task)[feature.modality][index]
                    if count:
                        raise ValueError(
                            f"Sample {self.step.samples[slots[index]]} has {count} placeholders of "
                            f"`{feature.modality}` in `input_ids`, but the sizes of samples give it no tokens in "
                            f"`{edge.source}`, so that nothing computes their features. Correct its size in the "
                            "column or the function that they come from."
                        )

    def is_last(self, task: Task) -> bool:
        """Whether the task's stage ends in the logits."""
        replica = self.plan.modules[task.module].replicas[task.replica]
        return task.module == LANGUAGE_MODEL and task.stage == len(replica) - 1


def _batch_key(task: Task) -> BatchKey:
    return (task.module, task.replica, task.microbatch, task.chunk)


def num_rows_of(shape: Sequence[int]) -> int:
    """Rows of a hidden state whose last dimension is its width."""
    count = 1
    for size in shape[:-1]:
        count *= size
    return count
