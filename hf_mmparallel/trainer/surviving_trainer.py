"""A Trainer whose training goes on when ranks are lost, and that others can join."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from transformers.trainer_callback import ProgressCallback

from .._files import readable
from ..resilience.reconfiguration import TooFewNodesError
from ..runtime.held_state import HeldParameter, give_to_optimizer, held_parameters, restore_state
from ..runtime.optimizers import prepare_optimizer
from ..runtime.step_totals import StepTotals
from ..runtime.weight_placement import load_held
from ..world import Membership, doing, shared_failure
from ..world.connections import end_collectives
from .engine_trainer import EngineTrainer
from .rank_numbers import set_ranks
from .recovery import MembershipChange, NodeLayout, Recovery
from .told_run import ToldRun

logger = get_logger(__name__)
T = TypeVar("T")
_ASKED = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


def completed(method: Callable) -> Callable:
    """Makes a method run again on the ranks that are left, when ranks are lost in it; see [`Recovery.complete`]."""

    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        return self._completed(functools.partial(method, self, *args, **kwargs))

    return wrapper


class SurvivingTrainer(EngineTrainer):
    """A Trainer with an engine that, with `resilience`, is laid out anew in training when ranks are lost or join."""

    _recovery: Recovery | None = None
    _told: ToldRun | None = None  # of a rank that joins, until it has its place
    _told_folder: str | None = None  # the checkpoint that it begins from

    def _repeated(self, work: Callable[[], T]) -> T:
        """Does a part of a step in which ranks communicate, see [`Recovery.run`]."""
        return work() if self._recovery is None else self._recovery.run(work)

    def _completed(self, work: Callable[[], T]) -> T:
        """Does some work beside steps in which ranks communicate, see [`Recovery.complete`]."""
        return work() if self._recovery is None else self._recovery.complete(work)

    def _run_step(self) -> StepTotals:
        """Computes the gradients of the global batch that was read last."""
        if self._recovery is not None:
            self._engine.signs["sees_waiting"] = bool(self._recovery.membership.waiting)
            self._engine.signs["gave_up_save"] = self._saves.has_given_up
        with shared_failure("training step"):
            return self._steps.run(self._on_device, self.state.global_step)

    def _gradient_norm(self) -> torch.Tensor:
        """The norm of the gradient over the parameters of all ranks; with it the step counts."""
        engine = self._engine
        if self._recovery is None:
            norm = engine.gradient_norm()
        else:
            while (found := self._recovery.commit(lambda: float(engine.gradient_norm()))) is None:
                self._recovery.run(self._run_step)
            norm = torch.tensor(found, device=engine.device)
        if engine.num_signs["gave_up_save"]:
            self.control.should_save = True
        self._steps.step_counts()
        return norm

    def _agree_on_control(self) -> bool:
        """Whether any rank asks for something; then all do, which is logged if they did not before. Collective."""
        asked = [getattr(self.control, name) for name in _ASKED]

        def compare() -> list[list[int]]:
            numbers = [[(self.world.rank + 1) * flag for flag in asked], [-int(flag) for flag in asked]]
            return self.world.all_reduce(torch.tensor(numbers), "max", "what callbacks ask for").tolist()

        for name, last_rank, on_all in zip(_ASKED, *self._completed(compare), strict=True):
            if last_rank and not on_all:
                logger.warning_once(
                    f"A callback sets `{name}` on rank {last_rank - 1} and not on all ranks. All ranks follow: they "
                    "log, evaluate, save and stop together."
                )
            setattr(self.control, name, bool(last_rank))
        return any(getattr(self.control, name) for name in _ASKED)

    def _take_in(self) -> None:
        """Lets in processes that wait to join, if any rank knew of some in the last step."""
        if self._recovery is not None and self._engine.num_signs["sees_waiting"]:
            self._engine.num_signs["sees_waiting"] = 0
            self._recovery.take_in()

    @contextlib.contextmanager
    def _joined_checkpoint(self, given: str | None) -> Iterator[str | None]:
        """The checkpoint that a training begins from: for a rank that joins, what it is told once it is let in."""
        if self._recovery is None or not self._joins:
            yield given
            return
        logger.warning(f"Process {self._recovery.membership.id} waits to join the training.", main_process_only=False)
        with doing("waiting to join the training", waits=True):
            self._told = ToldRun.from_bytes(self._recovery.wait_to_join())
        with self._told.checkpoint() as folder:
            self._told_folder = folder
            yield folder

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Ends all ranks with one error if a file can't be read. A rank that joins has none, and does nothing."""
        if self.engine is None:
            return super()._load_rng_state(checkpoint)
        if self._told_folder is not None and checkpoint == self._told_folder:
            return

        def read() -> None:
            with readable(Path(str(checkpoint)) / self._rng_file):
                super(SurvivingTrainer, self)._load_rng_state(checkpoint)

        self._completed(lambda: self.world.raise_together(read))

    def _end_saves(self) -> None:
        """Waits for the last checkpoint; makes another one if that was given up, since ranks were lost in it."""
        self._completed(self._finish_save)
        # Of ranks that were lost in it, others may have finished before.
        given_up = self._completed(lambda: self.world.all_gather(self._saves.has_given_up, "the last checkpoint"))
        if any(given_up):
            self._save_checkpoint(self.model, None)
            self._completed(self._finish_save)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """A block in which the run goes on when ranks are lost, if the arguments ask for it."""
        if self.args.resilience is None:
            yield
            return
        membership = Membership.from_environment()
        assert membership is not None and self._layouts is not None
        layouts, layout = self._layouts
        recovery = Recovery(membership, self.world, layouts, layout, self._held_parameters, self._follow, self._tell)
        gc.freeze()  # what is there by now need not be looked at when the groups of lost ranks are collected
        membership.start(functools.partial(end_collectives, self.world.backend))
        self._recovery = recovery
        try:
            try:
                yield
            except TooFewNodesError as error:
                self._save_checkpoint(self.model, None)
                text = f"{error} The run is saved in `checkpoint-{self.state.global_step}` of its output folder."
                raise TooFewNodesError(text) from None
            recovery.complete(lambda: None)  # all ranks are there for what the script does next
        except BaseException as error:
            if recovery.has_begun:
                membership.report(f"{type(error).__name__}: {error}")
            raise
        else:
            membership.finish()
        finally:
            recovery.end()
            self._layouts = layouts, recovery.layout
            self._recovery = None
            gc.unfreeze()

    def _tell(self) -> bytes:
        """What a rank that joins has to know of this run."""
        return ToldRun.of(self, self._steps).to_bytes()

    def _held_parameters(self) -> dict[str, HeldParameter]:
        return held_parameters(self.model, self._prepared_optimizer)

    def _follow(self, layout: NodeLayout, held: Mapping[str, HeldParameter], event: MembershipChange) -> None:
        """Lays the model, the optimizer and the data out for the ranks that are there now. Collective."""
        engine, was_first = self._engine, self.state.is_world_process_zero
        assert self._recovery is not None
        self._saves.start_anew()
        set_ranks(self.world.rank, self.world.size, self._recovery.local_rank)
        engine.change_plan(layout.plan, load_held({name: parameter.values for name, parameter in held.items()}))
        optimizer = self._prepared_optimizer
        give_to_optimizer(optimizer, self.model, held)
        prepare_optimizer(optimizer, engine.holds_all_trained, self.world, engine.slices, engine.storage)
        restore_state(optimizer, self.model, held)
        self._steps.follow_plan()
        self._evaluation_samples.compare_again()
        if self._told is not None:
            self._told.restore_sums(self)
            self._told.restore_callbacks(self)
            self._told, self._joins = None, False
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        event.step = self.state.global_step
        event.total_s = time.time() - event.lost_at
        event.layout = ", ".join(f"{name}: {module.layout}" for name, module in layout.plan.modules.items())
        event.reason = layout.reason
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and not was_first:
                callback.on_train_begin(self.args, self.state, self.control)
            told: Any = getattr(callback, "on_reconfigure", None)
            if told is not None:
                told(self.args, self.state, self.control, event=event)
        if self.is_world_process_zero():
            logger.warning(event.sentence)
        self.log(
            {
                "parallel/ranks": event.world_size,
                "parallel/recovered_in_s": round(event.total_s, 3),
                "parallel/recovery_copied_mib": round(event.copied_bytes / 2**20, 3),
            }
        )
