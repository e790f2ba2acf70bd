"""Small collectives over Python values, and errors that all ranks raise together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def all_gather_values(value: Any) -> list[Any]:
    """The value of every rank."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def gather_values(value: Any) -> list[Any] | None:
    """The value of every rank on the first one, `None` elsewhere."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values


def raise_together(work: Callable[[], Any]) -> Any:
    """
    Does what may fail with a `ValueError` or an `OSError` on some ranks only, and raises it on all, so that none waits
    for another.

    Args:
        work (`Callable`): Holds no collectives that a failing rank would leave out.
    """
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as raised:
        error = raised
    if error is not None and not dist.is_initialized():
        raise error
    told = None if error is None else (getattr(error, "errno", None), str(error))
    for rank, found in enumerate(all_gather_values(told)):
        if found is not None:
            number, message = found
            message = f"rank {rank}: {message}"
            raise (ValueError(message) if number is None else OSError(number, message)) from error
    return result
