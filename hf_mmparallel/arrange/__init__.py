"""
Arrangements of a global batch over replicas and microbatches, and of tokens over context-parallel ranks.

Pure functions of numbers on top of `plan`; imported by everything that plans or predicts a step.
"""

from .balance import Balance, compare_with_contiguous, measured_balance, step_balance
from .contiguous import num_microbatches
from .methods import ARRANGEMENTS, Arrangement, Microbatches, arrange_step, contiguous_step
from .tokens.assignment import ContextAssignment, assign_rows, padded_length
from .tokens.blocks import BLOCK, block_counts, block_workloads, distribute
from .tokens.modes import ContextCosts, assign_context, choose_faster
from .tokens.segments import assign_segments, independent_segments

__all__ = [
    "ARRANGEMENTS",
    "BLOCK",
    "Arrangement",
    "Balance",
    "ContextAssignment",
    "ContextCosts",
    "Microbatches",
    "arrange_step",
    "assign_context",
    "assign_rows",
    "assign_segments",
    "block_counts",
    "block_workloads",
    "choose_faster",
    "compare_with_contiguous",
    "contiguous_step",
    "distribute",
    "independent_segments",
    "measured_balance",
    "num_microbatches",
    "padded_length",
    "step_balance",
]
