"""The default arrangement of a run's steps, by predicted step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..plan import SampleSizes
from ..plan.methods import ARRANGEMENT_CANDIDATES
from .gradient_sums import optimizer_ms
from .step_planner import StepPlanner

DEFAULT_ARRANGEMENT = ARRANGEMENT_CANDIDATES[0]  # used without a prediction, if sizes of samples are unknown

AS_FAST = 0.001  # relative difference of predicted times up to which steps are reported as equally fast


@dataclass(frozen=True)
class ArrangementChoice:
    """A chosen arrangement with the reason."""

    arrangement: str = DEFAULT_ARRANGEMENT
    step_ms: Mapping[str, float] = field(default_factory=dict)  # compared arrangement -> predicted time of a step

    def __str__(self) -> str:
        """The reason as text."""
        chosen_ms = self.step_ms[self.arrangement]
        others = sorted((ms, name) for name, ms in self.step_ms.items() if name != self.arrangement)
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


def choose_arrangement(planner: StepPlanner, batches: Sequence[SampleSizes]) -> ArrangementChoice:
    """Chooses the candidate with the shortest predicted step, and alike on ranks that are given the same batches."""
    step_ms: dict[str, float] = {}
    update_ms = optimizer_ms(planner.costs, planner.plan, planner.sync_groups) if planner.training else 0.0
    for arrangement in ARRANGEMENT_CANDIDATES:
        # the planner's own arrangement does not matter
        tried = planner.with_arrangement(arrangement)
        arranged = (tried.arrange(range(batch.num_samples), batch) for batch in batches)
        times = [tried.timeline(step.step, step.sizes).iteration_ms + update_ms for step in arranged]
        step_ms[arrangement] = sum(times) / len(times)
    # among equally fast ones the first candidate
    return ArrangementChoice(min(step_ms, key=lambda arrangement: round(step_ms[arrangement], 6)), step_ms)
