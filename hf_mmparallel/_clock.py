"""Clocks: the host's, that of a CUDA stream, and that of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments and measures the time between two of them."""

    def mark(self) -> Any:
        """The present moment."""
        ...

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one moment to another."""
        ...


class HostClock:
    """Moments of the host."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):  # seconds; wall time when left out
        self.mark = now

    def ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)


class CudaClock:
    """Moments of the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)


def clock_of(device: torch.device, now: Callable[[], float] = time.perf_counter) -> Clock:
    """The clock of work on a device: of its stream for CUDA, otherwise of the host."""
    return CudaClock() if device.type == "cuda" else HostClock(now)


class StepClock:
    """
    Marks of time in a step: of the host's clock, or events on the stream where work is queued ahead of the device.
    """

    def __init__(self, device: torch.device):
        self.clock = clock_of(device)
        self.start = self.clock.mark()

    def mark(self) -> Any:
        return self.clock.mark()

    def ms(self, mark: Any) -> float:
        """Milliseconds from the start to a mark."""
        return self.clock.ms(self.start, mark)
