"""Comparison of a step's prediction with its measurement, and the causes of the difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..cost import StepCost
from ..cost.calibration import without_calibration
from ..cost.layers import LayersWithout
from ..cost.row_sizes import NO_TOKENS, ChunkSize
from ..cost.run_log import KINDS, LoggedWindow, TaskGroup
from ..cost.stage_times import StageCost, stage_costs
from ..cost.step_planner import PlannedStep, Prediction, StepPlanner
from ..plan import ParallelPlan, SampleSizes, StageKey, StepPlan, Workloads
from ..schedule import Task
from .workload_chart import number_text

_GROUPS = 4  # groups of the tasks of one kind of stage, by size
_SIZE_TOLERANCE = 0.02  # relative spread of sizes below which tasks are one group
_MAX_PERCENT_RATIO = 3.0  # ratio to the prediction below which a difference is given in percent
AS_PREDICTED = 0.05  # a step with a smaller relative error took as long as predicted
# causes besides tasks: the rest of a step, the wait for its batch, and the rest of the time between steps
IN_STEP, DATA, BETWEEN = "in_step", "data", "between"


def kind_of(task: Task) -> str:
    """The kind of a task in run logs."""
    return task.row.label


def name_of(task: Task) -> str:
    """The name of the tasks of this module and kind in run logs: `"<module>/forward"` or `"<module>/backward"`."""
    return f"{task.module}/{kind_of(task)}"


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran."""

    prediction: Prediction
    durations: Mapping[Task, float]  # milliseconds; of a task on several ranks, the slowest one


def times_on_a_rank(plan: ParallelPlan, steps: Sequence[MeasuredStep]) -> dict[str, tuple[float, float]]:
    """`"<module>/forward"` and so on -> predicted and measured ms of these tasks on one rank, means over steps."""
    sums = {f"{module}/{kind}": np.zeros(2) for module in sorted(plan.modules) for kind in KINDS}
    counts = {name: len(steps) * sum(1 for _ in module.stages()) for name, module in plan.modules.items()}
    for step in steps:
        predicted = step.prediction.timeline.task_times
        for task, duration_ms in step.durations.items():
            start_ms, end_ms = predicted[task]
            sums[name_of(task)] += np.array([end_ms - start_ms, duration_ms]) / counts[task.module]
    return {name: (float(pair[0]), float(pair[1])) for name, pair in sums.items() if pair.any()}


class StepComparer:
    """Predicts steps that run, and compares predictions with measurements."""

    def __init__(self, planner: StepPlanner):
        self.planner = planner

    def predict(self, step: StepPlan, sizes: SampleSizes, workloads: Workloads) -> Prediction:
        """Predicts a step with a given arrangement, and the workloads that it was arranged by."""
        return self.planner.predict(PlannedStep(step, sizes, workloads))

    def task_groups(self, steps: Sequence[MeasuredStep]) -> tuple[TaskGroup, ...]:
        """Sums over the tasks of steps by module, kind and size."""
        rows: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
        for step in steps:
            cost = StepCost(self.planner.costs, self.planner.plan, step.prediction.planned.step, step.prediction.sizes)
            for task, duration_ms in step.durations.items():
                chunk = cost.chunks.get((task.module, task.replica, task.microbatch, task.chunk), NO_TOKENS)
                parts = self._uncalibrated_ms(task, chunk)
                rows[task.module, kind_of(task)].append((chunk.tokens, duration_ms, cost(task), *parts))
        groups = []
        for key, tasks in sorted(rows.items()):
            for group in _by_size(np.array(tasks)):
                groups.append(TaskGroup(*key, len(group), *group.sum(axis=0).tolist()))
        return tuple(groups)

    @cached_property
    def _stages(self) -> tuple[Mapping[StageKey, StageCost], ...]:
        """Costs of stages without calibration; without launches; without sums, too; and without recomputation."""
        plan, base = self.planner.plan, without_calibration(self.planner.costs)
        modules = {name: replace(module, activation_checkpointing=False) for name, module in plan.modules.items()}
        without_sums = replace(base, layers=LayersWithout(base.layers, ("sums", "travels")))
        sources = (base, plan), (without_sums, plan), (without_sums, replace(plan, modules=modules))
        without_launches = [
            {key: stage.without_launches() for key, stage in stage_costs(*source).items()} for source in sources
        ]
        return stage_costs(base, plan), *without_launches

    def _uncalibrated_ms(self, task: Task, chunk: ChunkSize) -> tuple[float, float, float, float]:
        """Computation without recomputation, recomputation, launches and all-reduces, see [`TaskGroup`]."""
        launched, *stages = (costs[task.stage_key] for costs in self._stages)
        whole, without_sums, computed = (stage.task_ms(chunk.tokens, chunk.squares, task.row) for stage in stages)
        recomputed, sums = max(0.0, without_sums - computed), max(0.0, whole - without_sums)
        return computed, recomputed, launched.launched_ms(task.row), sums

    def causes(self, step: MeasuredStep) -> dict[str, float]:
        """
        Additional step time with measured instead of predicted task times: `"<module>/forward"` and
        `"<module>/backward"` -> milliseconds, negative if faster. Kinds are replaced one after the other, largest
        difference first, in the order of the predicted step; the values add up to the effect of all.
        """
        timeline = step.prediction.timeline
        names = np.array([name_of(task) for task in timeline.graph.tasks])
        times_ms = timeline.durations.tasks
        measured_ms = np.array([step.durations[task] for task in timeline.graph.tasks])
        off = {name: float(np.abs(measured_ms - times_ms)[names == name].sum()) for name in np.unique(names).tolist()}
        causes, before = {}, timeline.iteration_ms
        for name in sorted(off, key=lambda name: (-off[name], name)):
            times_ms = np.where(names == name, measured_ms, times_ms)
            after = timeline.with_durations(replace(timeline.durations, tasks=times_ms)).iteration_ms
            causes[name], before = after - before, after
        return causes


def rank_durations(prediction: Prediction, ranks: Sequence[np.ndarray]) -> dict[Task, float]:
    """
    Task -> milliseconds, from the times `[tasks]` of each rank in the order in which it runs them; raises `ValueError`
    if a rank has run other tasks than predicted.
    """
    durations: dict[Task, float] = {}
    for rank, times in enumerate(ranks):
        tasks = prediction.timeline.tasks_of_rank[rank]
        if len(tasks) != len(times):
            raise ValueError(f"rank {rank} ran {len(times)} tasks where {len(tasks)} were predicted")
        for task, duration_ms in zip(tasks, times.tolist(), strict=True):
            durations[task] = max(durations.get(task, 0.0), duration_ms)
    return durations


def _by_size(rows: np.ndarray) -> Iterable[np.ndarray]:
    """Rows of tasks in a few groups of similar compute times."""
    computed = rows[:, 3]
    if np.ptp(computed) <= _SIZE_TOLERANCE * computed.max(initial=0.0):
        return [rows]
    return [group for group in np.array_split(rows[np.argsort(computed, kind="stable")], _GROUPS) if len(group)]


@dataclass(frozen=True)
class RunComparison:
    """Windows of a run, predicted and measured."""

    windows: Sequence[LoggedWindow]  # at least one

    def mean(self, field: str) -> float:
        """Mean of a field of [`LoggedWindow`]."""
        return float(np.mean([getattr(window, field) for window in self.windows]))

    @property
    def causes(self) -> dict[str, float]:
        """
        Cause -> additional ms of a step, including data loading and the optimizer, over its prediction: the tasks of
        each module, and [`IN_STEP`], [`DATA`] and [`BETWEEN`]. Means over windows, which add up to the difference.
        """
        names = dict.fromkeys(name for window in self.windows for name in window.causes)
        causes = {name: float(np.mean([w.causes.get(name, 0.0) for w in self.windows])) for name in names}
        step_ms, wall_ms = self.mean("step_ms"), max(self.mean("wall_ms"), self.mean("step_ms"))
        causes[IN_STEP] = step_ms - self.mean("predicted_step_ms") - sum(causes.values())
        causes[DATA] = min(self.mean("data_ms"), wall_ms - step_ms)
        causes[BETWEEN] = wall_ms - step_ms - causes[DATA]
        return causes

    @property
    def task_times(self) -> dict[str, tuple[float, float]]:
        """`"<module>/forward"` and so on -> predicted and measured ms of these tasks in a step on a rank."""
        steps, sums = sum(window.compared for window in self.windows), defaultdict(lambda: np.zeros(2))
        for window in self.windows:
            for name, pair in window.task_times.items():
                sums[name] += np.array(pair) * window.compared / steps
        return {name: (float(pair[0]), float(pair[1])) for name, pair in sums.items()}

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """Names with units of the predicted quantities, with their predicted and measured values."""
        rows = [("step (ms)", self.mean("predicted_step_ms"), self.mean("step_ms"))]
        bubbles = [window.bubble for window in self.windows if window.bubble is not None]
        if bubbles:
            rows.append(("bubble (share of the step)", self.mean("predicted_bubble"), float(np.mean(bubbles))))
        for name, both in self.task_times.items():
            module, _, kind = name.partition("/")
            rows.append((f"{kind}s of {module} (ms on a rank)", *both))
        peaks = [window.memory for window in self.windows if window.memory is not None]
        if peaks:
            peak = max(peaks, key=lambda memory: memory.measured)
            rows.append((f"memory of the fullest rank, {peak.rank} (GiB)", peak.predicted, peak.measured))
        return rows

    @property
    def is_as_predicted(self) -> bool:
        """Checks that a step, with data loading and the optimizer, took about as long as predicted."""
        predicted = self.mean("predicted_step_ms")
        return abs(sum(self.causes.values())) < AS_PREDICTED * predicted

    @property
    def largest_cause(self) -> str:
        """The cause with the largest part of the difference."""
        causes = self.causes
        sign = 1.0 if sum(causes.values()) >= 0 else -1.0
        return max(causes, key=lambda name: sign * causes[name])

    @property
    def sentence(self) -> str:
        """The error of the prediction, its largest cause with figures, and a remedy."""
        predicted, causes = self.mean("predicted_step_ms"), self.causes
        total = predicted + sum(causes.values())
        text = f"A step took {_ms(total)} from batch to batch, where {_ms(predicted)} were predicted"
        if predicted:
            ratio = total / predicted
            text += f" ({ratio - 1:+.0%})" if ratio < _MAX_PERCENT_RATIO else f" ({_times(ratio)} times)"
        if self.is_as_predicted:
            return f"{text}."
        name = self.largest_cause
        what, remedy = _explanation(name, self.task_times, causes[name])
        return f"{text}. The largest part of the difference, {_signed(causes[name])}, is {what}. {remedy}"


def _ms(time_ms: float) -> str:
    return f"{number_text(time_ms)} ms"


def _signed(time_ms: float) -> str:
    return f"+{_ms(time_ms)}" if time_ms > 0 else _ms(time_ms)


def _times(ratio: float) -> str:
    """A ratio with two digits."""
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _explanation(name: str, times: Mapping[str, tuple[float, float]], cause_ms: float) -> tuple[str, str]:
    """A cause and a remedy, as text."""
    if name == DATA:
        return "the wait for its batch", "Raise `dataloader_num_workers`."
    if name == BETWEEN:
        return (
            "the optimizer step and other work between two steps, which is not part of the predicted program",
            'Use a fused optimizer (`optim="adamw_torch_fused"`), or larger global batches.',
        )
    if name == IN_STEP:
        what = "messages, gradient sums and the host between tasks"
        if cause_ms < 0:
            return what, "Links are faster than those of the device in the table."
        return (
            what,
            "Links are slower than those of the device in the table, or ranks wait for the host: use larger "
            "microbatches, or keep tensor parallelism and pipelines within a node.",
        )
    module, _, kind = name.partition("/")
    predicted, measured = times[name]
    ratio = f"{_times(measured / predicted)} times as long as predicted" if predicted else "longer than predicted"
    return (
        f"the {kind}s of `{module}`, which took {ratio} ({_ms(measured)} on a rank, not {_ms(predicted)})",
        "Correct the costs with `hf-mmparallel calibrate`.",
    )
