"""
Arrangements of a global batch over replicas and microbatches, and of tokens over cp ranks.

Pure functions of numbers on top of `plan`; imported by everything that plans or predicts a step.
"""

from ..plan.methods import ARRANGEMENTS
from .arrangements import Arrangement, arrange_step, contiguous_step, find_arrangement
from .balance import Balance, compare_with_contiguous, measured_balance, step_balance
from .microbatch_counts import fastest_counts, num_microbatches, plan_for_batch, with_fastest_counts

__all__ = [
    "ARRANGEMENTS",
    "Arrangement",
    "Balance",
    "arrange_step",
    "compare_with_contiguous",
    "contiguous_step",
    "fastest_counts",
    "find_arrangement",
    "measured_balance",
    "num_microbatches",
    "plan_for_batch",
    "step_balance",
    "with_fastest_counts",
]
