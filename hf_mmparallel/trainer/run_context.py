"""The parts of a run that code below the Trainer needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..plan import ModelSpec
from ..world import World
from .arguments import MultimodalTrainingArguments


@dataclass(frozen=True)
class RunContext:
    """Arguments, model and training samples of a run under a plan, as the Trainer has them at one moment."""

    args: MultimodalTrainingArguments
    world: World
    model: Any  # the whole one, or this rank's part of it once there is an engine
    spec: ModelSpec  # of the whole model
    train_dataset: Any
    collator: Any  # makes a batch of samples
    processing_class: Any  # tokenizer or processor
    sample_tokens: Callable | None  # sample -> module -> its tokens, see [`MultimodalParallelTrainer`]
    # dataset and its name in messages -> both it and its collator without the columns that the model does not read
    drop_columns: Callable[[Any, str], tuple[Any, Any]]
