"""
Reads optimizer state as version 0.1 wrote it: tensors by `torch.distributed.checkpoint`, all else in one JSON file.

Its table of tensors is a pickle. It is read by an unpickler that knows the few classes of such a table and refuses the
rest, and it may describe nothing but tensors: torch unpickles other values without any restriction. So nothing of a
checkpoint is executed.
"""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Shard

from ..world import World
from .optimizer_loading import another_optimizer, apply_state, on_host, same_settings
from .optimizer_names import cant_be_cut, is_rank_local, named_groups, rank_local_suffix
from .optimizer_slices import slice_of
from .updated_copies import entries_of, is_offloaded

TENSORS, TABLE = "tensors", "state.json"
_METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle._Unpickler):  # the one in Python, whose steps can be refused
    """Knows what a table of tensors consists of, and nothing else."""

    stack: list[Any]
    dispatch: dict[int, Any] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to `{module}.{name}`")
        return super().find_class(module, name)

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or inspect.isroutine(target):  # whose attributes would change for everybody
            raise pickle.UnpicklingError(f"it changes `{target.__qualname__}`")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch[pickle.BUILD[0]] = load_build


class _TensorPlanner(DefaultLoadPlanner):
    """Reads tensors only: its parent unpickles other values whatever they are."""

    def load_bytes(self, read_item: Any, value: Any) -> NoReturn:
        raise ValueError(f"`{read_item.dest_index.fqn}` is no tensor. Resume from another checkpoint that you trust.")


class _Reader(FileSystemReader):
    """Reads the table of tensors without executing anything, and checks that the files hold what it says."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / _METADATA
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            _check_tensors(metadata)
            pieces = [
                (info.relative_path, info.offset, info.offset + info.length) for info in metadata.storage_data.values()
            ]
        except Exception as error:  # a damaged pickle can raise anything
            raise ValueError(
                f"`{path}` is no table of optimizer state that can be read ({error or type(error).__name__}). Resume "
                f"from another checkpoint that you trust."
            ) from error
        for name, start, end in pieces:
            part = path.parent / name
            if name == ".." or Path(name).name != name:
                raise ValueError(f"`{path}` names the file `{name}` outside of its folder. Use another checkpoint.")
            size = part.stat().st_size if part.is_file() else 0
            if not 0 <= start < end <= size:
                raise ValueError(
                    f"`{part}` has {size} of {end} bytes of the optimizer's state. Resume from another checkpoint."
                )
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def _check_tensors(metadata: Any) -> None:
    """Raises `ValueError` for a table that describes anything but tensors, as they are in the files."""
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            raise ValueError(f"it says that `{name}` is no tensor")
    for index, info in metadata.storage_data.items():
        if info.transform_descriptors:
            raise ValueError(f"`{index.fqn}` would have to be decoded, which version 0.1 never asked for")


def load_earlier_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, folder: str | Path, world: World
) -> None:
    """
    Reads into every rank's optimizer what version 0.1 wrote under any layout, bit by bit. Called by all ranks.

    Args:
        optimizer (`torch.optim.Optimizer`): This rank's, new or used.
        model (`nn.Module`): The pruned model of this rank.
        folder (`str` or `Path`): The checkpoint.
        world ([`World`]): The ranks.

    Raises:
        `ValueError`:
            On all ranks, if the state can't be read, belongs to another model or can't be cut to this layout.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    folder = Path(folder)
    if any(slice_of(entry) is not None or is_offloaded(entry) for entry in entries_of(optimizer)):
        raise ValueError(
            f"`{folder}` was written by version 0.1, whose optimizer state can't be read with `zero_stage` above 0 or "
            "`offload_optimizer`. Resume without them, and from the next checkpoint on with any."
        )
    reader = _Reader(str(folder / TENSORS))
    states, settings = world.raise_together(lambda: _checked_empty_states(optimizer, model, folder, reader))
    tensors = {stored: _plain(value) for state in states.values() for stored, (_, value) in state[0].items()}
    load(tensors, storage_reader=reader, planner=_TensorPlanner(), no_dist=world.size == 1)
    filled = {}
    for parameter, (empty, values) in states.items():
        filled[parameter] = dict(values)
        for stored, (key, template) in empty.items():
            value = tensors[stored]
            if isinstance(value, DTensor) and value.placements != template.placements:
                value = value.redistribute(placements=template.placements)
            filled[parameter][key] = value
    apply_state(optimizer, filled, settings)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose shards are contiguous pieces, which is all that the writer knew."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = tuple(Shard(cast(Any, p).dim) if hasattr(p, "split_factor") else p for p in tensor.placements)
    return tensor if placements == tensor.placements else tensor.redistribute(placements=placements)


def _checked_empty_states(
    optimizer: Any, model: nn.Module, folder: Path, reader: _Reader
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Parameter -> (stored name -> (key, tensor to read into), plain values), and the settings of each group."""
    try:
        table = json.loads((folder / TABLE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"`{folder / TABLE}` can't be read ({error}). Resume from another checkpoint.") from error
    known = reader.read_metadata().state_dict_metadata
    states, settings = {}, []
    for index, (names, group) in enumerate(zip(named_groups(model, optimizer), optimizer.param_groups, strict=True)):
        found: list[dict[str, Any]] = []
        for name, parameter in zip(names, group["params"], strict=True):
            entry = table["parameters"].get(name)
            if entry is None or entry["shape"] != list(parameter.shape):
                raise another_optimizer(folder, name, parameter, None if entry is None else entry["shape"])
            found.append(entry["settings"])
            empty = _empty_tensors(name, parameter, entry, group)
            for stored in empty.keys() - known.keys():
                raise ValueError(f"`{folder / TENSORS}` lacks `{stored}`. Resume from another checkpoint.")
            states[parameter] = (empty, entry["values"])
        groups = table["groups"]
        without = groups[min(index, len(groups) - 1)] if groups else {}
        settings.append(same_settings(found, index, names, folder) if found else without)
    return states, settings


def _empty_tensors(
    name: str, parameter: torch.Tensor, entry: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, tuple[str, torch.Tensor]]:
    """Stored name -> (key, tensor to read into) of one parameter on this rank."""
    result = {}
    own = rank_local_suffix(parameter)
    for stored, kind in entry["tensors"].items():
        private = is_rank_local(stored.rpartition("/")[2])
        if private and f"{name}/{kind['key']}{own}" not in entry["tensors"]:
            raise cant_be_cut(kind["key"], name)
        if private and stored != f"{name}/{kind['key']}{own}":
            continue
        dtype = getattr(torch, kind["dtype"])
        if kind["shape"] == entry["shape"] and not private:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            device = "cpu" if on_host(kind["key"], group) else parameter.device
            value = torch.zeros(kind["shape"], dtype=dtype, device=device)
        result[stored] = (kind["key"], value)
    return result
