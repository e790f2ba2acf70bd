"""Names of methods that users choose; those of papers are imported on use, and nothing else imports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

# module of `hf_mmparallel.papers` and attribute of each published method
PUBLISHED_ARRANGEMENTS: Mapping[str, str] = {
    "entrain": "published_arrangements:entrain",
    "batch_rebalance": "published_arrangements:batch_rebalance",
    "disttrain": "published_arrangements:disttrain",
    "sub_microbatches": "published_arrangements:sub_microbatches",
}
_PUBLISHED = {
    **PUBLISHED_ARRANGEMENTS,
    "compare": "compare:compare",  # `plan --compare`
    "sample presets": "sample_presets:SAMPLE_PRESETS",  # `--dataset chartqa`
    "stable batch": "stable_batch:stability_lines",  # the split of ranks in the answer of `plan`
}

# Arrangements whose microbatches respect token and memory limits. Where the user names none, these are predicted and
# the fastest is chosen, the first of equal ones.
ARRANGEMENT_CANDIDATES = ("hierarchical", "tapered")
# the values of `microbatch_assignment` besides functions
ARRANGEMENTS = (*ARRANGEMENT_CANDIDATES, "contiguous", *PUBLISHED_ARRANGEMENTS)


def published_method(name: str) -> Any:
    """Import a published method."""
    module, _, attribute = _PUBLISHED[name].partition(":")
    return getattr(import_module(f"..papers.{module}", __package__), attribute)


def arrangement_name(arrangement: str | Callable[..., Any]) -> str:
    """Return the name of an arrangement, for text: that of the function where it is one."""
    return arrangement if isinstance(arrangement, str) else getattr(arrangement, "__name__", repr(arrangement))
