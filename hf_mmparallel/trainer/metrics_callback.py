"""Efficiency of the last steps in the Trainer's log, and measured timelines of chosen steps beside predicted ones."""

from __future__ import annotations

import json
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arrange.balance import Balance, compare_with_contiguous, excess, measured_balance
from ..cost import StepCost, training_flops
from ..plan import LANGUAGE_MODEL, ModelSpec, StageKey, StepPlan
from ..plan.methods import arrangement_name
from ..planning.device_detection import MEASURED as MEASURED_SOURCE
from ..planning.device_detection import core_per_rank
from ..planning.gantt import chrome_trace, gantt_png
from ..planning.recovery_chart import RecoveryMark, recovery_png
from ..planning.workload_chart import BEFORE, MEASURED, balance_png
from ..runtime.engine import ParallelEngine
from ..runtime.work import BoundaryTraffic, ModuleWork, StepRecord, StepResult
from ..schedule import Durations, Span, Task, Timeline
from ..world import World
from .engine_callback import EngineCallback, not_worth_a_run

# Balance of microbatches for the Trainer's log: their workloads as arranged, their forwards as measured.


@dataclass(frozen=True)
class RecordedStep:
    """A step on one rank, until the next log."""

    record: StepRecord
    balance: Balance  # forwards of the stages whose first rank this is, 0 for others
    arrangement: Mapping[str, float] = field(default_factory=dict)  # see [`arrangement_metrics`]


@dataclass(frozen=True)
class RanStep:
    """A step on one rank, which the device may not have finished."""

    result: StepResult
    step: StepPlan
    led: frozenset[StageKey]  # the stages whose first rank this is
    arrangement: Mapping[str, float] = field(default_factory=dict)

    def read(self) -> RecordedStep:
        """What was measured; waits for the device."""
        record = self.result.record
        # each rank leads its stages alone
        spans = [
            Span(0, timed.task, timed.start_ms, timed.end_ms)
            for timed in record.timeline
            if timed.task.stage_key in self.led
        ]
        return RecordedStep(record, measured_balance(self.step, spans), self.arrangement)


def last_balances(engine: ParallelEngine, microbatch_size: int) -> tuple[Balance, Balance] | None:
    """Returns the workloads of the last step in the sampler's order and as arranged; `None` if sizes are not known."""
    step, sizes, workloads = engine.current_step, engine.current_sizes, engine.current_workloads
    if step is None or sizes is None or workloads is None or not sizes.known:
        return None
    return compare_with_contiguous(engine.plan, step, workloads, microbatch_size)


def last_step(engine: ParallelEngine, microbatch_size: int) -> RanStep:
    """The step that an engine ran last. All ranks know the arrangement, so that nothing is communicated."""
    result, step = engine.last_result, engine.current_step
    assert result is not None and step is not None
    led = frozenset(key for key in engine.stages if engine.plan.stage(*key).all_ranks[0] == engine.rank)
    balances = last_balances(engine, microbatch_size)
    return RanStep(result, step, led, {} if balances is None else arrangement_metrics(*balances))


def arrangement_metrics(before: Balance, after: Balance) -> dict[str, float]:
    """Returns the numbers of an arrangement, with the samples in the sampler's order (`before`) and as arranged."""
    metrics = {}
    # in ms, over the microbatches of a replica
    for module in after.forward_ms:
        metrics[f"parallel/workload_std/{module}"] = after.std_ms(module)
        metrics[f"parallel/workload_std_before/{module}"] = before.std_ms(module)
    return {**metrics, "parallel/deferred_fraction": after.deferred_fraction}


def forward_metrics(balance: Balance) -> dict[str, float]:
    """Returns the numbers of a step's forwards, as all ranks measured them."""
    metrics = {}
    for module in balance.forward_ms:
        metrics[f"parallel/forward_ms_std/{module}"] = balance.std_ms(module)  # over a replica's microbatches
        # largest over mean, minus 1
        metrics[f"parallel/microbatch_imbalance/{module}"] = balance.microbatch_excess(module)
    return metrics


def measure(balances: Sequence[Balance], world: World) -> list[Balance]:
    """The forwards of some steps, summed over the stages of each replica. Collective."""
    mine = [balance.forward_ms for balance in balances]
    flat = [times for of_step in mine for replicas in of_step.values() for times in replicas]
    total = world.all_reduce(torch.from_numpy(np.concatenate(flat)), activity="metrics of the ranks").numpy()
    parts = iter(np.split(total, np.cumsum(list(map(len, flat)))[:-1]))
    return [
        Balance({name: tuple(next(parts) for _ in replicas) for name, replicas in of_step.items()}, {})
        for of_step in mine
    ]


def mean_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the steps that have it."""
    names = dict.fromkeys(name for numbers in metrics for name in numbers)
    return {name: float(np.mean([numbers[name] for numbers in metrics if name in numbers])) for name in names}


_MAX_LOGGED_STEPS = 1000  # the last ones are logged if there are more between two logs


@dataclass(frozen=True)
class RankWindow:
    duration_ms: float  # in the programs of steps
    wall_ms: float  # from the end of the step before the first to the end of the last, with data and optimizer
    busy_ms: float  # in tasks
    replicas_ms: dict[tuple[str, int], float]  # (module, replica) -> time in its tasks
    work: dict[str, ModuleWork]  # module -> tokens that it computed on

    @classmethod
    def of(cls, records: Sequence[StepRecord], wall_ms: float) -> RankWindow:
        replicas = defaultdict(float)
        busy = 0.0
        for record in records:
            for timed in record.timeline:
                took = timed.end_ms - timed.start_ms
                busy += took
                replicas[timed.task.module, timed.task.replica] += took
        duration = sum(record.duration_ms for record in records)
        return cls(duration, max(wall_ms, duration), busy, dict(replicas), total_work(r.work for r in records))


def total_work(parts: Iterable[Mapping[str, ModuleWork]]) -> dict[str, ModuleWork]:
    """The work of each module in several steps, or on several ranks."""
    total: dict[str, ModuleWork] = defaultdict(ModuleWork)
    for works in parts:
        for module, work in works.items():
            total[module].add(work.tokens, work.squares)
    return dict(total)


def efficiency(windows: Sequence[RankWindow], core_per_rank: bool) -> dict[str, float]:
    """Returns the numbers of a window over all ranks."""
    duration = max(window.duration_ms for window in windows)
    wall = max(window.wall_ms for window in windows)
    if not duration:
        return {}
    metrics: dict[str, float] = {}
    replicas: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for window in windows:
        for (module, replica), took in window.replicas_ms.items():
            replicas[module][replica] += took
    for module, work in total_work(window.work for window in windows).items():
        metrics[f"parallel/tokens_per_second/{module}"] = 1e3 * work.tokens / wall
    # ranks that share a device or a core have no measurable idle time
    if core_per_rank:
        busy = sum(window.busy_ms for window in windows)
        metrics["parallel/bubble_fraction"] = 1 - busy / (duration * len(windows))
    for module, times in replicas.items():
        if len(times) > 1:
            metrics[f"parallel/replica_imbalance/{module}"] = excess(times.values())  # largest over mean, minus 1
    return metrics


def flops_utilisation(spec: ModelSpec, windows: Sequence[RankWindow], peak_tflops: float) -> float:
    """Model FLOPs per second over the peak of all ranks' devices (MFU), see [`model_flops`]."""
    flops = 0.0
    for module, work in total_work(window.work for window in windows).items():
        per_token, per_square = training_flops(spec, module)
        flops += per_token * work.tokens + per_square * work.squares
    return flops / (1e9 * peak_tflops * len(windows) * max(window.wall_ms for window in windows))


class ParallelMetricsCallback(EngineCallback):
    """
    Adds to the log, under `parallel/`: tokens per second of each module, the bubble fraction, the imbalance between
    microbatches and between replicas of each module, and on a GPU model FLOPs utilisation: of the peak in the table,
    or as `model_flops_utilisation_of_measured_peak` of what matrix products reached. As means over the steps since the
    last log: the standard deviation of a microbatch's measured forward in each module (`forward_ms_std`), and, where
    sizes of samples are known, of its workload as arranged (`workload_std`) and in the sampler's order
    (`workload_std_before`), with the share of deferred samples. Of a mixture of experts `expert_imbalance`: how many
    times the tokens of the mean expert the busiest one of a layer has, minus 1, as the mean over layers.

    The Trainer has one by itself under a plan; remove it with `trainer.remove_callback(ParallelMetricsCallback)`.
    """

    def __init__(self):
        self.running: deque[RanStep] = deque()
        self.steps: deque[RecordedStep] = deque(maxlen=_MAX_LOGGED_STEPS)
        # Of steps, after the window's begin: marks of the device's clock, of which the host is ahead.
        self.ends: deque[Any] = deque(maxlen=_MAX_LOGGED_STEPS + 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin()

    def begin(self) -> None:
        self.running.clear()
        self.steps.clear()
        self.ends.clear()
        if self.engine is not None:
            self.ends.append(self.engine.clock.mark())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.engine is not None and self.engine.last_result is not None:
            self.running.append(last_step(self.engine, args.per_device_train_batch_size))
            self.ends.append(self.engine.clock.mark())
            self.read(waits=False)

    def read(self, waits: bool = True) -> None:
        """Reads the steps since the last log, or with `waits=False` those that the device has finished."""
        while self.running and (waits or self.running[0].result.is_done()):
            self.steps.append(self.running.popleft().read())

    def on_reconfigure(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin()

    def parallel_metrics(self) -> dict[str, float]:
        self.read()
        if self.engine is None or not self.steps:
            return {}
        wall_ms = self.engine.clock.ms(self.ends[0], self.ends[-1])
        mine = RankWindow.of([ran.record for ran in self.steps], wall_ms)
        windows = self.engine.world.all_gather(mine, "metrics of the ranks")
        metrics = efficiency(windows, core_per_rank(self.engine.world))
        balances = measure([ran.balance for ran in self.steps], self.engine.world)
        metrics |= mean_of(list(map(forward_metrics, balances)))
        metrics |= mean_of([ran.arrangement for ran in self.steps])
        imbalance = self.engine.take_expert_imbalance()
        metrics |= {f"parallel/expert_imbalance/{module}": excess for module, excess in imbalance.items()}
        self.begin()
        device = self.engine.costs.device
        if device.name != "cpu":
            name = "parallel/model_flops_utilisation"
            name = f"{name}_of_measured_peak" if device.source.startswith(MEASURED_SOURCE) else name
            metrics[name] = flops_utilisation(self.engine.spec, windows, device.peak_tflops)
        return metrics


# Measured timelines of chosen steps beside the predicted one.

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


# What a run with `resilience` went through.

RECOVERY = "recovery.png"


class RecoveryCallback(EngineCallback):
    """
    Draws `recovery.png` into the output folder at the end of a run that ranks were lost from or have joined: samples
    per second over time, with each of these changes, and the number of ranks. The Trainer has one by itself with
    `resilience`.
    """

    def __init__(self, samples_per_step: int):
        self.samples_per_step = samples_per_step
        # the changes so far; every rank notes them, since any may be the first one at the end
        self.marks: list[RecoveryMark] = []
        self._step_ends_s = array("d")
        self._began_s = 0.0
        self._num_ranks = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.engine is not None
        self.marks, self._step_ends_s = [], array("d")
        self._began_s, self._num_ranks = time.time(), self.engine.world.size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_ends_s.append(time.time() - self._began_s)

    def on_reconfigure(self, args: Any, state: Any, control: Any, event: Any = None, **kwargs: Any) -> None:
        changes = (("lost", event.lost), ("joined", event.joined))
        label = ", ".join(f"{verb} {', '.join(map(str, members))}" for verb, members in changes if members)
        took = event.lost_at - self._began_s, event.total_s
        self.marks.append(RecoveryMark(*took, event.world_size, label or "met anew"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.marks or not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / RECOVERY
        with not_worth_a_run(f"`{path}`"):
            path.parent.mkdir(parents=True, exist_ok=True)
            recovery_png(self._step_ends_s, self.samples_per_step, self._num_ranks, self.marks, path)

    def shared_state(self) -> dict[str, Any]:
        names = ("marks", "_step_ends_s", "_began_s", "_num_ranks")
        return {name: getattr(self, name) for name in names}

    @property
    def sentence(self) -> str | None:
        """What the run went through, in words; `None` if no rank was lost and none joined."""
        if not self.marks:
            return None
        took_s = sum(mark.took_s for mark in self.marks)
        times = "once" if len(self.marks) == 1 else f"{len(self.marks)} times"
        return (
            f"The ranks changed {times}, as some were lost, joined or met anew, and training went on: "
            f"{self._num_ranks} ranks at first, {self.marks[-1].num_ranks} at the end. The changes took {took_s:.2f} "
            "s in all, from each loss or join until the run went on."
        )
