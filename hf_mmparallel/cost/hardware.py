"""Peak numbers of a few devices and of what connects them, from their makers' data sheets."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """
    One device, and the links to others of its kind.

    Args:
        name (`str`): As in [`HARDWARE`].
        peak_tflops (`float`): Dense bf16 matrix products, in 10^12 operations a second.
        memory_gib (`float`, *optional*): Memory; `None` where it is the host's.
        link_gb_per_s (`float`): To a device of the same node, one way, in 10^9 bytes a second.
        memory_gb_per_s (`float`): Between the device and its memory.
        node_size (`int`): Devices of a node.
        node_link_gb_per_s (`float`): A device's share of the network to other nodes, one way.
        efficiency (`float`, *optional*, defaults to 0.4): Share of the peak that training reaches.
    """

    name: str
    peak_tflops: float
    memory_gib: float | None
    link_gb_per_s: float
    memory_gb_per_s: float
    node_size: int
    node_link_gb_per_s: float
    efficiency: float = 0.4

    @property
    def flops_per_ms(self) -> float:
        """Operations that training reaches in a millisecond."""
        return self.peak_tflops * 1e9 * self.efficiency

    @property
    def memory_bytes_per_ms(self) -> float:
        """Bytes between the device and its memory in a millisecond."""
        return self.memory_gb_per_s * 1e6

    def link_bytes_per_ms(self, ranks: Iterable[int]) -> float:
        """Bytes that each of some ranks sends in a millisecond when they talk; nodes hold consecutive ranks."""
        nodes = {rank // self.node_size for rank in ranks}
        return (self.link_gb_per_s if len(nodes) <= 1 else self.node_link_gb_per_s) * 1e6


# Links: NVLink 4 and 400 Gb/s a device, NVLink 3 and 200 Gb/s; PCIe 4 and 200 Gb/s for four (Cornstarch, section 7.1).
HARDWARE = {
    device.name: device
    for device in (
        Hardware("h100", 989.4, 80.0, 450.0, 3350.0, 8, 50.0),
        Hardware("h200", 989.4, 141.0, 450.0, 4800.0, 8, 50.0),
        Hardware("a100", 312.0, 80.0, 300.0, 2039.0, 8, 25.0),
        Hardware("a40", 149.7, 48.0, 32.0, 696.0, 4, 6.25),
        Hardware("cpu", 0.1, None, 3.0, 20.0, 64, 1.0),
    )
}


def hardware(name: str) -> Hardware:
    """
    Looks a device up.

    Args:
        name (`str`): Such as `"h100"`, in either case.

    Raises:
        `ValueError`: For a name that is not in the table.
    """
    found = HARDWARE.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), HARDWARE, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else f"Use one of {', '.join(HARDWARE)}."
        raise ValueError(f"`gpu_type={name}` is not in the table of devices. {hint}")
    return found
