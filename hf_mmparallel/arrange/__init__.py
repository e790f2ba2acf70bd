"""Arrangements of a global batch over replicas and microbatches, and of tokens over ranks, as pure functions."""

from .blocks import BLOCK, block_counts, block_workloads, distribute
from .context import ContextAssignment, assign_rows, padded_length
from .context_mode import ContextCosts, assign_context, choose_faster
from .contiguous import num_microbatches
from .methods import ARRANGEMENTS, Arrangement, Microbatches, arrange_step, contiguous_step
from .segments import assign_segments, independent_segments

__all__ = [
    "ARRANGEMENTS",
    "BLOCK",
    "Arrangement",
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
    "contiguous_step",
    "distribute",
    "independent_segments",
    "num_microbatches",
    "padded_length",
]
