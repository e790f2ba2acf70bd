"""From datasets to the inputs of each task."""

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
