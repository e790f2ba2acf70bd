"""
Reads optimizer state as version 0.1 wrote it, executing nothing in it (see `tensor_shards.py`).

`torch.distributed.checkpoint` wrote the tensors; one JSON file has all else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Shard

from ..world import World
from .optimizer_loading import another_optimizer, apply_state, on_host, same_settings
from .optimizer_names import cant_be_cut, is_rank_local, named_groups, rank_local_suffix
from .optimizer_slices import slice_of
from .tensor_shards import TensorPlanner, TensorReader
from .updated_copies import entries_of, is_offloaded

TENSORS, TABLE = "tensors", "state.json"


def load_earlier_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, folder: str | Path, world: World
) -> None:
    """
    Reads into every rank's optimizer what version 0.1 wrote under any layout, bit by bit. Collective; raises
    `ValueError` on all ranks if the state can't be read, belongs to another model or can't be cut to this layout.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    folder = Path(folder)
    if any(slice_of(entry) is not None or is_offloaded(entry) for entry in entries_of(optimizer)):
        raise ValueError(
            f"`{folder}` was written by version 0.1, whose optimizer state can't be read with `zero_stage` above 0 or "
            "`offload_optimizer`. Resume without them, and from the next checkpoint on with any."
        )
    reader = TensorReader(folder / TENSORS)
    states, settings = world.raise_together(lambda: _checked_empty_states(optimizer, model, folder, reader))
    tensors = {stored: _plain(value) for state in states.values() for stored, (_, value) in state[0].items()}
    load(tensors, storage_reader=reader, planner=TensorPlanner(), no_dist=world.size == 1)
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
    """Returns a tensor whose shards are contiguous pieces, which is all that the writer knew."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = tuple(Shard(cast(Any, p).dim) if hasattr(p, "split_factor") else p for p in tensor.placements)
    return tensor if placements == tensor.placements else tensor.redistribute(placements=placements)


def _checked_empty_states(
    optimizer: Any, model: nn.Module, folder: Path, reader: TensorReader
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
