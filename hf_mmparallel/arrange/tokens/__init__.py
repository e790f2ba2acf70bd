"""
Assignment of the tokens of a packed row to context-parallel ranks.

Pure functions of numbers; imported by the data loader, which permutes tokens, and by the planner.
"""

from .assignment import (
    BLOCK,
    ContextAssignment,
    Method,
    Mode,
    assign_rows,
    block_counts,
    block_workloads,
    distribute,
    padded_length,
)
from .segments import ContextCosts, assign_context, assign_segments, choose_faster, independent_segments

__all__ = [
    "BLOCK",
    "ContextAssignment",
    "ContextCosts",
    "Method",
    "Mode",
    "assign_context",
    "assign_rows",
    "assign_segments",
    "block_counts",
    "block_workloads",
    "choose_faster",
    "distribute",
    "independent_segments",
    "padded_length",
]
