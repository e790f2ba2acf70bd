"""Constants of a device as they are measured."""

from functools import partial

import pytest
import torch

from hf_mmparallel.cost import Hardware
from hf_mmparallel.planning import device_constants
from hf_mmparallel.planning.device_constants import measure_constants
from hf_mmparallel.planning.device_detection import measure_device


def test_constants_of_the_cpu_are_fields_of_a_device_and_shares(monkeypatch):
    monkeypatch.setattr(device_constants, "measure_device", partial(measure_device, budget_s=0.1))
    for sizes in ("_SIDES", "_TOKENS"):
        monkeypatch.setitem(getattr(device_constants, sizes), "cpu", 128)
    found = measure_constants(torch.device("cpu"), torch.float32, budget_s=0.05)
    assert set(found) <= set(Hardware.__dataclass_fields__) and "link_latency_us" not in found
    for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency"):
        assert 0 < found[name] <= 1
    assert all(0.01 < found[f"{form}_attention_share"] < 10 for form in ("masked", "block"))
    assert 0 < found["launch_us"] < 10_000 and found["fp32_tflops"] > 0 < found["memory_gb_per_s"]


@pytest.mark.gpu
def test_constants_of_a_gpu_are_of_its_peaks_in_the_table():
    found = measure_constants(torch.device("cuda"), torch.bfloat16)
    assert 0.3 < found["matmul_efficiency"] <= 1 and 0.05 < found["attention_efficiency"] <= 1
    assert 0.3 < found["memory_efficiency"] <= 1
