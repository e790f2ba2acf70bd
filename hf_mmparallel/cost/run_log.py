"""What runs write down of their steps, for `hf-mmparallel calibrate`: a JSON line for each run and logged window."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..plan import ModelSpec
from .profile import shape_digest

RUN_LOG = "trainer_log.jsonl"
"""Name of the file in the output folder of a run."""
LOG_VERSION = 3
Kind = Literal["forward", "backward"]
KINDS: tuple[Kind, ...] = ("forward", "backward")


@dataclass(frozen=True)
class RunHeader:
    """
    What a run was.

    Args:
        package (`str`): Version of `hf_mmparallel`.
        modules (`Mapping[str, str]`): Module -> digest of the shapes of its parameters, see [`module_digests`].
        device (`str`): The device as the table of devices calls it, by which costs were counted.
        device_name (`str`): The device as it calls itself.
        dtype (`str`): What matrix products are computed in.
        value_bytes (`int`): Bytes of a value that matrices are multiplied with.
        profile (`str`, *optional*): Digest of the profile that costs came from; `None` for operation counts.
        world_size (`int`): Ranks.
        plan (`str`): The plan's fingerprint.
        layout (`Mapping[str, Mapping[str, Any]]`): Module -> its dp, pp, cp and tp.
        schedule (`str`): The schedule.
        method (`str`): How samples came to microbatches.
    """

    package: str
    modules: Mapping[str, str]
    device: str
    device_name: str
    dtype: str
    value_bytes: int
    profile: str | None
    world_size: int
    plan: str
    layout: Mapping[str, Mapping[str, Any]]
    schedule: str
    method: str


@dataclass(frozen=True)
class TaskGroup:
    """
    Tasks of one kind on the stages of a module that have equally many layers, of about one size, summed up.

    Args:
        module (`str`): Their module.
        kind (`str`): `"forward"` or `"backward"`.
        layers (`int`): Layers of each stage.
        tasks (`int`): How many tasks.
        tokens (`float`): Their tokens.
        squares (`float`): The squared lengths of their sequences.
        measured_ms (`float`): What they took; of a task on several ranks the slowest counts.
        predicted_ms (`float`): What they were expected to take.
        base_ms (`float`):
            What the device computes by the costs without a calibration, without a recomputation and without sums.
        squares_ms (`float`): Of `base_ms`, the share that grows with squares.
        recomputed_ms (`float`):
            By the costs without a calibration, the forwards that backwards run once more, without sums.
        recomputed_squares_ms (`float`): Of `recomputed_ms`, the share that grows with squares.
        launch_ms (`float`): By the costs without a calibration, what the host takes to launch all of that. A task
            takes this where it is more than what the device computes.
        sums_ms (`float`): By the costs without a calibration, the sums over tensor-parallel ranks.
    """

    module: str
    kind: Kind
    layers: int
    tasks: int
    tokens: float
    squares: float
    measured_ms: float
    predicted_ms: float
    base_ms: float
    squares_ms: float
    recomputed_ms: float = 0.0
    recomputed_squares_ms: float = 0.0
    launch_ms: float = 0.0
    sums_ms: float = 0.0


@dataclass(frozen=True)
class MemoryPeak:
    """
    Memory of the fullest rank, in GiB.

    Args:
        rank (`int`): The rank on which most was measured.
        measured (`float`): The allocator's peak.
        predicted (`float`): What was expected on this rank.
        state (`float`): Of `predicted`: weights, gradients and optimizer state.
    """

    rank: int
    measured: float
    predicted: float
    state: float


@dataclass(frozen=True)
class LoggedWindow:
    """
    Steps between two logs. Times are means over steps, in ms.

    Args:
        step (`int`): The last optimizer step of the window.
        steps (`int`): How many steps there were, without the first one of the run.
        compared (`int`): Of these, the steps that were predicted too, which all but `wall_ms` and `data_ms` are of.
        step_ms (`float`): From the first action of a step to the end of its gradient sums, on the slowest rank.
        predicted_step_ms (`float`): The same, simulated.
        wall_ms (`float`): From asking for a batch to the end of the optimizer's step.
        data_ms (`float`): Of that, waiting for the batch, on the rank that waited longest.
        predicted_bubble (`float`): Share of the ranks' time outside of tasks, simulated.
        bubble (`float`, *optional*): The same as measured; `None` where ranks share cores.
        causes (`Mapping[str, float]`):
            `"<module>/forward"` and `"<module>/backward"` -> what the step is longer with these tasks as measured;
            with all of them it is as long as a step whose messages and sums are as predicted.
        memory ([`MemoryPeak`], *optional*): `None` where memory is not measured.
        groups (`tuple[TaskGroup, ...]`): The tasks.
    """

    step: int
    steps: int
    compared: int
    step_ms: float
    predicted_step_ms: float
    wall_ms: float
    data_ms: float
    predicted_bubble: float
    bubble: float | None
    causes: Mapping[str, float]
    memory: MemoryPeak | None
    groups: tuple[TaskGroup, ...]

    @property
    def replayed_ms(self) -> float:
        """A step with tasks as measured, and messages and sums as predicted."""
        return self.predicted_step_ms + sum(self.causes.values())

    def task_ms(self, field: str, module: str, kind: Kind) -> float:
        """The sum of a field of [`TaskGroup`] over the tasks of a kind."""
        return sum(getattr(group, field) for group in self.groups if (group.module, group.kind) == (module, kind))


@dataclass(frozen=True)
class RunLog:
    """The windows of one run."""

    header: RunHeader
    windows: tuple[LoggedWindow, ...]


def tasks_of(windows: Sequence[LoggedWindow]) -> list[tuple[str, Kind]]:
    """The modules of some windows, each with the kinds of tasks that it has."""
    found = {(group.module, group.kind): None for window in windows for group in window.groups}
    modules = dict.fromkeys(module for module, _ in found)
    return [(module, kind) for module in modules for kind in KINDS if (module, kind) in found]


def module_digests(spec: ModelSpec) -> dict[str, str]:
    """Module -> twelve hexadecimal digits of the shapes of its parameters, adapters left out."""
    found = {}
    for name, module in spec.modules.items():
        layers = [shape_digest(spec, name, index) for index in range(-1, module.num_layers + 1)]
        found[name] = hashlib.sha256("".join(layers).encode()).hexdigest()[:12]
    return found


def append_line(path: Path, entry: RunHeader | LoggedWindow) -> None:
    """Adds a line to a log; numbers have six digits."""
    kind = "run" if isinstance(entry, RunHeader) else "window"
    data = {"type": kind, **({"version": LOG_VERSION} if kind == "run" else {}), **asdict(entry)}
    with path.open("a") as file:
        file.write(json.dumps(_rounded(data)) + "\n")


def _rounded(value: Any) -> Any:
    """The same with six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(own) for key, own in value.items()}
    return [_rounded(own) for own in value] if isinstance(value, (list, tuple)) else value


def read_run_log(path: str | Path) -> list[RunLog]:
    """
    Reads a log; a run that was resumed, or repeated in the same folder, follows the one before.

    Args:
        path (`str` or `Path`): A `trainer_log.jsonl`.

    Raises:
        `ValueError`: If the file is something else, or of another version. A last line that was cut off is left out.
    """
    remedy = "A run under a plan writes one into its output folder, unless `log_predictions=False`."
    lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
    runs: list[tuple[RunHeader, list[LoggedWindow]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            kind = data.pop("type")
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            if runs and number == len(lines):  # the run was killed while it wrote
                break
            raise ValueError(f"`{path}` is no log of steps (line {number}). {remedy}") from error
        try:
            if kind == "run":
                version = data.pop("version")
                if version != LOG_VERSION:
                    raise ValueError(
                        f"`{path}` is a log of version {version}; this version of hf_mmparallel reads {LOG_VERSION}. "
                        "Train some steps again."
                    )
                runs.append((RunHeader(**data), []))
            else:
                runs[-1][1].append(_read_window(data))
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"`{path}` is a log with fields missing in line {number} ({error}). {remedy}") from error
    if not runs:
        raise ValueError(f"`{path}` is empty. {remedy}")
    return [RunLog(header, tuple(windows)) for header, windows in runs]


def _read_window(data: dict[str, Any]) -> LoggedWindow:
    """One window of a file."""
    groups: Sequence[Mapping[str, Any]] = data.pop("groups")
    memory = data.pop("memory")
    return LoggedWindow(
        **data,
        groups=tuple(TaskGroup(**group) for group in groups),
        memory=None if memory is None else MemoryPeak(**memory),
    )
