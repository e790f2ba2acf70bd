"""Costs that are corrected by the logs of runs."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hf_mmparallel.cost import Polynomial, StepCost, analytic_costs, memory_per_rank
from hf_mmparallel.cost.calibration import (
    MIN_WINDOWS,
    Calibration,
    TimeScale,
    calibrate_logs,
    costs_from,
    profile_digest,
    read_costs,
    without_calibration,
)
from hf_mmparallel.cost.profile import LayerProfile, measured_costs
from hf_mmparallel.cost.run_log import KINDS, TaskGroup, read_run_log
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin
from hf_mmparallel.planning.comparison import StepComparer
from tests.cost import models
from tests.cost.test_profile import profile_of

from ..planning.measured_steps import (
    CPU,
    SCALES,
    SPEC,
    calibration,
    corrected,
    counted,
    header,
    measured_step,
    planner,
    write_log,
)


def groups_of(path: Path, module: str) -> list[TaskGroup]:
    """Tasks of a module in all windows of a log."""
    windows = [window for run in read_run_log(path) for window in run.windows]
    return [group for window in windows for group in window.groups if group.module == module]


def scales_of(*paths: Path) -> Mapping[str, Mapping[Any, TimeScale]]:
    return calibrate_logs(list(paths)).scales


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A log, and what it gives."""
    path = tmp_path_factory.mktemp("log") / "trainer_log.jsonl"
    write_log(path, counted(), corrected(counted(), SCALES))
    return path.read_text(), calibrate_logs([path])


@pytest.fixture
def log(tmp_path, calibrated):
    path = tmp_path / "trainer_log.jsonl"
    path.write_text(calibrated[0])
    return path


def test_known_factors_are_found_and_predict_steps_that_were_not_fitted(calibrated):
    _, found = calibrated
    assert (found.judged, found.windows) == (4, 8) and found.outside_fraction == pytest.approx(0.0, abs=1e-5)
    for module, kinds in SCALES.items():
        for kind, scale in kinds.items():
            own = found.scales[module][kind]
            assert own == TimeScale(pytest.approx(scale.compute, rel=1e-4)), (module, kind)
    truth, costs = corrected(counted(), SCALES), costs_from(SPEC, CPU, 2, found)
    step = measured_step(StepComparer(planner(counted())), truth, 20)
    planned, sizes = step.prediction.planned, step.prediction.sizes
    cost = StepCost(costs, planner(costs).plan, planned.step, sizes)
    for task, took in step.durations.items():
        assert cost(task) == pytest.approx(took, rel=1e-3), task
    wanted = planner(truth).predict(planned, sizes).step_ms
    assert planner(costs).predict(planned, sizes).step_ms == pytest.approx(wanted, rel=1e-3)
    assert abs(step.prediction.step_ms / wanted - 1) > 0.2


def test_errors_are_those_of_windows_that_were_not_fitted(calibrated, log):
    errors = calibrated[1].errors
    assert set(errors) == {"step", "memory", *(f"{m}/{k}" for m in SCALES for k in KINDS[:2])}
    for name, own in errors.items():
        assert own.after < 0.01 < 0.1 < own.before <= own.worst_before, name
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for group in (group for line in lines[5:] for group in line["groups"]):
        group["measured_ms"] *= 10  # the last windows took ten times as long: no fit of the first ones knows
    log.write_text("\n".join(map(json.dumps, lines)))
    assert calibrate_logs([log]).errors["vision/forward"].after == pytest.approx(0.9, abs=0.01)


def test_a_window_that_something_else_slowed_down_changes_little(log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for group in lines[3]["groups"]:
        group["measured_ms"] *= 10
    log.write_text("\n".join(map(json.dumps, lines)))
    for module, kinds in scales_of(log).items():
        for kind, scale in kinds.items():
            assert scale.compute == pytest.approx(SCALES[module][kind].compute, rel=0.01)


def test_memory_of_activations_is_corrected(calibrated):
    found = calibrated[1]
    assert found.activations == pytest.approx(2.0)
    before, after = counted(), costs_from(SPEC, CPU, 2, replace(found, scales={}))
    step = measured_step(StepComparer(planner(before)), before, 0)
    planned, sizes, simulation = step.prediction.planned, step.prediction.sizes, step.prediction.timeline
    plain, twice = (
        memory_per_rank(costs, planner(costs).plan, planned.step, sizes, simulation.peak_in_flight)
        for costs in (before, after)
    )
    for rank, memory in plain.items():
        assert twice[rank].weights == memory.weights and twice[rank].optimizer == memory.optimizer
        assert memory.activations < twice[rank].activations <= 2 * memory.activations


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(TimeScale(2.0, 1.6), TimeScale(2.0, 2.5)), (TimeScale(0.5, 0.3), TimeScale(1.0, 1.6))],
)
def test_launches_have_a_factor_of_their_own(tmp_path, forward, backward):
    """On a device of which small tasks take the time of their launches, and large ones what they compute."""
    costs = analytic_costs(SPEC, replace(CPU, launch_us=150.0))
    wanted = {"forward": forward, "backward": backward}
    path = write_log(tmp_path / "log.jsonl", costs, corrected(costs, {"vision": wanted}))
    calibration = calibrate_logs([path])
    for kind, scale in wanted.items():
        groups = [group for group in groups_of(path, "vision") if group.kind == kind]
        for factor, field in ((scale.compute, "computed_ms"), (scale.launch, "launch_ms")):
            times = [factor * getattr(group, field) for group in groups]
            same = [g.measured_ms == pytest.approx(time, rel=1e-3) for g, time in zip(groups, times, strict=True)]
            assert sum(same) > 6, "enough tasks of each sort"
        found = calibration.scales["vision"][kind]
        assert (found.compute, found.launch) == pytest.approx((scale.compute, scale.launch), rel=0.01), kind
        assert calibration.errors[f"vision/{kind}"].worst_after < 0.01
    for found in calibration.scales[LANGUAGE_MODEL].values():  # as predicted
        assert (found.launches, found.compute) == pytest.approx((1.0, 1.0), rel=0.01)


CUT = {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(tp_size=2)}


def test_sums_of_tensor_parallel_ranks_have_a_factor_of_their_own(tmp_path):
    """A machine that computes at another speed has the same links, and the other way round."""
    linked = analytic_costs(SPEC, replace(CPU, collective_latency_us=200.0, link_gb_per_s=0.06))
    scale, slow = TimeScale(0.5), TimeScale(0.5, sum=3.0)
    computes, both = (
        corrected(linked, {LANGUAGE_MODEL: dict.fromkeys(KINDS, own), "vision": dict.fromkeys(KINDS, scale)})
        for own in (scale, slow)
    )
    alone = write_log(tmp_path / "alone.jsonl", linked, computes)  # no ranks that share matrices
    assert all(group.sums_ms == 0.0 for name in SPEC.modules for group in groups_of(alone, name))
    for own in scales_of(alone)[LANGUAGE_MODEL].values():
        assert (own.compute, own.sum) == (pytest.approx(0.5, rel=1e-4), None)
    cut = {
        name: write_log(tmp_path / f"{name}.jsonl", linked, truth, plugins=CUT)
        for name, truth in (("computes", computes), ("both", both))
    }
    for group in groups_of(cut["both"], LANGUAGE_MODEL):
        assert 0.2 * group.measured_ms < 3.0 * group.sums_ms < 0.95 * group.measured_ms
    for logs, wanted in (([cut["computes"]], 1.0), ([cut["both"]], 3.0), ([alone, cut["both"]], 3.0)):
        for own in scales_of(*logs)[LANGUAGE_MODEL].values():
            assert (own.compute, own.sum) == pytest.approx((0.5, wanted), rel=0.02), logs


def test_launches_that_no_task_shows_keep_their_time(tmp_path):
    quick = analytic_costs(SPEC, replace(CPU, launch_us=0.01))
    truth = corrected(quick, {name: dict.fromkeys(KINDS, TimeScale(3.0)) for name in SPEC.modules})
    scales = scales_of(write_log(tmp_path / "log.jsonl", quick, truth))
    for scale in (scale for kinds in scales.values() for scale in kinds.values()):
        assert scale.launch is None and scale.compute == pytest.approx(3.0, rel=1e-4)
    own = corrected(quick, scales).layers.layer("vision", 1, 1)
    assert own.launch_ms == quick.layers.layer("vision", 1, 1).launch_ms


def test_a_run_by_calibrated_costs_is_calibrated_anew(tmp_path):
    truth = corrected(counted(), SCALES)
    half = corrected(counted(), {"vision": {"forward": TimeScale(1.7)}})
    assert without_calibration(half).layers is not half.layers and profile_digest(half) is None
    paths = [write_log(tmp_path / f"{index}.jsonl", costs, truth) for index, costs in enumerate((counted(), half))]
    first, second = map(scales_of, paths)
    for module, kinds in first.items():
        for kind, scale in kinds.items():
            assert second[module][kind].compute == pytest.approx(scale.compute, rel=1e-4)


def test_a_profile_goes_into_the_file(tmp_path):
    factors = {(name, index): 1.0 for name in SPEC.modules for index in range(-1, models.LAYERS + 1)}
    profile = profile_of(SPEC, factors)
    costs = measured_costs(SPEC, CPU, profile)
    path = write_log(tmp_path / "log.jsonl", costs, corrected(costs, SCALES))
    with pytest.raises(ValueError, match="planned with a `layer_profile`. Pass the same file as `--profile`"):
        calibrate_logs([path])
    with pytest.raises(ValueError, match="`--profile` is not the profile of the run"):
        calibrate_logs([path], replace(profile, model="another"))
    calibrate_logs([path], profile).save(tmp_path / "calibrated.json")
    found = read_costs(tmp_path / "calibrated.json")
    assert isinstance(found, Calibration) and found.profile == profile
    assert LayerProfile.load(tmp_path / "calibrated.json") == profile
    again = costs_from(SPEC, CPU, 4, found)  # a profile has its own size of values
    truth = corrected(costs, SCALES).layers.layer("vision", 2, 1).forward(64, 64 * 64)
    assert again.layers.layer("vision", 2, 1).forward(64, 64 * 64) == pytest.approx(truth, rel=0.02)


def test_every_cost_of_a_layer_is_corrected():
    twice = TimeScale(2.0, launch=2.0, sum=2.0)
    scales = {name: {"forward": twice, "backward": twice} for name in SPEC.modules}
    base, costs = counted(), corrected(counted(), scales, activations=2.0)
    for module, index, tp_size in (("vision", 1, 2), (LANGUAGE_MODEL, -1, 1), (LANGUAGE_MODEL, models.LAYERS, 1)):
        before, after = (own.layers.layer(module, index, tp_size) for own in (base, costs))
        assert any(own != Polynomial() for own in before.sums) == (tp_size > 1)
        for field in fields(before):
            plain, changed = getattr(before, field.name), getattr(after, field.name)
            wanted = tuple(own * 2 for own in plain) if isinstance(plain, tuple) else plain * 2
            assert changed == wanted, field.name
    placed, started = (own.layers.starting_at(1).layer("vision", 1, 2) for own in (base, costs))
    assert started.forward == placed.forward * 2


def test_a_calibration_is_read_as_it_was_written(calibrated, tmp_path):
    found, path = calibrated[1], tmp_path / "calibrated.json"
    found.save(path)
    assert read_costs(path) == found
    data = json.loads(path.read_text())
    for content, complaint in (
        (json.dumps({**data, "calibration": {**data["calibration"], "scales": None}}), "fields missing"),
        (json.dumps({**data, "calibration": None}), "fields missing"),
        ("no JSON", "holds no costs"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=complaint):
            read_costs(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"modules": {"vision": "0"}}, "another model: `vision`"),
        ({"modules": {"sight": "0"}}, r"another model: .*\['sight'\]"),
        ({"device": "h100"}, "`h100` .*, not of `cpu`"),
        ({"package": "0.0.9"}, "0.0.9"),
        ({"dtype": "float32"}, "float32, not in bfloat16"),
    ],
)
def test_a_calibration_of_something_else_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        costs_from(SPEC, CPU, 2, replace(calibration(SCALES), run=header(counted(), **changes)))


def test_logs_that_are_too_short_or_of_different_runs_are_refused(tmp_path):
    short = write_log(tmp_path / "short.jsonl", counted(), counted(), MIN_WINDOWS - 1)
    with pytest.raises(ValueError, match=f"has {MIN_WINDOWS - 1} windows .* needs {MIN_WINDOWS}"):
        calibrate_logs([short])
    assert calibrate_logs([short, short]).windows == 2 * (MIN_WINDOWS - 1)
    others: dict[str, dict[str, Any]] = {
        "models": {"modules": {LANGUAGE_MODEL: "0"}},
        "kinds of devices": {"device": "h100"},
        "dtypes": {"dtype": "float32"},
        "versions of hf_mmparallel": {"package": "9.9"},
    }
    for what, changes in others.items():
        path = write_log(tmp_path / f"{what}.jsonl", counted(), counted(), 1, **changes)
        with pytest.raises(ValueError, match=f"different {what}"):
            calibrate_logs([short, path])


def test_a_log_holds_runs_one_after_the_other(log):
    text = log.read_text()
    log.write_text(text + text)
    first, second = read_run_log(log)
    assert first == second and first.header == header(counted()) and len(first.windows) == 8
    log.write_text(text[: len(text) // 2])  # killed while it wrote
    (cut,) = read_run_log(log)
    assert cut.windows == first.windows[: len(cut.windows)] and 0 < len(cut.windows) < 8
    for content, complaint in (
        ("", "is empty"),
        ("a picture", r"is not a run log \(line 1\)"),
        (text.replace('"tasks"', '"jobs"'), "is a log with fields missing in line 2"),
    ):
        log.write_text(content)
        with pytest.raises(ValueError, match=complaint):
            read_run_log(log)
