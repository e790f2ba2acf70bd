"""
The Trainer and its arguments.

The top of the package beside `cli`; nothing imports it but users. In it only this file imports `trainer.py`.
"""

from .arguments import MultimodalTrainingArguments
from .trainer import MultimodalParallelTrainer

__all__ = ["MultimodalParallelTrainer", "MultimodalTrainingArguments"]
