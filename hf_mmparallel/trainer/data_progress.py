"""The state of a Trainer in a checkpoint, and its position in the data, counted in samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import has_length

from .._files import check_complete, readable
from ..data.global_batches import GlobalBatch
from ..data.position import DataPosition
from .memory_ratio import Mark


def check_trainer_state(folder: Path) -> None:
    """Raises `ValueError` if the stock Trainer could not read its state in a checkpoint."""
    check_complete(folder, TRAINER_STATE_NAME)
    with readable(folder / TRAINER_STATE_NAME):
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))


def save_trainer_state(folder: Path, state: TrainerState, stateful: Iterable[Any]) -> None:
    """Writes the state of a Trainer, with those of the callbacks and the control that have one (`stateful`)."""
    for part in stateful:
        if isinstance(part, ExportableState):
            name = type(part).__name__
            states: Any = state.stateful_callbacks
            if isinstance(states[name], list):
                states[name].append(part.state())
            else:
                states[name] = part.state()
    state.save_to_json(str(folder / TRAINER_STATE_NAME))


class DataProgress:
    """The position of a training run in its data, of the checkpoint that it goes on from or the start."""

    def __init__(self, global_batch_size: int, folder: str | None = None):
        self.global_batch_size = global_batch_size
        saved = None if folder is None else DataPosition.load(folder)
        self.position = saved or DataPosition()
        self.resumed_at: tuple[int, int] | None = None

    def step(self, global_batch: GlobalBatch) -> None:
        """Advances by the samples of a step."""
        self.position = self.position.after(global_batch, self.global_batch_size)

    def training_values(self, values: tuple, args: Any, dataloader: DataLoader) -> tuple:
        """
        Returns the `values` of `Trainer.set_initial_training_values` for a resumed run, maybe with another batch size:
        the number of steps follows from the samples that are left. The loader's global batches get the position.
        """
        position = self.position
        if args.ignore_data_skip:
            self.position = DataPosition(num_skipped=position.num_skipped)
        if not position.global_step or args.ignore_data_skip:
            return values
        epochs, steps_per_epoch, *others, max_steps = values
        global_batches: Any = dataloader.batch_sampler
        num_samples = len(global_batches.sampler) if has_length(dataloader) else None
        epoch, done = self.resumed_at = position.resume(global_batches, num_samples)
        if num_samples is not None and args.max_steps > 0:
            epochs = epoch + math.ceil((max_steps - position.global_step + done) / steps_per_epoch)
        elif num_samples is not None:
            max_steps += position.global_step - epoch * steps_per_epoch - done
        return epochs, steps_per_epoch, *others, max_steps

    def save(self, folder: Path, global_step: int, num_skipped: int, memory_ratio: Mark | None = None) -> None:
        """Writes the position into a checkpoint, with the memory ratio."""
        learned = self.position.memory_ratio if memory_ratio is None else list(memory_ratio)
        position = dataclasses.replace(
            self.position, global_step=global_step, num_skipped=num_skipped, memory_ratio=learned
        )
        position.save(folder)
