"""The device of a rank beside the host: moments of its stream, and copies for which neither waits for the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class SideStream:
    """A stream for copies between a device and the host beside its computation; the CPU as a device has none."""

    def __init__(self, device: torch.device):
        self._stream: Any = torch.Stream(device) if device.type != "cpu" else None

    @property
    def pins(self) -> bool:
        """Whether memory of the host is to be pinned for the copies."""
        return self._stream is not None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """A block whose copies come after all that the device has been given to do."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            yield

    def mark(self) -> Any:
        """The end of the copies so far, `None` if they have ended."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Lets the device wait for copies."""
        if mark is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(mark)

    def synchronize(self) -> None:
        """Waits for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


def to_device(value: Any, device: torch.device) -> Any:
    """Copies the tensors in a value to a device, from pinned memory, for which the host does not wait."""
    if device.type in ("cpu", "meta"):
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    def send(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return tree_map_only(Tensor, send, value)


# Tensors of a device whose values the host knows, because it has sent them or has computed them, too.

_VALUES = "_values_on_host"  # attribute of a tensor on the device: the tensor in host memory
_VERSION = "_version_on_host"  # of the tensor that is no view: the version of its memory that the host knows


def keep_values(on_device: Any, on_host: Any, exact: bool = False) -> None:
    """Keeps the values of whole numbers and masks, of others if they are `exact`, of one tensor or of several."""
    if isinstance(on_device, Tensor) and isinstance(on_host, Tensor):
        is_rounded = on_host.is_floating_point() or on_host.is_complex()
        if on_device.shape == on_host.shape and on_device.dtype == on_host.dtype and (exact or not is_rounded):
            setattr(on_device, _VALUES, on_host)
            setattr(_memory_of(on_device), _VERSION, on_device._version)
    elif isinstance(on_device, (tuple, list)) and isinstance(on_host, (tuple, list)):
        for pair in zip(on_device, on_host, strict=True):
            keep_values(*pair, exact)


def known_values(tensor: Tensor) -> Tensor | None:
    """Returns the values of a tensor that are known, and that nothing has changed on the device alone since."""
    on_host = getattr(tensor, _VALUES, None)
    return on_host if on_host is None or getattr(_memory_of(tensor), _VERSION, -1) == tensor._version else None


def _memory_of(tensor: Tensor) -> Tensor:
    """The tensor of which this is a view, which is changed with it."""
    return tensor if tensor._base is None else tensor._base
