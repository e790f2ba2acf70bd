"""
Signals of a cluster to a training: ranks note them until the end of a step. By [`PreemptionCallback`] all ranks stop
after the same step, with a checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.logging import get_logger

from ..world import World
from .engine_callback import EngineCallback

logger = get_logger(__name__)

# What clusters send before they take nodes away: Kubernetes and torchrun the first; Slurm the one that its `--signal`
# names, which is often the second.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _LeftToRank:
    """The first signal does nothing in a data worker; the second one, from its loader, ends it."""

    def __init__(self):
        self.seen = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.seen:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.seen = True


def leave_signals_to_rank() -> None:
    """Leaves signals, which launchers send to all processes, to the rank, which needs its workers to end a step."""
    for number in SIGNALS:
        signal.signal(number, _LeftToRank())


def _kill_data_workers() -> None:
    """Ends data workers that are left when the process ends: one signal of `multiprocessing` would not."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises for a data worker that is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


@contextlib.contextmanager
def noting_signals(note: Callable[[], None]) -> Iterator[None]:
    """A block in which the signals only call a function; it has to be in the main thread, which gets them."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "`save_on_preemption` and `resilience` need the signals SIGTERM and SIGUSR1. Python gives signals to the "
            "main thread only, and `train` runs in another one. Call it in the main thread."
        )
    process, in_worker = os.getpid(), _LeftToRank()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == process:
            note()
        else:  # forked from this process
            in_worker(number, frame)

    atexit.unregister(_kill_data_workers)
    atexit.register(_kill_data_workers)
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class PreemptionCallback(EngineCallback):
    """
    Ends the training of all ranks with a checkpoint when any of them gets one of [`SIGNALS`]. The ranks agree at the
    end of a step: under a plan by the numbers that they add up anyway, else by a sum of their own.
    """

    def __init__(self, world: World):
        self.world = world
        self.is_asked = False
        self.num_asked = 0

    def listening(self) -> contextlib.AbstractContextManager:
        """A block in which the signals end the training."""
        self._ask(False)
        self.num_asked = 0
        return noting_signals(lambda: self._ask(True))

    def _ask(self, stop: bool) -> None:
        self.is_asked = stop
        if self.engine is not None:
            self.engine.signs["was_asked_to_stop"] = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.engine is not None:
            self.num_asked = self.engine.num_signs["was_asked_to_stop"]
        else:
            self.num_asked = int(self.world.all_reduce(torch.tensor(int(self.is_asked)), activity="a signal to stop"))
        if self.num_asked:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # there may be no time for it

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.num_asked:  # the step has been saved
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.num_asked:
            ranks = "1 rank was" if self.num_asked == 1 else f"{self.num_asked} ranks were"
            logger.warning(
                f"{ranks} asked to stop (SIGTERM or SIGUSR1): training ended after step {state.global_step} of "
                f"{state.max_steps}. `checkpoint-{state.global_step}` is whole; go on from it with "
                "`trainer.train(resume_from_checkpoint=True)`."
            )
