"""Which modules of a plan stand in front of the language model, and which behind it."""

from __future__ import annotations

from .model_spec import LANGUAGE_MODEL
from .parallel_plan import ParallelPlan


def encoders_of(plan: ParallelPlan) -> tuple[str, ...]:
    """The modules whose features enter the language model, in the order of the plan."""
    sources = {edge.source for edge in plan.edges if edge.target == LANGUAGE_MODEL}
    return tuple(name for name in plan.modules if name in sources)


def generators_of(plan: ParallelPlan) -> tuple[str, ...]:
    """The modules that take hidden states of the language model, in the order of the plan."""
    targets = {edge.target for edge in plan.edges if edge.source == LANGUAGE_MODEL}
    return tuple(name for name in plan.modules if name in targets)
