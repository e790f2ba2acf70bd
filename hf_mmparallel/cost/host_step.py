"""The optimizer's step on the CPU: what it moves, and its time."""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Hardware


@dataclass(frozen=True)
class HostStep:
    """What the optimizer's step of a rank on the CPU moves."""

    memory_bytes: float = 0.0  # read and written in host memory
    received_bytes: float = 0.0  # gradients that come from the device
    sent_bytes: float = 0.0  # weights that go to it


def host_step_ms(device: Hardware, step: HostStep) -> float:
    """Time of the optimizer's step on the CPU; 0 for a host whose speed is unknown."""
    link, memory = device.host_link_bytes_per_ms, device.host_memory_bytes_per_ms
    if link is None or memory is None:
        return 0.0
    # bucket by bucket gradients arrive, the CPU updates, and weights return, so the slowest of the three counts
    return max(step.memory_bytes / memory, step.received_bytes / link, step.sent_bytes / link)
