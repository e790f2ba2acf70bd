"""
Writes optimizer state into the stock Trainer's file, from which any layout and the stock Trainer itself can resume.

`optimizer.pt` is what `torch.save(optimizer.state_dict())` writes on one process, with the names of the parameters
added. No rank ever holds all of it: the first rank writes a file of the right size without values, then each rank
writes the values of the parameters that it owns to their offsets. `optimizer_loading.py` reads it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.serialization import skip_data
from torch.utils import serialization

from ..modeling.unowned import is_on_mesh
from .optimizer_slices import (
    STATE,
    is_rank_local,
    join,
    named_groups,
    rank_local_suffix,
    settings_of,
    slice_of,
    whole_parameter,
)
from .sharded_model import ShardedModel
from .updated_copies import MASTER, master_to_save
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
    if type(value) not in (*_PLAIN, list, tuple, dict) or (isinstance(value, dict) and not all(map(_is_key, value))):
        raise ValueError(f"The optimizer's `{what}={value!r}` can't be saved. Use a number, string or list.")
    for part in parts:
        _plain_value(part, what)
    return value


def _is_key(value: Any) -> bool:
    return type(value) in _PLAIN


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
        """Waits until what this rank wrote is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
