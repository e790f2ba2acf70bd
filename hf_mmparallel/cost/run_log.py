"""The log of a run's steps for `hf-mmparallel calibrate`: a JSON line per run and per logged window."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..plan import ModelSpec
from ..schedule.kinds import KINDS as TASK_KINDS
from .profile import shape_digest

RUN_LOG = "trainer_log.jsonl"  # name of the file in the output folder of a run
KINDS = tuple(kind.label for kind in TASK_KINDS.values())


@dataclass(frozen=True)
class RunHeader:
    """The first line of a run in a log."""

    package: str  # version of `hf_mmparallel`
    modules: Mapping[str, str]  # module -> digest of the shapes of its parameters, see [`module_digests`]
    device: str  # name in the device table of the device that costs were predicted for
    device_name: str  # name that the driver reports
    dtype: str  # compute dtype of matrix products
    value_bytes: int  # bytes of a value in matrix products
    profile: str | None  # digest of the layer profile; `None` for operation counts
    # what the run was, for people
    world_size: int
    plan: str  # the plan's fingerprint
    layout: Mapping[str, Mapping[str, Any]]  # module -> its dp, pp, cp and tp
    schedule: str
    method: str  # how samples are assigned to microbatches


@dataclass(frozen=True)
class TaskGroup:
    """
    Sums over tasks of one module and kind and of similar size, in milliseconds. Predictions but `predicted_ms` are
    without calibration.
    """

    module: str
    kind: str
    tasks: int
    tokens: float
    measured_ms: float  # of a task on several ranks, the slowest one
    predicted_ms: float
    computed_ms: float  # compute time without recomputation and tensor-parallel all-reduces
    recomputed_ms: float = 0.0  # recomputed forwards, without all-reduces
    launch_ms: float = 0.0  # host time to launch all kernels, a task's time if it exceeds the compute time
    sums_ms: float = 0.0  # tensor-parallel all-reduces


@dataclass(frozen=True)
class MemoryPeak:
    """Memory in GiB of the rank with the highest peak."""

    rank: int
    measured: float  # the allocator's peak
    predicted: float
    state: float  # part of `predicted`: weights, gradients and optimizer state


@dataclass(frozen=True)
class LoggedWindow:
    """Steps between two logs. Times are means over these steps, in milliseconds."""

    step: int  # the last optimizer step of the window
    steps: int  # number of steps, without the first one of the run
    compared: int  # number of steps with a prediction; all fields but `wall_ms` and `data_ms` refer to these
    step_ms: float  # from the first action of a step to the end of its gradient all-reduces, on the slowest rank
    predicted_step_ms: float  # the simulated value of `step_ms`
    wall_ms: float  # from the request for a batch to the end of the optimizer step
    data_ms: float  # part of `wall_ms`: waiting for the batch, on the rank that waits longest
    predicted_bubble: float  # simulated share of the ranks' time outside of tasks
    bubble: float | None  # the measured share; `None` if ranks share cores
    # `"<module>/forward"` and `"<module>/backward"` -> predicted and measured time of these tasks on one rank
    task_times: Mapping[str, Sequence[float]]
    # the same names -> additional step time with measured instead of predicted times of these tasks; all of them
    # together give a step with measured tasks and predicted messages and all-reduces
    causes: Mapping[str, float]
    memory: MemoryPeak | None  # `None` if memory is not measured
    groups: tuple[TaskGroup, ...]

    @property
    def replayed_ms(self) -> float:
        """Time of a step with measured tasks, and predicted messages and all-reduces."""
        return self.predicted_step_ms + sum(self.causes.values())

    def task_ms(self, field: str, module: str, kind: str) -> float:
        """Sum of a field of [`TaskGroup`] over the tasks of one kind."""
        return sum(getattr(group, field) for group in self.groups if (group.module, group.kind) == (module, kind))


@dataclass(frozen=True)
class RunLog:
    """The windows of one run."""

    header: RunHeader
    windows: tuple[LoggedWindow, ...]


def tasks_of(windows: Sequence[LoggedWindow]) -> list[tuple[str, str]]:
    """(module, kind) of all tasks in windows."""
    present = {(group.module, group.kind): None for window in windows for group in window.groups}
    modules = dict.fromkeys(module for module, _ in present)
    return [(module, kind) for module in modules for kind in KINDS if (module, kind) in present]


def module_digests(spec: ModelSpec) -> dict[str, str]:
    """Module -> digest (12 hexadecimal digits) of the shapes of its parameters, without adapters."""
    digests = {}
    for name, module in spec.modules.items():
        layers = [shape_digest(spec, name, index) for index in range(-1, module.num_layers + 1)]
        digests[name] = hashlib.sha256("".join(layers).encode()).hexdigest()[:12]
    return digests


def append_line(path: Path, entry: RunHeader | LoggedWindow) -> None:
    """Appends a line to a log, with numbers rounded to six significant digits."""
    data = {"type": "run" if isinstance(entry, RunHeader) else "window", **asdict(entry)}
    with path.open("a") as file:
        file.write(json.dumps(_rounded(data)) + "\n")


def _rounded(value: Any) -> Any:
    """The value with all floats rounded to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_run_log(path: str | Path) -> list[RunLog]:
    """Reads a `trainer_log.jsonl`; raises `ValueError` for another format."""
    remedy = "A run under a plan writes one into its output folder, unless `log_predictions=False`."
    lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
    # several if a run was resumed or repeated in the same folder
    runs: list[tuple[RunHeader, list[LoggedWindow]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            kind = data.pop("type")
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            if runs and number == len(lines):  # the run was killed while it wrote
                break
            raise ValueError(f"`{path}` is not a run log (line {number}). {remedy}") from error
        try:
            if kind == "run":
                runs.append((RunHeader(**data), []))
            else:
                runs[-1][1].append(_read_window(data))
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"`{path}` is a log with fields missing in line {number} ({error}). {remedy}") from error
    if not runs:
        raise ValueError(f"`{path}` is empty. {remedy}")
    return [RunLog(header, tuple(windows)) for header, windows in runs]


def _read_window(data: dict[str, Any]) -> LoggedWindow:
    """Parses one window of a file."""
    groups: Sequence[Mapping[str, Any]] = data.pop("groups")
    memory = data.pop("memory")
    return LoggedWindow(
        **data,
        groups=tuple(TaskGroup(**group) for group in groups),
        memory=None if memory is None else MemoryPeak(**memory),
    )
