"""The inputs of the tasks of one step on one rank: samples, batches, feature tokens of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._device import to_device
from ..data.context_tokens import WORDS, ChunkKey, ContextSharding
from ..data.item_sharding import Sharding
from ..data.step_batch import StepData
from ..kernels.bitfield_attention.context_parallel import SequenceShard
from ..modeling import count_feature_tokens
from ..modeling.host_values import send_known
from ..modeling.shared_tokens import TOKEN_GROUP
from ..plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ParallelPlan, Stage, StageKey
from ..schedule.kinds import Task

Owners = tuple[Tensor, Tensor]


class FeatureOrder:
    """The tokens of a task's features: one block for each feature, in it the tokens of each sample in turn."""

    def __init__(
        self, features: Sequence[FeatureSpec], samples: Sequence[int], num_tokens: Mapping[str, Sequence[int]]
    ):
        # (feature, sample by batch index) -> its first token and number of tokens
        self.starts: dict[tuple[int, int], tuple[int, int]] = {}
        self.sizes: list[int] = []
        token = 0
        for number, feature in enumerate(features):
            first = token
            for sample, count in zip(samples, num_tokens[feature.modality], strict=True):
                self.starts[number, sample] = (token, count)
                token += count
            self.sizes.append(token - first)
        self.num_tokens = token

    def positions(self, samples: Sequence[int]) -> Tensor:
        """Returns the tokens of some samples, feature by feature: int64 `[num_tokens]`."""
        ranges = [self.starts[number, sample] for number in range(len(self.sizes)) for sample in samples]
        spans = [torch.arange(start, start + count) for start, count in ranges]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


class FeatureOwners:
    """The cp rank that has each token of a task's features, and its index among the tokens there, of all features."""

    def __init__(self, order: FeatureOrder, owners: Sequence[Owners] | None = None, cp_size: int = 1):
        # `owners` has for each feature, int64 `[tokens]`, the cp rank of each token and its index among the feature's
        # tokens there; without it one cp rank has all
        self.order = order
        self.cp_ranks: Tensor | None = None
        self.indices: Tensor | None = None
        self.sizes: list[list[int]] = [order.sizes]  # of each cp rank, its tokens of each feature
        if owners is not None:
            counts = torch.stack([ranks.bincount(minlength=cp_size) for ranks, _ in owners])
            starts = counts.cumsum(0) - counts
            self.cp_ranks = torch.cat([ranks for ranks, _ in owners])
            self.indices = torch.cat([starts[i][ranks] + indices for i, (ranks, indices) in enumerate(owners)])
            self.sizes = counts.T.tolist()

    def select(self, samples: Sequence[int]) -> tuple[Tensor | None, Tensor]:
        """Returns int64 `[num_tokens]` cp ranks of the tokens of samples, `None` if one has all, and indices there."""
        positions = self.order.positions(samples)
        if self.cp_ranks is None or self.indices is None:
            return None, positions
        return self.cp_ranks[positions], self.indices[positions]


class StepInputs:
    """
    The inputs of the tasks of one step on one rank. They stay in host memory, where shapes and numbers of tokens are
    read, and a task's are copied to the device for its forward.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        rank: int,
        spec: ModelSpec,
        stages: Mapping[StageKey, Any],
        groups: Mapping[tuple[int, ...], Any],
        data: StepData,
        device: torch.device,
    ):
        self.plan = plan
        self.rank = rank
        self.spec = spec
        self.stages = stages
        self.groups = groups
        self.device = device
        self.step = data.step
        self._batches = data.batches
        self._shardings = data.shardings
        self._num_tokens: dict[ChunkKey, dict[str, list[int]]] = {}
        self._local: dict[tuple, Mapping[str, Any]] = {}
        self._on_device: dict[tuple, Mapping[str, Any]] = {}
        self._shapes: dict[tuple, list[torch.Size]] = {}
        self._owners: dict[tuple, FeatureOwners] = {}

    def planned_stage(self, task: Task) -> Stage:
        """Returns the stage of a task in the plan: its ranks and layers; `stages` has the layers themselves."""
        return self.plan.stage(*task.stage_key)

    def cp_rank(self, task: Task) -> int:
        return self.planned_stage(task).cp_rank_of(self.rank)

    def is_last(self, task: Task) -> bool:
        return task.stage == len(self.plan.modules[task.module].replicas[task.replica]) - 1

    def makes_logits(self, task: Task) -> bool:
        """Returns whether the first output of the task's stage is logits, from which a loss is computed."""
        return self.is_last(task) and task.module == LANGUAGE_MODEL

    def makes_loss(self, task: Task) -> bool:
        """Returns whether the only output of the task's stage is the loss of a generator."""
        return self.is_last(task) and task.module in self.plan.generators

    def is_empty(self, task: Task) -> bool:
        """Returns whether a task has no samples and only takes part in collectives, see [`build_graph`]."""
        return not self.samples(task)

    def samples(self, task: Task) -> tuple[int, ...]:
        return self.step.chunk(*_chunk_key(task))

    def whole_batch(self, task: Task) -> Mapping[str, Any]:
        """Returns the inputs of a task of this rank in host memory, with the tokens of all cp ranks."""
        return self._batches[_chunk_key(task)]

    def host_batch(self, task: Task) -> Mapping[str, Any]:
        """Returns the inputs of a task of this rank in host memory, with the tokens of its cp rank."""
        sharding = self._sharding(task)
        if sharding is None:
            return self.whole_batch(task)
        if task.key not in self._local:
            self._local[task.key] = sharding.local(self.whole_batch(task), self.cp_rank(task))
        return self._local[task.key]

    def batch(self, task: Task) -> Mapping[str, Any]:
        """Returns [`~StepInputs.host_batch`] on the device, with the mask words of all that its tokens attend to."""
        if task.key not in self._on_device:
            sharding, inputs = self._sharding(task), send_known(self.host_batch(task), self.device)
            if isinstance(sharding, ContextSharding):
                inputs[WORDS] = sharding.shard(self.cp_rank(task), self._cp_group(task), self.device)
            elif sharding is not None and sharding.by_tokens:
                inputs[TOKEN_GROUP] = self._cp_group(task)
            self._on_device[task.key] = inputs
        return self._on_device[task.key]

    def _cp_group(self, task: Task) -> Any:
        """Returns the process group of the ranks that share the tokens of a task with this one."""
        stage = self.planned_stage(task)
        return self.groups[stage.cp_groups[stage.mesh[self.cp_rank(task)].index(self.rank)]]

    def is_real(self, task: Task) -> Tensor | None:
        """Returns which tokens of a task of the language model are no padding, float32 `[tokens]`, `None` for all."""
        batch, sharding = self.whole_batch(task), self._sharding(task)
        words = batch.get(WORDS)
        mask = batch.get("attention_mask") if words is None else words != 0
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        real = (mask != 0).flatten().float()
        if isinstance(sharding, ContextSharding):
            tokens = sharding.order[self.cp_rank(task)]
            real = real[tokens.clamp_min(0)] * (tokens >= 0)
        return to_device(real, self.device)

    def release(self, task: Task) -> None:
        """Frees the inputs of a task on the device."""
        self._on_device.pop(task.key, None)

    def forward_batch(self, task: Task, has_input_grad: bool) -> Mapping[str, Any]:
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
        if task.key not in self._shapes:
            # an encoder's follow from a forward
            inputs = self.host_batch(task) if task.module == LANGUAGE_MODEL else self.batch(task)
            self._shapes[task.key] = self.stages[task.stage_key].input_shapes(inputs)
        return self._shapes[task.key]

    def num_feature_tokens(self, task: Task) -> Mapping[str, Sequence[int]]:
        """Counts, by modality, feature tokens of each sample of a task of this rank or with sharded tokens."""
        sharding = self._sharding(task)
        if sharding is not None:
            return sharding.num_tokens
        key = _chunk_key(task)
        if key not in self._num_tokens:
            self._num_tokens[key] = count_feature_tokens(self._batches[key], self.spec.placeholders)
        return self._num_tokens[key]

    def num_local_tokens(self, task: Task) -> Mapping[str, int]:
        """Counts, by modality, the feature tokens of a task of this rank on its cp rank."""
        sharding = self._sharding(task)
        if sharding is None:
            return {modality: sum(counts) for modality, counts in self.num_feature_tokens(task).items()}
        cp_rank = self.cp_rank(task)
        return {modality: int((ranks == cp_rank).sum()) for modality, (ranks, _) in sharding.owners.items()}

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

    def _sharding(self, task: Task) -> Sharding | None:
        """Returns how the tokens or images of a task are sharded over its cp ranks; `None` for one cp rank."""
        return self._shardings.get(_chunk_key(task))


def _chunk_key(task: Task) -> ChunkKey:
    return (task.module, task.replica, task.microbatch, task.chunk)


def check_features_computed(inputs: StepInputs, task: Task) -> None:
    """Refuses a sample with placeholders whose features enter a task, but are computed nowhere."""
    samples = inputs.samples(task)
    for edge in inputs.plan.edges:
        if edge.target != task.module or task.stage not in inputs.plan.edge_stages(edge, task.replica):
            continue
        absent = [
            index for index, sample in enumerate(samples) if (edge.source, sample) not in inputs.step.location_of
        ]
        for feature in inputs.spec.edge_features(edge.source, edge.target) or ():
            for index in absent:
                count = inputs.num_feature_tokens(task)[feature.modality][index]
                if count:
                    raise ValueError(
                        f"Sample {inputs.step.samples[samples[index]]} has {count} placeholders of "
                        f"`{feature.modality}` in `input_ids`, but the sizes of samples give it no tokens in "
                        f"`{edge.source}`, so that nothing computes their features. Correct its size in the "
                        "column or the function that they come from."
                    )


def check_feature_tokens(inputs: StepInputs, task: Task, outputs: Sequence[Tensor]) -> None:
    """Checks that the last stage of a module made a feature token for each placeholder of its samples."""
    features = inputs.spec.modules[task.module].features
    if not features or not inputs.is_last(task):
        return
    sizes = inputs.feature_owners(task, features).sizes[inputs.cp_rank(task)]
    for feature, output, wanted in zip(features, outputs, sizes, strict=True):
        if output.shape[0] != wanted:
            samples = [inputs.step.samples[sample] for sample in inputs.samples(task)]
            raise ValueError(
                f"Samples {samples} have {wanted} placeholders of `{feature.modality}` in `input_ids`, but "
                f"`{task.module}` made {output.shape[0]} features of them. Make the processor's placeholders and "
                "media agree."
            )


def check_labels(batch: Mapping[str, Any]) -> None:
    if batch.get("labels") is None and batch.get("shift_labels") is None:
        raise ValueError(
            f"The batch has no `labels` to train on, only {', '.join(f'`{name}`' for name in batch)}. Add a "
            "column `labels`, or a collator that makes it."
        )
