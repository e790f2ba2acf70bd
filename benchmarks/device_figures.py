"""The table of `docs/devices.md`, made from the package's table of devices, see `pages.py`."""

from __future__ import annotations

from collections.abc import Callable

from hf_mmparallel.cost import device_table
from hf_mmparallel.cost.devices import PEAK_OF_DTYPE


def devices() -> str:
    """A row for each device, in the order of the table."""
    rates = ("memory, GB/s", "link, GB/s", "node", "network, GB/s")
    names = ("name", "bf16", "fp16", "TF32", "fp32", "memory, GiB", *rates, "source")
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for device in device_table().values():
        peaks = [getattr(device, field) for field in PEAK_OF_DTYPE.values()]
        memory = "host's" if device.memory_gib is None else f"{device.memory_gib:g}"
        numbers = [*peaks, device.memory_gb_per_s, device.link_gb_per_s, device.node_size, device.network_gb_per_s]
        cells = [f"{number:,g}" for number in numbers]
        cells.insert(len(peaks), memory)
        rows.append(f"| `{device.name}` | {' | '.join(cells)} | {device.source} |")
    return "\n".join(rows)


BLOCKS: dict[str, Callable[[], str]] = {"devices": devices}
