"""The Trainer and its arguments. Nothing imports it but users; in it only this file imports `trainer.py`."""

from .arguments import MultimodalTrainingArguments
from .trainer import MultimodalParallelTrainer

__all__ = ["MultimodalParallelTrainer", "MultimodalTrainingArguments"]
