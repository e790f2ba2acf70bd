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
    """
    Arguments, model and training samples of a run under a plan, as the Trainer has them at one moment.

    Args:
        args ([`MultimodalTrainingArguments`]): The arguments.
        world ([`World`]): The ranks.
        model (`PreTrainedModel`): The whole model, or this rank's part of it once there is an engine.
        spec (`ModelSpec`): Description of the whole model.
        train_dataset (`Dataset`, *optional*): The training samples.
        collator (`Callable`): Makes a batch of samples.
        processing_class (*optional*): Tokenizer or processor.
        sample_tokens (`Callable`, *optional*): Sample -> module -> its tokens, see [`MultimodalParallelTrainer`].
        drop_columns (`Callable[[Any, str], tuple[Any, Callable]]`):
            Dataset and its name in messages -> the dataset and its collator, without the columns that the model does
            not read.
    """

    args: MultimodalTrainingArguments
    world: World
    model: Any
    spec: ModelSpec
    train_dataset: Any
    collator: Any
    processing_class: Any
    sample_tokens: Callable | None
    drop_columns: Callable[[Any, str], tuple[Any, Any]]
