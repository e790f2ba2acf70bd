"""
What a rank holds of a model and its optimizer, by the names of parameters, and how it travels to other ranks.

A rank that changes its place in a plan keeps what it holds, and receives the rest from ranks that hold it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..modeling import is_unowned
from ..modeling.dtensors import from_shard, local
from ..world import World, doing
from .optimizer_loading import apply_state
from .optimizer_names import named_groups, settings_of
from .updated_copies import MASTER, saved_master

_IN_FLIGHT_BYTES = 256 * 2**20


@dataclass
class HeldParameter:
    """
    A parameter, or this rank's shard of it, with the optimizer's state for it.

    Args:
        values (`torch.Tensor`): Its values; those of the model itself.
        group (`int`, *optional*): Index of its group in the optimizer; `None` if it is not trained.
        state (`dict[str, Any]`): State of the optimizer, local tensors and plain values; float32 weights as
            [`MASTER`].
    """

    values: torch.Tensor
    group: int | None = None
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What has to be sent of it, in the order of its [`_Outline`]."""
        return [self.values, *(value for value in self.state.values() if isinstance(value, torch.Tensor))]


class Transfer(NamedTuple):
    """A parameter that one rank sends to another."""

    name: str
    source: int
    target: int


def held_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, HeldParameter]:
    """
    Parameter -> what this rank holds of it.

    Args:
        model (`nn.Module`): The pruned model of this rank.
        optimizer (`torch.optim.Optimizer`, *optional*): Its optimizer.
    """
    held = {
        name: HeldParameter(local(parameter).detach())
        for name, parameter in model.named_parameters()
        if not is_unowned(parameter)
    }
    if optimizer is None:
        return held
    for index, names in enumerate(named_groups(model, optimizer)):
        for name, entry in zip(names, optimizer.param_groups[index]["params"], strict=True):
            master = saved_master(entry)
            state = {} if master is None else {MASTER: local(master)}
            for key, value in optimizer.state.get(entry, {}).items():
                state[key] = local(value) if isinstance(value, torch.Tensor) else value
            held[name].group, held[name].state = index, state
    return held


class _SentTensor(NamedTuple):
    """A tensor that is sent separately: its shape and dtype, and whether it is in host memory."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _SentTensor:
        return cls(tensor.shape, tensor.dtype, tensor.device.type == "cpu")

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Outline:
    """What is sent of a parameter, see [`HeldParameter`], without the tensors themselves."""

    values: _SentTensor
    group: int | None
    state: dict[str, Any]

    @classmethod
    def of(cls, held: HeldParameter) -> _Outline:
        state = {k: _SentTensor.of(v) if isinstance(v, torch.Tensor) else v for k, v in held.state.items()}
        return cls(_SentTensor.of(held.values), held.group, state)

    @property
    def num_bytes(self) -> int:
        tensors = (value for value in self.state.values() if isinstance(value, _SentTensor))
        return self.values.num_bytes + sum(tensor.num_bytes for tensor in tensors)


def exchange(
    held: Mapping[str, HeldParameter], transfers: Iterable[Transfer], world: World
) -> tuple[dict[str, HeldParameter], int]:
    """
    Sends and receives parameters with their state. Collective.

    All ranks go through the transfers in one order and wait for the oldest ones, so that none waits for another in a
    circle.

    Args:
        held (`Mapping[str, HeldParameter]`): What this rank holds.
        transfers (`Iterable[Transfer]`): All transfers, the same on all ranks.
        world ([`World`]): The ranks.

    Returns:
        `dict[str, HeldParameter]`: What this rank has received.
        `int`: Bytes that all ranks have received.
    """
    transfers = list(transfers)
    mine = {t.name: _Outline.of(held[t.name]) for t in transfers if t.source == world.rank}
    outlines = world.all_gather(mine, "exchanging what ranks hold")
    received: dict[str, HeldParameter] = {}
    window = _Window()
    with doing("copying parameters and their state", waits=True):
        for transfer in transfers:
            if transfer.source == world.rank:
                for tensor in held[transfer.name].tensors:
                    window.send(tensor, transfer.target, world)
            elif transfer.target == world.rank:
                outline = outlines[transfer.source][transfer.name]
                received[transfer.name] = window.receive(outline, transfer.source, world)
        window.finish()
    return received, sum(outlines[transfer.source][transfer.name].num_bytes for transfer in transfers)


class _Window:
    """Messages on their way, of which the oldest are waited for when there are too many bytes."""

    def __init__(self):
        self._works: deque[tuple[Any, Any, torch.Tensor]] = deque()
        self._num_bytes = 0

    def send(self, tensor: torch.Tensor, target: int, world: World) -> None:
        if tensor.numel():
            wired = tensor.to(world.wire_device).contiguous()
            self._add(dist.isend(wired, world.processes[target], world.group), wired, None)

    def receive(self, outline: _Outline, source: int, world: World) -> HeldParameter:
        values = self._receive(outline.values._replace(on_host=False), source, world)
        state = {
            key: self._receive(value, source, world) if isinstance(value, _SentTensor) else value
            for key, value in outline.state.items()
        }
        return HeldParameter(values, outline.group, state)

    def _receive(self, sent: _SentTensor, source: int, world: World) -> torch.Tensor:
        result = torch.empty(sent.shape, dtype=sent.dtype, device="cpu" if sent.on_host else world.device)
        if result.numel():
            wired = (
                result if result.device == world.wire_device else torch.empty_like(result, device=world.wire_device)
            )
            self._add(dist.irecv(wired, world.processes[source], world.group), wired, result)
        return result

    def _add(self, work: Any, wired: torch.Tensor, result: torch.Tensor | None) -> None:
        self._works.append((work, wired, wired if result is None else result))
        self._num_bytes += wired.nbytes
        while self._num_bytes > _IN_FLIGHT_BYTES:
            self._wait()

    def _wait(self) -> None:
        work, wired, result = self._works.popleft()
        work.wait()
        if result is not wired:
            result.copy_(wired)
        self._num_bytes -= wired.nbytes

    def finish(self) -> None:
        while self._works:
            self._wait()


def give_to_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, held: Mapping[str, HeldParameter]
) -> None:
    """
    Lets an optimizer update the trained parameters of a model that has been laid out anew. It has no state after it;
    [`restore_state`] gives it back.

    Args:
        optimizer (`torch.optim.Optimizer`): The optimizer, with the same groups on all ranks.
        model (`nn.Module`): The pruned model of this rank.
        held (`Mapping[str, HeldParameter]`): What this rank holds under the new plan.
    """
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []
    for name, parameter in model.named_parameters():
        if not is_unowned(parameter) and parameter.requires_grad:
            index = held[name].group
            if index is not None:  # the optimizer has it
                optimizer.param_groups[index]["params"].append(parameter)


def restore_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module, held: Mapping[str, HeldParameter]) -> None:
    """Gives an optimizer the state of its parameters, see [`give_to_optimizer`]."""
    states = {}
    for names, group in zip(named_groups(model, optimizer), optimizer.param_groups, strict=True):
        for name, entry in zip(names, group["params"], strict=True):
            states[entry] = {key: _as_entry(value, entry) for key, value in held[name].state.items()}
    apply_state(optimizer, states, [settings_of(group) for group in optimizer.param_groups])


def _as_entry(value: Any, entry: Any) -> Any:
    """A rank's part of the state in the form of an entry of the optimizer."""
    is_cut = isinstance(entry, DTensor) and isinstance(value, torch.Tensor) and value.shape == local(entry).shape
    return from_shard(value, entry) if is_cut else value
