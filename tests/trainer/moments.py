"""What a test does or notes in the middle of a training."""

import logging
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class AfterSteps(TrainerCallback):
    """Calls a function with the number of each step when it is done."""

    def __init__(self, call: Callable[[int], Any]):
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.call(state.global_step)


class AtTheEnd(TrainerCallback):
    """Calls a function with the state of a training that is done."""

    def __init__(self, call: Callable[[Any], Any]):
        self.call = call

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.call(state)


def messages(name: str) -> list[str]:
    """What is logged under a name from now on."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return texts
