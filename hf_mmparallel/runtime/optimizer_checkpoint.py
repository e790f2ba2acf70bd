"""
Optimizer state by parameter name, so that any layout can go on from it.

Tensors are written by `torch.distributed.checkpoint`, which cuts and joins shards on reading; everything else
(hyperparameters, counters that are plain numbers, which tensors there are) is one JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard

TENSORS, TABLE = "tensors", "state.json"


def all_gather_values(value: Any) -> list[Any]:
    """The value of every rank."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def raise_together(work: Callable[[], Any]) -> Any:
    """
    Does what may fail with a `ValueError` on some ranks only, and raises it on all, so that none waits for another.

    Args:
        work (`Callable`): Holds no collectives that a failing rank would leave out.
    """
    result, error = None, None
    try:
        result = work()
    except ValueError as raised:
        error = raised
    if error is not None and not dist.is_initialized():
        raise error
    for rank, message in enumerate(all_gather_values(None if error is None else str(error))):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}") from error
    return result


def _names(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """Names of the parameters of each group."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose shards are contiguous pieces, which is all that the writer knows."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = tuple(Shard(cast(Any, p).dim) if hasattr(p, "split_factor") else p for p in tensor.placements)
    return tensor if placements == tensor.placements else tensor.redistribute(placements=placements)


def _key(name: str, key: str, value: torch.Tensor, parameter: torch.Tensor) -> str:
    """The name under which a tensor is written; one that is a rank's own is told apart by its place in the mesh."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
        mesh = parameter.device_mesh
        return f"{name}/{key}@{mesh.get_local_rank()}of{mesh.size()}"
    return f"{name}/{key}"


def _jsonable(value: Any, what: str) -> Any:
    """Numbers, strings, `None` and lists of them as they are, a tensor of one element as its number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    try:
        json.dumps(value)
    except TypeError:
        raise ValueError(f"The optimizer's `{what}={value!r}` can't be saved. Use a number, string or list.") from None
    return value


def save_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, folder: str | Path) -> None:
    """
    Writes the state of every rank's optimizer to a folder. Called by all ranks.

    Args:
        optimizer (`torch.optim.Optimizer`): This rank's, with any tensors and numbers as state.
        model (`nn.Module`): The pruned model of this rank, which gives parameters their names.
        folder (`str` or `Path`): On a file system that all ranks share; made if needed.

    Raises:
        `ValueError`: On all ranks, for state or hyperparameters that are neither tensors nor plain values.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    folder = Path(folder)
    tensors, table = raise_together(lambda: _collect(optimizer, model))
    tables = all_gather_values(table)
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        merged: dict[str, Any] = {"groups": max((t["groups"] for t in tables), key=len), "parameters": {}}
        for of_rank in tables:
            for name, entry in of_rank["parameters"].items():
                known = merged["parameters"].setdefault(name, entry)
                known["tensors"] = {**entry["tensors"], **known["tensors"]}
        (folder / TABLE).write_text(json.dumps(merged, indent=1) + "\n")
    tensors = {key: _plain(tensor) for key, tensor in tensors.items()}
    save(tensors, checkpoint_id=str(folder / TENSORS), no_dist=not dist.is_initialized())


def _collect(optimizer: Any, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by key, and the table of everything else."""
    tensors: dict[str, torch.Tensor] = {}
    table: dict[str, Any] = {"groups": [], "parameters": {}}
    for names, group in zip(_names(model, optimizer), optimizer.param_groups, strict=True):
        settings = {key: _jsonable(value, key) for key, value in group.items() if key != "params"}
        table["groups"].append(settings)
        for name, parameter in zip(names, group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            entry: dict[str, Any] = {"shape": list(parameter.shape), "settings": settings, "tensors": {}, "values": {}}
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    stored = _key(name, key, value, parameter)
                    tensors[stored] = value.detach()
                    dtype = str(value.dtype).removeprefix("torch.")
                    entry["tensors"][stored] = {"key": key, "shape": list(value.shape), "dtype": dtype}
                else:
                    entry["values"][key] = _jsonable(value, key)
            table["parameters"][name] = entry
    return tensors, table


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, folder: str | Path) -> None:
    """
    Reads into every rank's optimizer what [`save_optimizer`] wrote under any layout, bit by bit. Called by all ranks.

    Args:
        optimizer (`torch.optim.Optimizer`): This rank's, new or used.
        model (`nn.Module`): The pruned model of this rank.
        folder (`str` or `Path`): What was written.

    Raises:
        `ValueError`: On all ranks, if the state belongs to another model or can't be cut to this layout.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    folder = Path(folder)
    states, settings = raise_together(lambda: _empty_states(optimizer, model, folder))
    tensors = {stored: _plain(value) for state in states.values() for stored, (_, value) in state[0].items()}
    load(tensors, checkpoint_id=str(folder / TENSORS), no_dist=not dist.is_initialized())
    for parameter, (empty, values) in states.items():
        state = dict(values)
        for stored, (key, template) in empty.items():
            value = tensors[stored]
            if isinstance(value, DTensor) and value.placements != template.placements:
                value = value.redistribute(placements=template.placements)
            state[key] = value
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


def _empty_states(optimizer: Any, model: nn.Module, folder: Path) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Parameter -> (stored name -> (key, tensor to read into), plain values), and the settings of each group."""
    if not (folder / TABLE).is_file():
        raise ValueError(f"`{folder}` holds no optimizer state (`{TABLE}`). Give a folder that a checkpoint wrote.")
    table = json.loads((folder / TABLE).read_text())
    states, settings = {}, []
    for index, (names, group) in enumerate(zip(_names(model, optimizer), optimizer.param_groups, strict=True)):
        found: list[dict[str, Any]] = []
        for name, parameter in zip(names, group["params"], strict=True):
            entry = table["parameters"].get(name)
            if entry is None or entry["shape"] != list(parameter.shape):
                shape = "nothing" if entry is None else f"shape {tuple(entry['shape'])}"
                raise ValueError(
                    f"`{folder}` is the optimizer state of another model: it has {shape} for `{name}` of shape "
                    f"{tuple(parameter.shape)}. Resume from a checkpoint of this model with the same frozen parts."
                )
            found.append(entry["settings"])
            states[parameter] = (_empty_tensors(name, parameter, entry, group), entry["values"])
        if any(other != found[0] for other in found):
            raise ValueError(
                f"`{folder}` was saved with other parameter groups: those of group {index} (`{names[0]}`, ...) had "
                f"different settings. Resume with the same `weight_decay` and learning rates by parameter."
            )
        groups = table["groups"]
        settings.append(found[0] if found else groups[min(index, len(groups) - 1)] if groups else {})
    return states, settings


def _empty_tensors(
    name: str, parameter: torch.Tensor, entry: dict[str, Any], group: dict[str, Any]
) -> dict[str, tuple[str, torch.Tensor]]:
    """Stored name -> (key, tensor to read into) of one parameter on this rank."""
    result = {}
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    own = f"@{mesh.get_local_rank()}of{mesh.size()}" if mesh is not None else ""
    for stored, kind in entry["tensors"].items():
        private = "@" in stored.rpartition("/")[2]
        if private and f"{name}/{kind['key']}{own}" not in entry["tensors"]:
            raise ValueError(
                f"The optimizer's `{kind['key']}` of `{name}` is a rank's own tensor and can't be cut anew. Resume "
                f"with the same tensor-parallel size."
            )
        if private and stored != f"{name}/{kind['key']}{own}":
            continue
        dtype = getattr(torch, kind["dtype"])
        if kind["shape"] == entry["shape"] and not private:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            on_host = kind["key"] == "step" and not (group.get("fused") or group.get("capturable"))
            device = "cpu" if on_host else parameter.device
            value = torch.zeros(kind["shape"], dtype=dtype, device=device)
        result[stored] = (kind["key"], value)
    return result
