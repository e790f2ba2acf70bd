"""The plan's engine under Trainers of other libraries, by inheritance: their data handling, our training steps."""

from __future__ import annotations

from typing import TypeVar

from transformers import Trainer

from .trainer import MultimodalParallelTrainer

TrainerClass = TypeVar("TrainerClass", bound=Trainer)


def parallelize(trainer_class: type[TrainerClass]) -> type[TrainerClass]:
    """
    Makes a subclass of a Trainer that also is a [`MultimodalParallelTrainer`].

    Data, tokens and collators are those of `trainer_class`; model, training steps, evaluation and checkpoints those of
    [`MultimodalParallelTrainer`], with `parallel` and the rest of [`MultimodalTrainingArguments`] in its arguments.

    Args:
        trainer_class (`type`):
            A subclass of `transformers.Trainer`, such as `trl.SFTTrainer`, for which the result is
            [`MultimodalSFTTrainer`], with [`MultimodalSFTConfig`] for its arguments.

    Returns:
        `type`: The subclass. Under a plan it raises `ValueError` for an override of `trainer_class` that a plan can't
        call, such as a `compute_loss` of its own.

    Example:

    ```python
    >>> from transformers import Trainer
    >>> class MyTrainer(Trainer):
    ...     pass
    >>> trainer = parallelize(MyTrainer)(model, args, data_collator=collator, train_dataset=dataset)
    >>> isinstance(trainer, MyTrainer) and isinstance(trainer, MultimodalParallelTrainer)
    True
    ```
    """
    if any(base.__name__ == "SFTTrainer" and base.__module__.startswith("trl.") for base in trainer_class.__mro__):
        from .sft import SFTData, SFTSteps

        bases = (SFTData, trainer_class, SFTSteps)
    else:
        bases = (trainer_class, MultimodalParallelTrainer)
    return type(f"Multimodal{trainer_class.__name__}", bases, {"__module__": __name__})
