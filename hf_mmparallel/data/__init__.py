"""From datasets to the inputs of each task."""

from .chat_collator import ChatCollator, PretokenizedCollator
from .defaults import default_collator

__all__ = ["ChatCollator", "PretokenizedCollator", "default_collator"]
