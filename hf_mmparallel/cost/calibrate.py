"""From the logs of runs to a calibration: what is fitted, on which windows, and how far off it is on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from .calibration import Accuracy, Calibration, TimeScale, profile_digest
from .profile import LayerProfile
from .run_log import Kind, LoggedWindow, RunHeader, TaskGroup, read_run_log, tasks_of

MIN_WINDOWS = 4
"""Fewest windows of a log: two to fit, two to judge by."""
_FOLDS = 5
_WORTH = 0.9  # of the error of a plainer form; one with more coefficients has to stay below
_EXACT = 1e-5  # and has to be better by so much, which is about what a log is rounded to
_LEAST_ACTIVATIONS = 0.05
_LEAST_COMPUTED = 0.05  # of what tasks took, where sums are expected to take longer than that
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
_LAUNCHED = ("base", "launches")
"""The plainest form where launches are expected to take longer than what some tasks compute."""
_SPLITS = 12  # of tasks into those that launches take and those that a device computes, at most
_MEASURED, _TOKENS, _SQUARES, _LAYERS, _RECOMPUTED, _LAUNCHES, _SUMS = range(7)
"""Columns of [`_rows`]."""


@dataclass(frozen=True)
class CalibrationResult:
    """
    A calibration and what it was judged by.

    Args:
        calibration ([`Calibration`]): Fitted on all windows, with the errors of a fit on the first half of them.
        fitted (`int`): Windows that the judged fit was made from.
        judged (`int`): Windows that it was judged by.
        has_launches (`bool`): Whether the device takes time to launch what the tasks compute.
        outside_share (`float`): Of the measured steps of the judged windows, the share that neither tasks nor
            predicted messages and sums explain; below 0 where these are predicted to take longer than they do.
    """

    calibration: Calibration
    fitted: int
    judged: int
    has_launches: bool
    outside_share: float


def calibrate_logs(paths: Sequence[str | Path], profile: LayerProfile | None = None) -> CalibrationResult:
    """
    Calibrates costs by the logs of runs of one model on one kind of device.

    Args:
        paths (`Sequence[str | Path]`): Their `trainer_log.jsonl` files.
        profile ([`LayerProfile`], *optional*): What the runs took their costs from, if they did.

    Raises:
        `ValueError`: For files that are no logs, are too short, or are of different models, devices or costs.
    """
    runs = [run for path in paths for run in read_run_log(path)]
    header = runs[0].header
    for run in runs[1:]:
        _check_alike(header, run.header)
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


def _check_alike(header: RunHeader, other: RunHeader) -> None:
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
            raise ValueError(f"The logs are of runs with different {what}{shown}. Calibrate each by itself.")


def _check_profile(header: RunHeader, profile: LayerProfile | None) -> None:
    """Raises `ValueError` unless a profile is the one that the runs used."""
    given = None if profile is None else profile_digest(profile)
    if given == header.profile:
        return
    if profile is None:
        raise ValueError("The run took its costs from a `layer_profile`. Give the same file with `--profile`.")
    used = "operation counts" if header.profile is None else "another profile"
    raise ValueError(f"`--profile` is not what the run took its costs from, which is {used}. Give that, or none.")


@dataclass(frozen=True)
class _Fit:
    """Corrections of times and of activations."""

    scales: dict[str, dict[Kind, TimeScale]]
    activations: float | None

    @classmethod
    def of(cls, windows: Sequence[LoggedWindow]) -> _Fit:
        """What some windows say."""
        scales: dict[str, dict[Kind, TimeScale]] = {}
        for module, kind in tasks_of(windows):  # forwards first
            forward = scales.get(module, {}).get("forward", TimeScale())
            scale = _fit_times([_rows(window, module, kind, forward) for window in windows])
            if scale is not None:
                scales.setdefault(module, {})[kind] = scale
        peaks = [window.memory for window in windows if window.memory is not None]
        ratios = [
            (peak.measured - peak.state) / (peak.predicted - peak.state)
            for peak in peaks
            if peak.predicted > peak.state
        ]
        return cls(scales, max(_LEAST_ACTIVATIONS, float(np.median(ratios))) if ratios else None)

    def group_ms(self, group: TaskGroup) -> float:
        """The time of some tasks as corrected."""
        own = self.scales.get(group.module, {})
        scale, forward = own.get(group.kind, TimeScale()), own.get("forward", TimeScale())
        return float(_predicted(scale, np.array([_row(group, forward)]))[0])

    def task_ms(self, window: LoggedWindow, module: str, kind: Kind) -> float:
        """The time of a window's tasks of a kind as corrected."""
        return sum(self.group_ms(group) for group in window.groups if (group.module, group.kind) == (module, kind))

    def step_ms(self, window: LoggedWindow) -> float:
        """
        The step as corrected. A replay says what it takes with tasks as predicted and as measured; in between it is
        taken to grow with the tasks.
        """
        result = window.predicted_step_ms
        for module, kind in tasks_of([window]):
            predicted, measured = (window.task_ms(f, module, kind) for f in ("predicted_ms", "measured_ms"))
            if measured != predicted:
                way = (self.task_ms(window, module, kind) - predicted) / (measured - predicted)
                result += float(np.clip(way, -1.0, 2.0)) * window.causes.get(f"{module}/{kind}", 0.0)
        return result

    def memory(self, state: float, predicted: float) -> float:
        """Memory as corrected."""
        return state + (predicted - state) * (self.activations or 1.0)


def _scaled(scale: TimeScale, whole_ms: float, squares_ms: float, passed: int) -> float:
    """A time as corrected, of which a part grows with squares; its chunks pass so many layers."""
    return scale.token * (whole_ms - squares_ms) + scale.square * squares_ms + scale.layer_ms * passed


def _recomputed_ms(group: TaskGroup, forward: TimeScale) -> float:
    """What the forwards take that backwards run once more."""
    if not group.recomputed_ms:
        return 0.0
    return _scaled(forward, group.recomputed_ms, group.recomputed_squares_ms, group.layers * group.tasks)


def _rows(window: LoggedWindow, module: str, kind: Kind, forward: TimeScale) -> NDArray:
    """
    A window's tasks of a kind `[groups, 7]`: measured time; time by the base costs that grows with tokens and with
    squares; layers that chunks pass; time of what is recomputed, as corrected; launches, and sums over tensor-parallel
    ranks, by the base costs.
    """
    rows = [_row(group, forward) for group in window.groups if (group.module, group.kind) == (module, kind)]
    return np.array(rows, float).reshape(-1, 7)


def _row(group: TaskGroup, forward: TimeScale) -> tuple[float, ...]:
    """A row of [`_rows`]."""
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
    """The times of tasks as corrected `[groups]`: what is computed, or its launches where they take longer."""
    factors = np.array([scale.token, scale.square, scale.layer_ms, scale.sums])
    computed = rows[:, [_TOKENS, _SQUARES, _LAYERS, _SUMS]] @ factors + rows[:, _RECOMPUTED]
    return np.maximum(computed, scale.launches * rows[:, _LAUNCHES])


def _fit_times(windows: Sequence[NDArray]) -> TimeScale | None:
    """
    The correction with the fewest coefficients that predicts windows left out of its fit about as well as those with
    more: a factor; with one of launches, or a constant for each layer; with a factor of squares of its own. Where
    launches are expected to take longer than what some tasks compute, it begins with both. `None` without any times.
    """
    windows = [
        rows[(rows[:, _MEASURED] > rows[:, _RECOMPUTED]) & (rows[:, [_TOKENS, _SQUARES]].sum(axis=1) > 0)]
        for rows in windows
    ]
    windows = [rows for rows in windows if len(rows)]
    if not windows:
        return None
    hidden = any((_computed_shares(rows) < 1).any() for rows in windows)
    chosen = _LAUNCHED if hidden else _FORMS[0]
    least = _left_out_error(windows, chosen)
    linked = any(rows[:, _SUMS].any() for rows in windows)
    for form in (form for form in _FORMS if linked or "sums" not in form):
        error = _left_out_error(windows, form)
        if error < min(_WORTH * least, least - _EXACT):
            chosen, least = form, error
    return _fit_form(np.concatenate(windows), chosen)


def _fit_form(rows: NDArray, form: tuple[str, ...]) -> TimeScale:
    """
    A correction, with the tasks split into those that take the time of their launches and those that take what they
    compute: as the costs expect it, unless another split predicts them clearly better.
    """
    rows = rows[np.argsort(_computed_shares(rows), kind="stable")]
    expected = int((_computed_shares(rows) < 1).sum())
    counts = np.unique(np.linspace(0, (rows[:, _LAUNCHES] > 0).sum(), _SPLITS).astype(int))
    scale = _fit_split(rows, expected, form)
    best = min((_fit_split(rows, count, form) for count in counts), key=lambda own: _relative_error(own, rows))
    return best if _relative_error(best, rows) < _WORTH * _relative_error(scale, rows) else scale


def _computed_shares(rows: NDArray) -> NDArray:
    """Of each row, what is computed over its launches, by the costs; infinite without launches."""
    computed, launches = rows[:, [_TOKENS, _SQUARES, _RECOMPUTED, _SUMS]].sum(axis=1), rows[:, _LAUNCHES]
    return np.divide(computed, launches, out=np.full(len(rows), np.inf), where=launches > 0)


def _fit_split(rows: NDArray, count: int, form: tuple[str, ...]) -> TimeScale:
    """The correction by which the first tasks take the time of their launches, and the others what they compute."""
    launch = None
    if count and "launches" in form:
        launched = rows[:count]
        launch = _weighted_median(launched[:, _MEASURED] / launched[:, _LAUNCHES], launched[:, _LAUNCHES])
    coefficients = tuple(name for name in form if name != "launches")
    if len(rows) - count < len(coefficients):
        return TimeScale(launch=launch)
    return replace(_fit_computed(rows[count:], coefficients), launch=launch)


def _fit_computed(rows: NDArray, form: tuple[str, ...]) -> TimeScale:
    """Least squares of relative errors with coefficients from 0; of a factor alone, the median, for outliers."""
    measured, tokens, squares, layers, recomputed, _, sums = rows.T
    own = measured - recomputed
    measured = own if "sums" in form else np.maximum(own - sums, _LEAST_COMPUTED * own)
    columns = {"base": tokens + squares, "tokens": tokens, "squares": squares, "layers": layers, "sums": sums}
    if form == ("base",):
        factor = _weighted_median(measured / columns["base"], columns["base"])
        return TimeScale(factor, factor)
    matrix = np.stack([columns[name] / measured for name in form], axis=1)
    units = np.maximum(matrix.max(axis=0), np.finfo(float).tiny)
    found = dict(zip(form, (nnls(matrix / units, np.ones(len(rows)))[0] / units).tolist(), strict=True))
    token = found.get("base", found.get("tokens", 1.0))
    return TimeScale(token, found.get("squares", token), found.get("layers", 0.0), sum=found.get("sums"))


def _left_out_error(windows: Sequence[NDArray], form: tuple[str, ...]) -> float:
    """The mean relative error in windows that are left out in turns; infinite where there are too few rows."""
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
    """Of each row, how far off the corrected time is, as a share of what was measured without what is recomputed."""
    return np.abs(_predicted(scale, rows) - rows[:, _MEASURED]) / (rows[:, _MEASURED] - rows[:, _RECOMPUTED])


def _relative_error(scale: TimeScale, rows: NDArray) -> float:
    """The mean of [`_relative_errors`]."""
    return float(_relative_errors(scale, rows).mean())


def _weighted_median(values: NDArray, weights: NDArray) -> float:
    """The value that half of the weight lies below."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _errors(windows: Sequence[LoggedWindow], fit: _Fit) -> dict[str, dict[str, Accuracy]]:
    """The errors of predictions in some windows, as they were and as corrected."""
    pairs: dict[str, list[tuple[float, float, float]]] = {}
    for window in windows:
        pairs.setdefault("step", []).append((window.step_ms, window.predicted_step_ms, fit.step_ms(window)))
        for module, kind in tasks_of([window]):
            measured, predicted = (window.task_ms(f, module, kind) for f in ("measured_ms", "predicted_ms"))
            if measured:
                found = measured, predicted, fit.task_ms(window, module, kind)
                pairs.setdefault(f"{module}/{kind}", []).append(found)
        if window.memory is not None:
            peak = window.memory
            found = peak.measured, peak.predicted, fit.memory(peak.state, peak.predicted)
            pairs.setdefault("memory", []).append(found)
    return {name: _accuracies(np.array(found)) for name, found in pairs.items()}


def _accuracies(found: NDArray) -> dict[str, Accuracy]:
    """Errors of `[windows, 3]`: measured, predicted before and after."""
    errors = np.abs(found[:, 1:] / found[:, :1] - 1)
    medians, worst = np.median(errors, axis=0).tolist(), errors.max(axis=0).tolist()
    return {
        when: Accuracy(*own) for when, own in zip(("before", "after"), zip(medians, worst, strict=True), strict=True)
    }
