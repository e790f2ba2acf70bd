"""The inputs of the tasks of one step on one rank: samples, batches, feature tokens of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..data.context_tokens import WORDS, ChunkKey, ContextSharding
from ..data.step_batch import StepData
from ..kernels.bitfield_attention.context_parallel import SequenceShard
from ..modeling import count_feature_tokens
from ..plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ParallelPlan, Stage, StageKey
from ..schedule.actions import Task
from .feature_tokens import FeatureOrder, FeatureOwners


class StepInputs:
    """The inputs of the tasks of one step on one rank."""

    def __init__(
        self,
        plan: ParallelPlan,
        rank: int,
        spec: ModelSpec,
        stages: Mapping[StageKey, Any],
        groups: Mapping[tuple[int, ...], Any],
        data: StepData,
    ):
        self.plan = plan
        self.rank = rank
        self.spec = spec
        self.stages = stages
        self.groups = groups
        self.step = data.step
        self._batches = data.batches
        self._shardings = data.shardings
        self._num_tokens: dict[ChunkKey, dict[str, list[int]]] = {}
        self._local: dict[tuple, Mapping[str, Any]] = {}
        self._shapes: dict[tuple, list[torch.Size]] = {}
        self._owners: dict[tuple, FeatureOwners] = {}

    def planned_stage(self, task: Task) -> Stage:
        """Returns the stage of a task in the plan: its ranks and layers; `stages` has the layers themselves."""
        return self.plan.stage(*task.stage_key)

    def cp_rank(self, task: Task) -> int:
        """Returns the cp rank of this rank in the mesh of a task."""
        return self.planned_stage(task).cp_rank_of(self.rank)

    def tp_group(self, task: Task) -> tuple[int, ...]:
        """Returns the tp group of this rank in the mesh of a task, whose ranks have the same tokens."""
        return self.planned_stage(task).mesh[self.cp_rank(task)]

    def is_last(self, task: Task) -> bool:
        """Returns whether the task's stage is the last one of its replica."""
        return task.stage == len(self.plan.modules[task.module].replicas[task.replica]) - 1

    def makes_logits(self, task: Task) -> bool:
        """Returns whether the first output of the task's stage is logits, from which a loss is computed."""
        is_sink = all(edge.source != task.module for edge in self.plan.edges)
        return self.is_last(task) and (task.module == LANGUAGE_MODEL or is_sink)

    def is_empty(self, task: Task) -> bool:
        """Returns whether a task has no samples and only takes part in collectives, see [`build_graph`]."""
        return not self.samples(task)

    def samples(self, task: Task) -> tuple[int, ...]:
        """Returns batch indices of the samples of a task."""
        return self.step.chunk(*_chunk_key(task))

    def whole_batch(self, task: Task) -> Mapping[str, Any]:
        """Returns the inputs of a task of this rank, with the tokens of all cp ranks."""
        return self._batches[_chunk_key(task)]

    def batch(self, task: Task) -> Mapping[str, Any]:
        """Returns the inputs of a task of this rank, with the tokens of its cp rank."""
        sharding = self._sharding(task)
        if sharding is None:
            return self.whole_batch(task)
        if task.key not in self._local:
            whole, stage, cp_rank = self.whole_batch(task), self.planned_stage(task), self.cp_rank(task)
            shared_by = stage.cp_groups[stage.mesh[cp_rank].index(self.rank)]
            shard = sharding.shard(cp_rank, self.groups[shared_by], whole[WORDS].device)
            self._local[task.key] = {**sharding.local(whole, cp_rank), WORDS: shard}
        return self._local[task.key]

    def forward_batch(self, task: Task, has_input_grad: bool) -> Mapping[str, Any]:
        """Returns [`~StepInputs.batch`] for the forward of a task."""
        batch = self.batch(task)
        words = batch.get(WORDS)
        if not isinstance(words, SequenceShard) or not has_input_grad:
            return batch
        # all cp ranks run the backward of the attention if any needs the gradient of an input, also without a feature
        # token
        return {**batch, WORDS: replace(words, has_backward=True)}

    def gather_tokens(self, task: Task, tokens: torch.Tensor) -> torch.Tensor:
        """Gathers the values of all tokens of a task's batch, from those of each cp rank."""
        words = self.batch(task).get(WORDS)
        return words.gather_tokens(tokens) if isinstance(words, SequenceShard) else tokens

    def hidden_shapes(self, task: Task) -> list[torch.Size]:
        """Returns shapes of the hidden states that the stage of a task receives."""
        if task.key not in self._shapes:
            self._shapes[task.key] = self.stages[task.stage_key].input_shapes(self.batch(task))
        return self._shapes[task.key]

    def num_feature_tokens(self, task: Task) -> Mapping[str, Sequence[int]]:
        """Counts, by modality, feature tokens of each sample of a task of this rank or with sharded tokens."""
        sharding = self._sharding(task)
        if sharding is not None:
            return sharding.num_tokens
        key = _chunk_key(task)
        if key not in self._num_tokens:
            self._num_tokens[key] = count_feature_tokens(self._batches[key], self.spec)
        return self._num_tokens[key]

    def feature_owners(self, task: Task, features: tuple[FeatureSpec, ...]) -> FeatureOwners:
        """Returns cp rank and index of each feature token in a task of this rank, or one whose tokens are sharded."""
        key = (task.key, features)
        if key not in self._owners:
            order = FeatureOrder(features, self.samples(task), self.num_feature_tokens(task))
            sharding = self._sharding(task)
            if sharding is None:
                self._owners[key] = FeatureOwners(order)
            else:
                owners = [sharding.owners[feature.modality] for feature in features]
                self._owners[key] = FeatureOwners(order, owners, self.planned_stage(task).cp_size)
        return self._owners[key]

    def _sharding(self, task: Task) -> ContextSharding | None:
        """Returns how the tokens of a task are sharded over its cp ranks; `None` for one cp rank."""
        return self._shardings.get(_chunk_key(task))


def _chunk_key(task: Task) -> ChunkKey:
    return (task.module, task.replica, task.microbatch, task.chunk)
