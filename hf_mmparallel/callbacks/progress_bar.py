"""One progress bar that carries the loss."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ProgressCallback

_IN_BAR = {"loss": "loss", "grad_norm": "grad", "learning_rate": "lr", "parallel/bubble_fraction": "bubble"}


class LossProgressCallback(ProgressCallback):
    """
    The Trainer's progress bar with the last loss, gradient norm, learning rate and bubble in it; other logs, such as
    evaluation metrics, are written above. The Trainer uses it under a plan; `disable_tqdm` turns it off.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        if "loss" in logs:
            shown = {short: f"{logs[name]:.4g}" for name, short in _IN_BAR.items() if name in logs}
            self.training_bar.set_postfix(shown)
            return
        shown = {name: value for name, value in logs.items() if name != "total_flos"}
        values = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
        )
        self.training_bar.write(", ".join(values))
