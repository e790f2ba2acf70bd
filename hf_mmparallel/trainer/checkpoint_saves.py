"""The checkpoints of a run under a plan: at most one is being written while the training goes on."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.logging import get_logger
from transformers import TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from .._portable import expm1
from ..plan import save_layout
from ..runtime.engine import ParallelEngine
from ..runtime.host_memory import available_bytes_per_rank
from ..runtime.writes import FolderSave, HostCopies, Writes, save_errors
from ..world import World
from .auto import SAVED_PLAN

logger = get_logger(__name__)

_STEPS = 33  # whose starts are kept, for the median duration of a step
_LONG_RUN_S, _COSTLY = 3600.0, 1.01  # shortest run, and its least relative time, for which an interval is advised


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    state: TrainerState  # of the Trainer at its step


class BestCheckpoint(NamedTuple):
    metric: float | None = None
    global_step: int | None = None
    path: str | None = None

    @classmethod
    def of(cls, state: TrainerState) -> BestCheckpoint:
        return cls(state.best_metric, state.best_global_step, state.best_model_checkpoint)

    def give_to(self, state: TrainerState) -> None:
        state.best_metric, state.best_global_step, state.best_model_checkpoint = self


class CheckpointSaves:
    def __init__(self, args: Any, world: World):
        self.args = args
        self.world = world
        self._copies: HostCopies | None = None
        self._collecting: Writes | None = None
        self._save: FolderSave | None = None  # not finished yet
        self._state: TrainerState | None = None  # of the checkpoint that is not there yet
        self._last_state = TrainerState()  # of the last checkpoint
        self._saved: SavedCheckpoint | None = None
        self._has_warned = self._has_advised = False
        self.has_given_up = False  # the last checkpoint, so that another one is due
        self._best_before = BestCheckpoint()  # before the last evaluation or save
        self._best_before_save = BestCheckpoint()  # the same of the last checkpoint
        self._given_up: Path | None = None
        self._step_starts_s: deque[float] = deque(maxlen=_STEPS)

    @contextmanager
    def checkpoint(self, folder: Path, state: TrainerState) -> Iterator[Writes]:
        """A block that collects what this rank writes of a checkpoint; `finish` waits for it. Collective."""
        assert self._save is None, "one at a time"
        then = functools.partial(self._rotate, folder.parent, state)
        save = FolderSave(folder, self.world, self._host_copies() if self.args.async_save else None, then)
        try:
            with save as self._collecting, save_errors(folder):
                yield self._collecting
        finally:
            self._collecting = None
        self._save, self._state = save, copy.copy(state)
        self._last_state = self._state
        self.has_given_up = False
        self._best_before_save, self._given_up = self._best_before, None
        if save.writes.num_early and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "`async_save=True`: the copies of a checkpoint do not fit into host memory. What does not fit is "
                "written at once, and the step waits for it.",
                main_process_only=False,
            )

    def _host_copies(self) -> HostCopies:
        if self._copies is None:
            self._copies = HostCopies(int(available_bytes_per_rank(self.world)))
        self._copies.reuse()
        return self._copies

    def _rotate(self, folder: Path, state: TrainerState) -> None:
        rotate_checkpoints(
            output_dir=str(folder),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )

    def finish(self) -> None:
        """Waits for the checkpoint that is being written. Collective; raises on all ranks what went wrong."""
        save = self._save
        if save is not None:
            self._note_saved(save)
            save.finish()  # if ranks are lost in it, it is given up
            self._save = None
            self._note_saved(save)
            if not self._has_advised:
                self._has_advised = True
                self._advise(save, self._last_state)

    def start_anew(self) -> None:
        """Gives up the checkpoint that is being written, and what is known of those before."""
        # Other ranks have other parts to write. All ranks go on alike, whatever they had come to, and so do those that
        # join.
        self._copies, self._has_warned, self._has_advised = None, False, False
        self._step_starts_s.clear()
        save, self._save = self._save, None
        if save is not None:
            self._note_saved(save)
            save.give_up()
            self._note_saved(save)
            self.has_given_up = True
            self._given_up = save.path

    def note_best_before(self, state: TrainerState) -> None:
        """Notes the best checkpoint before an evaluation, for a run that gives up the checkpoint of a better one."""
        self._best_before = BestCheckpoint.of(state)

    def best_left(self, state: TrainerState) -> BestCheckpoint:
        """The best checkpoint that there is; the one before, if the best one had to be given up."""
        best, before, folder = BestCheckpoint.of(state), self._best_before_save, self._given_up
        if folder is None or folder.is_dir() or before == best:
            return best
        if folder.name == f"{PREFIX_CHECKPOINT_DIR}-{best.global_step}":
            return before
        return best._replace(path=before.path) if best.path == str(folder) else best

    def note_step(self) -> None:
        self._step_starts_s.append(time.perf_counter())

    def _advise(self, save: FolderSave, state: TrainerState) -> None:
        """Says how often to save, by what the first checkpoint has cost. Collective."""
        costs = self.world.gather((save.blocked_s, save.write_s), "the cost of a checkpoint")
        steps_s = [after - before for before, after in itertools.pairwise(self._step_starts_s)]
        if costs is not None and steps_s:
            blocked_s, write_s = (max(durations) for durations in zip(*costs, strict=True))
            advice = save_advice(blocked_s, write_s, statistics.median(steps_s), state, self.args)
            if advice:
                logger.warning(advice)

    def take_saved(self) -> SavedCheckpoint | None:
        """The checkpoint that has appeared since the last call, on the first rank."""
        if self._save is not None:
            self._note_saved(self._save)
        saved, self._saved = self._saved, None
        return saved

    def _note_saved(self, save: FolderSave) -> None:
        if save.is_there and self._state is not None:
            self._saved, self._state = SavedCheckpoint(save.path, self._state), None

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """A block after which a process that ends by an error waits a while for its checkpoint."""
        try:
            yield
        except BaseException:
            save, self._save = self._save, None
            if save is not None:
                save.leave()
            raise

    @contextmanager
    def writing(self, folder: str | Path) -> Iterator[Writes]:
        """A block that writes files of the checkpoint that is collected, or of a folder, at its end. Collective."""
        if self._collecting is not None and self._collecting.folder == Path(folder):
            yield self._collecting
            return
        writes = Writes(folder)
        with save_errors(writes.path):
            yield writes
        writes.finish(self.world)


def write_beside_weights(folder: Path, engine: ParallelEngine, processor: Any) -> None:
    """Writes the plan, the processor and the model card of an adapter, on one rank."""
    engine.sharded.write_adapter_card(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    save_layout(folder / SAVED_PLAN, engine.plan, engine.options.module_settings)


def save_advice(blocked_s: float, write_s: float, step_s: float, state: TrainerState, args: TrainingArguments) -> str:
    """
    Returns one line on the interval of saves with which a run is expected to end first; empty for a run of less than
    an hour, or if its own interval costs about as little. Training waits for `blocked_s`, files take `write_s` more, 0
    if training waits for them, and a step takes `step_s`.
    """
    hours: float = args.mean_time_between_failures_h  # type: ignore[attr-defined]
    mean_s, run_s = 3600 * hours, state.max_steps * step_s
    if run_s < _LONG_RUN_S:
        return ""
    is_by_steps = SaveStrategy(args.save_strategy) == SaveStrategy.STEPS
    own = min(state.save_steps if is_by_steps else state.global_step, state.max_steps)
    best = max(round(min(best_save_interval_s(blocked_s, mean_s, write_s), run_s) / step_s), 1)
    own_time, best_time = (expected_slowdown(count * step_s, blocked_s, mean_s) for count in (own, best))
    if own_time < _COSTLY * best_time:
        return ""
    return (
        f"Saving every {best:,} steps is cheapest with a failure every {hours:g} h (`mean_time_between_failures_h`); "
        f"every {own:,}, as now, the run takes {own_time / best_time - 1:.1%} longer."
    )


# How often to save (Young, 1974; Daly, 2006: "A higher order estimate of the optimum interval").


def best_save_interval_s(save_s: float, mean_time_between_failures_s: float, write_s: float = 0.0) -> float:
    """
    The time from the end of a save to the start of the next with the shortest expected run, in seconds (Daly's
    higher-order form, equation 37, for failures that are independent of each other). Training waits for `save_s`, and
    a save that goes on beside it is done after `write_s`. Raises `ValueError` for a negative duration, or no time
    between failures, which is that of the whole job.
    """
    if save_s < 0 or write_s < 0 or mean_time_between_failures_s <= 0:
        raise ValueError(
            f"`save_s={save_s}` and `write_s={write_s}` must be at least 0, and "
            f"`mean_time_between_failures_s={mean_time_between_failures_s}` above 0."
        )
    share = save_s / (2 * mean_time_between_failures_s)
    if share >= 1:  # a failure comes before the save is over, on average
        return max(mean_time_between_failures_s, write_s)
    # Young's interval, the first term of Daly's form
    young = math.sqrt(2 * save_s * mean_time_between_failures_s)
    return max(young * (1 + math.sqrt(share) / 3 + share / 9) - save_s, write_s)


def expected_slowdown(interval_s: float, save_s: float, mean_time_between_failures_s: float) -> float:
    """
    Expected duration of a run with a save after each interval, in units of its duration without failures, whose
    distances are exponential, and saves (Daly, 2006).
    """
    return mean_time_between_failures_s * expm1((interval_s + save_s) / mean_time_between_failures_s) / interval_s
