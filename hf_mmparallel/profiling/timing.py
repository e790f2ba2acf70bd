"""Times of what runs on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def run_seconds(
    run: Callable[[], Any], device: torch.device, end: float = 0.0, least: int = 2, most: int | None = None
) -> list[float]:
    """
    Returns seconds of consecutive runs, each until the device is done, without a first, which loads libraries.

    No run beyond `least` begins after `end`, a time of `time.perf_counter`.
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
    """Waits until a device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
