"""
Assignment of the tokens of a packed row to context-parallel ranks.

Pure functions of numbers; imported by the data loader, which permutes tokens, and by the planner.
"""

from .assignment import ContextAssignment, Mode, assign_rows, padded_length
from .blocks import BLOCK, Method, block_counts, block_workloads, distribute
from .modes import ContextCosts, assign_context, choose_faster
from .segments import assign_segments, independent_segments

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
