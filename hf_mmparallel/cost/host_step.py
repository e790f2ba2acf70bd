"""The optimizer's step on the CPU: what it moves, and its time."""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Hardware


@dataclass(frozen=True)
class HostStep:
    """
    What the optimizer's step of a rank on the CPU moves.

    Args:
        memory_bytes (`float`): Traffic of host memory.
        received_bytes (`float`): Gradients that come from the device.
        sent_bytes (`float`): Weights that go to it.
    """

    memory_bytes: float = 0.0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0


def host_step_ms(device: Hardware, step: HostStep) -> float:
    """
    Time of the optimizer's step on the CPU: bucket by bucket gradients arrive, the CPU updates, and weights return, so
    that the slowest of the three counts. All ranks of a node step at the same time and share its memory.

    Args:
        device ([`Hardware`]): The device; of a host whose speed is unknown, the step takes no time.
        step ([`HostStep`]): What the step moves.
    """
    link, memory = device.host_link_bytes_per_ms, device.host_memory_bytes_per_ms
    if link is None or memory is None:
        return 0.0
    return max(step.memory_bytes / memory, step.received_bytes / link, step.sent_bytes / link)
