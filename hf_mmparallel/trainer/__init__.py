"""
The Trainer, its arguments and callbacks. Nothing imports it but users; `sft.py` needs TRL, and is loaded by its names.
"""

from .arguments import MultimodalTrainingArguments
from .own_loop import ParallelLoader, ParallelModel, prepare
from .parallelize import parallelize
from .trainer import MultimodalParallelTrainer

__all__ = [
    "MultimodalParallelTrainer",
    "MultimodalTrainingArguments",
    "ParallelLoader",
    "ParallelModel",
    "parallelize",
    "prepare",
]
