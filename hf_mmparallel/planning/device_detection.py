"""The device of the ranks: recognised by the properties that the driver reports, or measured."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger

from ..cost import Hardware, find_device, recognize_device
from ..cost.devices import PEAK_OF_DTYPE
from ..world import World
from .links import measure_links, run_seconds

logger = get_logger(__name__)

MEASURED = "measured"  # start of the `source` of a device with measured numbers
_GIB = 2**30
_BUDGET_S = 2.0  # of all measurements together, about
_PRODUCT_SHARE = 0.8  # of the peak that a large matrix product reaches (8192 x 8192 on an H200: 0.78 to 0.80)
_LONGEST_SIDE = 8192
_RUNS = 3  # of each timed function, including the one that does not count
_COPY_BYTES = 2**28
# key of `PEAK_OF_DTYPE` -> dtype of the tensors, and torch's setting for products of float32
_TIMED = {
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float32": (torch.float32, "ieee"),
}
_HOST_FIELDS = ("host_link_gb_per_s", "host_memory_gib", "host_memory_gb_per_s")
_MIN_OVER_RANKS = ("memory_gb_per_s", "link_gb_per_s", "overlap_efficiency", "float8_speedup")
_MIN_OVER_RANKS += ("masked_attention_share", "block_attention_share")
_MAX_OVER_RANKS = ("link_latency_us", "node_link_latency_us", "launch_us")
# optional field of a device -> its default
_DEFAULTS: Mapping[str, Callable[[Hardware], float]] = {
    "message_gb_per_s": lambda device: device.link_gb_per_s,
    "node_message_gb_per_s": lambda device: min(device.link_gb_per_s, device.network_gb_per_s),
    "collective_latency_us": lambda device: device.link_latency_us,
    "node_collective_latency_us": lambda device: device.node_link_latency_us,
}


def find_known_device(device: torch.device) -> Hardware | None:
    """The table's entry for a device with the memory that it reports, `None` for one that is not in the table."""
    if device.type == "cpu":
        return find_device("cpu")
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return recognize_device(found.name, found.total_memory, found.multi_processor_count)


def reported_name(device: torch.device) -> str:
    """The name of a device by its driver."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else str(device.type)


def core_per_rank(world: World) -> bool:
    """Whether every rank of this host has a GPU or a core of its own; otherwise idle time is not measurable."""
    return world.device.type != "cpu" or len(os.sched_getaffinity(0)) >= world.size


def device_of_ranks(world: World) -> Hardware:
    """Returns the same device on all ranks; of unlike ones the [`slowest`] of each number. Collective."""
    device = world.device
    mine = find_known_device(device)
    limits = power_limits(device)
    told = world.all_gather((reported_name(device), mine, limits), "comparing the devices of the ranks")
    unknown = list(dict.fromkeys(name for name, found, _ in told if found is None))
    lowered = [(rank, *own) for rank, (_, _, own) in enumerate(told) if own is not None and own[0] < 0.98 * own[1]]
    if lowered:
        rank, watts, default = lowered[0]
        logger.warning(
            f"The power limit of {len(lowered)} of {len(told)} devices is below the default (rank {rank}: {watts:.0f} "
            f"of {default:.0f} W). Steps will take longer than predicted."
        )
    # where a rank has a device that is not in the table all measure theirs, which takes about two seconds
    if unknown:
        local = measure_device(device)
        found = slowest(world.all_gather(local, "comparing measured devices"))
        found = replace(measure_links(found, world), name=unknown[0])
        logger.warning(
            f"`{'`, `'.join(unknown)}` is not in the table of devices. Measured: {summary(found)}. Give `gpu_spec` a "
            "file with its numbers to set them."
        )
        return found
    devices = [found for _, found, _ in told if found is not None]
    names = Counter(found.name for found in devices)
    if len(names) > 1:
        each = ", ".join(f"{count} x {name}" for name, count in names.items())
        logger.warning(f"The ranks have unlike devices ({each}). Plans count with the slowest numbers of each.")
    return slowest(devices)


def slowest(devices: Sequence[Hardware]) -> Hardware:
    """Combines several devices into the slowest of each number, under the name of the first."""
    if len(set(devices)) == 1:
        return devices[0]
    # the smallest peaks, memories, rates, shares of the network and nodes, the longest latencies, and efficiencies by
    # which nothing is faster than on the slowest
    peaks = tuple(PEAK_OF_DTYPE.values())
    network = min(devices, key=lambda device: device.network_gb_per_s)
    node_size = min(device.node_size for device in devices)
    memories = [device.memory_gib for device in devices if device.memory_gib is not None]
    return replace(
        devices[0],
        **{field: min(getattr(device, field) for device in devices) for field in (*peaks, *_MIN_OVER_RANKS)},
        **{field: max(getattr(device, field) for device in devices) for field in _MAX_OVER_RANKS},
        **{
            field: _slowest_efficiency(devices, field, peaks)
            for field in ("matmul_efficiency", "attention_efficiency")
        },
        memory_efficiency=_slowest_efficiency(devices, "memory_efficiency", ["memory_gb_per_s"]),
        memory_gib=min(memories, default=None),
        **{field: _smallest_if_known(devices, field) for field in _HOST_FIELDS},
        node_size=node_size,
        network_cards=network.network_cards,
        node_link_gb_per_s=network.node_link_gb_per_s * node_size / network.node_size,
        **{field: _slowest_of_set(devices, field) for field in _DEFAULTS},
    )


def _smallest_if_known(devices: Sequence[Hardware], field: str) -> float | None:
    """The smallest of a number; `None` if it is unknown of any device."""
    values = [getattr(device, field) for device in devices]
    return None if None in values else min(values)


def _slowest_efficiency(devices: Sequence[Hardware], field: str, peaks: Iterable[str]) -> float:
    """The share of the smallest of each peak with which no device is slower than that, in any of the peaks."""
    return min(
        min(getattr(device, peak) * getattr(device, field) for device in devices)
        / min(getattr(device, peak) for device in devices)
        for peak in peaks
    )


def _slowest_of_set(devices: Sequence[Hardware], field: str) -> float | None:
    """The slowest of a number that may be left out, where any device has it."""
    if all(getattr(device, field) is None for device in devices):
        return None
    default = _DEFAULTS[field]
    values = [default(device) if (own := getattr(device, field)) is None else own for device in devices]
    return max(values) if field.endswith("_us") else min(values)


def summary(device: Hardware) -> str:
    """Peaks, memory and rates of a device in a line."""
    peaks = ", ".join(f"{dtype} {getattr(device, field):.3g}" for dtype, field in PEAK_OF_DTYPE.items())
    memory = "" if device.memory_gib is None else f"{device.memory_gib:.1f} GiB of memory, "
    return (
        f"{peaks} TFLOP/s; {memory}{device.memory_gb_per_s:.3g} GB/s; links {device.link_gb_per_s:.3g} GB/s in a node "
        f"of {device.node_size}, {device.network_gb_per_s:.3g} GB/s for each device between nodes"
    )


def measure_device(device: torch.device, budget_s: float = _BUDGET_S) -> Hardware:
    """Times matrix products in each dtype and a copy in memory of this rank's device, in about `budget_s` seconds."""
    part_s = budget_s / (len(_TIMED) + 1)
    full = _product_tflops(device, "float32", part_s)
    peaks = {"float32": full}
    for dtype in _TIMED:
        if dtype != "float32" and (dtype != "tf32" or device.type == "cuda"):
            peaks[dtype] = _product_tflops(device, dtype, part_s)
    for dtype in PEAK_OF_DTYPE:
        peaks[dtype] = peaks.get(dtype) or full  # what a device has no units for is computed in float32
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / _GIB
    memory_gb_per_s = _copy_gb_per_s(device, part_s)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # links are not measured here, see `measure_links`
    base = find_device("cpu")
    if device.type != "cpu":  # messages between GPUs are not those between processes
        names = ("link_latency_us", "node_link_latency_us", "launch_us")
        names += ("masked_attention_share", "block_attention_share")
        base = replace(base, **{name: getattr(Hardware, name) for name in names})
    return replace(
        base,
        name=reported_name(device),
        **{field: peaks[dtype] for dtype, field in PEAK_OF_DTYPE.items()},
        memory_gib=memory,
        memory_gb_per_s=memory_gb_per_s,
        matmul_efficiency=min(1.0, Hardware.matmul_efficiency / _PRODUCT_SHARE),
        attention_efficiency=min(1.0, Hardware.attention_efficiency / _PRODUCT_SHARE),
        memory_efficiency=1.0,
        source=f"{MEASURED} on this machine",
        aliases=(),
    )


def _product_tflops(device: torch.device, dtype: str, budget_s: float) -> float:
    """Rate of square matrix products of a dtype, 10^12 operations a second; 0 where the device has none."""
    kind, precision = _TIMED[dtype]
    # Sides double as long as there is time; the longest is timed until the budget is spent.
    side, best, end = 256, 0.0, None
    with products_in(precision):
        try:
            while True:
                left, right = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
                seconds = min(run_seconds(lambda a=left, b=right: a @ b, device))
                best = max(best, 2 * side**3 / seconds / 1e12)
                end = end or time.perf_counter() + budget_s  # the first product loads libraries
                if side >= _LONGEST_SIDE or time.perf_counter() + 8 * _RUNS * seconds > end:
                    seconds = min(run_seconds(lambda a=left, b=right: a @ b, device, end))
                    return max(best, 2 * side**3 / seconds / 1e12)
                side *= 2
        except (RuntimeError, NotImplementedError):  # no such kernel, or no memory for a longer side
            return best


def _copy_gb_per_s(device: torch.device, budget_s: float) -> float:
    """Rate at which a copy reads and writes memory, in 10^9 bytes a second."""
    size = _COPY_BYTES if device.type != "cpu" else _COPY_BYTES >> 2
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = min(run_seconds(lambda: target.copy_(source), device, time.perf_counter() + budget_s))
    return 2 * size / seconds / 1e9


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Sets how products of float32 are computed on a GPU, for a while."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def power_limits(device: torch.device) -> tuple[float, float] | None:
    """The power limit of a device and its default, in watts; `None` where they can't be read."""
    if device.type != "cuda" or torch.version.hip is not None or shutil.which("nvidia-smi") is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [
        "nvidia-smi",
        "-i",
        uuid,
        "--query-gpu=power.limit,power.default_limit",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        limit, default = (float(text) for text in done.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):  # no permission, a MIG instance, `[N/A]`
        return None
    return limit, default


def tf32_is_on() -> bool:
    """Whether torch rounds products of float32 to TF32 on a GPU."""
    own: Any = torch.backends.cuda.matmul
    every: Any = torch.backends
    precision = own.fp32_precision
    return (every.fp32_precision if precision == "none" else precision) == "tf32"
