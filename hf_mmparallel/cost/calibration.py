"""Corrections of predicted costs, fitted to the logs of runs, and layer costs with these corrections applied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from .. import __version__
from .._portable import on_grid, weighted_sum
from ..plan import ModelSpec
from ..schedule.kinds import KINDS as TASK_KINDS
from ..schedule.kinds import Work
from .analytic import analytic_costs
from .devices import Hardware
from .layers import OURS, CostModel, Engine, LayerCost, LayerCosts
from .profile import LayerProfile, MeasuredLayers, measured_costs, read_cost_file
from .run_log import KINDS, LoggedWindow, MemoryPeak, RunHeader, module_digests, read_run_log, tasks_of

MIN_WINDOWS = 4  # minimum number of windows of a log: two for the fit, two for its evaluation
_MIN_ACTIVATION_FACTOR = 0.05
_MAX_ROUNDS = 20  # maximum number of splits into launch-bound and compute-bound tasks


_SCALED: tuple[Work, ...] = ("forward", "inputs", "weights")  # parts of a layer's work whose costs have factors


@dataclass(frozen=True)
class TimeScale:
    """Factors of the times of one kind of task; `None` if the runs don't determine one, used as 1."""

    compute: float = 1.0
    launch: float | None = None  # of the time in which the host launches kernels, which a task takes at least
    sum: float | None = None  # of tensor-parallel all-reduces

    @property
    def launches(self) -> float:
        """Factor of launch times, 1 if unknown."""
        return 1.0 if self.launch is None else self.launch

    @property
    def sums(self) -> float:
        """Factor of all-reduce times, 1 if unknown."""
        return 1.0 if self.sum is None else self.sum


@dataclass(frozen=True)
class Accuracy:
    """Relative errors of predictions in some windows of a log, before and after a calibration."""

    before: float  # median
    after: float
    worst_before: float
    worst_after: float


@dataclass(frozen=True)
class Calibration:
    """Corrections of the costs of a model on a device, fitted to the windows of runs."""

    run: RunHeader  # of the first log: the model, the device and the dtype of all of them
    scales: Mapping[str, Mapping[str, TimeScale]]  # by module
    activations: float | None = None  # factor of activation bytes; `None` if no memory was measured
    # quantity (`"step"`, `"memory"`, `"vision/forward"`, ...) -> errors in windows that were left out of the fit
    errors: Mapping[str, Accuracy] = field(default_factory=dict)
    # fraction of the step times that neither tasks nor predicted messages and all-reduces explain; negative if the
    # latter are predicted to take longer than they do
    outside_fraction: float = 0.0
    windows: int = 0  # number of windows of the fit
    profile: LayerProfile | None = None  # the profile whose costs are corrected; `None` for operation counts

    @classmethod
    def fit(cls, run: RunHeader, windows: Sequence[LoggedWindow], profile: LayerProfile | None) -> Calibration:
        """Fits the factors to windows."""
        scales: dict[str, dict[str, TimeScale]] = {}
        for module, kind in tasks_of(windows):  # forwards first, which backwards recompute
            own = scales.setdefault(module, {})
            scale = _fit_times(_task_rows(windows, module, kind, own.get("forward", TimeScale())))
            if scale is not None:
                own[kind] = scale
        peaks = [window.memory for window in windows if window.memory is not None]
        ratios = [
            (peak.measured - peak.state) / (peak.predicted - peak.state)
            for peak in peaks
            if peak.predicted > peak.state
        ]
        activations = max(_MIN_ACTIVATION_FACTOR, float(np.median(ratios))) if ratios else None
        return cls(run, scales, activations, windows=len(windows), profile=profile)

    @property
    def judged(self) -> int:
        """Number of windows, the last ones, that `errors` are of."""
        return self.windows // 2

    def scale(self, module: str, kind: str) -> TimeScale:
        """The factors of one kind of task, 1 for tasks without any."""
        return self.scales.get(module, {}).get(kind, TimeScale())

    def scale_of(self, module: str, part: Work) -> TimeScale:
        """The factors of the kind of task that has any, with a part of a layer's work and the fewest others."""
        known = self.scales.get(module, {})
        kinds = sorted((kind for kind in TASK_KINDS.values() if part in kind.work), key=lambda kind: len(kind.work))
        labels = (kind.label for kind in kinds)
        return next((known[label] for label in labels if label in known), TimeScale())

    def task_ms(self, window: LoggedWindow, module: str, kind: str) -> float:
        """Corrected time of all tasks of one kind in a window."""
        rows = _task_rows([window], module, kind, self.scale(module, "forward"))
        return float(_corrected_ms(self.scale(module, kind), rows).sum())

    def step_ms(self, window: LoggedWindow) -> float:
        """Corrected step time: interpolated between the predicted step and the replay with measured task times."""
        result = window.predicted_step_ms
        for module, kind in tasks_of([window]):
            predicted, measured = (window.task_ms(f, module, kind) for f in ("predicted_ms", "measured_ms"))
            if measured != predicted:
                way = (self.task_ms(window, module, kind) - predicted) / (measured - predicted)
                result += float(np.clip(way, -1.0, 2.0)) * window.causes.get(f"{module}/{kind}", 0.0)
        return result

    def memory(self, peak: MemoryPeak) -> float:
        """Corrected memory of a rank."""
        return peak.state + (peak.predicted - peak.state) * (self.activations or 1.0)

    def errors_in(self, windows: Sequence[LoggedWindow]) -> dict[str, Accuracy]:
        """Errors of predictions in windows, before and after the correction."""
        # measured, predicted before, predicted after
        values: dict[str, list[tuple[float, float, float]]] = {}
        for window in windows:
            values.setdefault("step", []).append((window.step_ms, window.predicted_step_ms, self.step_ms(window)))
            for module, kind in tasks_of([window]):
                measured, predicted = (window.task_ms(f, module, kind) for f in ("measured_ms", "predicted_ms"))
                if measured:
                    entry = measured, predicted, self.task_ms(window, module, kind)
                    values.setdefault(f"{module}/{kind}", []).append(entry)
            peak = window.memory
            if peak is not None:
                values.setdefault("memory", []).append((peak.measured, peak.predicted, self.memory(peak)))
        accuracies = {}
        for name, entries in values.items():
            table = np.array(entries)
            errors = np.abs(table[:, 1:] / table[:, :1] - 1)
            accuracies[name] = Accuracy(*np.median(errors, axis=0).tolist(), *errors.max(axis=0).tolist())
        return accuracies

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON, with its profile."""
        values = asdict(self)
        data = {"profile": values.pop("profile"), "calibration": values}
        Path(path).write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def from_file(cls, data: Mapping[str, Any], path: str | Path) -> Calibration:
        """Reads the calibration in the content of a file, see [`read_cost_file`]; raises `ValueError`."""
        profile = None if data.get("profile") is None else LayerProfile.from_file(data, path)
        try:
            values = dict(data["calibration"])
            scales: dict[str, dict[str, TimeScale]] = {
                module: {kind: TimeScale(**kinds[kind]) for kind in KINDS if kind in kinds}
                for module, kinds in values.pop("scales").items()
            }
            errors = {name: Accuracy(**error) for name, error in values.pop("errors").items()}
            run = RunHeader(**values.pop("run"))
            return cls(run, scales, errors=errors, profile=profile, **values)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(
                f"`{path}` is a calibration with fields missing ({error}). Write one with `hf-mmparallel calibrate`."
            ) from error

    def check(self, spec: ModelSpec, device: Hardware) -> None:
        """Raises `ValueError` for another model, device, dtype, or operation counts of another version."""
        run, digests = self.run, module_digests(spec)
        # adapters and frozen parameters make no difference
        other = [name for name, digest in run.modules.items() if digests.get(name, digest) != digest]
        if other or not run.modules.keys() & digests.keys():
            difference = (
                f"`{other[0]}` has parameters of other shapes"
                if other
                else f"it has {sorted(run.modules)}, the model {list(digests)}"
            )
            raise ValueError(
                f"The calibration is of another model: {difference}. Calibrate with logs of this model: "
                "`hf-mmparallel calibrate trainer_log.jsonl`."
            )
        if device.name != run.device:
            raise ValueError(
                f"The calibration corrects costs of `{run.device}` ({run.device_name}), not of `{device.name}`. Use "
                f"it for `{run.device}`, or calibrate with runs on `{device.name}`."
            )
        if self.profile is None and device.dtype != run.dtype:
            raise ValueError(
                f"The calibration is of runs in {run.dtype}, not in {device.dtype}. Plan for {run.dtype}, or "
                f"calibrate with runs in {device.dtype}."
            )
        if self.profile is None and run.package.split(".")[:2] != __version__.split(".")[:2]:
            raise ValueError(
                f"The calibration corrects operation counts of hf_mmparallel {run.package}; those of {__version__} "
                "may differ. Train some steps with this version and calibrate again."
            )


# Fitting the factors to logs.


def calibrate_logs(paths: Sequence[str | Path], profile: LayerProfile | None = None) -> Calibration:
    """
    Calibrates costs by the `trainer_log.jsonl` files of runs that planned with `profile`, if any. The factors are fit
    to all windows, the errors are those of a fit to the first half of them in the others.

    Raises:
        `ValueError`: For files that are not logs, are too short, or are of different models, devices or costs.
    """
    runs = [run for path in paths for run in read_run_log(path)]
    header = runs[0].header
    for run in runs[1:]:
        _check_compatible(header, run.header)
    _check_profile(header, profile)
    windows = [window for run in runs for window in run.windows if window.groups]
    if len(windows) < MIN_WINDOWS:
        raise ValueError(
            f"The log has {len(windows)} windows with predictions; a calibration needs {MIN_WINDOWS}, half of them to "
            "judge it by. Train longer, or with fewer `logging_steps`."
        )
    calibration = Calibration.fit(header, windows, profile)
    half = len(windows) - calibration.judged
    return replace(
        calibration,
        errors=Calibration.fit(header, windows[:half], profile).errors_in(windows[half:]),
        outside_fraction=1 - sum(window.replayed_ms for window in windows) / sum(window.step_ms for window in windows),
    )


def _check_compatible(header: RunHeader, other: RunHeader) -> None:
    """Raises `ValueError` for logs that can't be calibrated together."""
    for name, what in (
        ("modules", "models"),
        ("device", "kinds of devices"),
        ("dtype", "dtypes"),
        ("value_bytes", "bytes of a value"),
        ("profile", "sources of costs"),
        ("package", "versions of hf_mmparallel"),
    ):
        values = getattr(header, name), getattr(other, name)
        if values[0] != values[1]:
            shown = "" if name == "modules" else f" ({values[0]} and {values[1]})"
            raise ValueError(f"The logs are of runs with different {what}{shown}. Calibrate each run by itself.")


def _check_profile(header: RunHeader, profile: LayerProfile | None) -> None:
    """Raises `ValueError` unless a profile is the one that the runs used."""
    given = None if profile is None else profile_digest(profile)
    if given == header.profile:
        return
    if profile is None:
        raise ValueError("The run planned with a `layer_profile`. Pass the same file as `--profile`.")
    used = "operation counts" if header.profile is None else "another profile"
    raise ValueError(f"`--profile` is not the profile of the run, which planned with {used}. Pass that one, or none.")


def _task_rows(windows: Sequence[LoggedWindow], module: str, kind: str, forward: TimeScale) -> NDArray:
    """
    Task groups of one kind `[groups, 5]`: measured time, and as predicted those of compute, of recomputed forwards,
    which are corrected by `forward`, of all-reduces and of launches.
    """
    rows = [
        (g.measured_ms, g.computed_ms, forward.compute * g.recomputed_ms, g.sums_ms, g.launch_ms)
        for window in windows
        for g in window.groups
        if (g.module, g.kind) == (module, kind)
    ]
    return np.array(rows, float).reshape(-1, 5)


def _computed_ms(scale: TimeScale, rows: NDArray) -> NDArray:
    """Corrected times of tasks `[groups]` that need not wait for their launches."""
    return weighted_sum(rows[:, 1:4], [scale.compute, 1.0, scale.sums])


def _corrected_ms(scale: TimeScale, rows: NDArray) -> NDArray:
    """Corrected times of tasks `[groups]`: the larger of compute and launch time."""
    return np.maximum(_computed_ms(scale, rows), scale.launches * rows[:, 4])


def _fit_times(rows: NDArray) -> TimeScale | None:
    """Fits the factors of one kind of task; `None` without times."""
    rows = rows[(rows[:, 0] > rows[:, 2]) & (rows[:, 1] > 0)]
    if not len(rows):
        return None
    # tasks are launch-bound or compute-bound as predicted, then as by the factors that this gives, until these agree
    scale, launched = TimeScale(), np.full(len(rows), -1)
    for _ in range(_MAX_ROUNDS):
        split = _computed_ms(scale, rows) < scale.launches * rows[:, 4]
        if (split == launched).all():
            break
        launched = split
        compute, sums = (1.0, None) if split.all() else _fit_computed(rows[~split])
        launch = _weighted_median(rows[split, 0] / rows[split, 4], rows[split, 4]) if split.any() else None
        scale = TimeScale(compute, launch, sums)
    return scale


def _fit_computed(rows: NDArray) -> tuple[float, float | None]:
    """Factors of compute and of all-reduces, which tasks of different sizes, or without any, tell apart."""
    measured, computed, recomputed, sums, _ = rows.T
    rest = measured - recomputed
    if sums.any():
        matrix = np.stack([computed, sums], axis=1) / rest[:, None]
        units = matrix.max(axis=0)
        factors = on_grid(nnls(matrix / units, np.ones(len(rows)))[0] / units).tolist()
        if min(factors) > 0.0:
            return factors[0], factors[1]
    factor = _weighted_median(rest / (computed + sums), computed + sums)
    return factor, factor if sums.any() else None


def _weighted_median(values: NDArray, weights: NDArray) -> float:
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


# Costs with corrections.


class CalibratedLayers:
    """Layer costs with the corrections of a [`Calibration`]; modules that it lacks, such as a generator, have none."""

    def __init__(self, base: LayerCosts, calibration: Calibration):
        self.base, self.calibration = base, calibration

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        cost = self.base.layer(module, index, tp_size)
        forward, inputs, weights = (self.calibration.scale_of(module, part) for part in _SCALED)
        first, second, of_weights = *cost.launch_ms, weights.launches * cost.weight_launch_ms
        memory = self.calibration.activations or 1.0
        return LayerCost(
            forward=cost.forward * forward.compute,
            data_gradient=cost.data_gradient * inputs.compute,
            weight_gradient=cost.weight_gradient * weights.compute,
            activations=cost.activations * memory,
            frozen_activations=cost.frozen_activations * memory,
            launch_ms=(
                first * forward.launches,
                (second - cost.weight_launch_ms) * inputs.launches + of_weights,
            ),
            weight_launch_ms=of_weights,
            sums=(cost.sums[0] * forward.sums, cost.sums[1] * inputs.sums),
            travels=(cost.travels[0] * forward.sums, cost.travels[1] * inputs.sums),
            gathers=cost.gathers * weights.sums,
            elementwise=cost.elementwise * forward.compute,
        )

    def starting_at(self, first_rank: int) -> CalibratedLayers:
        """See [`LayerCosts`]."""
        return CalibratedLayers(self.base.starting_at(first_rank), self.calibration)

    def with_spec(self, spec: ModelSpec) -> CalibratedLayers:
        """See [`LayerCosts`]."""
        return CalibratedLayers(self.base.with_spec(spec), self.calibration)


def without_calibration(costs: CostModel) -> CostModel:
    """The cost model without its corrections, if it has any."""
    return replace(costs, layers=costs.layers.base) if isinstance(costs.layers, CalibratedLayers) else costs


def profile_digest(costs: CostModel | LayerProfile) -> str | None:
    """Digest (12 hexadecimal digits) of a profile, or of a cost model's profile; `None` for operation counts."""
    if isinstance(costs, CostModel):
        layers = without_calibration(costs).layers
        if not isinstance(layers, MeasuredLayers):
            return None
        costs = layers.profile
    return hashlib.sha256(json.dumps(asdict(costs), sort_keys=True).encode()).hexdigest()[:12]


def read_costs(path: str | Path) -> LayerProfile | Calibration:
    """Reads a file for `--profile` or `layer_profile`; raises `ValueError` for another format."""
    data = read_cost_file(path)
    return (Calibration if "calibration" in data else LayerProfile).from_file(data, path)


def costs_from(
    spec: ModelSpec,
    device: Hardware,
    value_bytes: int,
    source: LayerProfile | Calibration | None,
    engine: Engine = OURS,
) -> CostModel:
    """
    Cost model of a file, see [`read_costs`], or of operation counts of an engine; raises `ValueError` for corrections
    or a profile of another model, and for corrections of another device or dtype.
    """
    # files define their own `value_bytes`
    if isinstance(source, Calibration):
        source.check(spec, device)
        base = costs_from(spec, device, source.run.value_bytes, source.profile)
        return replace(base, layers=CalibratedLayers(base.layers, source))
    return (
        analytic_costs(spec, device, value_bytes, engine) if source is None else measured_costs(spec, device, source)
    )
