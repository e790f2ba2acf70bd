"""The arrangements of samples as data; `arrange/methods.py` has the function of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AssignmentPolicy:
    """
    The properties of an arrangement of samples in replicas and microbatches.

    Args:
        keeps_limits (`bool`, *optional*, defaults to `False`):
            Whether its microbatches respect token and memory limits.
        is_candidate (`bool`, *optional*, defaults to `True`):
            Whether it is predicted, and chosen if it is fastest, where the user names none.
    """

    keeps_limits: bool = False
    is_candidate: bool = True


ASSIGNMENTS: Mapping[str, AssignmentPolicy] = {
    "hierarchical": AssignmentPolicy(keeps_limits=True),
    "tapered": AssignmentPolicy(keeps_limits=True),
    "entrain": AssignmentPolicy(),
    "batch_rebalance": AssignmentPolicy(),
    "disttrain": AssignmentPolicy(),
    "contiguous": AssignmentPolicy(),
    "sub_microbatches": AssignmentPolicy(is_candidate=False),
}
"""Name -> properties, in the order of preference among equally fast ones."""

ASSIGNMENT_CANDIDATES = tuple(name for name, policy in ASSIGNMENTS.items() if policy.is_candidate)
KEEPING_LIMITS = tuple(name for name in ASSIGNMENT_CANDIDATES if ASSIGNMENTS[name].keeps_limits)
