"""Point-to-point messages: over `torch.distributed`, or inside one process for tests of whole programs."""

from __future__ import annotations

import queue
from collections import defaultdict
from dataclasses import dataclass, field
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

    With `receives_ahead` a `recv` may be posted while the message's cause is still to be sent; without, the first one
    of a channel may wait for its sender.
    """

    rank: int
    receives_ahead: bool

    def send(self, tensor: torch.Tensor, target: int) -> Handle: ...

    def recv(self, buffer: torch.Tensor, source: int) -> Handle: ...


class DistributedTransport:
    """
    Messages over `torch.distributed`.

    Args:
        world ([`World`]): The ranks.
        groups (`dict[tuple[int, int], ProcessGroup]`, *optional*):
            A group for each directed pair of ranks that talk, which backends that order all traffic of a group in one
            stream (NCCL) need. Without it the group of all ranks carries everything; gloo orders each pair on its own.
    """

    def __init__(self, world: World, groups: dict[tuple[int, int], dist.ProcessGroup] | None = None):
        self.world = world
        self.rank = world.rank
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
    """The handle of a transfer; `torch` gives none to a rank outside of the group."""
    assert work is not None
    return work


@dataclass
class _Sent:
    """Keeps the tensor of a send alive until it has left, which gloo only says when it is waited for."""

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


@dataclass
class LoopbackWorld:
    """The channels between ranks that are threads of one process."""

    timeout_s: float = 20.0
    channels: dict[tuple[int, int], queue.Queue] = field(default_factory=dict)
    posted: dict[tuple[int, int], list[_Posted]] = field(default_factory=lambda: defaultdict(list))

    def channel(self, source: int, target: int) -> queue.Queue:
        """The channel of a pair, the same one for both threads whoever asks first."""
        return self.channels.setdefault((source, target), queue.Queue())

    def transport(self, rank: int) -> LoopbackTransport:
        return LoopbackTransport(rank, self)


class LoopbackTransport:
    """The end of one rank in a [`LoopbackWorld`]; shapes are checked, which `torch.distributed` does not do."""

    def __init__(self, rank: int, world: LoopbackWorld):
        self.rank = rank
        self.world = world
        self.receives_ahead = True

    def send(self, tensor: torch.Tensor, target: int) -> Handle:
        self.world.channel(self.rank, target).put(tensor.detach().clone())
        return _Done()

    def recv(self, buffer: torch.Tensor, source: int) -> Handle:
        key = (source, self.rank)
        posted = _Posted(buffer, self.world.channel(*key), self.world.posted[key], self.world.timeout_s)
        self.world.posted[key].append(posted)
        return posted


class _Done:
    """A transfer that was finished when it was started."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class _Posted:
    """A posted receive of a loopback channel; waiting for it first takes all that were posted before it."""

    def __init__(self, buffer: torch.Tensor, channel: queue.Queue, posted: list[_Posted], timeout_s: float):
        self.buffer = buffer
        self.channel = channel
        self.posted = posted
        self.timeout_s = timeout_s
        self.done = False

    def wait(self) -> None:
        while not self.done:
            first = self.posted.pop(0)
            tensor = self.channel.get(timeout=self.timeout_s)
            assert tensor.shape == first.buffer.shape and tensor.dtype == first.buffer.dtype, (
                f"sent {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(first.buffer.shape)} {first.buffer.dtype}"
            )
            first.buffer.copy_(tensor)
            first.done = True

    def is_completed(self) -> bool:
        return self.done
