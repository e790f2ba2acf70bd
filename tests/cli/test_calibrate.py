"""`hf-mmparallel calibrate`: what it prints, a file that `plan --profile` reads, errors in one line."""

import json

import pytest

from hf_mmparallel.cli.main import main
from hf_mmparallel.cost.calibration import Calibration, read_costs
from hf_mmparallel.cost.run_log import module_digests
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from tests.search.measured_steps import SCALES, corrected, counted, write_log


@pytest.fixture
def log(model, tmp_path):
    """The log of runs of a model, as if on an H100."""
    modules = module_digests(build_model_spec(build_on_meta(str(model))))
    truth = corrected(counted(), SCALES)
    return write_log(tmp_path / "trainer_log.jsonl", counted(), truth, modules=modules, device="h100")


def test_calibrate_says_how_far_off_it_was_and_writes_what_plan_reads(model, log, tmp_path, capsys):
    path = tmp_path / "calibrated.json"
    assert main(["calibrate", str(log), "--output", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "8 windows of vision, language_model on a CPU" in out
    assert "Errors in the last 4 windows, by a fit of the first 4" in out and "Factors of costs, by all windows" in out
    assert "vision, forward │ 3 │ 3 │ - │" in out and "activations │ 2 │" in out
    assert f"Calibration written to {path}" in out
    found = read_costs(path)
    assert isinstance(found, Calibration) and found.windows == 8

    plan = ["plan", "--model", str(model), "--module", "vision:dp=2", "--module", "language_model:pp=2"]
    steps = {}
    # The log says nothing of launches, which would hide what so small a model computes.
    (tmp_path / "gpu.yaml").write_text("{like: h100, name: h100, launch_us: 0}")
    spec = ["--gpu-spec", str(tmp_path / "gpu.yaml")]
    for name, extra in (("counted", spec), ("calibrated", [*spec, "--profile", str(path)])):
        assert main([*plan, "--global-batch-size", "8", *extra, "--json", str(tmp_path / f"{name}_plan.json")]) == 0
        steps[name] = json.loads((tmp_path / f"{name}_plan.json").read_text())
        printed = " ".join(capsys.readouterr().out.split())
        assert ("calibrated by 8 windows of runs, off by" in printed) == (name == "calibrated")
    assert steps["calibrated"]["step_ms"] > 1.2 * steps["counted"]["step_ms"]

    assert main([*plan, "--profile", str(path), "--gpu-type", "a100"]) == 2
    assert "corrects costs of `h100` (a CPU), not of `a100`" in capsys.readouterr().err


def test_a_run_is_named_by_its_folder_too(log, tmp_path, capsys):
    assert log.parent == tmp_path
    assert main(["calibrate", str(tmp_path)]) == 0
    assert "8 windows of vision, language_model" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "empty").mkdir()
    assert main(["calibrate", str(tmp_path / "empty")]) == 2
    assert "empty` is a folder without a `trainer_log.jsonl`. A run under a plan" in capsys.readouterr().err
    assert main(["calibrate", str(log), "--profile", str(tmp_path)]) == 2
    assert f"`--profile {tmp_path}` is not a file" in capsys.readouterr().err


def test_errors_are_one_line(log, tmp_path, capsys):
    (tmp_path / "short.jsonl").write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    (tmp_path / "other.jsonl").write_text("{}\n")
    for path, complaint in (
        (tmp_path / "missing.jsonl", "does not exist. Give the `trainer_log.jsonl`"),
        (tmp_path / "short.jsonl", "The log has 2 windows with predictions; a calibration needs 4"),
        (tmp_path / "other.jsonl", "is not a run log (line 1)"),
    ):
        assert main(["calibrate", str(path)]) == 2
        error = capsys.readouterr().err
        assert complaint in error and error.count("\n") == 1


def test_memory_that_was_not_measured_is_said(log, capsys):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("\n".join(json.dumps({**line, **({"memory": None} if "memory" in line else {})}) for line in lines))
    assert main(["calibrate", str(log)]) == 0
    assert "Memory is not calibrated: it was not measured, which needs CUDA." in capsys.readouterr().out
