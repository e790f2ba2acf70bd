"""A step as it was predicted beside the same step as it ran, and what the difference comes from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost import StepCost
from ..cost.calibration import uncalibrated
from ..cost.layers import LayersWithoutSums
from ..cost.run_log import KINDS, Kind, LoggedWindow, TaskGroup, tasks_of
from ..cost.stage_times import StageCost, stage_costs
from ..drawing.workload_chart import number_text
from ..plan import ParallelPlan, SampleSizes, StepPlan, Workloads
from ..schedule import Task, simulate
from ..schedule.actions import StageKey
from ..steps.step_planner import PlannedStep, Prediction, StepPlanner

_GROUPS = 4  # of the tasks of a kind of stages, by their size
_SPREAD = 0.02  # of their sizes, below which they are one group
_IN_PERCENT = 3.0  # times the prediction, below which a difference is told in percent
AS_PREDICTED = 0.05
"""A step that is off by a smaller share took as long as predicted."""
IN_STEP, DATA, BETWEEN = "in_step", "data", "between"
"""Causes that are no tasks: the rest of a step, the wait for its batch, and what else is between steps."""


def kind_of(task: Task) -> Kind:
    """The kind of a task as logs call it."""
    return KINDS[task.kind == "bwd"]


@dataclass(frozen=True)
class MeasuredStep:
    """
    A step that ran.

    Args:
        prediction (`Prediction`): What was expected of it.
        durations (`Mapping[Task, float]`): Milliseconds of each task; of one on several ranks the slowest counts.
    """

    prediction: Prediction
    durations: Mapping[Task, float]


def num_stages(plan: ParallelPlan) -> dict[str, int]:
    """Module -> the stages of all of its replicas."""
    return {name: sum(1 for _ in module.stages()) for name, module in plan.modules.items()}


def times_on_a_rank(plan: ParallelPlan, steps: Sequence[MeasuredStep]) -> dict[tuple[str, Kind], tuple[float, float]]:
    """
    (module, kind) -> time of these tasks in a step on one of the ranks that share them, in ms: as predicted and as
    measured, the mean over some steps.
    """
    stages, sums = num_stages(plan), defaultdict(lambda: [0.0, 0.0])
    for step in steps:
        predicted = {span.task: span.end_ms - span.start_ms for span in step.prediction.simulation.spans}
        for task, took in step.durations.items():
            own = sums[task.module, kind_of(task)]
            own[0] += predicted[task] / stages[task.module] / len(steps)
            own[1] += took / stages[task.module] / len(steps)
    return {key: (predicted, measured) for key, (predicted, measured) in sums.items()}


class StepComparer:
    """
    Predicts steps that run, and compares what they took.

    Args:
        planner ([`StepPlanner`]): What plans them.
    """

    def __init__(self, planner: StepPlanner):
        plan = planner.plan
        modules = {name: replace(module, activation_checkpointing=False) for name, module in plan.modules.items()}
        self.planner = planner
        self.base = uncalibrated(planner.costs)
        self.unlinked = replace(self.base, layers=LayersWithoutSums(self.base.layers))
        self.plain_plan = replace(plan, modules=modules)

    def predict(self, step: StepPlan, sizes: SampleSizes, workloads: Workloads) -> Prediction:
        """
        What is expected of a step that is arranged already.

        Args:
            step (`StepPlan`): Its arrangement.
            sizes (`SampleSizes`): Of its samples.
            workloads (`Workloads`): What they were arranged by.
        """
        planned = PlannedStep(step, self.planner.program(step, sizes), sizes, workloads)
        return self.planner.predict(planned)

    def task_groups(self, steps: Sequence[MeasuredStep]) -> tuple[TaskGroup, ...]:
        """The tasks of some steps, summed up by module, kind, layers of the stage and size."""
        rows: dict[tuple[str, Kind, int], list[np.ndarray]] = defaultdict(list)
        for step in steps:
            costs = _TaskCosts(self, step.prediction)
            for task, took in step.durations.items():
                layers = self.planner.plan.stage(*task.stage_key).num_layers
                rows[task.module, kind_of(task), layers].append(np.array([*costs.of(task), took]))
        found = []
        for (module, kind, layers), own in sorted(rows.items()):
            for part in _by_size(np.array(own)):
                tokens, squares, predicted, *base, measured = part.sum(axis=0).tolist()
                found.append(TaskGroup(module, kind, layers, len(part), tokens, squares, measured, predicted, *base))
        return tuple(found)

    def causes(self, step: MeasuredStep) -> dict[str, float]:
        """
        What a step is longer with tasks as measured: those of one module and kind after the other, the most different
        first, in replays of its program. The sum is what it is longer with all of them.

        Args:
            step ([`MeasuredStep`]): The step.

        Returns:
            `dict[str, float]`: `"<module>/forward"` and `"<module>/backward"` -> milliseconds, negative where faster.
        """
        planner, prediction = self.planner, step.prediction
        program = prediction.planned.program
        cost = StepCost(planner.costs, planner.plan, prediction.planned.step, prediction.sizes, planner.groups)
        off: dict[str, float] = defaultdict(float)
        for task, took in step.durations.items():
            off[f"{task.module}/{kind_of(task)}"] += abs(took - cost(task))
        measured: set[str] = set()

        def time(task: Task) -> float:
            return step.durations[task] if f"{task.module}/{kind_of(task)}" in measured else cost(task)

        causes, before = {}, prediction.simulation.iteration_ms
        for name in sorted(off, key=lambda name: (-off[name], name)):
            measured.add(name)
            after = simulate(planner.plan, program, time, cost.message_ms, cost.sync_ms).iteration_ms
            causes[name], before = after - before, after
        return causes


def rank_durations(prediction: Prediction, ranks: Sequence[np.ndarray]) -> dict[Task, float]:
    """
    Task -> milliseconds, from those of each rank in the order of its program.

    Args:
        prediction (`Prediction`): Of the step.
        ranks (`Sequence[np.ndarray]`): For each rank, float `[tasks]`.

    Raises:
        `ValueError`: If a rank has run other tasks than were predicted.
    """
    durations: dict[Task, float] = {}
    for rank, times in enumerate(ranks):
        actions = prediction.planned.program.actions.get(rank, ())
        tasks = [action.task for action in actions if action.task is not None and action.message is None]
        if len(tasks) != len(times):
            raise ValueError(f"rank {rank} ran {len(times)} tasks where {len(tasks)} were predicted")
        for task, took in zip(tasks, times.tolist(), strict=True):
            durations[task] = max(durations.get(task, 0.0), took)
    return durations


class _TaskCosts:
    """What the tasks of a step cost, in parts."""

    def __init__(self, comparer: StepComparer, prediction: Prediction):
        plan, costs = comparer.planner.plan, comparer.planner.costs
        step, sizes = prediction.planned.step, prediction.sizes
        self.predicted = StepCost(costs, plan, step, sizes)
        self.chunks = self.predicted.chunks
        self.base = stage_costs(comparer.base, plan)
        self.stages, self.unlinked, self.plain = (
            {key: replace(stage, launch_ms=(0.0, 0.0)) for key, stage in stages.items()}
            for stages in (
                self.base,
                stage_costs(comparer.unlinked, plan),
                stage_costs(comparer.unlinked, comparer.plain_plan),
            )
        )

    def of(self, task: Task) -> tuple[float, ...]:
        """
        Tokens and squares; time as predicted; by the base costs what the device computes without a recomputation and
        without sums, what of it grows with squares, the recomputation, what of that grows with squares; the launches
        of all of it; the sums.
        """
        chunk = self.chunks[task.module, task.replica, task.microbatch, task.chunk]
        tokens, squares = chunk.tokens, chunk.squares
        base, of_squares = self._parts(self.plain, task, tokens, squares)
        computed, all_of_squares = self._parts(self.unlinked, task, tokens, squares)
        whole, _ = self._parts(self.stages, task, tokens, squares)
        again = max(0.0, computed - base), max(0.0, all_of_squares - of_squares)
        launched = self.base[task.stage_key].launch_ms[task.kind == "bwd"]
        return tokens, squares, self.predicted(task), base, of_squares, *again, launched, max(0.0, whole - computed)

    @staticmethod
    def _parts(stages: Mapping[StageKey, StageCost], task: Task, tokens: float, squares: float) -> tuple[float, float]:
        """What the device computes of a task, and what of it grows with squares."""
        stage = stages[task.stage_key]
        time = stage.forward_ms if task.kind == "fwd" else stage.backward_ms
        whole = time(tokens, squares)
        return whole, max(0.0, whole - time(tokens, 0.0))


def _by_size(rows: np.ndarray) -> Iterable[np.ndarray]:
    """Rows of tasks in a few groups of like base times."""
    base = rows[:, 3]
    if np.ptp(base) <= _SPREAD * base.max(initial=0.0):
        return [rows]
    return [part for part in np.array_split(rows[np.argsort(base, kind="stable")], _GROUPS) if len(part)]


@dataclass(frozen=True)
class RunComparison:
    """
    Windows of a run, predicted beside measured.

    Args:
        windows (`Sequence[LoggedWindow]`): At least one.
        stages (`Mapping[str, int]`): Module -> stages of all of its replicas.
    """

    windows: Sequence[LoggedWindow]
    stages: Mapping[str, int]

    def mean(self, field: str) -> float:
        """The mean of a field of [`LoggedWindow`]."""
        return float(np.mean([getattr(window, field) for window in self.windows]))

    @property
    def causes(self) -> dict[str, float]:
        """
        What a step, with its data and the optimizer's, is longer than it was predicted to be: by the tasks of each
        module, by the rest of the step ([`IN_STEP`]), by the wait for its batch ([`DATA`]) and by what else is between
        two steps ([`BETWEEN`]). In ms, the mean over the windows; the sum is the difference.
        """
        names = dict.fromkeys(name for window in self.windows for name in window.causes)
        found = {name: float(np.mean([w.causes.get(name, 0.0) for w in self.windows])) for name in names}
        step_ms, wall_ms = self.mean("step_ms"), max(self.mean("wall_ms"), self.mean("step_ms"))
        found[IN_STEP] = step_ms - self.mean("predicted_step_ms") - sum(found.values())
        found[DATA] = min(self.mean("data_ms"), wall_ms - step_ms)
        found[BETWEEN] = wall_ms - step_ms - found[DATA]
        return found

    @property
    def task_times(self) -> dict[str, tuple[float, float]]:
        """
        `"<module>/forward"` and so on -> time of these tasks in a step on one of the ranks that share them, in ms, as
        predicted and as measured.
        """
        steps = sum(window.compared for window in self.windows)
        found = {}
        for module, kind in tasks_of(self.windows):
            both = (sum(w.task_ms(f, module, kind) for w in self.windows) for f in ("predicted_ms", "measured_ms"))
            predicted, measured = (total / steps / self.stages[module] for total in both)
            found[f"{module}/{kind}"] = predicted, measured
        return found

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """What was predicted, as predicted and as measured, with units in the names."""
        found = [("step (ms)", self.mean("predicted_step_ms"), self.mean("step_ms"))]
        bubbles = [window.bubble for window in self.windows if window.bubble is not None]
        if bubbles:
            found.append(("bubble (share of the step)", self.mean("predicted_bubble"), float(np.mean(bubbles))))
        for name, both in self.task_times.items():
            module, _, kind = name.partition("/")
            found.append((f"{kind}s of {module} (ms on a rank)", *both))
        peaks = [window.memory for window in self.windows if window.memory is not None]
        if peaks:
            peak = max(peaks, key=lambda own: own.measured)
            found.append((f"memory of the fullest rank, {peak.rank} (GiB)", peak.predicted, peak.measured))
        return found

    @property
    def is_as_predicted(self) -> bool:
        """Whether a step, with its data and the optimizer's, took about as long as predicted."""
        predicted = self.mean("predicted_step_ms")
        return abs(sum(self.causes.values())) < AS_PREDICTED * predicted

    @property
    def largest_cause(self) -> str:
        """The cause that makes most of the difference."""
        causes = self.causes
        sign = 1.0 if sum(causes.values()) >= 0 else -1.0
        return max(causes, key=lambda name: sign * causes[name])

    @property
    def sentence(self) -> str:
        """How far off the prediction was, the largest cause with its figures, and what to do."""
        predicted, causes = self.mean("predicted_step_ms"), self.causes
        total = predicted + sum(causes.values())
        told = f"A step took {_ms(total)} from batch to batch, where {_ms(predicted)} were predicted"
        if predicted:
            ratio = total / predicted
            told += f" ({ratio - 1:+.0%})" if ratio < _IN_PERCENT else f" ({_times(ratio)} times)"
        if self.is_as_predicted:
            return f"{told}."
        name = self.largest_cause
        what, remedy = _told(name, self.task_times, causes[name])
        return f"{told}. The largest part of the difference, {_signed(causes[name])}, is {what}. {remedy}"


def _ms(time_ms: float) -> str:
    return f"{number_text(time_ms)} ms"


def _signed(time_ms: float) -> str:
    return f"+{_ms(time_ms)}" if time_ms > 0 else _ms(time_ms)


def _times(ratio: float) -> str:
    """A ratio with about two digits."""
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _told(name: str, times: Mapping[str, tuple[float, float]], cause_ms: float) -> tuple[str, str]:
    """A cause in words, and what can be done about it."""
    if name == DATA:
        return "the wait for its batch", "Raise `dataloader_num_workers`."
    if name == BETWEEN:
        return (
            "the optimizer's step and what else is between two steps, which is not part of the predicted program",
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
