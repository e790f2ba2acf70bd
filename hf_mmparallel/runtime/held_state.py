"""
What a rank holds of a model and its optimizer, by the names of parameters, and how it travels to other ranks.

A rank that changes its place in a plan keeps what it holds, and receives the rest from ranks that hold it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..modeling import is_unowned
from ..modeling.dtensors import from_shard, local
from ..world import World, track_activity
from .local_shards import Region
from .optimizer_loading import apply_state
from .optimizer_slices import named_groups, settings_of
from .updated_copies import MASTER, master_to_save

_IN_FLIGHT_BYTES = 256 * 2**20


@dataclass
class HeldParameter:
    """A parameter, or this rank's shard of it, with the optimizer's state for it."""

    values: torch.Tensor  # those of the model itself
    group: int | None = None  # index of its group in the optimizer; `None` if it is not trained
    state: dict[str, Any] = field(default_factory=dict)  # local tensors and plain values; float32 weights as `MASTER`

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What has to be sent of it, in the order of its [`_Outline`]."""
        return [self.values, *(value for value in self.state.values() if isinstance(value, torch.Tensor))]

    def region(self, name: str, region: Region | None) -> HeldParameter:
        """Cuts a region out of values and state. Raises `ValueError` for state of other shapes, which can't be cut."""
        if region is None:
            return self
        check_cuttable(self.state, self.values, name)
        state = {
            key: region.copy(value) if _is_like(value, self.values) else value for key, value in self.state.items()
        }
        return HeldParameter(region.copy(self.values), self.group, state)

    @classmethod
    def join(cls, pieces: Sequence[tuple[Region | None, HeldParameter]]) -> HeldParameter:
        """Joins pieces, each with its place, `None` for all of it."""
        region, first = pieces[0]
        if region is None:
            return first
        keys = [key for key, value in first.state.items() if _is_like(value, first.values)]
        whole = cls(region.blank(first.values), first.group, dict(first.state))
        whole.state.update({key: region.blank(first.state[key]) for key in keys})
        for region, piece in pieces:
            assert region is not None, "there is nothing beside all of it"
            region.write(whole.values, piece.values)
            for key in keys:
                region.write(whole.state[key], piece.state[key])
        return whole


def check_cuttable(state: Mapping[str, Any], values: torch.Tensor, name: str) -> None:
    """Raises `ValueError` if an optimizer has state of a parameter that can't be cut with its values."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1 and not _is_like(value, values):
            raise ValueError(
                f"The optimizer's `{key}` of `{name}` has shape {tuple(value.shape)}, not that of the parameter, "
                "so that it can't be cut for a tp group of another size. Use tp groups of one size, or an "
                'optimizer such as `optim="adamw_torch"`.'
            )


def _is_like(value: Any, values: torch.Tensor) -> bool:
    """Returns whether state has a value for each of the values of a parameter."""
    return isinstance(value, torch.Tensor) and value.shape == values.shape


class Transfer(NamedTuple):
    """A parameter, or a part of it, that one rank sends to another, or keeps for itself."""

    name: str
    source: int
    target: int
    taken: Region | None = None  # where it lies in what the source holds; `None` if it is all of that
    given: Region | None = None  # where it lies in what the target needs; `None` if it is all of that


def held_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, HeldParameter]:
    """Returns what this rank holds of each parameter."""
    held = {
        name: HeldParameter(local(parameter).detach())
        for name, parameter in model.named_parameters()
        if not is_unowned(parameter)
    }
    if optimizer is None:
        return held
    for index, names in enumerate(named_groups(model, optimizer)):
        for name, entry in zip(names, optimizer.param_groups[index]["params"], strict=True):
            master = master_to_save(entry)
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
    Sends and receives parameters with their state, and joins the parts of each: what this rank has received, and the
    bytes that all ranks have received. Collective, with the same transfers on all ranks.
    """
    transfers = list(transfers)
    sent = {(t.name, t.taken) for t in transfers if t.source == world.rank}
    mine = world.raise_together(lambda: {(name, taken): held[name].region(name, taken) for name, taken in sent})
    outlines = world.all_gather({key: _Outline.of(part) for key, part in mine.items()}, "exchanging what ranks hold")
    received: dict[str, list[tuple[Region | None, HeldParameter]]] = {}
    window = _Window()
    num_bytes = 0
    with track_activity("copying parameters and their state", waits=True):
        # in one order on all ranks, which wait for the oldest ones, so that none waits for another in a circle
        for name, source, target, taken, given in transfers:
            outline = outlines[source][name, taken]
            num_bytes += outline.num_bytes if source != target else 0
            if target == world.rank:
                own = mine[name, taken] if source == target else window.receive(outline, source, world)
                received.setdefault(name, []).append((given, own))
            elif source == world.rank:
                for tensor in mine[name, taken].tensors:
                    window.send(tensor, target, world)
        window.finish()
    return {name: HeldParameter.join(parts) for name, parts in received.items()}, num_bytes


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
    Lets an optimizer, with the same groups on all ranks, update the trained parameters of a model that has been laid
    out anew; [`restore_state`] gives its state back.
    """
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []
    for name, parameter in model.named_parameters():
        if not is_unowned(parameter) and parameter.requires_grad:
            index = held[name].group
            if index is not None:  # the optimizer has it
                _group_for(parameter, optimizer.param_groups[index], optimizer)["params"].append(parameter)


def _group_for(parameter: torch.Tensor, group: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the group of the rank that a parameter comes from, or one with its settings for another kind."""
    alike = (other for other in optimizer.param_groups if settings_of(other) == settings_of(group))
    # optimizers don't step on `DTensor`s and plain tensors together, and other ranks may cut it
    is_cut = isinstance(parameter, DTensor)
    fits = (one for one in (group, *alike) if all(isinstance(other, DTensor) == is_cut for other in one["params"]))
    return next(fits, group)


def restore_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module, held: Mapping[str, HeldParameter]) -> None:
    """Gives an optimizer the state of its parameters, see [`give_to_optimizer`]."""
    states = {}
    for names, group in zip(named_groups(model, optimizer), optimizer.param_groups, strict=True):
        for name, entry in zip(names, group["params"], strict=True):
            states[entry] = {key: _as_entry(value, entry) for key, value in held[name].state.items()}
    apply_state(optimizer, states, [settings_of(group) for group in optimizer.param_groups])


def _as_entry(value: Any, entry: Any) -> Any:
    is_cut = isinstance(entry, DTensor) and isinstance(value, torch.Tensor) and value.shape == local(entry).shape
    return from_shard(value, entry) if is_cut else value
