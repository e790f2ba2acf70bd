"""The base of callbacks that read the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

if TYPE_CHECKING:
    from ..runtime.engine import ParallelEngine

logger = get_logger(__name__)


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
        engine ([`ParallelEngine`], *optional*): The engine, `None` when the stock Trainer runs.
    """

    engine: ParallelEngine | None = None

    def on_reconfigure(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """
        Called on each rank when ranks were lost or have joined, once the engine has another plan, before its first
        step. What was noted of earlier steps does not belong to this plan. Any callback of the Trainer may have this
        event; `event`, a [`MembershipChange`], says what has happened.
        """

    def shared_state(self) -> dict[str, Any]:
        """
        The attributes of this callback that a rank which joins the training is given, such as what was noted of the
        whole run; none by default.
        """
        return {}

    def parallel_metrics(self) -> dict[str, float]:
        """
        Numbers for the log since it was last called. The Trainer calls it on all ranks when it logs a loss, so that it
        may communicate.
        """
        return {}
