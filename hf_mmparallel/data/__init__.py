"""
Reads datasets and makes the inputs of each task: readers, sample sizes, collators, packing, the loader of steps.

Uses `steps`, `modeling` and below; may be imported by the engine, the planner and the Trainer.
"""

from .arranged_batches import ArrangedBatchSampler
from .chat_collator import ChatCollator
from .context_tokens import cut_row, shard_row
from .defaults import default_collator
from .packing import PackingCollator, unpack
from .token_collator import PretokenizedCollator

__all__ = [
    "ArrangedBatchSampler",
    "ChatCollator",
    "PackingCollator",
    "PretokenizedCollator",
    "cut_row",
    "default_collator",
    "shard_row",
    "unpack",
]
