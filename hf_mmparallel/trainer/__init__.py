"""What the user of the HF Trainer meets."""

from .arguments import MultimodalTrainingArguments
from .trainer import MultimodalParallelTrainer

__all__ = ["MultimodalParallelTrainer", "MultimodalTrainingArguments"]
