"""The base of callbacks that read the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.logging import get_logger
from transformers import TrainerCallback

if TYPE_CHECKING:
    from ..runtime.engine import ParallelEngine

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
        """
        Does work in which ranks communicate, and returns its result; again, if ranks are lost in it, with
        `resilience`. The Trainer replaces it by its own.
        """
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
