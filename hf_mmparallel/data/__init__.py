"""From datasets to the inputs of each task."""

from .chat_collator import ChatCollator, PretokenizedCollator

__all__ = ["ChatCollator", "PretokenizedCollator"]
