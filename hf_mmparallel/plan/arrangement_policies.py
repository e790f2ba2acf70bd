"""The arrangements of samples as data; `arrange/arrangements.py` has the function of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ArrangementPolicy:
    """The properties of an arrangement of samples in replicas and microbatches."""

    keeps_token_limits: bool = False  # its microbatches respect token and memory limits
    is_candidate: bool = True  # predicted, and chosen if it is fastest, where the user names none


# name -> properties, in the order of preference among equally fast ones
ARRANGEMENT_POLICIES: Mapping[str, ArrangementPolicy] = {
    "hierarchical": ArrangementPolicy(keeps_token_limits=True),
    "tapered": ArrangementPolicy(keeps_token_limits=True),
    "entrain": ArrangementPolicy(),
    "batch_rebalance": ArrangementPolicy(),
    "disttrain": ArrangementPolicy(),
    "contiguous": ArrangementPolicy(),
    "sub_microbatches": ArrangementPolicy(is_candidate=False),
}

ARRANGEMENT_CANDIDATES = tuple(name for name, policy in ARRANGEMENT_POLICIES.items() if policy.is_candidate)
KEEPING_LIMITS = tuple(name for name in ARRANGEMENT_CANDIDATES if ARRANGEMENT_POLICIES[name].keeps_token_limits)
