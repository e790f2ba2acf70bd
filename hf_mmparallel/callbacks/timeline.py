"""Measured timelines of chosen steps beside the predicted one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..schedule import Span, simulate
from ..schedule.draw import chrome_trace, gantt_png
from .base import EngineCallback


class TimelineCallback(EngineCallback):
    """
    Writes what each rank did when in chosen steps: `timeline-<step>.png` and `timeline-<step>.json` (Chrome trace, for
    `chrome://tracing` or Perfetto), the predicted schedule beside the measured one.

    Args:
        steps (`Collection[int]`): Optimizer steps, counted from 1 as in the log.
        folder (`str` or `Path`, *optional*): Where to write; `args.output_dir` when left out.
    """

    def __init__(self, steps: Collection[int], folder: str | Path | None = None):
        self.steps = frozenset(steps)
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.engine is None or state.global_step not in self.steps:
            return
        measured = self.gather()
        if not state.is_world_process_zero:
            return
        assert self.engine.current_step is not None
        folder = Path(self.folder or args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        predicted = simulate(
            self.engine.plan, self.engine.program(self.engine.current_step, training=True), cost_from(measured)
        )
        name = f"timeline-{state.global_step}"
        gantt_png(predicted, folder / f"{name}.png", measured=measured)
        chrome_trace(predicted, folder / f"{name}.json", measured=measured)

    def gather(self) -> list[Span]:
        """The tasks of the last step on all ranks, on one clock that starts with the first of them. Collective."""
        assert self.engine is not None and self.engine.last_result is not None
        result = self.engine.last_result
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, (result.started_s, result.timeline))
        first = min((1e3 * started + timed.start_ms for started, timeline in rows for timed in timeline), default=0.0)
        return [
            Span(rank, timed.task, 1e3 * started + timed.start_ms - first, 1e3 * started + timed.end_ms - first)
            for rank, (started, timeline) in enumerate(rows)
            for timed in timeline
        ]


def cost_from(spans: Collection[Span]) -> Any:
    """Task -> its mean measured duration in ms over the stage's tasks of the same kind, so that shapes compare."""
    times: dict[tuple, list[float]] = {}
    for span in spans:
        times.setdefault((span.task.kind, *span.task.stage_key), []).append(span.end_ms - span.start_ms)
    means = {key: sum(values) / len(values) for key, values in times.items()}
    return lambda task: means[(task.kind, *task.stage_key)]
