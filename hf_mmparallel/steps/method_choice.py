"""Which arrangement the steps of a run have, where the user names none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..cost.optimizer import optimizer_ms
from ..plan import SampleSizes
from .condensed import iteration_ms
from .step_planner import StepPlanner

KEEPING_LIMITS = ("hierarchical", "tapered")
"""The arrangements whose microbatches keep to limits of tokens and memory."""
CHOICES = (*KEEPING_LIMITS, "entrain", "batch_rebalance", "disttrain", "contiguous")
"""What is chosen from, in the order of preference among equals."""
DEFAULT_METHOD = CHOICES[0]
"""Where nothing can be predicted, since sizes of samples are unknown."""

AS_FAST = 0.001
"""Steps whose predicted times differ by no more than that share are told to be as fast."""


@dataclass(frozen=True)
class MethodChoice:
    """
    An arrangement and why it was chosen.

    Args:
        method (`str`, *optional*, defaults to `"hierarchical"`): Its name.
        step_ms (`Mapping[str, float]`, *optional*): Arrangement -> predicted time of a step, of those compared.
    """

    method: str = DEFAULT_METHOD
    step_ms: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Why, in words."""
        own_ms = self.step_ms[self.method]
        others = sorted((ms, name) for name, ms in self.step_ms.items() if name != self.method)
        slower = [(ms, name) for ms, name in others if ms > own_ms * (1 + AS_FAST)]
        told = ", ".join(f"`{name}` {ms:,.4g}" for ms, name in slower or others)
        if others and not slower:
            return (
                f"all are predicted to take {own_ms:,.4g} ms a step within {100 * AS_FAST:g} %, so that it hardly "
                f"matters which ({told})"
            )
        equal = ", ".join(f"`{name}`" for _, name in others[: len(others) - len(slower)])
        also = f", {equal} as fast within {100 * AS_FAST:g} %" if equal else ""
        return f"predicted to be fastest, {own_ms:,.4g} ms a step{also} ({told})"


def choose_method(planner: StepPlanner, batches: Sequence[SampleSizes]) -> MethodChoice:
    """
    The arrangement with which steps are predicted to be shortest. Where microbatches have a limit of tokens or memory,
    only arrangements that keep to it are compared. Of equally fast ones the first of [`CHOICES`] is chosen.

    Args:
        planner ([`StepPlanner`]): The planner of steps, whose own arrangement does not count.
        batches (`Sequence[SampleSizes]`): Global batches such as there will be.

    Returns:
        [`MethodChoice`]: The choice, which depends on nothing else, so that all ranks with the same batches agree.
    """
    has_limit = planner.max_tokens is not None or planner.memory_bytes is not None
    found: dict[str, float] = {}
    update_ms = optimizer_ms(planner.costs, planner.plan) if planner.training else 0.0
    for method in KEEPING_LIMITS if has_limit else CHOICES:
        tried = planner.with_method(method)
        arranged = (tried.arrange(range(batch.num_samples), batch) for batch in batches)
        times = [iteration_ms(tried, step) + update_ms for step in arranged]
        found[method] = sum(times) / len(times)
    return MethodChoice(min(found, key=lambda method: round(found[method], 6)), found)
