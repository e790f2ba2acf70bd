"""The training steps of a run under a plan: a global batch is read, run and checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..data.step_batch import StepBatch, UnreadableBatch
from ..data.step_dataset import StepDataset
from ..plan.arrangement_policies import KEEPING_LIMITS
from ..runtime.engine import ParallelEngine, StepTotals
from ..world import ACTIVITY, shared_failure
from .agreement import SampleAgreement, TargetCount
from .arguments import MultimodalTrainingArguments
from .data_progress import DataProgress
from .finite import FiniteCheck
from .loaders import TrainingLoader
from .memory_ratio import Mark, MemoryRatio
from .oversized_samples import LimitWatch


class TrainingSteps:
    """
    Reads and runs the steps of a training, and warns of what goes wrong in them.

    Args:
        engine ([`ParallelEngine`]): This rank's part of the model.
        args ([`MultimodalTrainingArguments`]): The arguments.
        global_batch_size (`int`): Samples of a global batch.

    Attributes:
        samples ([`SampleAgreement`]): Leaves out samples that can't be read.
        finite ([`FiniteCheck`]): Warns of losses and gradients that are not finite.
        limits ([`LimitWatch`]): Warns of samples above the limits of microbatches.
        memory_ratio ([`MemoryRatio`], *optional*): With `memory_limit_gib="auto"`; of the loader in use.
        progress ([`DataProgress`]): Position of the run in its data.
        totals ([`StepTotals`]): Sums of the last step over all ranks.
    """

    def __init__(self, engine: ParallelEngine, args: MultimodalTrainingArguments, global_batch_size: int):
        self.engine = engine
        self.global_batch_size = global_batch_size
        self.samples = SampleAgreement(args.on_bad_sample == "skip", engine.world, "training dataset")
        self.finite = FiniteCheck(args.logging_nan_inf_filter)
        self.memory_ratio: MemoryRatio | None = None
        self.progress = DataProgress(global_batch_size)
        self.totals = StepTotals(0.0, 0, 0, 0)
        self._targets = TargetCount()
        self.limits = LimitWatch()

    def begin(self, checkpoint: str | None) -> None:
        """Sets the position in the data to that of a checkpoint, or to the start. Collective."""
        self.progress = self.engine.world.raise_together(lambda: DataProgress(self.global_batch_size, checkpoint))
        self.samples.num_skipped = self.progress.position.num_skipped

    def use(self, training: TrainingLoader) -> None:
        """Lets the steps that follow be those of a loader, for callbacks, errors and the memory ratio."""
        self.engine.plan_steps_with(training.run_planner)
        self.memory_ratio = training.memory_ratio

    @property
    def learned_ratio(self) -> Mark | None:
        """The memory ratio that the checkpoint has."""
        learned = self.progress.position.memory_ratio
        return None if learned is None else (learned[0], learned[1], learned[2])

    def read(self, items: Iterator[StepBatch | UnreadableBatch], dataset: StepDataset, step: int) -> StepBatch | None:
        """
        Reads the next global batch, without samples that can't be read. Collective.

        Args:
            items (`Iterator[StepBatch | UnreadableBatch]`): The items of the training loader.
            dataset (`StepDataset`): The dataset of the loader, which reads a batch again.
            step (`int`): Number of the step.

        Returns:
            [`StepBatch`]: The batch; `None` at the end of an epoch.
        """
        ACTIVITY.step = step
        engine = self.engine
        with shared_failure("reading samples"):
            with engine.waiting_for_data():
                item = next(items, None)
            batch = self.samples.agree(item, dataset)
        if batch is None:
            return None
        self.progress.step(batch.global_batch)
        if engine.planner is not None and engine.planner.arrangement in KEEPING_LIMITS:
            self.limits.saw(batch.step, batch.workloads)
        return batch

    def run(self, batch: StepBatch, index: int) -> StepTotals:
        """
        Computes the gradients of a global batch. Collective.

        Args:
            batch ([`StepBatch`]): The batch, on this rank's device.
            index (`int`): Steps before it.
        """
        self.totals = self.engine.train_step(batch, index)
        self._targets.saw(self.totals.num_targets, is_first=not index)
        if self.memory_ratio is not None:
            self.memory_ratio.saw_step(self.engine)
        self.finite.loss(index + 1, self.totals.mean_loss)
        return self.totals

    def gradient_norm(self, index: int, norm: torch.Tensor | None) -> torch.Tensor:
        """The norm of the gradient of a step, unless clipping has computed it, checked to be finite."""
        norm = self.engine.gradient_norm() if norm is None else norm
        self.finite.norm(index + 1, norm)
        return norm

    def num_tokens(self, counted: str) -> int:
        """Input tokens of the last step, as `include_num_input_tokens_seen` counts them."""
        if counted == "no":
            return 0
        return self.totals.num_real_tokens if counted == "non_padding" else self.totals.num_tokens

    def save(self, folder: Any, global_step: int) -> None:
        """Writes the position in the data into a checkpoint."""
        learned = None if self.memory_ratio is None else self.memory_ratio.learned
        self.progress.save(folder, global_step, self.samples.num_skipped, learned)
