"""What a run with `resilience` went through: a picture, and sentences for the model card."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

from ..planning.recovery_chart import RecoveryMark, recovery_png
from .engine_callback import EngineCallback, not_worth_a_run

RECOVERY = "recovery.png"


class RecoveryCallback(EngineCallback):
    """
    Draws `recovery.png` into the output folder at the end of a run that ranks were lost from or have joined: samples
    per second over time, with each of these changes, and the number of ranks. The Trainer has one by itself with
    `resilience`.
    """

    def __init__(self, samples_per_step: int):
        self.samples_per_step = samples_per_step
        # the changes so far; every rank notes them, since any may be the first one at the end
        self.marks: list[RecoveryMark] = []
        self._step_ends_s = array("d")
        self._began_s = 0.0
        self._num_ranks = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.engine is not None
        self.marks, self._step_ends_s = [], array("d")
        self._began_s, self._num_ranks = time.time(), self.engine.world.size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_ends_s.append(time.time() - self._began_s)

    def on_reconfigure(self, args: Any, state: Any, control: Any, event: Any = None, **kwargs: Any) -> None:
        changes = (("lost", event.lost), ("joined", event.joined))
        label = ", ".join(f"{verb} {', '.join(map(str, members))}" for verb, members in changes if members)
        took = event.lost_at - self._began_s, event.total_s
        self.marks.append(RecoveryMark(*took, event.world_size, label or "met anew"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.marks or not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / RECOVERY
        with not_worth_a_run(f"`{path}`"):
            path.parent.mkdir(parents=True, exist_ok=True)
            recovery_png(self._step_ends_s, self.samples_per_step, self._num_ranks, self.marks, path)

    def shared_state(self) -> dict[str, Any]:
        names = ("marks", "_step_ends_s", "_began_s", "_num_ranks")
        return {name: getattr(self, name) for name in names}

    @property
    def sentence(self) -> str | None:
        """What the run went through, in words; `None` if no rank was lost and none joined."""
        if not self.marks:
            return None
        took_s = sum(mark.took_s for mark in self.marks)
        times = "once" if len(self.marks) == 1 else f"{len(self.marks)} times"
        return (
            f"The ranks changed {times}, as some were lost, joined or met anew, and training went on: "
            f"{self._num_ranks} ranks at first, {self.marks[-1].num_ranks} at the end. The changes took {took_s:.2f} "
            "s in all, from each loss or join until the run went on."
        )
