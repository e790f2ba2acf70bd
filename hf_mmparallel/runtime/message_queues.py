"""The messages of one rank in flight: posted receives, started sends, and slices that stay on the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .._device import to_device
from ..plan import FeatureSpec
from ..schedule.kinds import Message, Task
from ..world import World
from .payloads import (
    Payload,
    Payloads,
    Route,
    Slice,
    compose,
    ends_of,
    feature_routes,
    hidden_state_routes,
    select,
    slice_size,
)
from .step_inputs import StepInputs
from .work import Arrival

# Point-to-point messages between ranks.


class Handle(Protocol):
    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """
    Messages between this rank and others: the n-th `recv` from a rank gets the n-th tensor that it sent here. Neither
    call blocks, but a transfer can wait for all earlier ones between the same ranks, in both directions. A received
    buffer is valid after `wait`, a sent tensor must not change before.
    """

    rank: int

    def connect(self, channels: Iterable[tuple[int, int]]) -> None:
        """Prepares the channels of this rank: pairs of ranks, in order. The ranks at the other ends do it, too."""

    def send(self, tensor: torch.Tensor, target: int) -> Handle: ...

    def recv(self, buffer: torch.Tensor, source: int) -> Handle: ...


class DistributedTransport:
    """
    Messages over `torch.distributed`, in the group of all ranks.

    NCCL makes a communicator, with a stream, of each two ranks of a group that send each other something.
    """

    def __init__(self, world: World):
        self.world = world
        self.rank = world.rank
        self._through_host = not world.on_device
        self._connected: set[tuple[int, int]] = set()

    def connect(self, channels: Iterable[tuple[int, int]]) -> None:
        if self._through_host:
            return
        token = torch.zeros(1, device=self.world.device)
        for low, high in channels:
            if (low, high) not in self._connected:  # the first call blocks the host until the other rank is there
                if self.rank == low:
                    self.send(token, high).wait()
                else:
                    self.recv(token, low).wait()
                self._connected.add((low, high))

    def send(self, tensor: torch.Tensor, target: int) -> Handle:
        if self._through_host:
            tensor = tensor.cpu()
        return _Sent(dist.isend(tensor, self.world.processes[target], self.world.group), tensor)

    def recv(self, buffer: torch.Tensor, source: int) -> Handle:
        group, process = self.world.group, self.world.processes[source]
        if self._through_host and buffer.device.type != "cpu":
            host = torch.empty(buffer.shape, dtype=buffer.dtype)
            return _Copied(dist.irecv(host, process, group), host, buffer)
        work: Any = dist.irecv(buffer, process, group)
        return work


@dataclass
class _Sent:
    """A send whose tensor has to stay alive until it has left, which gloo reports only to `wait`."""

    work: Any  # `dist.Work`
    tensor: torch.Tensor

    def wait(self) -> None:
        self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


@dataclass
class _Copied:
    """A receive into host memory that is copied to the device when it is waited for."""

    work: Any  # `dist.Work`
    host: torch.Tensor
    buffer: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.buffer.copy_(self.host)

    def is_completed(self) -> bool:
        return False  # the copy is made in `wait`


# The messages of one step: the tokens of a task that each exchanges between this rank and others.

IndexedRoute = tuple[Route, torch.Tensor | None]


class StepMessages:
    """Layouts of the messages of one step on one rank, derived from the payloads and this rank's inputs."""

    def __init__(self, payloads: Payloads, inputs: StepInputs):
        self.payloads = payloads
        self.inputs = inputs

    def routes(self, message: Message, task: Task, num_tokens: int) -> list[IndexedRoute]:
        """
        Returns the routes of a message that begin or end on this rank, each with the indices of its tokens among the
        `num_tokens` that the task of this rank has here, `None` for all of them in order.
        """
        payload, rank = self.payloads.of(message), self.inputs.rank
        is_producer = task.key == ends_of(message)[0].key
        if payload.features is None:
            indices, routes = None, hidden_state_routes(num_tokens, payload.producer_mesh, payload.consumer_mesh)
        else:
            indices, routes = self._feature_routes(message, payload.features, is_producer)
        return [
            (route, compose(indices, route.tokens))
            for route in routes
            if rank in (route.producers if is_producer else route.consumers)
        ]

    def _feature_routes(
        self, message: Message, features: tuple[FeatureSpec, ...], is_producer: bool
    ) -> tuple[torch.Tensor, list[Route]]:
        """Returns the index of each token of a message at the end that this rank runs, and all of its routes."""
        payload, (producer, consumer) = self.payloads.of(message), ends_of(message)
        here, there = (producer, consumer) if is_producer else (consumer, producer)
        shared = set(self.inputs.samples(consumer))
        samples = [sample for sample in self.inputs.samples(producer) if sample in shared]
        cp_ranks, indices = self.inputs.feature_owners(here, features).select(samples)
        # The other end may be a task of other ranks only. With a single cp rank nothing about it is needed; otherwise
        # this rank has the sharding of its tokens.
        other_cp_ranks = None
        if self.inputs.planned_stage(there).cp_size > 1:
            other_cp_ranks, _ = self.inputs.feature_owners(there, features).select(samples)
        ends = (cp_ranks, other_cp_ranks) if is_producer else (other_cp_ranks, cp_ranks)
        meshes = payload.producer_mesh, payload.consumer_mesh
        return indices, feature_routes(len(indices), *meshes, *ends)

    def shapes(self, payload: Payload, task: Task) -> list[torch.Size]:
        """Returns shapes of the tensors of a payload that enter a task on this rank."""
        if payload.features is None:
            return self.inputs.hidden_shapes(task)
        owners = self.inputs.feature_owners(task, payload.features)
        return [torch.Size((count, payload.width)) for count in owners.sizes[self.inputs.cp_rank(task)]]


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

    @property
    def num_bytes(self) -> int:
        """Bytes that come from other ranks."""
        buffers = [received.buffer for arriving in self.slices for received in arriving]
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)


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
        return torch.empty(num_tokens, payload.width, dtype=payload.dtype, device=self.device)

    def zeros(self, num_tokens: int, payload: Payload) -> Tensor:
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
                own_index = None if index is None else index[slice_.start : slice_.stop]
                arriving.append(_ReceivedSlice(slice_, own_index, buffer))
            incoming.slices.append(arriving)
        self._received.setdefault(message.target, []).append(incoming)

    def wait(self, task: Task, mark: Callable[[], Any] = lambda: None) -> list[Arrival]:
        """Waits for all messages to a task; returns those from other modules, with marks of a clock."""
        arrivals = []
        for incoming in self._received.get(task, ()):
            started = mark() if incoming.message.crosses_boundary else None
            for handle in incoming.handles:
                handle.wait()
            if incoming.message.crosses_boundary:
                ends = incoming.message.source.module, incoming.message.target.module
                arrivals.append(Arrival(ends, incoming.num_bytes, started, mark()))
        return arrivals

    def take_arrived(self, task: Task) -> list[Incoming]:
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

    def sum_gradients(self, messages: Sequence[Incoming], num_tokens: int) -> Tensor:
        """Sums the gradients of the same outputs of a task that its consumers returned."""
        total = self.zeros(num_tokens, messages[0].payload)
        for incoming in messages:
            for arriving in incoming.slices:
                for received in arriving:
                    tokens = self._tensor(incoming, received)
                    if received.index is None:
                        total[received.slice.start : received.slice.stop] += tokens
                    else:
                        total.index_add_(0, to_device(received.index, total.device), tokens)
        tp_group = next(ranks for ranks in messages[0].payload.producer_mesh if self.rank in ranks)
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
        for handle in self._sent.pop(task, ()):
            handle.wait()

    def finish(self) -> None:
        for task in list(self._sent):
            self.wait_for_sends(task)


def _direction(message: Message, slice_: Slice) -> tuple[int, int]:
    """Returns the rank that sends a slice of a message, and the one that receives it."""
    ends = slice_.producer, slice_.consumer
    return ends if message.kind == "act" else (ends[1], ends[0])
