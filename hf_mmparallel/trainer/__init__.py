"""
What the user of the HF Trainer meets.

The top of the package beside `cli`; nothing imports it but users.
"""

from .arguments import MultimodalTrainingArguments
from .trainer import MultimodalParallelTrainer

__all__ = ["MultimodalParallelTrainer", "MultimodalTrainingArguments"]
