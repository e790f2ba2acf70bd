"""The messages of one rank in flight: posted receives, started sends, and slices that stay on the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..schedule.actions import Message, Task
from .messages import IndexedRoute
from .payloads import Payload
from .routes import Route, Slice, select, slice_size
from .transport import Handle, Transport


@dataclass
class _ReceivedSlice:
    """A slice of a route that arrives on this rank."""

    slice: Slice
    index: Tensor | None  # of its tokens among those of the task; `None` for tokens in order
    buffer: Tensor | None  # `None` for a slice that stays on this rank


@dataclass
class Incoming:
    """A message that this rank receives."""

    message: Message
    payload: Payload
    routes: Sequence[IndexedRoute]  # those that end on this rank
    slices: list[list[_ReceivedSlice]] = field(default_factory=list)  # of each route
    handles: list[Handle] = field(default_factory=list)  # the receives that are posted


class MessageQueues:
    """Receives and sends of one step on one rank."""

    def __init__(self, transport: Transport, groups: Mapping[tuple[int, ...], Any], device: torch.device):
        self.transport = transport
        self.rank = transport.rank
        self.groups = groups
        self.device = device
        self._received: dict[Task, list[Incoming]] = {}
        self._staying: dict[tuple[Message, Slice], Tensor] = {}
        self._sent: dict[Task, list[Handle]] = {}

    def empty(self, num_tokens: int, payload: Payload) -> Tensor:
        """Makes a buffer for tokens of a payload."""
        return torch.empty(num_tokens, payload.width, dtype=payload.dtype, device=self.device)

    def zeros(self, num_tokens: int, payload: Payload) -> Tensor:
        """Makes a buffer of zeros for tokens of a payload."""
        return self.empty(num_tokens, payload).zero_()

    # Receiving

    def receive(self, message: Message, payload: Payload, routes: Sequence[IndexedRoute]) -> None:
        """Posts the receives of this rank's slices of a message."""
        incoming = Incoming(message, payload, routes)
        for route, index in routes:
            arriving = []
            for slice_ in route.slices:
                source, target = _direction(message, slice_)
                if target != self.rank:
                    continue
                buffer = None
                if source != self.rank:
                    buffer = self.empty(slice_.num_tokens, payload)
                    incoming.handles.append(self.transport.recv(buffer, source))
                arriving.append(_ReceivedSlice(slice_, _index_of(index, slice_), buffer))
            incoming.slices.append(arriving)
        self._received.setdefault(message.target, []).append(incoming)

    def wait(self, task: Task) -> None:
        """Waits for all messages to a task."""
        for incoming in self._received.get(task, ()):
            for handle in incoming.handles:
                handle.wait()

    def arrived(self, task: Task) -> list[Incoming]:
        """Returns the messages to a task, in the same order on all of its ranks."""
        # the collectives that follow need one order; ranks may post receives in different orders
        return sorted(self._received.pop(task, ()), key=lambda incoming: incoming.message)

    def gather(self, incoming: Incoming) -> list[tuple[Tensor, Tensor | None]]:
        """
        Returns the tokens `[num_tokens, width]` of each route of an activation that has some on this cp rank, and
        their indices among those of the task, `None` for all in order.
        """
        result = []
        for (route, index), arriving in zip(incoming.routes, incoming.slices, strict=True):
            if route.num_tokens:
                tensors = [self._tensor(incoming, received) for received in arriving]
                result.append((self._gathered(route, incoming.payload, tensors), index))
        return result

    def _gathered(self, route: Route, payload: Payload, tensors: Sequence[Tensor]) -> Tensor:
        """Joins the tokens of a route, of which each rank of the consumer's tp group has a slice."""
        if len(route.consumers) == 1:
            return tensors[0]
        size = slice_size(route.num_tokens, len(route.consumers))
        padded = self.zeros(size, payload)
        for tokens in tensors:
            padded[: len(tokens)] = tokens
        full = self.empty(size * len(route.consumers), payload)
        dist.all_gather_single(full, padded, group=self.groups[route.consumers])
        return full[: route.num_tokens]

    def sum_gradients(self, messages: Sequence[Incoming], num_tokens: int, tp_group: tuple[int, ...]) -> Tensor:
        """Sums the gradients of the same outputs of a task that its consumers returned."""
        total = self.zeros(num_tokens, messages[0].payload)
        for incoming in messages:
            for arriving in incoming.slices:
                for received in arriving:
                    tokens = self._tensor(incoming, received)
                    if received.index is None:
                        total[received.slice.start : received.slice.stop] += tokens
                    else:
                        total.index_add_(0, received.index.to(total.device), tokens)
        if num_tokens and len(tp_group) > 1:
            # the ranks hold the same tokens, and each received other slices
            dist.all_reduce(total, group=self.groups[tp_group])
        return total

    def _tensor(self, incoming: Incoming, received: _ReceivedSlice) -> Tensor:
        if received.buffer is not None:
            return received.buffer
        return self._staying.pop((incoming.message, received.slice))

    # Sending

    def send(self, message: Message, payload: Payload, routes: Sequence[IndexedRoute], tokens: Tensor) -> None:
        """Sends this rank's slices of a message, of `tokens` `[num_tokens, width]`, or keeps those that stay on it."""
        for route, index in routes:
            on_route = select(tokens, index).to(payload.dtype)
            for slice_ in route.slices:
                source, target = _direction(message, slice_)
                if source != self.rank:
                    continue
                sent = on_route[slice_.start : slice_.stop].contiguous()
                if target == self.rank:
                    self._staying[message, slice_] = sent
                else:
                    self._sent.setdefault(message.source, []).append(self.transport.send(sent, target))
        self._drop_completed()

    def _drop_completed(self) -> None:
        """Frees the buffers of completed sends, also of tasks without a backward, which waits for the others."""
        for task, handles in list(self._sent.items()):
            self._sent[task] = [handle for handle in handles if not handle.is_completed()]
            if not self._sent[task]:
                del self._sent[task]

    def wait_for_sends(self, task: Task) -> None:
        """Waits for the sends of a task."""
        for handle in self._sent.pop(task, ()):
            handle.wait()

    def finish(self) -> None:
        """Waits for all sends in flight."""
        for task in list(self._sent):
            self.wait_for_sends(task)


def _direction(message: Message, slice_: Slice) -> tuple[int, int]:
    """Returns the rank that sends a slice of a message, and the one that receives it."""
    ends = slice_.producer, slice_.consumer
    return ends if message.kind == "act" else (ends[1], ends[0])


def _index_of(index: Tensor | None, slice_: Slice) -> Tensor | None:
    return None if index is None else index[slice_.start : slice_.stop]
