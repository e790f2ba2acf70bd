"""The device of the ranks: the slowest of unlike ones, and measured where it is not in the table."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.cost import Hardware, find_device
from hf_mmparallel.cost.devices import PEAK_OF_DTYPE
from hf_mmparallel.planning import device_constants, links
from hf_mmparallel.planning import device_detection as devices
from hf_mmparallel.planning.device_constants import measure_constants
from hf_mmparallel.planning.device_detection import (
    device_of_ranks,
    find_known_device,
    measure_device,
    power_limits,
    products_in,
    reported_name,
    slowest,
    tf32_is_on,
)
from hf_mmparallel.world import World
from tests.distributed import run_distributed

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def properties(name: str, gib: float, units: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, total_memory=int(gib * 2**30), multi_processor_count=units, uuid="1-2")


def test_the_cpu_is_known_and_not_measured(monkeypatch):
    monkeypatch.setattr(devices, "measure_device", None)
    assert find_known_device(CPU) == find_device("cpu") and reported_name(CPU) == "cpu" and power_limits(CPU) is None
    assert device_of_ranks(World()) == find_device("cpu")
    assert find_known_device(torch.device("xpu")) is None


@pytest.mark.parametrize(
    ("name", "gib", "units", "expected"),
    [("NVIDIA L40S", 44.39, 142, "l40s"), ("NVIDIA RTX A4000", 15.7, 48, None), ("NVIDIA A100X", 79.2, 108, None)],
)
def test_gpus_are_recognized_by_what_torch_reports(monkeypatch, name, gib, units, expected):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(name, gib, units))
    found = find_known_device(GPU)
    assert (None if found is None else found.name) == expected
    assert found is None or found.memory_gib == pytest.approx(gib)
    assert reported_name(GPU) == name


class TestMeasuring:
    def test_the_cpu_can_be_measured(self):
        found = measure_device(CPU, budget_s=0.1)
        for field in PEAK_OF_DTYPE.values():
            assert 1e-6 < getattr(found, field) < 1e3
        assert found.tf32_tflops == found.fp32_tflops  # there are no such products on a CPU
        assert 0.05 < found.memory_gb_per_s < 1e4 and found.memory_gib is None
        assert found.source.startswith("measured") and found.name == "cpu"
        # What is reached counts as the peak, so that the share of it that training reaches is larger.
        assert found.matmul_efficiency == pytest.approx(Hardware.matmul_efficiency / 0.8)

    def test_peaks_follow_from_times(self, monkeypatch):
        sides: list[int] = []
        seconds = {torch.float32: 4e-6, torch.bfloat16: 1e-6, torch.float16: 2e-6}

        def timed(run, device, end=0.0):
            result = run()
            sides.append(result.shape[0] if result.ndim == 2 else 0)
            return [1e-3 if result.dtype == torch.uint8 else seconds[result.dtype] * (result.shape[0] / 256) ** 3]

        monkeypatch.setattr(devices, "run_seconds", timed)
        monkeypatch.setattr(devices, "_LONGEST_SIDE", 512)
        found = measure_device(CPU)
        assert max(sides) == 512  # longer sides are tried while there is time
        assert found.fp32_tflops == pytest.approx(2 * 256**3 / 4e-6 / 1e12)
        assert found.bf16_tflops == pytest.approx(4 * found.fp32_tflops)
        assert found.fp16_tflops == pytest.approx(2 * found.fp32_tflops)
        assert found.memory_gb_per_s == pytest.approx(2 * (devices._COPY_BYTES >> 2) / 1e-3 / 1e9)

    def test_a_dtype_without_products_counts_as_float32(self, monkeypatch):
        product = torch.Tensor.__matmul__

        def refused(left, right):
            if left.dtype == torch.float16:
                raise RuntimeError("not implemented for 'Half'")
            return product(left, right)

        monkeypatch.setattr(torch.Tensor, "__matmul__", refused)
        found = measure_device(CPU, budget_s=0.05)
        assert found.fp16_tflops == found.fp32_tflops

    def test_products_in_tf32_are_for_a_while(self):
        before = torch.backends.cuda.matmul.fp32_precision
        with products_in("tf32"):
            assert tf32_is_on()
        assert torch.backends.cuda.matmul.fp32_precision == before and not tf32_is_on()


def test_of_unlike_devices_each_number_is_the_slowest():
    a40, l4 = find_device("a40"), find_device("l4")
    found = slowest([a40, l4])
    assert found.name == "a40" and found.bf16_tflops == l4.bf16_tflops and found.memory_gib == l4.memory_gib
    assert found.link_gb_per_s == l4.link_gb_per_s and found.network_gb_per_s == l4.network_gb_per_s
    assert found.node_size == a40.node_size  # the smaller nodes
    assert slowest([a40]) == a40 and slowest([find_device("cpu")] * 2) == find_device("cpu")


@pytest.mark.parametrize("names", list(itertools.permutations(["h100", "h100-pcie", "a100", "l4"], 2)))
def test_nothing_of_unlike_devices_is_faster_than_on_the_slowest(names):
    """A device of its own for each: what a group of ranks takes is what it takes on one of the devices."""
    first, second = (replace(find_device(name), launch_us=8.0 + len(name)) for name in names)
    second = replace(second, link_latency_us=9.0, node_collective_latency_us=40.0, node_message_gb_per_s=1.0)
    both, found = (first, second), slowest([first, second])
    for ranks in (range(4), range(4, 12), [0, 64], range(64)):
        assert found.message_bytes_per_ms(ranks) == min(own.message_bytes_per_ms(ranks) for own in both)
        assert found.link_bytes_per_ms(ranks) <= min(own.link_bytes_per_ms(ranks) for own in both)
        assert found.latency_us(ranks) == max(own.latency_us(ranks) for own in both)
        assert found.step_latency_us(ranks) == max(own.step_latency_us(ranks) for own in both)
    assert found.network_gb_per_s == min(own.network_gb_per_s for own in both)
    assert found.launch_us == max(own.launch_us for own in both)
    for dtype in PEAK_OF_DTYPE:
        own, theirs = found.computing_in(dtype), [device.computing_in(dtype) for device in both]
        assert own.flops_per_ms <= min(device.flops_per_ms for device in theirs) * (1 + 1e-9)
        for attention in ("sdpa", "bitfield"):
            rates = [device.attention_flops_per_ms(attention) for device in theirs]
            assert own.attention_flops_per_ms(attention) <= min(rates) * (1 + 1e-9)
    assert found.memory_bytes_per_ms == pytest.approx(min(own.memory_bytes_per_ms for own in both))
    assert found.computing_in("bfloat16").flops_per_ms >= 0.9 * min(own.flops_per_ms for own in both)


def test_an_order_of_ranks_changes_no_number():
    both = [find_device(name) for name in UNLIKE]
    words = {"name": "", "aliases": (), "source": "", "multiprocessors": 0}
    assert replace(slowest(both), **words) == replace(slowest(both[::-1]), **words)


@pytest.mark.parametrize(
    ("script", "limits"),
    [
        ('[ "$2" = GPU-1-2 ] && echo "500.00, 700.00"', (500, 700)),
        ("echo '[N/A], [N/A]'", None),
        ("exit 6", None),
        ("echo", None),
    ],
)
def test_power_limits_are_what_the_tool_says(monkeypatch, tmp_path, script, limits):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties("NVIDIA H100 NVL", 93, 132))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert power_limits(GPU) == limits


def _on_a_rank() -> list[tuple[Hardware, list[str]]]:
    """Where rank 1 has a device that is not in the table, and where ranks have unlike ones."""
    said: list[str] = []
    devices.logger = SimpleNamespace(warning=said.append)  # type: ignore[assignment]
    devices.measure_device = partial(measure_device, budget_s=0.05)
    links._MESSAGES_PER_ROUND, links._BYTES["cpu"] = 2, 2**18
    rank = dist.get_rank()
    if rank == 1:
        devices.find_known_device, devices.reported_name = lambda _: None, lambda _: "NVIDIA Something"
    results = [(device_of_ranks(World()), said.copy())]
    said.clear()
    devices.find_known_device = lambda _: find_device(UNLIKE[rank])
    devices.power_limits = lambda _: (300.0, 350.0) if rank == 1 else None
    results.append((device_of_ranks(World()), said.copy()))
    return results


UNLIKE = ["h100", "h100-pcie"]


@pytest.mark.distributed
def test_ranks_agree_on_what_they_measured_and_on_unlike_devices_with_low_power_limits():
    ((first, said), (slow, of_unlike)), ((second, _), (other, _)) = run_distributed(_on_a_rank, 2)
    assert first == second and first.name == "NVIDIA Something" and first.source.startswith("measured")
    assert first.node_size == 2 and first.network_cards == 2
    assert 1e-4 < first.link_gb_per_s < 1e3 and first.link_gb_per_s != find_device("cpu").link_gb_per_s
    (line,) = said
    assert "`NVIDIA Something`" in line and "bfloat16 " in line and "`gpu_spec`" in line
    assert slow == other == slowest([find_device(name) for name in UNLIKE])
    assert "rank 1: 300 of 350 W" in of_unlike[0] and "1 x h100, 1 x h100-pcie" in of_unlike[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_reaches_most_of_the_peaks_of_the_table():
    known, found = find_known_device(GPU), measure_device(GPU)
    if known is None:
        pytest.skip(f"{reported_name(GPU)} is not in the table of devices")
    for field, least in (("bf16_tflops", 0.45), ("fp16_tflops", 0.45), ("tf32_tflops", 0.4), ("fp32_tflops", 0.4)):
        assert least < getattr(found, field) / getattr(known, field) < 1.05
    assert 0.6 < found.memory_gb_per_s / known.memory_gb_per_s < 1.05


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
