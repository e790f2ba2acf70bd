"""A training that goes on when ranks are lost, and that others can join."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from transformers.trainer_callback import ExportableState, ProgressCallback

from ..resilience.pipelines import ClusterPlan, TooFewNodesError
from ..runtime.held_state import HeldParameter, give_to_optimizer, held_parameters, let_go, restore_state
from ..runtime.optimizer_slices import settings_of
from ..runtime.optimizers import prepare_optimizer
from ..world import Membership, raise_on_all_ranks, track_activity
from ..world.connections import end_collectives
from .arguments import set_ranks
from .engine_callback import EngineCallback
from .engine_state import EngineState
from .recovery import MembershipChange, Recovery, RepeatedFailureError, place_of
from .training_steps import save_trainer_state

logger = get_logger(__name__)

_TRACKERS = "transformers.integrations.integration_utils"  # whose callbacks report to wandb, trackio, ClearML, ...
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")


@dataclass(frozen=True)
class JoinState:
    """What a rank that joins is told of a run between two steps: a checkpoint without weights."""

    files: dict[str, bytes]  # of a checkpoint: the states of the Trainer and its callbacks, the position in the data
    schedule: dict[str, Any]  # state of the learning rate schedule
    groups: list[dict[str, Any]]  # settings of the groups of the optimizer
    sums: dict[str, float]  # what the Trainer adds up between two logs
    callbacks: list[tuple[str, dict[str, Any]]]  # class and attributes of each one that has a state

    @classmethod
    def of(cls, trainer: Any, steps: Any) -> JoinState:
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
        for name, value in self.sums.items():
            setattr(trainer, name, value)
        trainer._globalstep_last_logged = int(trainer._globalstep_last_logged)
        trainer._tr_loss = torch.tensor(self.sums["_tr_loss"], device=trainer.args.device)


def _state_of(callback: Any) -> dict[str, Any]:
    """The attributes of a callback that ranks which join are given."""
    if isinstance(callback, EngineCallback):
        return callback.shared_state()
    return callback.state()["attributes"] if isinstance(callback, ExportableState) else {}


T = TypeVar("T")
_CONTROL_FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


class Survival:
    """Repeats work of a Trainer in which ranks were lost, and lays the run out anew, with `resilience`."""

    def __init__(self, trainer: Any, run: EngineState):
        self.trainer, self.run = trainer, run
        self.recovery: Recovery | None = None  # in a training
        self.told: JoinState | None = None  # of a rank that joins, until it has its place
        self.join_folder: str | None = None  # the checkpoint that it begins from
        self._loss = torch.zeros(())  # of the last step, as it is logged

    def repeat(self, work: Callable[[], T]) -> T:
        return work() if self.recovery is None else self.recovery.run(work)

    def complete(self, work: Callable[[], T]) -> T:
        return work() if self.recovery is None else self.recovery.complete(work)

    def run_step(self) -> torch.Tensor:
        """Computes the gradients of the global batch that was read last; returns the loss that is logged."""
        self._loss = self.repeat(self._run_step)
        return self._loss

    def _run_step(self) -> torch.Tensor:
        if self.recovery is not None:
            self.trainer._engine.signs["sees_waiting"] = bool(self.recovery.membership.waiting)
            self.trainer._engine.signs["gave_up_save"] = self.run.saves.has_given_up
        with raise_on_all_ranks("training step"):
            totals = self.run.steps.run(self.trainer.state.global_step)
        loss = totals.mean_loss.to(self.trainer.args.device, torch.float32)
        return self.run.steps.finite.logged(loss, self.trainer)

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the gradient over the parameters of all ranks; with it the step counts."""
        engine = self.trainer._engine
        if self.recovery is None:
            norm = engine.gradient_norm()
        else:
            while (square := self.recovery.commit(lambda: float(engine.gradient_square()))) is None:
                before = self._loss
                self.trainer._tr_loss += self.run_step() - before  # the loop has added that of the attempt before
            norm = engine.norm_of_square(torch.tensor(square, dtype=torch.float64, device=engine.device))
        if engine.num_signs["gave_up_save"]:
            self.trainer.control.should_save = True
        self.run.steps.step_counts()
        return norm

    def agree_on_control(self) -> bool:
        """Whether any rank asks for something; then all do, which is logged if they did not before. Collective."""
        trainer = self.trainer
        asked = [getattr(trainer.control, name) for name in _CONTROL_FLAGS]

        def compare() -> list[list[int]]:
            numbers = [[(trainer.world.rank + 1) * flag for flag in asked], [-int(flag) for flag in asked]]
            return trainer.world.all_reduce(torch.tensor(numbers), "max", "what callbacks ask for").tolist()

        for name, last_rank, on_all in zip(_CONTROL_FLAGS, *self.complete(compare), strict=True):
            if last_rank and not on_all:
                logger.warning_once(
                    f"A callback sets `{name}` on rank {last_rank - 1} and not on all ranks. All ranks follow: they "
                    "log, evaluate, save and stop together."
                )
            setattr(trainer.control, name, bool(last_rank))
        return any(getattr(trainer.control, name) for name in _CONTROL_FLAGS)

    def note_signal(self) -> None:
        """This rank's node leaves after the step; a rank that has not joined yet ends at once."""
        if self.run.joins:
            raise SystemExit("Ended by a signal before it could join the training.")
        self.trainer._engine.signs["was_asked_to_leave"] = True

    def let_leave(self) -> None:
        """Goes on without nodes that were asked to leave, if any rank was in the last step."""
        engine = self.trainer._engine
        if self.recovery is not None and engine.num_signs["was_asked_to_leave"]:
            engine.num_signs["was_asked_to_leave"] = 0
            self.complete(self.run.finish_save)  # to which those who leave add a part
            self.recovery.let_leave(engine.signs["was_asked_to_leave"])

    def take_in(self) -> None:
        """Lets in processes that wait to join, if any rank knew of some in the last step."""
        if self.recovery is not None and self.trainer._engine.num_signs["sees_waiting"]:
            self.trainer._engine.num_signs["sees_waiting"] = 0
            self.recovery.take_in()

    @contextlib.contextmanager
    def join_checkpoint(self, given: str | None) -> Iterator[str | None]:
        """The checkpoint that a training begins from: for a rank that joins, what it is told once it is let in."""
        if self.recovery is None or not self.run.joins:
            yield given
            return
        logger.warning(f"Process {self.recovery.membership.id} waits to join the training.", main_process_only=False)
        with track_activity("waiting to join the training", waits=True):
            self.told = told = pickle.loads(self.recovery.wait_to_join())
        with told.checkpoint() as folder:
            self.join_folder = folder
            yield folder

    def end_saves(self) -> None:
        """Waits for the last checkpoint; makes another one if that was given up, since ranks were lost in it."""
        trainer = self.trainer
        self.complete(self.run.finish_save)
        # Of ranks that were lost in it, others may have finished before.
        given_up = self.complete(lambda: trainer.world.all_gather(self.run.saves.has_given_up, "the last checkpoint"))
        if any(given_up):
            trainer._save_checkpoint(trainer.model, None)
            self.complete(self.run.finish_save)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """A block in which the run goes on when ranks are lost, if the arguments ask for it."""
        trainer = self.trainer
        if trainer.args.resilience is None:
            yield
            return
        membership = Membership.from_environment()
        assert membership is not None and self.run.layouts is not None
        layouts, layout = self.run.layouts
        recovery = Recovery(membership, trainer.world, layouts, layout, self.held_parameters, self.follow, self.tell)
        gc.freeze()  # what is there by now need not be looked at when the groups of lost ranks are collected
        membership.start(functools.partial(end_collectives, trainer.world.backend))
        self.recovery = recovery
        try:
            try:
                yield
            except (TooFewNodesError, RepeatedFailureError) as error:
                trainer._save_checkpoint(trainer.model, None)
                self.end_saves()  # before the launcher hears that this process ends
                text = f"{error} The run is saved in `checkpoint-{trainer.state.global_step}` of its output folder."
                raise type(error)(text) from None
            recovery.complete(lambda: None)  # all ranks are there for what the script does next
        except BaseException as error:
            if recovery.has_begun:
                membership.report(f"{type(error).__name__}: {error}", place_of(error))
            raise
        else:
            membership.finish()
        finally:
            recovery.end()
            self.run.layouts = layouts, recovery.layout
            self.recovery = None
            gc.unfreeze()

    def tell(self) -> bytes:
        return pickle.dumps(JoinState.of(self.trainer, self.run.steps))

    def held_parameters(self) -> dict[str, HeldParameter]:
        """What this rank holds for the next layout; not gradients, which belong to a step that is done or repeated."""
        self.trainer.model.zero_grad()
        self.trainer.optimizer.zero_grad()
        return held_parameters(self.trainer.model, self.run.prepared_optimizer, self.trainer._engine.slices)

    def follow(self, layout: ClusterPlan, held: Mapping[str, HeldParameter], event: MembershipChange) -> None:
        """Lays the model, the optimizer and the data out for the ranks that are there now. Collective."""
        trainer = self.trainer
        engine, was_first = trainer._engine, trainer.state.is_world_process_zero
        assert self.recovery is not None
        self.run.saves.start_anew()
        set_ranks(trainer.world.rank, trainer.world.size, self.recovery.local_rank)
        let_go(trainer.model, self.run.prepared_optimizer, held)
        held = {name: part.to(engine.device) for name, part in held.items()}  # what was received is in host memory
        engine.change_plan(layout.plan, {name: parameter.values for name, parameter in held.items()})
        optimizer = self.run.prepared_optimizer
        give_to_optimizer(optimizer, trainer.model, held)
        prepare_optimizer(optimizer, engine.holds_all_trained, trainer.world, engine.slices, engine.storage)
        restore_state(optimizer, trainer.model, held)
        self.run.steps.follow_plan()
        self.run.evaluation_samples.compare_again()
        if self.told is not None:
            self.told.restore_sums(self.trainer)
            self.told.restore_callbacks(self.trainer)
            self.told, self.run.joins = None, False
        best = self.run.saves.best_left(trainer.state)
        trainer.world.broadcast(best, "the best checkpoint").give_to(trainer.state)
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        event.step = trainer.state.global_step
        event.total_s = time.time() - event.lost_at
        event.layout = ", ".join(f"{name}: {module.layout}" for name, module in layout.plan.modules.items())
        event.reason = layout.reason
        if trainer.is_world_process_zero():
            logger.warning(event.sentence)
            if not was_first:
                self._begin_on_first_rank()
        for callback in list(trainer.callback_handler.callbacks):
            if hasattr(callback, "on_reconfigure"):
                self._call(callback, "on_reconfigure", event=event)
        is_logged = trainer.control.should_log
        trainer.log(
            {
                "parallel/ranks": event.world_size,
                "parallel/recovered_in_s": round(event.total_s, 3),
                "parallel/recovery_copied_mib": round(event.copied_bytes / 2**20, 3),
            }
        )
        # A log takes what a callback asked for; the loss of a step whose callbacks were at work is still to come.
        trainer.control.should_log = is_logged

    def _begin_on_first_rank(self) -> None:
        """Begins what only the first rank has, now that this one is it: bars, runs of trackers, the repository."""
        if self.trainer.args.push_to_hub:
            self.trainer.init_hf_repo()
        for callback in list(self.trainer.callback_handler.callbacks):
            of_transformers = any(kind.__module__ == _TRACKERS for kind in type(callback).__mro__)
            if of_transformers and hasattr(callback, "_initialized"):
                callback._initialized = False  # most trackers note on all ranks that the first one has begun a run
            has_begun = not of_transformers or self._call(callback, "on_init_end")
            if of_transformers or isinstance(callback, ProgressCallback):
                has_begun = has_begun and self._call(callback, "on_train_begin")
            if not has_begun:  # else its next log would end this rank, and so on rank after rank
                self.trainer.remove_callback(callback)

    def _call(self, callback: Any, name: str, **kwargs: Any) -> bool:
        """Calls a callback; returns whether it did not fail, which is no reason for this rank to end."""
        trainer = self.trainer
        about = {"model": trainer.model, "processing_class": trainer.processing_class, "optimizer": trainer.optimizer}
        try:
            getattr(callback, name)(trainer.args, trainer.state, trainer.control, **about, **kwargs)
        except Exception as error:
            assert self.recovery is not None
            if self.recovery.is_loss(error):
                raise
            logger.warning(
                f"`{type(callback).__name__}.{name}` failed when ranks had changed; the training goes on: "
                f"{type(error).__name__}: {error}",
                main_process_only=False,
            )
            return False
        return True
