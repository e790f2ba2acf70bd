"""Default arrangement of a run's steps, by predicted step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..cost.optimizer import optimizer_ms
from ..plan import SampleSizes
from ..plan.assignments import ASSIGNMENT_CANDIDATES, KEEPING_LIMITS
from .representatives import iteration_ms
from .step_planner import StepPlanner

DEFAULT_METHOD = ASSIGNMENT_CANDIDATES[0]
"""Used without a prediction, if sizes of samples are unknown."""

AS_FAST = 0.001
"""Relative difference of predicted times up to which steps are reported as equally fast."""


@dataclass(frozen=True)
class MethodChoice:
    """
    A chosen arrangement with the reason.

    Args:
        method (`str`, *optional*, defaults to `"hierarchical"`): Its name.
        step_ms (`Mapping[str, float]`, *optional*): Compared arrangement -> predicted time of a step.
    """

    method: str = DEFAULT_METHOD
    step_ms: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """The reason as text."""
        chosen_ms = self.step_ms[self.method]
        others = sorted((ms, name) for name, ms in self.step_ms.items() if name != self.method)
        slower = [(ms, name) for ms, name in others if ms > chosen_ms * (1 + AS_FAST)]
        times = ", ".join(f"`{name}` {ms:,.4g}" for ms, name in slower or others)
        if others and not slower:
            return (
                f"all are predicted to take {chosen_ms:,.4g} ms a step within {100 * AS_FAST:g} %, so that it hardly "
                f"matters which ({times})"
            )
        equal = ", ".join(f"`{name}`" for _, name in others[: len(others) - len(slower)])
        also = f", {equal} as fast within {100 * AS_FAST:g} %" if equal else ""
        return f"predicted to be fastest, {chosen_ms:,.4g} ms a step{also} ({times})"


def choose_method(planner: StepPlanner, batches: Sequence[SampleSizes]) -> MethodChoice:
    """
    The arrangement with the shortest predicted step. If microbatches have a token or memory limit, only arrangements
    that respect it are compared. Among equally fast ones the first of [`ASSIGNMENT_CANDIDATES`] is chosen.

    Args:
        planner ([`StepPlanner`]): The step planner; its arrangement is ignored.
        batches (`Sequence[SampleSizes]`): Typical global batches.

    Returns:
        [`MethodChoice`]: The choice, a function of the arguments only, so that ranks with the same batches agree.
    """
    has_limit = planner.max_tokens is not None or planner.memory_bytes is not None
    step_ms: dict[str, float] = {}
    update_ms = optimizer_ms(planner.costs, planner.plan) if planner.training else 0.0
    for method in KEEPING_LIMITS if has_limit else ASSIGNMENT_CANDIDATES:
        tried = planner.with_method(method)
        arranged = (tried.arrange(range(batch.num_samples), batch) for batch in batches)
        times = [iteration_ms(tried, step) + update_ms for step in arranged]
        step_ms[method] = sum(times) / len(times)
    return MethodChoice(min(step_ms, key=lambda method: round(step_ms[method], 6)), step_ms)
