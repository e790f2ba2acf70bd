"""`--gpu-type`, `--gpu-spec` and `--dtype`: which device a plan counts with."""

from __future__ import annotations

import json

import pytest

from hf_mmparallel.cli.main import main

LAYOUT = ["--module", "language_model:dp=1,pp=1,tp=1", "--seq-len", 4096, "--global-batch-size", 4]


@pytest.fixture
def step_ms(text_model, tmp_path, run):
    """The predicted step of a command, in ms."""

    def predict(*arguments) -> float:
        path = tmp_path / "figures.json"
        run("plan", "--model", text_model, *LAYOUT, *arguments, "--json", path)
        return json.loads(path.read_text())["step_ms"]

    return predict


def described(folder, text: str):
    path = folder / "gpu.yaml"
    path.write_text(text)
    return path


# A device whose products are slow.
PRODUCTS = "like: h100\nname: products\nbf16_tflops: 10\nfp16_tflops: 10\ntf32_tflops: 5\nfp32_tflops: 1\n"


def test_each_dtype_takes_its_own_time(step_ms, tmp_path):
    path = described(tmp_path, PRODUCTS + "memory_gb_per_s: 10000\n")
    times = {dtype: step_ms("--gpu-spec", path, "--dtype", dtype) for dtype in ("bfloat16", "tf32", "float32")}
    assert times["float32"] > 2 * times["tf32"] > 3 * times["bfloat16"]


def test_a_described_device_is_planned_for(text_model, tmp_path, run, figures):
    path = described(tmp_path, "like: a40\nname: fast-a40\nbf16_tflops: 300\nfp16_tflops: 300\nmemory_gib: 20.5\n")
    assert "fits the 18.45 GiB, 90% of the memory of fast-a40" in run(
        "plan", "--model", text_model, *LAYOUT, "--gpu-spec", path, "--dry-run"
    )
    found = figures("plan", "--model", text_model, *LAYOUT, "--gpu-spec", path)
    assert found["gpu_type"] == "fast-a40"
    plan = tmp_path / "plan.yaml"
    run("plan", "--model", text_model, *LAYOUT, "--gpu-spec", path, "--output", plan)
    assert "fast-a40" in plan.read_text() and "fast-a40" in run(
        "simulate", plan, "--model", text_model, "--gpu-spec", path
    )


def test_a_what_if_may_name_a_device_of_the_table(text_model, tmp_path, figures):
    path = described(tmp_path, PRODUCTS + "memory_gb_per_s: 1000\n")
    asked = ["--gpus", 2, "--seq-len", 64, "--effort", 1, "--global-batch-size", 4]
    found = figures("plan", "--model", text_model, *asked, "--gpu-spec", path, "--what-if", "gpu_type=h200")
    assert found["gpu_type"] == "products" and found["what_if"]["gpu_type=h200"]["gpu_type"] == "h200"
    assert found["what_if"]["gpu_type=h200"]["step_ms"] < found["step_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-type", "v100"], "`gpu_type=v100` may be any of"),
        (["--gpu-type", "a4000"], "is not in the table of devices"),
        (["--what-if", "gpu_type=v100", "--gpus", "2"], "may be any of `v100-pcie-16gb`"),
        (["--gpu-spec", "nothing.yaml"], "`gpu_spec=nothing.yaml` can't be read"),
    ],
)
def test_devices_that_are_not_known_are_errors(text_model, fail, arguments, message):
    assert message in fail("plan", "--model", text_model, *LAYOUT, *arguments)


def test_a_device_is_named_or_described(text_model, tmp_path, capsys):
    path = described(tmp_path, "like: h100\n")
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(text_model), "--gpu-type", "h200", "--gpu-spec", str(path)])
    assert "--gpu-spec: not allowed with argument --gpu-type" in capsys.readouterr().err


def test_a_unit_that_is_wrong_by_a_thousand_is_an_error(text_model, tmp_path, fail):
    path = described(tmp_path, "like: h100\nbf16_tflops: 989400\n")
    error = fail("plan", "--model", text_model, *LAYOUT, "--gpu-spec", path)
    assert "`bf16_tflops=989400` is not between" in error and "divide by 1,000" in error


def test_names_as_drivers_report_them(text_model, figures):
    found = figures("plan", "--model", text_model, *LAYOUT, "--gpu-type", "NVIDIA A100-PCIE-40GB")
    assert found["gpu_type"] == "a100-pcie-40gb"
