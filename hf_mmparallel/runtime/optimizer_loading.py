"""
Reads optimizer state of any layout, or of the stock Trainer, into this rank's optimizer.

The file is mapped into memory, and a rank copies its parameters' part of it. Nothing in it is executed.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._files import check_complete, reason_of
from ..modeling.unowned import from_shard, shard_as
from ..world import World
from .optimizer_slices import (
    MODULE,
    STATE,
    cant_be_cut,
    named_groups,
    rank_local_suffix,
    settings_of,
    slice_of,
    whole_parameter,
)
from .sharded_files import FSDP_OPTIMIZER, ShardedFiles, sharded_files
from .updated_copies import MASTER, refresh_copies, restore_copy, source_of_copy

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
    """
    Reads a file of optimizer state, tensors when they are used; raises `ValueError` for a file that is not there, is
    cut short, or holds more than tensors and plain values.
    """
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
    """Returns the error for the state of a parameter that is missing or has another shape."""
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
