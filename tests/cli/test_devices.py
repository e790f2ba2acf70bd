"""`--gpu-type`, `--gpu-spec` and `--dtype`: which device a plan counts with."""

from __future__ import annotations

import pytest

LAYOUT = ["--module", "language_model:dp=1,pp=1,tp=1", "--seq-len", 4096, "--global-batch-size", 4]
# A device whose products are slow.
PRODUCTS = "like: h100\nname: products\nbf16_tflops: 10\nfp16_tflops: 10\ntf32_tflops: 5\nfp32_tflops: 1\n"


@pytest.fixture
def described(tmp_path):
    """The options for a device of this description."""

    def write(text: str) -> list:
        path = tmp_path / "gpu.yaml"
        path.write_text(text)
        return ["--gpu-spec", path]

    return write


def test_each_dtype_takes_its_own_time(text_model, figures, described):
    asked = ["plan", "--model", text_model, *LAYOUT, *described(PRODUCTS + "memory_gb_per_s: 10000\n"), "--dtype"]
    bfloat16, tf32, float32 = (figures(*asked, dtype)["step_ms"] for dtype in ("bfloat16", "tf32", "float32"))
    assert float32 > 2 * tf32 > 3 * bfloat16


def test_a_described_device_is_planned_for(text_model, tmp_path, run, figures, described):
    device = described("like: a40\nname: fast-a40\nbf16_tflops: 300\nfp16_tflops: 300\nmemory_gib: 20.5\n")
    asked, plan = ["plan", "--model", text_model, *LAYOUT, *device], tmp_path / "plan.yaml"
    assert figures(*asked, "--output", plan)["gpu_type"] == "fast-a40" and "fast-a40" in plan.read_text()
    assert "fits the 18.45 GiB, 90% of the memory of fast-a40" in run(*asked, "--dry-run")
    assert "fast-a40" in run("simulate", plan, "--model", text_model, *device)


def test_a_what_if_may_name_a_device_of_the_table(text_model, figures, described):
    asked = ["--gpus", 2, "--seq-len", 64, "--effort", 1, "--global-batch-size", 4, "--what-if", "gpu_type=h200"]
    found = figures("plan", "--model", text_model, *asked, *described(PRODUCTS + "memory_gb_per_s: 1000\n"))
    other = found["what_if"]["gpu_type=h200"]
    assert (found["gpu_type"], other["gpu_type"]) == ("products", "h200") and other["step_ms"] < found["step_ms"]


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


def test_a_device_is_named_or_described_in_its_units(text_model, figures, fail, described, capsys):
    asked = ["plan", "--model", text_model, *LAYOUT]
    found = figures(*asked, "--gpu-type", "NVIDIA A100-PCIE-40GB")  # as drivers report it
    assert found["gpu_type"] == "a100-pcie-40gb"
    error = fail(*asked, *described("like: h100\nbf16_tflops: 989400\n"))
    assert "`bf16_tflops=989400` is not between" in error and "divide by 1,000" in error
    with pytest.raises(SystemExit):
        fail(*asked, "--gpu-type", "h200", *described("like: h100\n"))
    assert "--gpu-spec: not allowed with argument --gpu-type" in capsys.readouterr().err
