"""What a rank that joins a training is told of it, to go on from there: a checkpoint without weights."""

from __future__ import annotations

import contextlib
import copy
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from ..callbacks.base import EngineCallback
from ..runtime.optimizer_names import settings_of
from .data_progress import save_trainer_state

_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")


@dataclass(frozen=True)
class ToldRun:
    """A run between two steps, without weights and what belongs to them."""

    files: dict[str, bytes]  # of a checkpoint: the states of the Trainer and its callbacks, the position in the data
    schedule: dict[str, Any]  # state of the learning rate schedule
    groups: list[dict[str, Any]]  # settings of the groups of the optimizer
    sums: dict[str, float]  # what the Trainer adds up between two logs
    callbacks: list[tuple[str, dict[str, Any]]]  # class and attributes of each one that has a state

    @classmethod
    def of(cls, trainer: Any, steps: Any) -> ToldRun:
        """Returns the run of this rank's Trainer and its [`TrainingSteps`]."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            state = copy.deepcopy(trainer.state)  # without what is written
            save_trainer_state(folder, state, [*trainer.callback_handler.callbacks, trainer.control])
            steps.save(folder, trainer.state.global_step)
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
        groups = [settings_of(group) for group in trainer.optimizer.param_groups]
        sums = {name: float(getattr(trainer, name)) for name in _SUMS}
        callbacks = [(type(one).__name__, _state_of(one)) for one in trainer.callback_handler.callbacks]
        return cls(files, trainer.lr_scheduler.state_dict(), groups, sums, callbacks)

    @classmethod
    def from_bytes(cls, data: bytes) -> ToldRun:
        """The inverse of [`ToldRun.to_bytes`]."""
        return pickle.loads(data)

    def to_bytes(self) -> bytes:
        """The run as other ranks are sent it."""
        return pickle.dumps(self)

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str]:
        """A folder with the files, for the duration of a block."""
        with tempfile.TemporaryDirectory(prefix="hf_mmparallel-") as folder:
            for name, content in self.files.items():
                Path(folder, name).write_bytes(content)
            yield folder

    def restore_schedule(self, optimizer: Any, schedule: Any) -> None:
        """Gives the schedule its state, and the optimizer the groups of the others, without parameters."""
        optimizer.param_groups[:] = [{"params": [], **settings} for settings in self.groups]
        lambdas = getattr(schedule, "lr_lambdas", self.groups)
        if len(lambdas) != len(self.groups):  # the same for all groups, of which this rank had others
            schedule.lr_lambdas = [lambdas[0]] * len(self.groups)
        schedule.load_state_dict(self.schedule)

    def restore_callbacks(self, trainer: Any) -> None:
        """Gives callbacks what others have noted, such as the patience left of `EarlyStoppingCallback`."""
        told = list(self.callbacks)  # all ranks decide alike; callbacks of one class are told apart by their order
        for callback in trainer.callback_handler.callbacks:
            name = type(callback).__name__
            found = next((entry for entry in told if entry[0] == name), None)
            if found is not None:
                told.remove(found)
                for attribute, value in found[1].items():
                    setattr(callback, attribute, value)

    def restore_sums(self, trainer: Any) -> None:
        """Gives a Trainer in its loop what it adds up between two logs."""
        for name, value in self.sums.items():
            setattr(trainer, name, value)
        trainer._globalstep_last_logged = int(trainer._globalstep_last_logged)
        trainer._tr_loss = torch.tensor(self.sums["_tr_loss"], device=trainer.args.device)


def _state_of(callback: Any) -> dict[str, Any]:
    """The attributes of a callback that ranks which join are given."""
    if isinstance(callback, EngineCallback):
        return callback.shared_state()
    return callback.state()["attributes"] if isinstance(callback, ExportableState) else {}
