"""Measured timelines of chosen steps beside the predicted one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..arrange.balance import Balance, measured_balance
from ..cost import StepCost
from ..plan import LANGUAGE_MODEL
from ..plan.methods import arrangement_name
from ..planning.gantt import chrome_trace, gantt_png
from ..planning.workload_chart import BEFORE, MEASURED, balance_png
from ..runtime.work import BoundaryTraffic
from ..schedule import Durations, Span, Task, Timeline
from .engine_callback import EngineCallback, not_worth_a_run
from .metrics_callback import last_balances

Boundaries = Mapping[tuple[str, str], BoundaryTraffic]  # by the modules that sent and received, on one rank


class TimelineCallback(EngineCallback):
    """
    Writes the tasks of each rank over time in chosen steps: `timeline-<step>.png` and `timeline-<step>.json` (Chrome
    trace, for `chrome://tracing` or Perfetto), predicted beside measured; and `workloads-<step>.png`, the forwards of
    each microbatch as measured, beside their estimates where sizes of samples are known. `boundaries-<step>.json` has
    for each boundary between modules, and for the gradients back, the bytes that ranks received from others, and how
    long tasks waited for them in ms, in sum and at most on one rank, beside the tokens of the step.

    Args:
        steps (`Collection[int]`): Optimizer steps, counted from 1 as in the log.
        folder (`str` or `Path`, *optional*): Output folder; `args.output_dir` when left out.

    Example:

    ```python
    >>> callbacks = [TimelineCallback(steps=[2, 10])]
    >>> trainer = MultimodalParallelTrainer(model, args, train_dataset=dataset, callbacks=callbacks)
    ```
    """

    def __init__(self, steps: Collection[int], folder: str | Path | None = None):
        self.steps = frozenset(steps)
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.engine is None or state.global_step not in self.steps:
            return
        gathered = self.complete(self.gather)
        if gathered is None or not state.is_world_process_zero:
            return
        with not_worth_a_run(f"The timeline of step {state.global_step}"):
            self.write(Path(self.folder or args.output_dir), state.global_step, *gathered, args)

    def write(
        self, folder: Path, step: int, measured: Sequence[Span], boundaries: Sequence[Boundaries], args: Any
    ) -> None:
        """Writes the pictures, the trace and the boundaries of a step that ran last."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = self.boundary_rows(boundaries)
        (folder / f"boundaries-{step}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        predicted = self.predicted(measured)
        gantt_png(predicted, folder / f"timeline-{step}.png", measured=measured)
        chrome_trace(predicted, folder / f"timeline-{step}.json", measured=measured)
        balance_png(
            self.balances(measured, args.per_device_train_batch_size),
            folder / f"workloads-{step}.png",
            title=f"Forward of each microbatch in step {step}",
            own_scale=[MEASURED],
        )

    def predicted(self, measured: Sequence[Span]) -> Timeline:
        """The order of the last step with the durations of its stages as measured."""
        engine = self.engine
        assert engine is not None and engine.current_step is not None and engine.planner is not None
        step, sizes = engine.current_step, engine.current_sizes
        estimate = StepCost(engine.costs, engine.plan, step, sizes) if sizes is not None else None
        timeline, cost = engine.planner.timeline(step, sizes), cost_from(measured, estimate)
        own_ms, planned = np.array([cost(task) for task in timeline.graph.tasks]), timeline.durations
        # measured tasks have the waits for messages within, and sums are not measured
        return timeline.with_durations(Durations(own_ms, np.zeros_like(planned.messages), np.zeros_like(planned.sums)))

    def balances(self, measured: Sequence[Span], microbatch_size: int) -> dict[str, Balance]:
        """Columns of the picture of workloads."""
        engine = self.engine
        assert engine is not None and engine.current_step is not None and engine.planner is not None
        panels = {}
        balances = last_balances(engine, microbatch_size)
        if balances is not None:
            panels = {BEFORE: balances[0], f"after, {arrangement_name(engine.planner.arrangement)}": balances[1]}
        leading = [span for span in measured if engine.first_rank(span.task) == span.rank]
        return {**panels, MEASURED: measured_balance(engine.current_step, leading)}

    def boundary_rows(self, boundaries: Sequence[Boundaries]) -> list[dict[str, Any]]:
        """What crossed each boundary in the last step, over all ranks."""
        assert self.engine is not None
        sizes = self.engine.current_sizes
        tokens = None if sizes is None else int(sizes.tokens[LANGUAGE_MODEL].sum())
        rows = []
        for source, target in sorted({ends for of_rank in boundaries for ends in of_rank}):
            own = [of_rank[source, target] for of_rank in boundaries if (source, target) in of_rank]
            waits_ms = [traffic.wait_ms for traffic in own]
            num_bytes = sum(traffic.num_bytes for traffic in own)
            row = {"from": source, "to": target, "tokens": tokens, "bytes": num_bytes}
            rows.append({**row, "wait_ms": sum(waits_ms), "longest_wait_ms": max(waits_ms)})
        return rows

    def gather(self) -> tuple[list[Span], list[Boundaries]] | None:
        """
        The tasks of the last step on all ranks, on one clock that starts with the first of them, and what each
        received over boundaries; `None` if the layout has changed since. Collective.
        """
        assert self.engine is not None
        result = self.engine.last_result
        if result is None:  # as on all ranks: each has a new engine
            return None
        own = result.started_s, result.record.timeline, result.record.boundaries
        rows = self.engine.world.all_gather(own, "timelines of the ranks")
        first = min(
            (1e3 * started + timed.start_ms for started, timeline, _ in rows for timed in timeline), default=0.0
        )
        spans = [
            Span(rank, timed.task, 1e3 * started + timed.start_ms - first, 1e3 * started + timed.end_ms - first)
            for rank, (started, timeline, _) in enumerate(rows)
            for timed in timeline
        ]
        return spans, [boundaries for _, _, boundaries in rows]


def cost_from(spans: Collection[Span], estimate: Callable[[Task], float] | None = None) -> Callable[[Task], float]:
    """Returns task -> ms: the total of a stage's tasks of one kind, divided in proportion to `estimate`."""
    # equal parts without an estimate, so that shapes compare
    weight = estimate or (lambda _: 1.0)
    took: dict[tuple, float] = defaultdict(float)
    estimated: dict[tuple, float] = defaultdict(float)
    for span in spans:
        key = (span.task.kind, *span.task.stage_key)
        took[key] += span.end_ms - span.start_ms
        estimated[key] += weight(span.task)

    def cost(task: Task) -> float:
        key = (task.kind, *task.stage_key)
        return took[key] * weight(task) / estimated[key] if estimated[key] else 0.0

    return cost
