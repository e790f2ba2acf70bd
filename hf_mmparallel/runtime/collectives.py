"""Small collectives over Python values, and errors that all ranks raise together. Watchers see that they wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .activity import ACTIVITY, doing
from .failure import RemoteRankError, check_rank_lives, failure_sentence

T = TypeVar("T")
_POLL_S = 0.2  # between two looks into the store
_POLLS_PER_S = 2048  # of all ranks together


def _waiting(what: str | None) -> AbstractContextManager[None]:
    """Notes that this rank waits for others, in what it is doing unless that has a name of its own."""
    return doing(ACTIVITY.doing if what is None else what, waits=True)


def wire_device(device: torch.device) -> torch.device:
    """Where tensors of the default group travel: on the device under NCCL, otherwise in host memory."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def barrier(what: str | None = None) -> None:
    """Waits for the other ranks, if there are any."""
    if dist.is_initialized():
        with _waiting(what):
            dist.barrier()


def all_gather_values(value: T, what: str | None = None, group: Any = None) -> list[T]:
    """
    The value of every rank.

    Args:
        value (`Any`): What can be pickled.
        what (`str`, *optional*): What it is for, as watchers say it; what this rank is doing by default.
        group (`ProcessGroup`, *optional*): The ranks; all by default.
    """
    values = [value] * (dist.get_world_size(group) if dist.is_initialized() else 1)
    if len(values) > 1:
        with _waiting(what):
            dist.all_gather_object(values, value, group=group)
    return values


def gather_values(value: Any, what: str | None = None) -> list[Any] | None:
    """The value of every rank on the first one, `None` elsewhere."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with _waiting(what):
        dist.gather_object(value, values)
    return values


def broadcast_value(value: T, device: torch.device, what: str | None = None) -> T:
    """
    The value of the first rank, on all ranks.

    Args:
        value (`Any`): What can be pickled; on other ranks it is not looked at.
        device (`torch.device`): Where the ranks compute.
        what (`str`, *optional*): What it is for, as watchers say it; what this rank is doing by default.
    """
    if not dist.is_initialized():
        return value
    values = [value]
    with _waiting(what):
        dist.broadcast_object_list(values, src=0, device=wire_device(device))
    return values[0]


def send_tensor(tensor: torch.Tensor, target: int, device: torch.device) -> None:
    """Sends a tensor that lies anywhere to a rank that calls [`receive_tensor`]."""
    if tensor.numel():
        with _waiting(None):
            dist.send(tensor.detach().contiguous().to(wire_device(device)), target)


def receive_tensor(shape: Sequence[int], dtype: torch.dtype, source: int, device: torch.device) -> torch.Tensor:
    """A tensor that a rank sends with [`send_tensor`], in host memory."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=wire_device(device))
    if tensor.numel():
        with _waiting(None):
            dist.recv(tensor, source)
    return tensor.cpu()


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


def wait_for_first_rank(is_first: bool, what: str | None = None) -> None:
    """
    Holds the other ranks until the first one has come here, for however long: collectives have a time limit, and this
    has none. Ranks that wait look into the store, and end if the first rank fails or is gone. Collective.

    Args:
        is_first (`bool`): Whether this is the first rank, which waits for nobody.
        what (`str`, *optional*): What it is for, as watchers say it; what this rank is doing by default.
    """
    store = dist.distributed_c10d._get_default_store()
    key = f"hf_mmparallel/arrived/{_turns.next(store)}"
    if is_first:
        store.set(key, "")
        return
    longest = max(_POLL_S, dist.get_world_size() / _POLLS_PER_S)
    pause = _POLL_S / 16
    with _waiting(what):
        while not store.check([key]):
            check_rank_lives(0)
            time.sleep(pause)
            pause = min(2 * pause, longest)


class _Turns:
    """Counts how often ranks have waited for the first one, anew for each store."""

    def __init__(self) -> None:
        self.store: Any = None
        self.count = 0

    def next(self, store: Any) -> int:
        if store is not self.store:
            self.store, self.count = store, 0
        self.count += 1
        return self.count


_turns = _Turns()


def from_first_rank(find: Callable[[], T], device: torch.device) -> T:
    """
    What the first rank finds, on all ranks, however long that takes. Collective.

    Args:
        find (`Callable`): Called on the first rank only; what it returns can be pickled.
        device (`torch.device`): Where the ranks compute.

    Raises:
        `ValueError`: On the other ranks with the sentence of the first, for a `ValueError` or `OSError` there.
        [`RemoteRankError`]: On the other ranks, for any other exception there.
    """
    if not dist.is_initialized():
        return find()
    found: Any = None, None
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found = find(), None
        except Exception as error:
            plain = isinstance(error, (OSError, ValueError))
            failure = error
            found = None, ValueError(str(error)) if plain else RemoteRankError(failure_sentence(0, error))
    wait_for_first_rank(dist.get_rank() == 0, "what rank 0 finds out")
    value, told = broadcast_value(found, device, "what rank 0 finds out")
    if failure is not None:
        raise failure
    if told is not None:
        raise told
    return value
