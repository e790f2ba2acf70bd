"""
Writes optimizer state into the stock Trainer's file, from which any layout and the stock Trainer itself can resume.

`optimizer.pt` is what `torch.save(optimizer.state_dict())` writes on one process, with the names of the parameters
added. No rank ever holds all of it: the first rank writes a file of the right size without values, then each rank
writes the values of the parameters that it owns to their offsets.
"""

from __future__ import annotations

import functools
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.serialization import skip_data
from torch.utils import serialization

from .._files import check_complete, reason_of
from ..modeling.unowned import from_shard, is_on_mesh, shard_as
from ..world import World
from .optimizer_slices import (
    MODULE,
    STATE,
    cant_be_cut,
    is_rank_local,
    join,
    named_groups,
    rank_local_suffix,
    settings_of,
    slice_of,
    whole_parameter,
)
from .sharded_files import FSDP_OPTIMIZER, ShardedFiles, sharded_files
from .sharded_model import ShardedModel
from .updated_copies import MASTER, master_to_save, refresh_copies, restore_copy, source_of_copy
from .writes import Writes

# Ranks on several hosts write to one file, so that no two of them may share a page of it.
_ALIGNMENT = 4096
_PLAIN = (bool, int, float, str, type(None))

Offsets = dict[str, dict[str, int]]
"""Parameter -> tensor of its state -> where its values start in the file."""


def _plain_value(value: Any, what: str) -> Any:
    """Returns a value as it is saved; raises `ValueError` for one that only executed code could read."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    parts = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
    if type(value) not in (*_PLAIN, list, tuple, dict) or (
        isinstance(value, dict) and not all(type(key) in _PLAIN for key in value)
    ):
        raise ValueError(f"The optimizer's `{what}={value!r}` can't be saved. Use a number, string or list.")
    for part in parts:
        _plain_value(part, what)
    return value


class _Collected:
    """The optimizer state that this rank writes, or whose shards it gives to the rank that does."""

    def __init__(self, optimizer: Any, sharded: ShardedModel):
        world = sharded.world
        self.owned = {name for name, shards in sharded.shards.items() if shards.owner == world.rank}
        self.owners = {name: world.processes[shards.owner] for name, shards in sharded.shards.items()}
        self.parameters: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        for names, group in zip(named_groups(sharded.model, optimizer), optimizer.param_groups, strict=True):
            settings = {key: _plain_value(value, key) for key, value in settings_of(group).items()}
            for name, parameter in zip(names, group["params"], strict=True):
                if self._is_needed(name, parameter, sharded):
                    state, master = optimizer.state.get(parameter, {}), master_to_save(parameter)
                    state = state if master is None else {**state, MASTER: master}
                    self._add(name, parameter, settings, state)

    def _is_needed(self, name: str, entry: torch.Tensor, sharded: ShardedModel) -> bool:
        """Returns whether this rank writes a parameter's state, or gives its part to the rank that does."""
        flat_slice, whole = slice_of(entry), whole_parameter(entry)
        if flat_slice is None:
            return name in self.owned or is_on_mesh(whole, self.owners[name])
        tp_group = sharded.group_of_owner(name) if isinstance(whole, DTensor) else (sharded.shards[name].owner,)
        processes = dist.get_process_group_ranks(flat_slice.group)
        return any(sharded.world.processes[rank] in processes for rank in tp_group)

    def _add(self, name: str, entry: torch.Tensor, settings: dict[str, Any], state: Mapping[str, Any]) -> None:
        suffix = rank_local_suffix(entry)
        whole_shape = tuple(whole_parameter(entry).shape)
        tensors, values, kinds = {}, {}, {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                values[key] = _plain_value(value, key)
                continue
            shape = whole_shape if value.shape == entry.shape else tuple(value.shape)
            if suffix and shape != whole_shape and value.numel() > 1 and not isinstance(value, DTensor):
                key += suffix
            tensors[key] = value.detach()
            if name in self.owned or is_rank_local(key):
                kinds[key] = (shape, value.dtype)
        self.parameters[name] = entry
        self.tensors[name] = tensors
        self.entries[name] = {"settings": settings, "tensors": kinds, "values": values}

    def whole_tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (key, whole tensor) of what this rank writes of a parameter."""
        entry = self.parameters[name]
        # the ranks of a tp group or shard group pass tensors in one order, so each has to iterate to the end
        for key, tensor in self.tensors[name].items():
            value = join(tensor, entry) if tensor.shape == entry.shape else tensor
            if isinstance(value, DTensor) and is_on_mesh(value, self.owners[name]):
                value = value.full_tensor()
            if is_rank_local(key) or name in self.owned:
                yield key, value


def save_optimizer(
    optimizer: torch.optim.Optimizer, sharded: ShardedModel, writes: Writes, groups: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """
    Writes the state of every rank's optimizer to `optimizer.pt`; returns, on the first rank, the settings of the
    written groups. Collective.

    The stock Trainer can go on from it, unless parameters are grouped in another way than it would on the whole model
    (`groups`), or ranks have state of their own (8-bit optimizers under tensor parallelism or ZeRO). It then ends with
    "different number of parameter groups", as there is an empty group more. On all ranks raises `ValueError` for state
    or hyperparameters that are neither tensors nor plain values, and `OSError` if the first rank can't write.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    path = writes.folder / STATE
    world = sharded.world
    mine = world.raise_together(lambda: _Collected(optimizer, sharded))
    every = world.gather(mine.entries)
    written: list[dict[str, Any]] = []

    def write_frame() -> Offsets:
        if every is None:
            return {}
        merged = _merged(every)
        laid_out = _grouped(merged, groups)
        path.parent.mkdir(parents=True, exist_ok=True)
        written.extend(settings for settings, _ in laid_out)
        return _write_frame(path, merged, laid_out)

    offsets = world.broadcast(world.raise_together(write_frame))
    file = _Values(path)
    for name in offsets:
        for key, tensor in mine.whole_tensors(name) if name in mine.tensors else ():
            writes.add(file.write, offsets[name][key], writes.on_host(tensor))
    writes.add(file.close)
    return written


def _merged(every: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Parameter -> its entry, with the tensors of all ranks that write some of it."""
    merged: dict[str, dict[str, Any]] = {}
    for of_rank in every:
        for name, entry in of_rank.items():
            known = merged.setdefault(name, {**entry, "tensors": {}})
            known["tensors"].update(entry["tensors"])
    return merged


def _grouped(
    merged: Mapping[str, dict[str, Any]], groups: Sequence[Sequence[str]]
) -> list[tuple[dict[str, Any], list[str]]]:
    """Lists (settings, names) of each group that is written."""
    result: list[tuple[dict[str, Any], list[str]]] = []
    by_id = [{id(e): e for e in (merged[n]["settings"] for n in names if n in merged)} for names in groups]
    settings = [list(different.values()) for different in by_id]
    is_stock = {name for names in groups for name in names} == merged.keys() and all(
        other == of_group[0] for of_group in settings for other in of_group
    )
    if is_stock:
        first = next((of_group[0] for of_group in settings if of_group), {})
        for names, of_group in zip(groups, settings, strict=True):
            result.append((of_group[0] if of_group else first, list(names)))
    else:
        for name, entry in merged.items():
            for of_group, names in result:
                if of_group == entry["settings"]:
                    names.append(name)
                    break
            else:
                result.append((entry["settings"], [name]))
    if not is_stock or any(is_rank_local(key) for entry in merged.values() for key in entry["tensors"]):
        result.append((result[0][0] if result else {}, []))
    return result


def _aligned() -> Any:
    """Lets `torch.save` start each tensor at a page of its own."""
    config: Any = serialization.config
    return config.patch("save.storage_alignment", _ALIGNMENT)


def _write_frame(path: Path, merged: Mapping[str, Any], groups: list[tuple[dict[str, Any], list[str]]]) -> Offsets:
    """Writes the file with room for the tensors."""
    state, listed, tensors = {}, [], []
    with FakeTensorMode():
        for settings, names in groups:
            indices = range(len(state), len(state) + len(names))
            for index, name in zip(indices, names, strict=True):
                kinds = merged[name]["tensors"].items()
                tensors += [(name, key) for key, _ in kinds]
                values = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in kinds}
                state[index] = {**values, **merged[name]["values"]}
            listed.append({**settings, "params": list(indices), "param_names": names})
        used = {index: entry for index, entry in state.items() if entry}
        with skip_data(materialize_fake_tensors=True), _aligned():
            torch.save({"state": used, "param_groups": listed}, path)
    offsets: Offsets = {name: {} for name in merged}
    reader: Any = torch._C.PyTorchFileReader(str(path))
    for record, (name, key) in enumerate(tensors):  # which are numbered as they are met
        offsets[name][key] = reader.get_record_offset(f"data/{record}")
    return offsets


class _Values:
    """A file whose tensors have their offsets in bytes."""

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def _file(self) -> BinaryIO:
        return self.path.open("r+b")

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        self._file.seek(offset)
        self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


# Reads optimizer state of any layout, or of the stock Trainer, into this rank's optimizer.
#
# The file is mapped into memory, and a rank copies its parameters' part of it. Nothing in it is executed.

# Key under which `state_dict` of bitsandbytes hides entries from FSDP.
_WRAPPED = "__bnb_optimizer_quant_state__"


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    folder: str | Path,
    groups: Sequence[Sequence[str]],  # the trained parameters, in the stock Trainer's groups
    world: World,
) -> None:
    """
    Reads a checkpoint of `save_optimizer` under any layout, or of the stock Trainer, also under FSDP2 or DeepSpeed,
    into the optimizer of every rank without a change of any bit. Collective; raises `ValueError` on all ranks if the
    state can't be read, belongs to another model or can't be cut to this layout.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)

    def read() -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        entries, settings = _entries_of(Path(folder), groups, model)
        return _states(optimizer, model, entries, settings, Path(folder))

    apply_state(optimizer, *world.raise_together(read))


def apply_state(
    optimizer: Any, states: Mapping[Any, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Gives an optimizer the state of each of its parameters and the settings of each of its groups."""
    refresh_copies(optimizer)  # those without saved values get those of the weights
    for parameter, state in states.items():
        state = dict(state)
        master = state.pop(MASTER, None)
        if source_of_copy(parameter) is not None:
            state = {key: _as_wide(key, value, parameter) for key, value in state.items()}
            if master is not None:
                restore_copy(parameter, master)
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _as_wide(key: str, value: Any, like: torch.Tensor) -> Any:
    """Casts a value of the state to the dtype of `like`, if it has a number for each of its elements."""
    is_of_elements = isinstance(value, torch.Tensor) and value.shape == like.shape and key != "step"
    return value.to(like.dtype) if is_of_elements and value.is_floating_point() else value


def read_state(path: Path) -> dict[str, Any]:
    """Reads a file of optimizer state, tensors when they are used; raises `ValueError` for one that can't be read."""
    check_complete(path.parent, path.name)
    try:
        is_mapped = zipfile.is_zipfile(path)  # not what torch saved before 1.6
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
        if not isinstance(saved["state"], dict) or not isinstance(saved["param_groups"], list):
            raise TypeError("no optimizer's state dict")
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"`{path}` is no optimizer state that can be read ({reason_of(error)}). Resume from another checkpoint, "
            f"or remove `scheduler.pt` beside it to go on with the weights alone."
        ) from error
    return saved


def _entries_of(
    folder: Path, groups: Sequence[Sequence[str]], model: nn.Module
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Parameter -> (settings of its group, its state), and the settings of all groups, of any checkpoint."""
    if (folder / STATE).is_file():
        return _entries(folder / STATE, groups)
    if (folder / FSDP_OPTIMIZER).is_file():
        return _entries(folder / FSDP_OPTIMIZER, groups)
    files = sharded_files(folder)
    return _entries(folder / STATE, groups) if files is None else (_StateOf(files, model), [])


class _StateOf(Mapping[str, tuple[dict[str, Any], dict[str, Any]]]):
    """Parameter -> (no settings, its state), read when it is asked for."""

    def __init__(self, files: ShardedFiles, model: nn.Module):
        self.files = files
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def __getitem__(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, self.files.state(name, self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.files.names)

    def __len__(self) -> int:
        return len(self.files.names)


def _entries(
    path: Path, groups: Sequence[Sequence[str]]
) -> tuple[dict[str, tuple[dict[str, Any], dict[str, Any]]], list[dict[str, Any]]]:
    """Parameter -> (settings of its group, its state), and the settings of all groups."""
    saved = read_state(path)
    listed = [g for g in saved["param_groups"] if g["params"] or "param_names" not in g]
    if all("param_names" in group for group in listed):
        names = [group["param_names"] for group in listed]
    elif all(isinstance(index, str) for group in listed for index in group["params"]):  # FSDP's are names
        names = [group["params"] for group in listed]
    else:
        names = groups
        sizes, expected = [len(group["params"]) for group in listed], [len(members) for members in groups]
        if sizes != expected:
            raise ValueError(
                f"`{path.parent}` is the optimizer state of another model: it has {_and(sizes)} parameters in its "
                f"groups, where this one has {_and(expected)} that are trained with weight decay and without. Freeze "
                f"the same parts, and use the stock Trainer's own groups."
            )
    result = {}
    for group, members in zip(listed, names, strict=True):
        for index, name in zip(group["params"], members, strict=True):
            state = dict(saved["state"].get(index, {}))
            state.update(state.pop(_WRAPPED, {}))
            result[name] = settings_of(group), state
    return result, [settings_of(group) for group in saved["param_groups"]]


def _and(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _states(
    optimizer: Any,
    model: nn.Module,
    entries: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    folder: Path,
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Parameter -> its state on this rank, and the settings of each group."""
    states, settings = {}, []
    for index, (names, group) in enumerate(zip(named_groups(model, optimizer), optimizer.param_groups, strict=True)):
        saved = []
        for name, parameter in zip(names, group["params"], strict=True):
            if name not in entries:
                raise _another_optimizer(folder, name, whole_parameter(parameter), None)
            settings_of_name, state = entries[name]
            saved.append(settings_of_name)
            states[parameter] = _state_of(name, parameter, state, group, folder)
        alike = [other for other in groups if other.get(MODULE) == group.get(MODULE)]
        without = alike[min(index, len(alike) - 1)] if alike else {}
        settings.append(_same_settings(saved, index, names, folder) if saved else without)
    return states, settings


def _another_optimizer(folder: Path, name: str, parameter: torch.Tensor, shape: Sequence[int] | None) -> ValueError:
    has = "nothing" if shape is None else f"shape {tuple(shape)}"
    return ValueError(
        f"`{folder}` is the optimizer state of another model: it has {has} for `{name}` of shape "
        f"{tuple(parameter.shape)}. Resume from a checkpoint of this model with the same frozen parts."
    )


def _same_settings(saved: list[dict[str, Any]], index: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns the settings that a group's parameters were saved with; raises `ValueError` where they differ."""
    if any(other != saved[0] for other in saved):
        raise ValueError(
            f"`{folder}` was saved with other parameter groups: those of group {index} (`{names[0]}`, ...) had "
            f"different settings. Resume with the same `weight_decay` and learning rates by parameter."
        )
    return saved[0]


def _on_host(key: str, group: Mapping[str, Any]) -> bool:
    """Returns whether an entry is in host memory: torch's step counters, unless a kernel reads them."""
    return key == "step" and not (group.get("fused") or group.get("capturable"))


def _may_be_state(shape: torch.Size, of: torch.Size) -> bool:
    """Returns whether a tensor can belong to a parameter of shape `of`: other dimensions, or some summed up."""
    return len(shape) != len(of) or all(mine in (1, its) for mine, its in zip(shape, of, strict=True))


def _state_of(
    name: str, parameter: Any, saved: Mapping[str, Any], group: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    whole, suffix = whole_parameter(parameter), rank_local_suffix(parameter)
    shapes = [value.shape for value in saved.values() if isinstance(value, torch.Tensor)]
    strange = [shape for shape in shapes if not _may_be_state(shape, whole.shape)]
    if strange and whole.shape not in shapes:
        raise _another_optimizer(folder, name, whole, strange[0])
    state: dict[str, Any] = {}
    for stored, value in saved.items():
        key, _, of_rank = stored.partition("@")
        if key == MASTER and (source_of_copy(parameter) is None or source_of_copy(parameter).dtype == parameter.dtype):
            continue
        if of_rank and key + suffix not in saved:
            raise cant_be_cut(key, name)
        if of_rank and stored != key + suffix:
            continue
        if isinstance(value, torch.Tensor):
            has_values = value.numel() > 1 or (value.shape == whole.shape and key != "step")
            is_cut = suffix and has_values and not of_rank
            if is_cut and value.shape != whole.shape:
                raise cant_be_cut(key, name)
            value = _on_rank(value, parameter, is_cut=bool(is_cut), on_host=_on_host(key, group))
        if MASTER in saved and key != MASTER:
            value = _as_wide(key, value, parameter)  # the state of master weights is wider than that of 16-bit ones
        state[key] = value
    return state


def _on_rank(value: torch.Tensor, parameter: Any, is_cut: bool, on_host: bool) -> torch.Tensor:
    """Copies a tensor of the file, or this rank's shard or slice of it."""
    if not is_cut:
        return value.to("cpu" if on_host else parameter.device, copy=True)
    whole: Any = whole_parameter(parameter)
    if isinstance(whole, DTensor):
        value = shard_as(value, whole).to_local()
    flat_slice = slice_of(parameter)
    if flat_slice is not None:
        value = flat_slice.of(value.contiguous())
    shard = value.to(parameter.device, copy=True).contiguous()
    return from_shard(shard, whole) if isinstance(parameter, DTensor) else shard
