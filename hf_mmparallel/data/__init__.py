"""From datasets to the inputs of each task."""

from .chat_collator import ChatCollator, PretokenizedCollator
from .defaults import default_collator
from .packing import PackingCollator, unpack

__all__ = ["ChatCollator", "PackingCollator", "PretokenizedCollator", "default_collator", "unpack"]
