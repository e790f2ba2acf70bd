"""The base of callbacks that read the engine, and those of the console: one line for each log, at most one bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.logging import get_logger
from transformers import TrainerCallback

if TYPE_CHECKING:
    from ..runtime.engine import ParallelEngine


import sys
from collections.abc import Mapping

from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from ..cost import predicts_times
from ..plan import LANGUAGE_MODEL
from ..planning.workload_chart import number_text

logger = get_logger(__name__)
T = TypeVar("T")


@contextlib.contextmanager
def not_worth_a_run(what: str) -> Iterator[None]:
    """Turns any error of writing pictures and pages into a warning: training goes on without them."""
    try:
        yield
    except Exception as error:
        logger.warning(f"{what} could not be written: {type(error).__name__}: {error}")


class EngineCallback(TrainerCallback):
    """
    A callback that the Trainer hands its engine to.

    Attributes:
        engine ([`ParallelEngine`], *optional*): `None` when the stock Trainer runs.

    Example:

    ```python
    >>> class PrintTasks(EngineCallback):
    ...     def on_step_end(self, args, state, control, **kwargs):
    ...         if self.engine is not None:
    ...             print(self.engine.last_result)
    >>> trainer = MultimodalParallelTrainer(model, args, callbacks=[PrintTasks()])
    ```
    """

    engine: ParallelEngine | None = None

    def complete(self, work: Callable[[], T]) -> T:
        """Repeats work in which ranks communicate if some are lost in it. The Trainer replaces it by its own."""
        return work()

    def on_reconfigure(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """
        Called on each rank when ranks were lost or have joined, before the first step of the new plan, to which notes
        of earlier steps do not belong. Any callback of the Trainer may have it; `event` is a [`MembershipChange`].
        """

    def shared_state(self) -> dict[str, Any]:
        """Returns the attributes that a rank which joins is given, such as notes of the whole run; none by default."""
        return {}

    def parallel_metrics(self) -> dict[str, float]:
        """Returns numbers since the last call; all ranks call it when a loss is logged, so that it may communicate."""
        return {}


# The console of a run under a plan: one line for each log, beside at most one progress bar.

_TOKENS = f"parallel/tokens_per_second/{LANGUAGE_MODEL}"
_STEP, _PREDICTED, _MEMORY = "parallel/step_ms", "parallel/predicted_step_ms", "parallel/memory_gib"
_SHOWN = {"loss", "grad_norm", "learning_rate"}
_HIDDEN = {"epoch", "total_flos"}


def log_line(logs: Mapping[str, Any], step: int, max_steps: int, says_times: bool = True) -> str:
    """
    Returns a log of the Trainer as one line: step, loss, gradient norm, learning rate, tokens of the language model a
    second, time of a step beside its prediction, memory of the fullest rank; and other values by their names, such as
    metrics of an evaluation. Other numbers of the plan, under `parallel/`, stand in `log_history` only. Times of a CPU
    are not predicted (`says_times`).
    """
    parts = [f"step {step:,}/{max_steps:,}"] if max_steps else []
    if "loss" in logs:
        parts.append(f"loss {_number(logs['loss'])}")
    if "grad_norm" in logs:
        parts.append(f"grad norm {logs['grad_norm']:.3g}")
    if "learning_rate" in logs:
        parts.append(f"lr {logs['learning_rate']:.2e}".replace("e-0", "e-"))
    if _TOKENS in logs:
        parts.append(f"{logs[_TOKENS]:,.0f} tokens/s")
    if _STEP in logs:
        predicted = f" (predicted {number_text(logs[_PREDICTED])})" if says_times and _PREDICTED in logs else ""
        parts.append(f"step {number_text(logs[_STEP])} ms{predicted}")
    if _MEMORY in logs:
        parts.append(f"memory {logs[_MEMORY]:.1f} GiB")
    others = {
        name: value
        for name, value in logs.items()
        if name not in _SHOWN | _HIDDEN and not name.startswith("parallel/") and not name.endswith("_steps_per_second")
    }
    return "  ".join([*parts, *(f"{name} {_number(value)}" for name, value in others.items())])


def _number(value: Any) -> str:
    """A float with four digits, any other value as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Lines(EngineCallback):
    """Prints logs on the first rank."""

    def print_log(self, state: Any, logs: Mapping[str, Any]) -> None:
        says_times = self.engine is None or predicts_times(self.engine.costs)
        tqdm.write(log_line(logs, state.global_step, state.max_steps, says_times))  # above the bar, if there is one
        sys.stdout.flush()


class LossProgressCallback(_Lines, ProgressCallback):
    """
    The Trainer's progress bar with a line above it for each log, see [`log_line`]; without a terminal only the lines.
    The Trainer uses it under a plan in place of [`~transformers.ProgressCallback`], by which name it can be removed.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            # `disable=None`: no bar without a terminal
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=None)
        self.current_step = 0

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self.prediction_bar is None and state.is_world_process_zero and has_length(eval_dataloader):
            self.prediction_bar = tqdm(total=len(eval_dataloader), leave=False, dynamic_ncols=True, disable=None)
        super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.print_log(state, logs)


class LogLineCallback(_Lines, PrinterCallback):
    """
    Prints a line for each log, see [`log_line`]. The Trainer uses it under a plan with `disable_tqdm`, in place of
    [`~transformers.PrinterCallback`], by which name it can be removed.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            self.print_log(state, logs)
