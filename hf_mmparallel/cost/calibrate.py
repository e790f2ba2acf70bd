"""Fits a calibration to the logs of runs, with its error on windows that were left out of the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from .._portable import on_grid, weighted_sum
from .calibration import Accuracy, Calibration, TimeScale, profile_digest
from .profile import LayerProfile
from .run_log import Kind, LoggedWindow, RunHeader, TaskGroup, read_run_log, tasks_of

MIN_WINDOWS = 4  # minimum number of windows of a log: two for the fit, two for its evaluation
_FOLDS = 5
_MIN_IMPROVEMENT = 0.9  # a form with more coefficients needs an error below this share of the simpler form's
_LOG_PRECISION = 1e-5  # and an error smaller by at least this, about the rounding of a log
_MIN_ACTIVATION_FACTOR = 0.05
_MIN_COMPUTE_SHARE = 0.05  # of the measured time, if predicted all-reduces exceed it
_FORMS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("base", "sums"),
    ("base", "launches"),
    ("base", "layers"),
    ("base", "sums", "layers"),
    ("tokens", "squares", "layers"),
    ("tokens", "squares", "launches"),
    ("tokens", "squares", "sums", "layers"),
)
# simplest form if launches are predicted to take longer than the compute of some tasks
_LAUNCHED = ("base", "launches")
_SPLITS = 12  # maximum number of tried splits into launch-bound and compute-bound tasks
# columns of `_task_rows`: times, and the number of layers that chunks pass
_MEASURED, _TOKENS, _SQUARES, _LAYERS, _RECOMPUTED, _LAUNCHES, _SUMS = range(7)


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration with its evaluation."""

    calibration: Calibration  # fit on all windows, with the errors of a fit on the first half of them
    fitted: int  # windows of the evaluated fit
    judged: int  # windows that it was evaluated on
    has_launches: bool  # whether kernel launches take time on this device
    # share of the judged windows' step times that neither tasks nor predicted messages and all-reduces explain;
    # negative if the latter are predicted to take longer than they do
    outside_share: float


def calibrate_logs(paths: Sequence[str | Path], profile: LayerProfile | None = None) -> CalibrationResult:
    """
    Calibrates costs by the `trainer_log.jsonl` files of runs that planned with `profile`, if any.

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
    half = (len(windows) + 1) // 2
    first, judged = windows[:half], windows[half:]
    errors = _errors(judged, _Fit.of(first))
    whole = _Fit.of(windows)
    calibration = Calibration(
        modules=header.modules,
        device=header.device,
        device_name=header.device_name,
        dtype=header.dtype,
        value_bytes=header.value_bytes,
        scales=whole.scales,
        activations=whole.activations,
        errors=errors,
        windows=len(windows),
        profile=profile,
        package=header.package,
    )
    outside = sum(window.step_ms - window.replayed_ms for window in judged) / sum(w.step_ms for w in judged)
    has_launches = any(group.launch_ms for window in windows for group in window.groups)
    return CalibrationResult(calibration, len(first), len(judged), has_launches, outside)


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


@dataclass(frozen=True)
class _Fit:
    """Correction factors of task times and of activation memory."""

    scales: dict[str, dict[Kind, TimeScale]]
    activations: float | None

    @classmethod
    def of(cls, windows: Sequence[LoggedWindow]) -> _Fit:
        """Fits the factors to windows."""
        scales: dict[str, dict[Kind, TimeScale]] = {}
        for module, kind in tasks_of(windows):  # forwards first
            forward = scales.get(module, {}).get("forward", TimeScale())
            scale = _fit_times([_task_rows(window, module, kind, forward) for window in windows])
            if scale is not None:
                scales.setdefault(module, {})[kind] = scale
        peaks = [window.memory for window in windows if window.memory is not None]
        ratios = [
            (peak.measured - peak.state) / (peak.predicted - peak.state)
            for peak in peaks
            if peak.predicted > peak.state
        ]
        return cls(scales, max(_MIN_ACTIVATION_FACTOR, float(np.median(ratios))) if ratios else None)

    def group_ms(self, group: TaskGroup) -> float:
        """Corrected time of a group of tasks."""
        scales = self.scales.get(group.module, {})
        scale, forward = scales.get(group.kind, TimeScale()), scales.get("forward", TimeScale())
        return float(_predicted(scale, np.array([_task_row(group, forward)]))[0])

    def task_ms(self, window: LoggedWindow, module: str, kind: Kind) -> float:
        """Corrected time of all tasks of one kind in a window."""
        return sum(self.group_ms(group) for group in window.groups if (group.module, group.kind) == (module, kind))

    def step_ms(self, window: LoggedWindow) -> float:
        """Corrected step time: interpolated between the predicted step and the replay with measured task times."""
        result = window.predicted_step_ms
        for module, kind in tasks_of([window]):
            predicted, measured = (window.task_ms(f, module, kind) for f in ("predicted_ms", "measured_ms"))
            if measured != predicted:
                way = (self.task_ms(window, module, kind) - predicted) / (measured - predicted)
                result += float(np.clip(way, -1.0, 2.0)) * window.causes.get(f"{module}/{kind}", 0.0)
        return result

    def memory(self, state: float, predicted: float) -> float:
        """Corrected memory of a rank."""
        return state + (predicted - state) * (self.activations or 1.0)


def _scaled(scale: TimeScale, whole_ms: float, squares_ms: float, layer_passes: int) -> float:
    """Corrected time of chunks that pass `layer_passes` layers; `squares_ms` grows with squared lengths."""
    return scale.token * (whole_ms - squares_ms) + scale.square * squares_ms + scale.layer_ms * layer_passes


def _recomputed_ms(group: TaskGroup, forward: TimeScale) -> float:
    """Corrected time of the forwards that backwards recompute."""
    if not group.recomputed_ms:
        return 0.0
    return _scaled(forward, group.recomputed_ms, group.recomputed_squares_ms, group.layers * group.tasks)


def _task_rows(window: LoggedWindow, module: str, kind: Kind, forward: TimeScale) -> NDArray:
    """Task groups of one kind `[groups, 7]`, with corrected times of recomputation and uncorrected others."""
    rows = [_task_row(group, forward) for group in window.groups if (group.module, group.kind) == (module, kind)]
    return np.array(rows, float).reshape(-1, 7)


def _task_row(group: TaskGroup, forward: TimeScale) -> tuple[float, ...]:
    """One row of [`_task_rows`]."""
    return (
        group.measured_ms,
        group.base_ms - group.squares_ms,
        group.squares_ms,
        group.layers * group.tasks,
        _recomputed_ms(group, forward),
        group.launch_ms,
        group.sums_ms,
    )


def _predicted(scale: TimeScale, rows: NDArray) -> NDArray:
    """Corrected times of tasks `[groups]`: the larger of compute and launch time."""
    factors = np.array([scale.token, scale.square, scale.layer_ms, scale.sums])
    computed = weighted_sum(rows[:, [_TOKENS, _SQUARES, _LAYERS, _SUMS]], factors) + rows[:, _RECOMPUTED]
    return np.maximum(computed, scale.launches * rows[:, _LAUNCHES])


def _fit_times(windows: Sequence[NDArray]) -> TimeScale | None:
    """Selects the simplest correction with about the cross-validated error of larger ones; `None` without times."""
    windows = [
        rows[(rows[:, _MEASURED] > rows[:, _RECOMPUTED]) & (rows[:, [_TOKENS, _SQUARES]].sum(axis=1) > 0)]
        for rows in windows
    ]
    windows = [rows for rows in windows if len(rows)]
    if not windows:
        return None
    hidden = any((_computed_shares(rows) < 1).any() for rows in windows)
    # compute and launches both get a factor if launches are predicted to take longer than the compute of some tasks
    chosen = _LAUNCHED if hidden else _FORMS[0]
    lowest_error = _left_out_error(windows, chosen)
    linked = any(rows[:, _SUMS].any() for rows in windows)
    for form in (form for form in _FORMS if linked or "sums" not in form):
        error = _left_out_error(windows, form)
        if error < min(_MIN_IMPROVEMENT * lowest_error, lowest_error - _LOG_PRECISION):
            chosen, lowest_error = form, error
    return _fit_form(np.concatenate(windows), chosen)


def _fit_form(rows: NDArray, form: tuple[str, ...]) -> TimeScale:
    """Fits one form of the correction, with tasks split into launch-bound and compute-bound ones."""
    rows = rows[np.argsort(_computed_shares(rows), kind="stable")]
    expected = int((_computed_shares(rows) < 1).sum())
    counts = np.unique(np.linspace(0, (rows[:, _LAUNCHES] > 0).sum(), _SPLITS).astype(int))
    scale = _fit_split(rows, expected, form)
    best = min((_fit_split(rows, count, form) for count in counts), key=lambda fit: _relative_error(fit, rows))
    # the split that the costs predict, unless another one has a clearly lower error
    return best if _relative_error(best, rows) < _MIN_IMPROVEMENT * _relative_error(scale, rows) else scale


def _computed_shares(rows: NDArray) -> NDArray:
    """Predicted compute time of each row over its launch time; infinite without launches."""
    computed, launches = rows[:, [_TOKENS, _SQUARES, _RECOMPUTED, _SUMS]].sum(axis=1), rows[:, _LAUNCHES]
    return np.divide(computed, launches, out=np.full(len(rows), np.inf), where=launches > 0)


def _fit_split(rows: NDArray, count: int, form: tuple[str, ...]) -> TimeScale:
    """Correction with the first `count` tasks launch-bound and the others compute-bound."""
    launch = None
    if count and "launches" in form:
        launched = rows[:count]
        launch = _weighted_median(launched[:, _MEASURED] / launched[:, _LAUNCHES], launched[:, _LAUNCHES])
    coefficients = tuple(name for name in form if name != "launches")
    if len(rows) - count < len(coefficients):
        return TimeScale(launch=launch)
    return replace(_fit_computed(rows[count:], coefficients), launch=launch)


def _fit_computed(rows: NDArray, form: tuple[str, ...]) -> TimeScale:
    """Non-negative least squares of relative errors; a single factor is the median, which resists outliers."""
    measured, tokens, squares, layers, recomputed, _, sums = rows.T
    rest = measured - recomputed
    measured = rest if "sums" in form else np.maximum(rest - sums, _MIN_COMPUTE_SHARE * rest)
    columns = {"base": tokens + squares, "tokens": tokens, "squares": squares, "layers": layers, "sums": sums}
    if form == ("base",):
        factor = _weighted_median(measured / columns["base"], columns["base"])
        return TimeScale(factor, factor)
    matrix = np.stack([columns[name] / measured for name in form], axis=1)
    units = np.maximum(matrix.max(axis=0), np.finfo(float).tiny)
    factors = dict(zip(form, on_grid(nnls(matrix / units, np.ones(len(rows)))[0] / units).tolist(), strict=True))
    token = factors.get("base", factors.get("tokens", 1.0))
    return TimeScale(token, factors.get("squares", token), factors.get("layers", 0.0), sum=factors.get("sums"))


def _left_out_error(windows: Sequence[NDArray], form: tuple[str, ...]) -> float:
    """Mean relative error of a cross-validation over windows; infinite if there are too few rows."""
    folds = min(_FOLDS, len(windows))
    if sum(map(len, windows)) < 2 * len(form) or not _fit_form(np.concatenate(windows), form).is_plausible:
        return np.inf
    errors = []
    for fold in range(folds):
        fitted = [rows for index, rows in enumerate(windows) if index % folds != fold]
        if sum(map(len, fitted)) < 2 * len(form):
            return np.inf
        scale = _fit_form(np.concatenate(fitted), form)
        rows = np.concatenate([rows for index, rows in enumerate(windows) if index % folds == fold])
        errors.append(_relative_errors(scale, rows))
    return float(np.mean(np.concatenate(errors)))


def _relative_errors(scale: TimeScale, rows: NDArray) -> NDArray:
    """Errors of the corrected times, relative to the measured times without recomputation."""
    return np.abs(_predicted(scale, rows) - rows[:, _MEASURED]) / (rows[:, _MEASURED] - rows[:, _RECOMPUTED])


def _relative_error(scale: TimeScale, rows: NDArray) -> float:
    """Mean of [`_relative_errors`]."""
    return float(_relative_errors(scale, rows).mean())


def _weighted_median(values: NDArray, weights: NDArray) -> float:
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _errors(windows: Sequence[LoggedWindow], fit: _Fit) -> dict[str, dict[str, Accuracy]]:
    """Prediction errors in windows, before and after the correction."""
    pairs: dict[str, list[tuple[float, float, float]]] = {}
    for window in windows:
        pairs.setdefault("step", []).append((window.step_ms, window.predicted_step_ms, fit.step_ms(window)))
        for module, kind in tasks_of([window]):
            measured, predicted = (window.task_ms(f, module, kind) for f in ("measured_ms", "predicted_ms"))
            if measured:
                entry = measured, predicted, fit.task_ms(window, module, kind)
                pairs.setdefault(f"{module}/{kind}", []).append(entry)
        if window.memory is not None:
            peak = window.memory
            entry = peak.measured, peak.predicted, fit.memory(peak.state, peak.predicted)
            pairs.setdefault("memory", []).append(entry)
    return {name: _accuracies(np.array(entries)) for name, entries in pairs.items()}


def _accuracies(entries: NDArray) -> dict[str, Accuracy]:
    """Errors of `[windows, 3]`: measured, predicted before, predicted after."""
    errors = np.abs(entries[:, 1:] / entries[:, :1] - 1)
    medians, worst = np.median(errors, axis=0).tolist(), errors.max(axis=0).tolist()
    return {
        when: Accuracy(*pair) for when, pair in zip(("before", "after"), zip(medians, worst, strict=True), strict=True)
    }
