"""Warns of losses and gradients that are not finite."""

from __future__ import annotations

import math

import torch
from accelerate.logging import get_logger

logger = get_logger(__name__)


class FiniteCheck:
    """Warns of the first, the tenth and the hundredth step whose loss or norm of the gradient is not finite."""

    def __init__(self, filtered: bool):
        # whether such losses are left out of the log (`logging_nan_inf_filter`); training goes on, as in the stock
        # Trainer
        self.filtered = filtered
        self.num_steps = 0
        self._last_step = -1
        self._norm: tuple[int, torch.Tensor] | None = None

    def loss(self, step: int, value: float) -> None:
        """Checks a loss."""
        self.check_norm()
        if not math.isfinite(value):
            shown = " The log leaves it out (`logging_nan_inf_filter`)." if self.filtered else ""
            self._found(step, f"The loss of step {step} is {value}.{shown}")

    def norm(self, step: int, value: torch.Tensor) -> None:
        """Records a norm, which is checked later: reading it now would wait for the device."""
        self._norm = step, value

    def check_norm(self) -> None:
        """Checks the recorded norm of the last step, if it is not checked yet."""
        if self._norm is not None:
            step, value = self._norm[0], float(self._norm[1])
            self._norm = None
            if not math.isfinite(value):
                self._found(step, f"The norm of the gradient of step {step} is {value}.")

    def _found(self, step: int, sentence: str) -> None:
        """Counts a step once, and warns of few."""
        if step == self._last_step:
            return
        self._last_step = step
        self.num_steps += 1
        if math.log10(self.num_steps).is_integer():
            count = "" if self.num_steps == 1 else f" It is the {self.num_steps}th such step."
            logger.warning(
                f"{sentence}{count} Usually the learning rate is too high, samples hold values that are not finite, "
                "or a low precision overflows. Training goes on, but an update that is not finite spoils the weights: "
                f"resume from a checkpoint before step {step} with a lower `learning_rate` or `max_grad_norm`."
            )
