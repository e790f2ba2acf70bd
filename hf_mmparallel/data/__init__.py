"""
Reads datasets and makes the inputs of each task: readers, sample sizes, collators, packing, the loader of steps.

Uses `cost`, `modeling` and below; may be imported by the engine, the planner and the Trainer. What packing does not
need is loaded on first use, so that torch and transformers are enough for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .packing import PackingCollator, unpack
from .token_collator import PretokenizedCollator

if TYPE_CHECKING:
    from .arranged_batches import ArrangedBatchSampler
    from .chat_collator import ChatCollator
    from .context_tokens import cut_row, shard_row
    from .defaults import default_collator

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

_MODULE_OF = {
    "ArrangedBatchSampler": ".arranged_batches",
    "ChatCollator": ".chat_collator",
    "cut_row": ".context_tokens",
    "default_collator": ".defaults",
    "shard_row": ".context_tokens",
}


def __getattr__(name: str) -> Any:
    """Loads the module of a name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`.")
    return getattr(import_module(_MODULE_OF[name], __name__), name)
