"""Peak numbers of a few devices, from their makers' data sheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """
    One device.

    Args:
        name (`str`): As in [`HARDWARE`].
        peak_tflops (`float`): Dense bf16 matrix products, in 10^12 operations a second.
        memory_gib (`float`, *optional*): Memory; `None` where it is the host's.
        link_gb_per_s (`float`): To a neighbour, one way, in 10^9 bytes a second.
        efficiency (`float`, *optional*, defaults to 0.4): Share of the peak that training reaches.
    """

    name: str
    peak_tflops: float
    memory_gib: float | None
    link_gb_per_s: float
    efficiency: float = 0.4

    @property
    def flops_per_ms(self) -> float:
        """Operations that training reaches in a millisecond."""
        return self.peak_tflops * 1e9 * self.efficiency


HARDWARE = {
    device.name: device
    for device in (
        Hardware("h100", 989.4, 80.0, 450.0),
        Hardware("h200", 989.4, 141.0, 450.0),
        Hardware("a100", 312.0, 80.0, 300.0),
        Hardware("a40", 149.7, 48.0, 32.0),
        Hardware("cpu", 0.1, None, 3.0),
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
