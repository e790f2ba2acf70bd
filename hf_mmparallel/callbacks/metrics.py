"""Efficiency of the last steps, in the Trainer's log."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arrange.balance import excess
from ..cost import training_flops
from ..plan import ModelSpec
from ..profiling.device_detection import MEASURED, core_per_rank
from ..runtime.step_result import StepResult
from ..runtime.work import ModuleWork
from .base import EngineCallback
from .workload_balance import RanStep, forward_metrics, last_step, mean_of, measure

_MOST_STEPS = 1000  # the last ones are logged if there are more between two logs


@dataclass(frozen=True)
class RankWindow:
    """Times and work of one rank in the steps between two logs."""

    duration_ms: float  # in the programs of steps
    wall_ms: float  # from the end of the step before the first to the end of the last, with data and optimizer
    busy_ms: float  # in tasks
    replicas_ms: dict[tuple[str, int], float]  # (module, replica) -> time in its tasks
    work: dict[str, ModuleWork]  # module -> tokens that it computed on

    @classmethod
    def of(cls, results: Sequence[StepResult], wall_ms: float) -> RankWindow:
        replicas = defaultdict(float)
        busy = 0.0
        for result in results:
            for timed in result.timeline:
                took = timed.end_ms - timed.start_ms
                busy += took
                replicas[timed.task.module, timed.task.replica] += took
        duration = sum(r.duration_ms for r in results)
        return cls(duration, max(wall_ms, duration), busy, dict(replicas), total_work(r.work for r in results))


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
    """
    Returns model FLOPs per second over the peak of all ranks' devices (MFU); padding and recomputation do not count,
    see [`model_flops`].
    """
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
    (`workload_std_before`), with the share of deferred samples.

    The Trainer has one by itself under a plan; remove it with `trainer.remove_callback(ParallelMetricsCallback)`.
    """

    def __init__(self):
        self.steps: deque[RanStep] = deque(maxlen=_MOST_STEPS)
        self.ends_s: deque[float] = deque(maxlen=_MOST_STEPS + 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.engine is not None and self.engine.last_result is not None:
            self.steps.append(last_step(self.engine, args.per_device_train_batch_size))
            self.ends_s.append(time.perf_counter())

    def on_reconfigure(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.clear()
        self.ends_s = deque([time.perf_counter()], _MOST_STEPS + 1)

    def parallel_metrics(self) -> dict[str, float]:
        if self.engine is None or not self.steps:
            return {}
        mine = RankWindow.of([ran.result for ran in self.steps], 1e3 * (self.ends_s[-1] - self.ends_s[0]))
        windows = self.engine.world.all_gather(mine, "metrics of the ranks")
        metrics = efficiency(windows, core_per_rank(self.engine.world))
        metrics |= mean_of([forward_metrics(balance) for balance in measure(self.steps, self.engine.world)])
        metrics |= mean_of([ran.arrangement for ran in self.steps])
        self.steps.clear()
        self.ends_s = deque([time.perf_counter()], _MOST_STEPS + 1)
        device = self.engine.costs.device
        if device.name != "cpu":
            name = "parallel/model_flops_utilisation"
            name = f"{name}_of_measured_peak" if device.source.startswith(MEASURED) else name
            metrics[name] = flops_utilisation(self.engine.spec, windows, device.peak_tflops)
        return metrics
