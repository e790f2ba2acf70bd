"""Efficiency of the last steps, in the Trainer's log."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..arrange.balance import Balance, compare_with_contiguous, excess, measured_balance
from ..cost import training_flops
from ..plan import ModelSpec, StageKey, StepPlan
from ..planning.device_detection import MEASURED, core_per_rank
from ..runtime.engine import ParallelEngine
from ..runtime.work import ModuleWork, StepRecord, StepResult
from ..schedule import Span
from ..world import World
from .engine_callback import EngineCallback

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
    """Times and work of one rank in the steps between two logs."""

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
        """Begins a window."""
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
            name = f"{name}_of_measured_peak" if device.source.startswith(MEASURED) else name
            metrics[name] = flops_utilisation(self.engine.spec, windows, device.peak_tflops)
        return metrics
