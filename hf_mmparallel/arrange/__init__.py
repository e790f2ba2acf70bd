"""Arrangements of a global batch over replicas and microbatches, and of tokens over ranks, as pure functions."""

from .blocks import block_counts, block_workloads, distribute
from .context import ContextAssignment, assign_context, assign_rows, padded_length
from .contiguous import contiguous_step, num_microbatches

__all__ = [
    "ContextAssignment",
    "assign_context",
    "assign_rows",
    "block_counts",
    "block_workloads",
    "contiguous_step",
    "distribute",
    "num_microbatches",
    "padded_length",
]
