"""
From datasets to the inputs of each task: readers, sizes of samples, collators, packing, the loader of steps.

Uses `steps`, `modeling` and below; imported by the engine, the planner and the Trainer.
"""

from .chat_collator import ChatCollator, PretokenizedCollator
from .context_tokens import cut_row, shard_row
from .defaults import default_collator
from .packing import PackingCollator, unpack

__all__ = [
    "ChatCollator",
    "PackingCollator",
    "PretokenizedCollator",
    "cut_row",
    "default_collator",
    "shard_row",
    "unpack",
]
