"""The device of a rank beside the host: moments of its stream, and copies for which neither waits for the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def synchronize(device: torch.device) -> None:
    """Waits until a device has finished all queued work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class Clock(Protocol):
    """Marks moments and measures the time between two of them."""

    def mark(self) -> Any:
        """The present moment."""
        ...

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one moment to another."""
        ...

    def has_passed(self, mark: Any) -> bool:
        """Whether a moment has come, so that `wait` and `ms` return at once."""
        ...

    def wait(self, mark: Any) -> None:
        """Waits for a moment."""
        ...


class HostClock:
    """Moments of the host."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):  # seconds; wall time when left out
        self.mark = now

    def ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)

    def has_passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass


class DeviceClock:
    """Moments of the current stream of a device."""

    def __init__(self, device: torch.device):
        self.module: Any = torch.get_device_module(device)

    def mark(self) -> Any:
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        self.wait(end)
        return start.elapsed_time(end)

    def has_passed(self, mark: Any) -> bool:
        return mark.query()

    def wait(self, mark: Any) -> None:
        if not mark.query():
            mark.synchronize()


def clock_of(device: torch.device, now: Callable[[], float] = time.perf_counter) -> Clock:
    """The clock of work on a device: of its stream, or of the host for the CPU."""
    return HostClock(now) if device.type == "cpu" else DeviceClock(device)


class HostCopy:
    """Values on their way from the device to the host."""

    def __init__(self, values: Tensor):
        self._clock = clock_of(values.device)
        self._values = values.detach().to("cpu", non_blocking=True)
        self._copied = self._clock.mark()

    def is_here(self) -> bool:
        """Whether they can be read without waiting."""
        return self._clock.has_passed(self._copied)

    def read(self) -> Any:
        """Returns the values as numbers, when the device has computed them."""
        self._clock.wait(self._copied)
        return self._values.tolist()


def to_device(value: Any, device: torch.device) -> Any:
    """Copies the tensors in a value to a device, from pinned memory, for which the host does not wait."""
    if device.type in ("cpu", "meta"):
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    def send(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return tree_map_only(Tensor, send, value)
