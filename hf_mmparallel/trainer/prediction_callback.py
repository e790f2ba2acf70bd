"""Predicted beside measured: in the Trainer's log, in a file for `hf-mmparallel calibrate`, in a sentence."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger

from .. import __version__
from ..cost import predicts_times
from ..cost.calibration import profile_digest
from ..cost.run_log import RUN_LOG, LoggedWindow, MemoryPeak, RunHeader, append_line, module_digests
from ..cost.stage_memory import GIB
from ..cost.step_planner import Prediction
from ..plan.methods import arrangement_name
from ..planning.comparison import MeasuredStep, RunComparison, StepComparer, rank_durations, times_on_a_rank
from ..planning.device_detection import core_per_rank
from ..runtime.engine import ParallelEngine
from ..runtime.work import StepRecord, StepResult
from .engine_callback import EngineCallback, not_worth_a_run

logger = get_logger(__name__)

_MAX_COMPARED_STEPS = 4  # maximum steps of a window
_MAX_TIME_FRACTION = 0.02  # maximum share of the thread in the time since training began
_NUM_FIRST_WINDOWS = 8  # first windows, of which one step is compared in any case
_WINDOWS_BEFORE_LOG = 3  # windows before the error of the prediction is first logged
_WARN_ERROR = 0.25  # relative error of predicted steps


@dataclass(frozen=True)
class RankStep:
    """Measurements of one rank in a step that may be compared."""

    durations: np.ndarray  # (tasks,) milliseconds, in the order of its program
    step_ms: float  # from its first action to the end of the gradient sums

    @classmethod
    def of(cls, record: StepRecord) -> RankStep:
        return cls(np.array([timed.end_ms - timed.start_ms for timed in record.timeline]), record.step_ms)


@dataclass
class RankSteps:
    chosen: list[RankStep] = field(default_factory=list)  # those that may be compared
    # of each step, from asking for its batch to the end of the optimizer's step
    wall_ms: list[float] = field(default_factory=list)
    data_ms: list[float] = field(default_factory=list)  # of each step, waiting for its batch
    memory_gib: float | None = None  # the allocator's peak


class PredictionCallback(EngineCallback):
    """
    Compares steps with their predictions: simulations with the sizes of their own samples, by the costs that
    they were arranged by. To the log it adds, as means over up to four steps since the last one:

    | key | meaning |
    |---|---|
    | `parallel/step_ms`, `parallel/predicted_step_ms` | first forward to the end of the gradient sums, slowest rank |
    | `parallel/wall_ms`, `parallel/data_ms` | from batch to batch, and the wait for a batch; of all steps, measured |
    | `parallel/predicted_bubble_fraction` | share of the ranks' time outside of tasks |
    | `parallel/forward_ms/<module>`, `parallel/backward_ms/<module>` and `parallel/predicted_...` | on one rank |
    | `parallel/input_gradient_ms/<module>`, `parallel/weight_gradient_ms/<module>` and so on | of split backwards |
    | `parallel/memory_gib`, `parallel/predicted_memory_gib` | of the fullest rank; on CUDA |

    Each window is also a line of `trainer_log.jsonl` in the output folder, which `hf-mmparallel calibrate` reads. The
    first step of a run is left out. Rank 0 predicts in a thread, while steps run, for at most 2 % of the time after
    the first eight windows; a window for which there is no time has no predicted numbers.

    The Trainer has one by itself under a plan, unless `log_predictions=False`.
    """

    def __init__(self):
        self.windows: list[LoggedWindow] = []
        self._clear()
        self.comparer: StepComparer | None = None
        self.path: Path | None = None
        self._is_warm = self._told = False
        self._pool: ThreadPoolExecutor | None = None
        self._began_s = self._spent_s = 0.0

    def _clear(self) -> None:
        self.steps = RankSteps()
        self.chosen: list[StepResult] = []  # those that may be compared
        self.marks: list[tuple[Any, Any]] = []  # of the engine's clock: each step's start and end
        self.predictions: list[Future[Prediction] | None] = []

    @property
    def comparison(self) -> RunComparison | None:
        """All windows so far; `None` before the first, and on other ranks than the first."""
        if not self.windows or self.engine is None:
            return None
        return RunComparison(list(self.windows))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.windows = []
        self._clear()
        self._is_warm = self._told = False
        self._began_s, self._spent_s = time.perf_counter(), 0.0
        if self.engine is None or not state.is_world_process_zero:
            return
        self._pool = ThreadPoolExecutor(1, "predictions")
        self.path = Path(args.output_dir) / RUN_LOG
        self.comparer = None
        if self.engine.device.type != "cuda":
            logger.info("Memory is predicted, but not measured: only CUDA counts what is allocated.")

    def on_reconfigure(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self.on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self.engine
        if engine is None or engine.last_result is None or engine.planner is None:
            return
        if not self._is_warm:  # the first step compiles, allocates, and is checked
            self._is_warm = True
            if engine.device.type == "cuda" and args.skip_memory_metrics:
                torch.cuda.reset_peak_memory_stats(engine.device)
            return
        stride = max(1, int(state.logging_steps or 1) // _MAX_COMPARED_STEPS)
        index = len(self.marks)
        self.marks.append((engine.asked, engine.clock.mark()))
        self.steps.data_ms.append(engine.data_ms)
        if index % stride == 0 and index // stride < _MAX_COMPARED_STEPS:
            self.chosen.append(engine.last_result)
            if state.is_world_process_zero:
                self.predictions.append(self._start_prediction(engine))

    def _start_prediction(self, engine: ParallelEngine) -> Future[Prediction] | None:
        """Lets the thread predict the step that ran last, if its sizes are known and there is time for it."""
        step, sizes, workloads = engine.current_step, engine.current_sizes, engine.current_workloads
        if self._pool is None or step is None or sizes is None or workloads is None or not sizes.known:
            return None
        if (self.predictions or len(self.windows) >= _NUM_FIRST_WINDOWS) and not self._has_time():
            return None
        assert engine.planner is not None
        if self.comparer is None:
            self._write_header(engine)
        if self.comparer is None or self.comparer.planner is not engine.planner:
            self.comparer = StepComparer(engine.planner)
        return self._pool.submit(self._timed, self.comparer.predict, step, sizes, workloads)

    def _timed(self, work: Any, *args: Any) -> Any:
        """Does some work in the thread and counts its time."""
        start = time.thread_time()
        try:
            return work(*args)
        finally:
            self._spent_s += time.thread_time() - start

    def _write_header(self, engine: ParallelEngine) -> None:
        assert engine.planner is not None and self.path is not None
        costs, plan = engine.costs, engine.plan
        cuda = engine.device.type == "cuda"
        header = RunHeader(
            package=__version__,
            modules=module_digests(costs.spec),
            device=costs.device.name,
            device_name=torch.cuda.get_device_name(engine.device) if cuda else "cpu",
            dtype=costs.device.dtype,
            value_bytes=costs.value_bytes,
            profile=profile_digest(costs),
            world_size=plan.world_size,
            plan=plan.fingerprint,
            layout={
                name: {"dp": own.dp_size, "pp": own.pp_size, "cp": own.cp_size, "tp": own.tp_size}
                for name, own in plan.modules.items()
            },
            schedule=plan.schedule,
            method=arrangement_name(engine.planner.arrangement),
        )
        with not_worth_a_run(f"`{self.path}`"):
            append_line(self.path, header)

    def parallel_metrics(self) -> dict[str, float]:
        engine = self.engine
        if engine is None or not self.chosen:
            return {}
        # the device has finished the steps that are logged
        self.steps.chosen = [RankStep.of(result.record) for result in self.chosen]
        self.steps.wall_ms = [engine.clock.ms(asked, ended) for asked, ended in self.marks]
        if engine.device.type == "cuda":
            self.steps.memory_gib = torch.cuda.max_memory_allocated(engine.device) / GIB
        ranks = engine.world.gather(self.steps, "measured steps of the ranks")
        metrics: dict[str, float] = {}
        if ranks is not None:
            with not_worth_a_run("The comparison with predictions"):
                metrics = self._compared(engine, ranks)
        self._clear()
        return engine.world.broadcast(metrics, "predicted beside measured")

    def _compared(self, engine: ParallelEngine, ranks: Sequence[RankSteps]) -> dict[str, float]:
        """The numbers of a window, on the first rank. Longer work goes to the thread."""
        wall_ms = float(np.mean([rank.wall_ms for rank in ranks], axis=1).max())
        data_ms = float(np.mean(np.max([rank.data_ms for rank in ranks], axis=0)))
        metrics = {"parallel/wall_ms": wall_ms, "parallel/data_ms": data_ms}
        predictions = [None if future is None else future.result() for future in self.predictions]
        chosen = [index for index, prediction in enumerate(predictions) if prediction is not None]
        known = chosen or range(len(ranks[0].chosen))
        metrics["parallel/step_ms"] = float(np.mean([max(r.chosen[index].step_ms for r in ranks) for index in known]))
        if not chosen or self.comparer is None:
            return metrics
        steps = []
        for index in chosen:
            prediction = predictions[index]
            assert prediction is not None
            durations = rank_durations(prediction, [rank.chosen[index].durations for rank in ranks])
            steps.append(MeasuredStep(prediction, durations))
        window = LoggedWindow(
            step=engine.step_index + 1,
            steps=len(ranks[0].wall_ms),
            compared=len(steps),
            step_ms=metrics["parallel/step_ms"],
            predicted_step_ms=float(np.mean([step.prediction.timeline.iteration_ms for step in steps])),
            wall_ms=wall_ms,
            data_ms=data_ms,
            predicted_bubble=float(np.mean([step.prediction.timeline.idle_fraction for step in steps])),
            bubble=_bubble(ranks, chosen) if core_per_rank(engine.world) else None,
            task_times=times_on_a_rank(engine.plan, steps),
            causes={},
            memory=_memory(ranks, steps),
            groups=(),
        )
        assert self._pool is not None
        self._pool.submit(self._timed, self._finish, self.comparer, window, steps)
        if len(self.windows) >= _WINDOWS_BEFORE_LOG:
            self._tell()
        return metrics | _predicted_metrics(window, steps)

    def _finish(self, comparer: StepComparer, window: LoggedWindow, steps: Sequence[MeasuredStep]) -> None:
        """Finds the causes of a difference and writes the window, in the thread."""
        if len(self.windows) >= _NUM_FIRST_WINDOWS and not self._has_time():
            return
        with not_worth_a_run(f"`{self.path}`"):
            causes = comparer.causes(steps[-1])
            whole = replace(window, causes=causes, groups=comparer.task_groups(steps))
            assert self.path is not None
            append_line(self.path, whole)
            self.windows.append(whole)

    def _has_time(self) -> bool:
        """Whether the thread has taken less than its share of the time since training began."""
        return self._spent_s < _MAX_TIME_FRACTION * (time.perf_counter() - self._began_s)

    def _tell(self) -> None:
        """Logs the error of the prediction once, as a warning if it is large; times on a CPU are not predicted."""
        comparison = self.comparison
        if comparison is not None and not self._told:
            self._told = True
            off = abs(sum(comparison.causes.values())) / comparison.mean("predicted_step_ms")
            is_far = off > _WARN_ERROR and self.engine is not None and predicts_times(self.engine.costs)
            logger.log(logging.WARNING if is_far else logging.INFO, comparison.sentence)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            self._tell()


def _predicted_metrics(window: LoggedWindow, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    metrics = {
        "parallel/predicted_step_ms": window.predicted_step_ms,
        "parallel/predicted_bubble_fraction": window.predicted_bubble,
        "parallel/predicted_memory_gib": max(step.prediction.peak_memory_bytes for step in steps) / GIB,
    }
    if window.memory is not None:
        metrics["parallel/memory_gib"] = window.memory.measured
    for name, (predicted, measured) in window.task_times.items():
        module, _, kind = name.replace(" ", "_").partition("/")
        metrics[f"parallel/predicted_{kind}_ms/{module}"] = predicted
        metrics[f"parallel/{kind}_ms/{module}"] = measured
    return metrics


def _bubble(ranks: Sequence[RankSteps], chosen: Sequence[int]) -> float:
    """The share of the ranks' time outside of tasks in some steps."""
    busy = sum(float(rank.chosen[index].durations.sum()) for rank in ranks for index in chosen)
    total = sum(max(rank.chosen[index].step_ms for rank in ranks) for index in chosen)
    return 1 - busy / (total * len(ranks))


def _memory(ranks: Sequence[RankSteps], steps: Sequence[MeasuredStep]) -> MemoryPeak | None:
    measured = [rank.memory_gib for rank in ranks]
    rank = int(np.argmax([gib or 0.0 for gib in measured]))
    gib = measured[rank]
    if gib is None:
        return None
    expected = max((step.prediction.memory[rank] for step in steps), key=lambda memory: memory.total)
    return MemoryPeak(rank, gib, expected.total_gib, (expected.total - expected.activations) / GIB)
