"""Times of what runs on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .._clock import clock_of


def run_seconds(
    run: Callable[[], Any], device: torch.device, end: float = 0.0, least: int = 2, most: int | None = None
) -> list[float]:
    """
    Seconds of some runs, one after the other, each waited for. One before them is not counted: it loads libraries.

    Args:
        run (`Callable`): What is timed.
        device (`torch.device`): What it runs on.
        end (`float`, *optional*): When no further run begins, by `time.perf_counter`.
        least (`int`, *optional*, defaults to 2): Runs that count, whatever the time.
        most (`int`, *optional*): Runs that count, at most.
    """
    times: list[float] = []
    while len(times) < 1 + least or (time.perf_counter() < end and (most is None or len(times) < 1 + most)):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[1:]


def synchronize(device: torch.device) -> None:
    """Waits until a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class StepClock:
    """
    Marks of time in a step: of the host's clock, or events on the stream where work is queued ahead of the device.

    Args:
        device (`torch.device`): Where stages compute.
    """

    def __init__(self, device: torch.device):
        self.clock = clock_of(device)
        self.start = self.clock.mark()

    def mark(self) -> Any:
        return self.clock.mark()

    def ms(self, mark: Any) -> float:
        """Milliseconds from the start to a mark."""
        return self.clock.ms(self.start, mark)
