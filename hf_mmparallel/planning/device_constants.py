"""Constants of the analytic costs, measured on a device: launch time, fractions of its peaks that kernels reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .._device import synchronize
from ..cost.devices import PEAK_OF_DTYPE
from ..kernels.bitfield_attention import bitfield_attention, encode_words
from .device_detection import find_known_device, measure_device
from .links import run_seconds

_LAUNCHES = 200
_SIDES = {"cuda": 8192, "cpu": 1024}  # rows and columns of the product that is timed
_TOKENS = {"cuda": 4096, "cpu": 512}
_VALUES = {"cuda": 2**27, "cpu": 2**22}
_MESSAGES = 100


def measure_constants(device: torch.device, dtype: torch.dtype, budget_s: float = 2.0) -> dict[str, float]:
    """
    Measures fields of [`Hardware`] of a device for a profile, each for at most `budget_s` seconds.

    These are peaks and the memory's rate as in the table of devices, or measured where it is not in it; `launch_us`;
    the shares of them that a large product, causal attention with its backward and an addition reach; what of that
    attention under a dense mask and `"bitfield"` reach; `link_latency_us` where there are two GPUs.
    """
    known = find_known_device(device) if device.type == "cuda" else None
    hardware = known or measure_device(device)
    hardware = hardware.computing_in(str(dtype).removeprefix("torch."))
    result = {field: float(getattr(hardware, field)) for field in (*PEAK_OF_DTYPE.values(), "memory_gb_per_s")}
    result["launch_us"] = _launch_us(device)
    result["matmul_efficiency"] = _share(_product_flops(device, dtype, budget_s), 1e12 * hardware.peak_tflops)
    rates = {form: _attention_flops(device, dtype, budget_s, form) for form in ("flash", "masked", "block")}
    result["attention_efficiency"] = _share(rates["flash"], 1e12 * hardware.peak_tflops)
    for form in ("masked", "block"):
        result[f"{form}_attention_share"] = round(rates[form] / rates["flash"], 4)
    result["memory_efficiency"] = _share(_moved_bytes(device, dtype, budget_s), 1e9 * hardware.memory_gb_per_s)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        result["link_latency_us"] = _latency_us()
    return result


def _share(rate: float, peak: float) -> float:
    """Returns a share of a peak, 1 at most, since a measured peak may be below what another kernel reaches."""
    return round(min(1.0, rate / peak), 4)


def _launch_us(device: torch.device) -> float:
    """Time of the host to start a kernel that does next to nothing."""
    value = torch.ones(1, device=device)
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            value = value + 1
        times.append((time.perf_counter() - start) / _LAUNCHES)
        synchronize(device)
    return round(1e6 * median(times), 2)


def _product_flops(device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    """Operations a second of one large matrix product."""
    side = _SIDES[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: left @ right, device, budget_s)


def _attention_flops(device: torch.device, dtype: torch.dtype, budget_s: float, form: str) -> float:
    """Returns operations a second of causal attention and its backward."""
    tokens, heads, width = _TOKENS[device.type], 16, 128
    shape = (1, heads, tokens, width)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    query, key, value = inputs
    gradient = torch.randn(shape, device=device, dtype=dtype)

    # A dense mask computes what it hides too; bitfield attention reads its mask for each block of tokens.
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril() if form == "masked" else None
    words = encode_words(torch.ones(1, tokens, dtype=torch.long, device=device))

    def run() -> None:
        if form == "block":
            output = bitfield_attention(query, key, value, words)
        else:
            output = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        torch.autograd.grad(output, inputs, gradient)

    pairs = tokens**2 if form == "masked" else tokens**2 / 2
    return 3.5 * 4 * heads * width * pairs / _seconds(run, device, budget_s)


def _moved_bytes(device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    """Bytes a second of the addition of two tensors into a third."""
    left, right, target = (torch.ones(_VALUES[device.type], device=device, dtype=dtype) for _ in range(3))
    seconds = _seconds(lambda: torch.add(left, right, out=target), device, budget_s)
    return 3 * left.numel() * left.element_size() / seconds


def _latency_us() -> float:
    """Time of a small copy from the first GPU to the second, half of there and back."""
    value = torch.ones(1, device="cuda:0")
    times = []
    for _ in range(_MESSAGES):
        synchronize(value.device)
        start = time.perf_counter()
        value.to("cuda:1").to("cuda:0")
        synchronize(value.device)
        times.append((time.perf_counter() - start) / 2)
    return round(1e6 * median(times), 2)


def _seconds(run: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    """Median time of some runs."""
    return median(run_seconds(run, device, time.perf_counter() + budget_s, least=3, most=49))
