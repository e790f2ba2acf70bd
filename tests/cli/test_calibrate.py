"""`hf-mmparallel calibrate`: what it prints, a file that `plan --profile` reads, errors in one line."""

import json

import pytest

from hf_mmparallel.cost.calibration import Calibration, read_costs
from hf_mmparallel.cost.run_log import module_digests
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from tests.planning.measured_steps import SCALES, corrected, counted, write_log


@pytest.fixture(scope="module")
def log_text(model, tmp_path_factory):
    modules = module_digests(build_model_spec(build_on_meta(str(model))))
    path, truth = tmp_path_factory.mktemp("log") / "log.jsonl", corrected(counted(), SCALES)
    return write_log(path, counted(), truth, modules=modules, device="h100").read_text()


@pytest.fixture
def log(log_text, tmp_path):
    """The log of runs of a model, as if on an H100."""
    path = tmp_path / "trainer_log.jsonl"
    path.write_text(log_text)
    return path


def test_calibrate_says_how_far_off_it_was_and_writes_what_plan_reads(model, log, tmp_path, run, figures, fail):
    path = tmp_path / "calibrated.json"
    out = run("calibrate", log, "--output", path)
    assert "8 windows of vision, language_model on a CPU" in out
    assert "Errors in the last 4 windows, by a fit of the first 4" in out and "Factors of costs, by all windows" in out
    assert "vision, forward │ 3 │ - │ - │" in out and "activations │ 2 │" in out
    assert f"Calibration written to {path}" in out
    found = read_costs(path)
    assert isinstance(found, Calibration) and found.windows == 8
    # The log says nothing of launches, which would hide what so small a model computes.
    (tmp_path / "gpu.yaml").write_text("{like: h100, name: h100, launch_us: 0}")
    plan = ["plan", "--model", model, "--module", "vision:dp=2", "--module", "language_model:pp=2"]
    counted_plan = [*plan, "--global-batch-size", 8, "--gpu-spec", tmp_path / "gpu.yaml"]
    calibrated_plan = [*counted_plan, "--profile", path]
    assert figures(*calibrated_plan)["step_ms"] > 1.2 * figures(*counted_plan)["step_ms"]
    assert "calibrated by 8 windows of runs, off by" in run(*calibrated_plan)
    assert "`h100` (a CPU), not of `a100`" in fail(*plan, "--profile", path, "--gpu-type", "a100")


def test_a_run_is_named_by_its_folder_too(log, tmp_path, run):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("\n".join(json.dumps({**line, **({"memory": None} if "memory" in line else {})}) for line in lines))
    out = run("calibrate", tmp_path)
    assert "8 windows of vision, language_model" in out
    assert "Memory is not calibrated: it was not measured, which needs CUDA." in out


def test_errors_are_one_line(log, tmp_path, fail):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.jsonl").write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    (tmp_path / "other.jsonl").write_text("{}\n")
    for name, complaint in (
        ("missing.jsonl", "does not exist. Give the `trainer_log.jsonl`"),
        ("short.jsonl", "The log has 2 windows with predictions; a calibration needs 4"),
        ("other.jsonl", "is not a run log (line 1)"),
        ("empty", "empty` is a folder without a `trainer_log.jsonl`"),
    ):
        assert complaint in fail("calibrate", tmp_path / name)
    assert f"`--profile {tmp_path}` is not a file" in fail("calibrate", log, "--profile", tmp_path)
