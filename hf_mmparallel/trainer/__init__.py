"""The Trainer and its arguments. Nothing imports it but users; in it only this file imports `trainer.py`."""

from .arguments import MultimodalTrainingArguments
from .own_loop import ParallelLoader, ParallelModel, prepare
from .trainer import MultimodalParallelTrainer

__all__ = [
    "MultimodalParallelTrainer",
    "MultimodalTrainingArguments",
    "ParallelLoader",
    "ParallelModel",
    "prepare",
]
