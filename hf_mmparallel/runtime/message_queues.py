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
    """
    A slice of a route that arrives on this rank.

    Args:
        slice ([`Slice`]): The slice.
        index (`torch.Tensor`, *optional*): Indices of its tokens among those of the task; `None` for tokens in order.
        buffer (`torch.Tensor`, *optional*): Receive buffer; `None` for a slice that stays on this rank.
    """

    slice: Slice
    index: Tensor | None
    buffer: Tensor | None


@dataclass
class Incoming:
    """
    A message that this rank receives.

    Args:
        message (`Message`): The message.
        payload ([`Payload`]): Its payload.
        routes (`list[tuple[Route, torch.Tensor | None]]`): Its routes that end on this rank.
        slices (`list[list[_ReceivedSlice]]`): The slices of each route that arrive on this rank.
        handles (`list[Handle]`): The receives that are posted.
    """

    message: Message
    payload: Payload
    routes: Sequence[IndexedRoute]
    slices: list[list[_ReceivedSlice]] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)


class MessageQueues:
    """
    Receives and sends of one step on one rank.

    Args:
        transport (`Transport`): Carries messages to other ranks.
        groups (`Mapping[tuple[int, ...], ProcessGroup]`): Ranks -> their group.
        device (`torch.device`): Device of the buffers.
    """

    def __init__(self, transport: Transport, groups: Mapping[tuple[int, ...], Any], device: torch.device):
        self.transport = transport
        self.rank = transport.rank
        self.groups = groups
        self.device = device
        self._received: dict[Task, list[Incoming]] = {}
        self._staying: dict[tuple[Message, Slice], Tensor] = {}
        self._sent: dict[Task, list[Handle]] = {}

    def empty(self, num_tokens: int, payload: Payload) -> Tensor:
        """A buffer for tokens of a payload."""
        return torch.empty(num_tokens, payload.width, dtype=payload.dtype, device=self.device)

    def zeros(self, num_tokens: int, payload: Payload) -> Tensor:
        """A buffer of zeros for tokens of a payload."""
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
        """
        The messages to a task, in the same order on all of its ranks, as the collectives that follow need; ranks may
        post receives in different orders.
        """
        return sorted(self._received.pop(task, ()), key=lambda incoming: incoming.message)

    def gather(self, incoming: Incoming) -> list[tuple[Tensor, Tensor | None]]:
        """
        All tokens of an activation that this cp rank receives.

        Args:
            incoming ([`Incoming`]): The message.

        Returns:
            `list[tuple[torch.Tensor, torch.Tensor | None]]`: The tokens `[num_tokens, width]` of each route that has
            some, and their indices among those of the task, `None` for all in order.
        """
        result = []
        for (route, index), arriving in zip(incoming.routes, incoming.slices, strict=True):
            if route.num_tokens:
                tensors = [self._tensor(incoming, received) for received in arriving]
                result.append((self._gathered(route, incoming.payload, tensors), index))
        return result

    def _gathered(self, route: Route, payload: Payload, tensors: Sequence[Tensor]) -> Tensor:
        """The tokens of a route, of which each rank of the consumer's tp group has a slice."""
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
        """
        The gradient of outputs of a task: the sum of the gradients that its consumers returned.

        Args:
            messages (`Sequence[Incoming]`): Gradients of the same outputs, at least one.
            num_tokens (`int`): Tokens of these outputs on this rank.
            tp_group (`tuple[int, ...]`): The ranks that hold the same tokens, each of which received other slices.
        """
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
            dist.all_reduce(total, group=self.groups[tp_group])
        return total

    def _tensor(self, incoming: Incoming, received: _ReceivedSlice) -> Tensor:
        """The tokens of a slice that has arrived."""
        if received.buffer is not None:
            return received.buffer
        return self._staying.pop((incoming.message, received.slice))

    # Sending

    def send(self, message: Message, payload: Payload, routes: Sequence[IndexedRoute], tokens: Tensor) -> None:
        """
        Sends this rank's slices of a message, or keeps them when they stay on this rank.

        Args:
            message (`Message`): The message.
            payload ([`Payload`]): Its payload.
            routes (`Sequence[tuple[Route, torch.Tensor | None]]`): The routes of it that begin on this rank.
            tokens (`torch.Tensor` of shape `[num_tokens, width]`): All tokens of the payload on this rank.
        """
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
    """The rank that sends a slice of a message, and the one that receives it."""
    ends = slice_.producer, slice_.consumer
    return ends if message.kind == "act" else (ends[1], ends[0])


def _index_of(index: Tensor | None, slice_: Slice) -> Tensor | None:
    """Indices of the tokens of a slice among those of the task."""
    return None if index is None else index[slice_.start : slice_.stop]
