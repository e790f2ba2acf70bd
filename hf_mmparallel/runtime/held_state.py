"""
What a rank holds of a model and its optimizer, by the names of parameters, and how it travels to other ranks.

A rank that changes its place in a plan keeps what it holds, and receives the rest from ranks that hold it: into host
memory, since it needs what it has held until all ranks have their parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..cost.stage_memory import COPY_WINDOW_BYTES
from ..modeling import is_unowned
from ..modeling.unowned import from_shard, give_values, local
from ..world import World, track_activity
from .optimizer_checkpoint import apply_state
from .optimizer_slices import OptimizerSlices, Region, named_groups, settings_of
from .updated_copies import MASTER, entries_of, master_to_save, set_copy, source_of_copy


@dataclass
class HeldParameter:
    """A parameter, or this rank's shard or slice of it, with the optimizer's state for it."""

    values: torch.Tensor  # those of the model itself
    group: int | None = None  # index of its group in the optimizer; `None` if it is not trained
    state: dict[str, Any] = field(default_factory=dict)  # local tensors and plain values; float32 weights as `MASTER`
    on_host: frozenset[str] = frozenset()  # keys of tensors of the state that the optimizer has in host memory

    def to(self, device: torch.device | str) -> HeldParameter:
        """Moves tensors to a device, but those of the optimizer's host memory, and `MASTER`, which it copies."""
        stays = {MASTER, *self.on_host}
        state = {
            key: value.to(device) if isinstance(value, torch.Tensor) and key not in stays else value
            for key, value in self.state.items()
        }
        return replace(self, values=self.values.to(device), state=state)

    def region(self, name: str, region: Region | None) -> HeldParameter:
        """Copies a region, or all of it, to host memory; raises `ValueError` for state that can't be cut."""
        part, places = _Outline.of(self, name, region).blank()
        for place, rows in zip(places, self.messages(region), strict=True):
            place.view(rows.shape).copy_(rows)
        return part

    def messages(self, region: Region | None) -> Iterator[torch.Tensor]:
        """What is sent of a region, or of all of it, in this memory and in the order of [`_Outline.blank`]."""
        for value in (self.values, *self.state.values()):
            if isinstance(value, torch.Tensor):
                yield from _rows(region.of(value) if region is not None and _is_like(value, self.values) else value)

    @classmethod
    def join(cls, pieces: Sequence[tuple[Region | None, HeldParameter]]) -> HeldParameter:
        """Joins pieces, each with its place, `None` for all of it."""
        region, first = pieces[0]
        if region is None:
            return first
        keys = [key for key, value in first.state.items() if _is_like(value, first.values)]
        whole = replace(first, values=region.blank(first.values), state=dict(first.state))
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
    return isinstance(value, torch.Tensor) and value.shape == values.shape


class Transfer(NamedTuple):
    """A parameter, or a part of it, that one rank sends to another, or keeps for itself."""

    name: str
    source: int
    target: int
    taken: Region | None = None  # where it lies in what the source holds; `None` if it is all of that
    given: Region | None = None  # where it lies in what the target needs; `None` if it is all of that


def held_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, slices: OptimizerSlices | None = None
) -> dict[str, HeldParameter]:
    """Returns what this rank holds of each parameter: of those that several ranks divide its own slice."""
    held = {
        name: HeldParameter(local(parameter if slices is None else slices.updated_tensor(parameter)).detach())
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
            on_host = {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
            held[name] = HeldParameter(held[name].values, index, state, frozenset(on_host))
    return held


def let_go(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, held: Mapping[str, HeldParameter]) -> None:
    """Frees weights and state of a model and its optimizer, whoever has them, but for what is held."""
    for parameter in (*model.parameters(), *(() if optimizer is None else entries_of(optimizer))):
        if not is_unowned(parameter):
            give_values(parameter, local(parameter).new_empty(0))
    if optimizer is not None:
        optimizer.state.clear()
    for part in held.values():
        if part.values.untyped_storage().nbytes() > part.values.nbytes:  # a slice in the memory of all of it
            part.values = part.values.clone()


def _rows(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Rows of a tensor that are sent together: a few of them are in the window at a time."""
    if tensor.dim() == 0:
        return (tensor.view(1),)
    row_bytes = max(1, tensor.nbytes // max(1, len(tensor)))
    return tensor.split(max(1, COPY_WINDOW_BYTES // 4 // row_bytes)) if tensor.numel() else ()


class _SentTensor(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    sizes: tuple[int, ...]  # elements of each message

    @classmethod
    def of(cls, tensor: torch.Tensor, region: Region | None) -> _SentTensor:
        shape, part = (tensor.shape, tensor) if region is None else (region.shape(tensor), region.of(tensor))
        return cls(shape, tensor.dtype, tuple(rows.numel() for rows in _rows(part)))

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Outline:
    """What is sent of a parameter, see [`HeldParameter`], without the tensors themselves."""

    values: _SentTensor
    group: int | None
    state: dict[str, Any]
    on_host: frozenset[str]

    @classmethod
    def of(cls, held: HeldParameter, name: str, region: Region | None) -> _Outline:
        if region is not None:
            check_cuttable(held.state, held.values, name)
        state = {
            key: _SentTensor.of(value, region if _is_like(value, held.values) else None)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in held.state.items()
        }
        return cls(_SentTensor.of(held.values, region), held.group, state, held.on_host)

    def blank(self) -> tuple[HeldParameter, list[torch.Tensor]]:
        """Such a part in host memory, without values, and where in it each message belongs."""
        places: list[torch.Tensor] = []

        def make(sent: Any) -> Any:
            if not isinstance(sent, _SentTensor):
                return sent
            tensor = torch.empty(sent.shape, dtype=sent.dtype, device="cpu")
            places.extend(tensor.view(-1).split(sent.sizes))
            return tensor

        values = make(self.values)
        state = {key: make(value) for key, value in self.state.items()}
        return HeldParameter(values, self.group, state, self.on_host), places

    @property
    def num_bytes(self) -> int:
        tensors = (value for value in self.state.values() if isinstance(value, _SentTensor))
        return self.values.num_bytes + sum(tensor.num_bytes for tensor in tensors)


def exchange(
    held: Mapping[str, HeldParameter], transfers: Iterable[Transfer], world: World
) -> tuple[dict[str, HeldParameter], int]:
    """
    Sends and receives parameters with their state, and joins the parts of each: what this rank has received, in host
    memory, and the bytes that all ranks have received. Collective, with the same transfers on all ranks.
    """
    transfers = list(transfers)
    sent = {(t.name, t.taken) for t in transfers if t.source == world.rank}
    mine = world.raise_together(lambda: {(name, taken): _Outline.of(held[name], name, taken) for name, taken in sent})
    outlines = world.all_gather(mine, "exchanging what ranks hold")
    received: dict[str, list[tuple[Region | None, HeldParameter]]] = {}
    window = _Window()
    num_bytes = 0
    with track_activity("copying parameters and their state", waits=True):
        # in one order on all ranks, which wait for the oldest ones, so that none waits for another in a circle
        for name, source, target, taken, given in transfers:
            outline = outlines[source][name, taken]
            num_bytes += outline.num_bytes if source != target else 0
            if source == target == world.rank:
                received.setdefault(name, []).append((given, held[name].region(name, taken)))
            elif target == world.rank:
                part, places = outline.blank()
                received.setdefault(name, []).append((given, part))
                for place in places:
                    window.receive(place, source, world)
            elif source == world.rank:
                for rows in held[name].messages(taken):
                    window.send(rows, target, world)
        window.finish()
    return {name: HeldParameter.join(received.pop(name)) for name in list(received)}, num_bytes


class _Window:
    """Messages on their way, of which the oldest are waited for before there are too many bytes."""

    def __init__(self):
        self._works: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self._num_bytes = 0

    def send(self, rows: torch.Tensor, target: int, world: World) -> None:
        self._make_room(rows.nbytes)
        wired = rows.to(world.wire_device).contiguous()
        self._works.append((dist.isend(wired, world.processes[target], world.group), wired, wired))

    def receive(self, place: torch.Tensor, source: int, world: World) -> None:
        self._make_room(place.nbytes)
        is_wired = place.device == world.wire_device
        wired = place if is_wired else torch.empty_like(place, device=world.wire_device)
        self._works.append((dist.irecv(wired, world.processes[source], world.group), wired, place))

    def _make_room(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        while self._works and self._num_bytes > COPY_WINDOW_BYTES:
            self._wait()

    def _wait(self) -> None:
        work, wired, place = self._works.popleft()
        work.wait()
        if place is not wired:
            place.copy_(wired)
        self._num_bytes -= wired.nbytes

    def finish(self) -> None:
        while self._works:
            self._wait()


def give_to_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, held: Mapping[str, HeldParameter]
) -> None:
    """Lets an optimizer update the trained parameters of a model that was laid out anew, before `restore_state`."""
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
    states, masters = {}, {}
    for names, group in zip(named_groups(model, optimizer), optimizer.param_groups, strict=True):
        for name, entry in zip(names, group["params"], strict=True):
            states[entry] = {k: _as_entry(v, entry) for k, v in held[name].state.items() if k != MASTER}
            masters[entry] = held[name].state.get(MASTER)
    apply_state(optimizer, states, [settings_of(group) for group in optimizer.param_groups])
    for entry, master in masters.items():
        if master is not None and source_of_copy(entry) is not None:
            set_copy(entry, master)


def _as_entry(value: Any, entry: Any) -> Any:
    is_cut = isinstance(entry, DTensor) and isinstance(value, torch.Tensor) and value.shape == local(entry).shape
    return from_shard(value, entry) if is_cut else value
