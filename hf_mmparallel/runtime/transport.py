"""Point-to-point messages between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ..world import World


class Handle(Protocol):
    """A started transfer."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """
    Ordered channels between ranks: the n-th `recv` from a rank gets the n-th tensor that this rank sent here. Neither
    call blocks; a received buffer is valid after `wait`, a sent tensor must not change before.
    """

    rank: int
    # `recv` never blocks, even before the sender has run; otherwise the first one of a channel can block until the
    # other rank starts its send
    receives_ahead: bool

    def send(self, tensor: torch.Tensor, target: int) -> Handle: ...

    def recv(self, buffer: torch.Tensor, source: int) -> Handle: ...


class DistributedTransport:
    """Messages over `torch.distributed`."""

    def __init__(self, world: World, groups: dict[tuple[int, int], dist.ProcessGroup] | None = None):
        self.world = world
        self.rank = world.rank
        # One for each directed pair of ranks that talk, which backends that order all traffic of a group in one stream
        # (NCCL) need. Without it the group of all ranks carries everything; gloo orders each pair on its own.
        self.groups = groups or {}
        self._through_host = not world.on_device
        self.receives_ahead = self._through_host  # NCCL connects a channel in its first call, with both ranks in it

    def _group(self, source: int, target: int) -> dist.ProcessGroup | None:
        return self.groups.get((source, target), self.world.group)

    def send(self, tensor: torch.Tensor, target: int) -> Handle:
        if self._through_host:
            tensor = tensor.cpu()
        process, group = self.world.processes[target], self._group(self.rank, target)
        return _Sent(_started(dist.isend(tensor, process, group)), tensor)

    def recv(self, buffer: torch.Tensor, source: int) -> Handle:
        group, process = self._group(source, self.rank), self.world.processes[source]
        if self._through_host and buffer.device.type != "cpu":
            host = torch.empty(buffer.shape, dtype=buffer.dtype)
            return _Copied(_started(dist.irecv(host, process, group)), host, buffer)
        return _started(dist.irecv(buffer, process, group))


def _started(work: dist.Work | None) -> dist.Work:
    """Returns the handle of a transfer; `torch` gives none to a rank outside of the group."""
    assert work is not None
    return work


@dataclass
class _Sent:
    """A send whose tensor has to stay alive until it has left, which gloo reports only to `wait`."""

    work: Handle
    tensor: torch.Tensor

    def wait(self) -> None:
        self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


@dataclass
class _Copied:
    """A receive into host memory that is copied to the device when it is waited for."""

    work: Handle
    host: torch.Tensor
    buffer: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.buffer.copy_(self.host)

    def is_completed(self) -> bool:
        return False  # the copy is made in `wait`
