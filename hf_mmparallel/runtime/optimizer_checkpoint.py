"""
Optimizer state in the stock Trainer's file, which any layout and the stock Trainer itself can go on from.

`optimizer.pt` is what `torch.save(optimizer.state_dict())` writes on one process, with the names of the parameters
added. No rank ever holds all of it: the first rank writes a file of the right size without values, then each rank
writes the values of the parameters that it owns to their places. On reading, the file is mapped into memory, and a
rank copies what it holds. Nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.serialization import skip_data
from torch.utils import serialization

from ..plan import Holding
from ..world import World
from .optimizers import whole_parameter
from .sharded_model import ShardedModel

STATE = "optimizer.pt"
# Ranks on several hosts write to one file, so that no two of them may share a page of it.
_ALIGNMENT = 4096
# Where `state_dict` of bitsandbytes puts what FSDP must not see.
_WRAPPED = "__bnb_optimizer_quant_state__"
_PLAIN = (bool, int, float, str, type(None))


def named_groups(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """Names of the parameters of each group of an optimizer."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(whole_parameter(p))] for p in group["params"]] for group in optimizer.param_groups]


def is_rank_local(key: str) -> bool:
    """Whether an entry of the state is one that only a rank of the same place in a mesh of the same size can use."""
    return "@" in key


def rank_local_suffix(parameter: torch.Tensor) -> str:
    """What tells a rank's own entries from those of the other ranks that hold shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return ""
    return f"@{parameter.device_mesh.get_local_rank()}of{parameter.device_mesh.size()}"


def cant_be_cut(key: str, name: str) -> ValueError:
    """The error for state that only the tensor-parallel size which it was saved under can use."""
    return ValueError(
        f"The optimizer's `{key}` of `{name}` is a rank's own tensor and can't be cut anew. Resume with the same "
        f"tensor-parallel size."
    )


def _in_form_of(value: Any, parameter: torch.Tensor) -> Any:
    """State that an optimizer keeps for a local shard as the `DTensor` that it is a shard of."""
    whole = whole_parameter(parameter)
    if whole is parameter or not isinstance(whole, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value
    return DTensor.from_local(
        value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _check_plain(value: Any, what: str) -> Any:
    """Raises `ValueError` for what could not be read without executing code."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    parts = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
    if type(value) not in (*_PLAIN, list, tuple, dict) or (isinstance(value, dict) and not all(map(_is_key, value))):
        raise ValueError(f"The optimizer's `{what}={value!r}` can't be saved. Use a number, string or list.")
    for part in parts:
        _check_plain(part, what)
    return value


def _is_key(value: Any) -> bool:
    return type(value) in _PLAIN


class _Collected:
    """
    What this rank has to save.

    Args:
        optimizer (`torch.optim.Optimizer`): This rank's.
        model (`nn.Module`): The pruned model of this rank.
        table (`Mapping[str, Holding]`): Parameter -> where it lives.
        rank (`int`): This rank.
    """

    def __init__(self, optimizer: Any, model: nn.Module, table: Mapping[str, Holding], rank: int):
        self.rank = rank
        self.owners = {name: holding.owner for name, holding in table.items()}
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        for names, group in zip(named_groups(model, optimizer), optimizer.param_groups, strict=True):
            settings = {key: _check_plain(value, key) for key, value in _settings(group).items()}
            for name, parameter in zip(names, group["params"], strict=True):
                if rank in self._writers(name, whole_parameter(parameter)):
                    self._add(name, parameter, settings, optimizer.state.get(parameter, {}))

    def _writers(self, name: str, parameter: torch.Tensor) -> list[int]:
        """The owner and the ranks that hold shards of its copy."""
        owner = self.owners[name]
        mesh = parameter.device_mesh.mesh.flatten().tolist() if isinstance(parameter, DTensor) else []
        return mesh if owner in mesh else [owner]

    def _add(self, name: str, parameter: torch.Tensor, settings: dict[str, Any], state: Mapping[str, Any]) -> None:
        whole = whole_parameter(parameter)
        tensors, values = {}, {}
        for key, value in state.items():
            value = _in_form_of(value, parameter)
            if not isinstance(value, torch.Tensor):
                values[key] = _check_plain(value, key)
            elif isinstance(whole, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
                tensors[key + rank_local_suffix(whole)] = value.detach()
            else:
                tensors[key] = value.detach()
        self.tensors[name] = tensors
        kinds = {
            key: (tuple(tensor.shape), tensor.dtype)
            for key, tensor in tensors.items()
            if self.rank == self.owners[name] or is_rank_local(key)
        }
        self.entries[name] = {"settings": settings, "tensors": kinds, "values": values}

    def whole_tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank writes of a parameter; the ranks that hold its shards pass their tensors in one order."""
        for key, tensor in self.tensors[name].items():
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if is_rank_local(key) or self.rank == self.owners[name]:
                yield key, value.cpu().contiguous()


def save_optimizer(
    optimizer: torch.optim.Optimizer, sharded: ShardedModel, folder: str | Path, groups: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """
    Writes the state of every rank's optimizer to `optimizer.pt`. Called by all ranks.

    The stock Trainer can go on from it, unless parameters are grouped in another way than it would on the whole model,
    or ranks have state of their own (8-bit optimizers under tensor parallelism). It then ends with "different number
    of parameter groups", as there is an empty group more.

    Args:
        optimizer (`torch.optim.Optimizer`): This rank's, with any tensors and numbers as state.
        sharded ([`ShardedModel`]): The model, which gives parameters their names and owners.
        folder (`str` or `Path`): On a file system that all ranks share; made if needed.
        groups (`Sequence[Sequence[str]]`): The trained parameters of the whole model, in the stock Trainer's groups.

    Returns:
        `list[dict[str, Any]]`: On the first rank, the settings of the groups that were written; empty elsewhere.

    Raises:
        `ValueError`: On all ranks, for state or hyperparameters that are neither tensors nor plain values.
        `OSError`: On all ranks, if one of them can't write.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    path = Path(folder) / STATE
    world = sharded.world
    mine = world.raise_together(lambda: _Collected(optimizer, sharded.model, sharded.holdings, world.rank))
    every = world.gather(mine.entries)
    written = []

    def write_frame() -> None:
        if every is not None:
            merged = _merged(every)
            laid_out = _grouped(merged, groups)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_frame(path, merged, laid_out)
            written.extend(settings for settings, _ in laid_out)

    world.raise_together(write_frame)
    _write_values(path, mine, world)
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
    """(settings, names) of each group that is written."""
    result: list[tuple[dict[str, Any], list[str]]] = []
    settings = [{id(e): e for e in (merged[n]["settings"] for n in names if n in merged)} for names in groups]
    is_stock = {name for names in groups for name in names} == merged.keys() and all(
        other == next(iter(found.values())) for found in settings for other in found.values()
    )
    if is_stock:
        known = [next(iter(found.values())) for found in settings if found]
        for names, found in zip(groups, settings, strict=True):
            own = next(iter(found.values()), known[0] if known else {})
            result.append((own, list(names)))
    else:
        for name, entry in merged.items():
            for own, names in result:
                if own == entry["settings"]:
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


def _write_frame(path: Path, merged: Mapping[str, Any], groups: list[tuple[dict[str, Any], list[str]]]) -> None:
    """Writes the file with room for the tensors."""
    state, listed = {}, []
    with FakeTensorMode():
        for settings, names in groups:
            indices = range(len(state), len(state) + len(names))
            for index, name in zip(indices, names, strict=True):
                kinds = merged[name]["tensors"].items()
                tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in kinds}
                state[index] = {**tensors, **merged[name]["values"]}
            listed.append({**settings, "params": list(indices), "param_names": names})
        used = {index: entry for index, entry in state.items() if entry}
        with skip_data(materialize_fake_tensors=True), _aligned():
            torch.save({"state": used, "param_groups": listed}, path)


def _write_values(path: Path, mine: _Collected, world: World) -> None:
    """Writes this rank's tensors to their places."""
    error: OSError | None = None
    with contextlib.ExitStack() as opened:

        def open_frame() -> tuple[Any, Any]:
            with FakeTensorMode():  # no values are read, but it is known where they are
                frame = torch.load(path, weights_only=True, map_location="cpu")
            return opened.enter_context(path.open("r+b")), frame

        file, frame = world.raise_together(open_frame)
        for group in frame["param_groups"]:
            for index, name in zip(group["params"], group["param_names"], strict=True):
                # A rank that can't write goes on, for those that gather their shards with it.
                for key, tensor in mine.whole_tensors(name) if name in mine.tensors else ():
                    place = frame["state"][index][key].untyped_storage()._checkpoint_offset
                    try:
                        file.seek(place)
                        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                    except OSError as raised:
                        error = error or raised
        try:
            file.flush()
            os.fsync(file.fileno())
        except OSError as raised:
            error = error or raised

    def report() -> None:
        if error is not None:
            raise error

    world.raise_together(report)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    folder: str | Path,
    groups: Sequence[Sequence[str]],
    world: World,
) -> None:
    """
    Reads into every rank's optimizer what [`save_optimizer`] wrote under any layout, or the stock Trainer, bit by bit.
    Called by all ranks.

    Args:
        optimizer (`torch.optim.Optimizer`): This rank's, new or used.
        model (`nn.Module`): The pruned model of this rank.
        folder (`str` or `Path`): What was written.
        groups (`Sequence[Sequence[str]]`): The trained parameters of the whole model, in the stock Trainer's groups.
        world ([`World`]): The ranks.

    Raises:
        `ValueError`:
            On all ranks, if the state can't be read, belongs to another model or can't be cut to this layout.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)

    def read() -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        entries, settings = _entries(Path(folder) / STATE, groups)
        return _states(optimizer, model, entries, settings, Path(folder))

    apply_state(optimizer, *world.raise_together(read))


def apply_state(
    optimizer: Any, states: Mapping[Any, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Gives an optimizer the state of each of its parameters and the settings of each of its groups."""
    for parameter, state in states.items():
        if state:
            optimizer.state[parameter] = dict(state)
        else:
            optimizer.state.pop(parameter, None)
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def read_state(path: Path) -> dict[str, Any]:
    """
    What a file of optimizer state holds; tensors are read when they are used.

    Raises:
        `ValueError`: For a file that is not there, is cut short, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise ValueError(
            f"`{path.parent}` holds no optimizer state (`{path.name}`). Give a folder that a checkpoint wrote."
        )
    try:
        is_mapped = zipfile.is_zipfile(path)  # not what torch saved before 1.6
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
        if not isinstance(found["state"], dict) or not isinstance(found["param_groups"], list):
            raise TypeError("no optimizer's state dict")
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"`{path}` is no optimizer state that can be read ({reason}). Resume from another checkpoint, or remove "
            f"`scheduler.pt` beside it to go on with the weights alone."
        ) from error
    return found


def _entries(
    path: Path, groups: Sequence[Sequence[str]]
) -> tuple[dict[str, tuple[dict[str, Any], dict[str, Any]]], list[dict[str, Any]]]:
    """Parameter -> (settings of its group, its state), and the settings of all groups."""
    saved = read_state(path)
    listed = [g for g in saved["param_groups"] if g["params"] or "param_names" not in g]
    if all("param_names" in group for group in listed):
        names = [group["param_names"] for group in listed]
    else:
        names = groups
        sizes, expected = [len(group["params"]) for group in listed], [len(own) for own in groups]
        if sizes != expected:
            raise ValueError(
                f"`{path.parent}` is the optimizer state of another model: it has {_and(sizes)} parameters in its "
                f"groups, where this one has {_and(expected)} that are trained with weight decay and without. Freeze "
                f"the same parts, and use the stock Trainer's own groups."
            )
    result = {}
    for group, own in zip(listed, names, strict=True):
        for index, name in zip(group["params"], own, strict=True):
            state = dict(saved["state"].get(index, {}))
            state.update(state.pop(_WRAPPED, {}))
            result[name] = _settings(group), state
    return result, [_settings(group) for group in saved["param_groups"]]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _and(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _states(
    optimizer: Any,
    model: nn.Module,
    entries: Mapping[str, tuple[dict[str, Any], dict[str, Any]]],
    groups: Sequence[dict[str, Any]],
    folder: Path,
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Parameter -> its state on this rank, and the settings of each group."""
    states, settings = {}, []
    for index, (names, group) in enumerate(zip(named_groups(model, optimizer), optimizer.param_groups, strict=True)):
        found = []
        for name, parameter in zip(names, group["params"], strict=True):
            if name not in entries:
                raise another_optimizer(folder, name, whole_parameter(parameter), None)
            found.append(entries[name][0])
            states[parameter] = _state_of(name, parameter, entries[name][1], group, folder)
        without = groups[min(index, len(groups) - 1)] if groups else {}
        settings.append(same_settings(found, index, names, folder) if found else without)
    return states, settings


def another_optimizer(folder: Path, name: str, parameter: torch.Tensor, shape: Sequence[int] | None) -> ValueError:
    """The error for the state of a parameter that is missing or has another shape."""
    has = "nothing" if shape is None else f"shape {tuple(shape)}"
    return ValueError(
        f"`{folder}` is the optimizer state of another model: it has {has} for `{name}` of shape "
        f"{tuple(parameter.shape)}. Resume from a checkpoint of this model with the same frozen parts."
    )


def same_settings(found: list[dict[str, Any]], index: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """The settings that the parameters of a group were saved with; raises `ValueError` where they differ."""
    if any(other != found[0] for other in found):
        raise ValueError(
            f"`{folder}` was saved with other parameter groups: those of group {index} (`{names[0]}`, ...) had "
            f"different settings. Resume with the same `weight_decay` and learning rates by parameter."
        )
    return found[0]


def on_host(key: str, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer keeps an entry in host memory: torch's counters, unless a kernel reads them."""
    return key == "step" and not (group.get("fused") or group.get("capturable"))


def _may_be_state(shape: torch.Size, of: torch.Size) -> bool:
    """Whether a tensor can belong to a parameter of shape `of`: other dimensions, or some of them summed up."""
    return len(shape) != len(of) or all(mine in (1, its) for mine, its in zip(shape, of, strict=True))


def _state_of(
    name: str, parameter: Any, saved: Mapping[str, Any], group: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """The state of one parameter on this rank."""
    whole, suffix = whole_parameter(parameter), rank_local_suffix(whole_parameter(parameter))
    shapes = [value.shape for value in saved.values() if isinstance(value, torch.Tensor)]
    strange = [shape for shape in shapes if not _may_be_state(shape, whole.shape)]
    if strange and whole.shape not in shapes:
        raise another_optimizer(folder, name, whole, strange[0])
    state: dict[str, Any] = {}
    for stored, value in saved.items():
        key, _, place = stored.partition("@")
        if place and key + suffix not in saved:
            raise cant_be_cut(key, name)
        if place and stored != key + suffix:
            continue
        if isinstance(value, torch.Tensor):
            is_cut = suffix and value.numel() > 1 and not place
            if is_cut and value.shape != whole.shape:
                raise cant_be_cut(key, name)
            value = _on_rank(value, parameter, is_cut=bool(is_cut), on_host=on_host(key, group))
        state[key] = value
    return state


def _on_rank(value: torch.Tensor, parameter: Any, is_cut: bool, on_host: bool) -> torch.Tensor:
    """A copy of a tensor of the file, or of this rank's shard of it."""
    if not is_cut:
        return value.to("cpu" if on_host else parameter.device, copy=True)
    whole: Any = whole_parameter(parameter)
    cut = distribute_tensor(value.to(whole.device), whole.device_mesh, whole.placements, src_data_rank=None)
    shard = cut.to_local().clone(memory_format=torch.contiguous_format)
    if whole is not parameter:
        return shard
    return DTensor.from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
