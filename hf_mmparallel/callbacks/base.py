"""What callbacks that look into the engine have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import TrainerCallback

if TYPE_CHECKING:
    from ..runtime.engine import ParallelEngine


class EngineCallback(TrainerCallback):
    """
    A callback that the Trainer hands its engine to.

    Attributes:
        engine ([`ParallelEngine`], *optional*): The engine, `None` when the stock Trainer runs.
    """

    engine: ParallelEngine | None = None

    def parallel_metrics(self) -> dict[str, float]:
        """
        Numbers for the log since it was last called. The Trainer calls it on all ranks when it logs a loss, so that it
        may communicate.
        """
        return {}
