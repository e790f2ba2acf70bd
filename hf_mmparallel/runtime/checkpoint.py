"""
Saving and loading a model that no rank holds whole.

Every rank writes what it owns into files of its own: a checkpoint is a plain folder that `from_pretrained` reads
and any other layout can load. Keys are those of the original checkpoint format, as `save_pretrained` writes them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..modeling.adapters import ADAPTER_WEIGHTS, adapter_file_key, parameters_to_save, write_adapters
from ..modeling.hollow import is_hollow
from ..modeling.loading import (
    WEIGHTS,
    WEIGHTS_INDEX,
    adapter_parameters,
    another_model,
    checkpoint_files,
    fill_parameters,
)
from ..modeling.tensor_parallel import base_name
from ..plan import Holding, ModelSpec, ParallelPlan, holdings
from .gather import gather_to_first
from .optimizer_checkpoint import all_gather_values, load_optimizer, raise_together, save_optimizer

__all__ = [
    "atomic_folder",
    "gather_state_dict",
    "load_adapters",
    "load_model",
    "load_optimizer",
    "save_adapters",
    "save_model",
    "save_optimizer",
]

_UNFINISHED = "_saving-"
_PREVIOUS = _UNFINISHED + "previous-"
_LOAD_CHUNK_BYTES = 1 << 30


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """
    A folder that appears at `path` only when everything in it is written.

    All ranks enter and leave together and write below the folder that they get. A crash in between leaves what was at
    `path` before, and a folder `_saving-*` beside it that the next save removes. The ranks share the file system.

    Args:
        path (`str` or `Path`): The final place; a folder there is replaced.
    """
    path = Path(path)
    temporary = path.with_name(_UNFINISHED + path.name)
    main = not dist.is_initialized() or dist.get_rank() == 0
    previous = path.with_name(f"{_PREVIOUS}{path.name}")
    if main:
        for replaced in path.parent.glob(_PREVIOUS + "*"):
            home = replaced.with_name(replaced.name.removeprefix(_PREVIOUS))
            if not home.exists():
                replaced.rename(home)  # a crash came between the two renames
        for leftover in path.parent.glob(_UNFINISHED + "*"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    _barrier()
    yield temporary
    _barrier()
    if main:
        for file in (*temporary.rglob("*"), temporary):
            _fsync(file)
        if path.exists():
            path.rename(previous)
            temporary.rename(path)
            shutil.rmtree(previous)
        else:
            temporary.rename(path)
        _fsync(path.parent)
    _barrier()


def _fsync(path: Path) -> None:
    """Waits until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _owner_of_buffer(name: str, table: Mapping[str, Holding]) -> int:
    """The rank that owns the parameters next to a buffer, the first rank when there are none."""
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        for parameter, holding in table.items():
            if parent and parameter.startswith(parent + "."):
                return holding.owner
    return 0


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a state dict has."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters}


def _whole(tensor: torch.Tensor, owner: int, rank: int) -> torch.Tensor | None:
    """The whole tensor in host memory on its owner; the ranks that hold shards of the owner's copy take part."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and owner in tensor.device_mesh.mesh.flatten().tolist():
        tensor = tensor.full_tensor()
    return tensor.cpu() if owner == rank else None


def _gathered(
    model: nn.Module, spec: ModelSpec, plan: ParallelPlan, rank: int, skip: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """
    Yields (name, whole tensor, layer) for everything that `rank` owns. Ranks of one tensor-parallel group pass the
    parameters in one order, so each has to iterate to the end.
    """
    table = holdings(spec, plan)
    parameters = dict(model.named_parameters())
    for module, part in spec.modules.items():
        for entry in part.parameters:
            holding = table[entry.name]
            if entry.name not in skip and holding.peers(rank) is not None:
                tensor = _whole(parameters[entry.name], holding.owner, rank)
                if tensor is not None:
                    yield entry.name, tensor, (module, entry.layer)
    for name, tensor in _persistent_buffers(model).items():
        if _owner_of_buffer(name, table) == rank:
            yield name, tensor.detach().cpu(), None


def save_model(
    model: Any,
    spec: ModelSpec,
    plan: ParallelPlan,
    rank: int,
    folder: str | Path,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """
    Writes the model to a folder from which `from_pretrained` restores the same weights. Called by all ranks.

    Each rank writes the parameters and persistent buffers that it owns, without the others' help but for its
    tensor-parallel group. Adapters are left out ([`save_adapters`] writes them); what they wrap has its plain name.

    Args:
        model (`PreTrainedModel`): The pruned model of this rank.
        spec (`ModelSpec`): The whole model.
        plan (`ParallelPlan`): The layout.
        rank (`int`): This rank.
        folder (`str` or `Path`): On a file system that all ranks share.
        max_shard_bytes (`int`, *optional*, defaults to 5 GB):
            Size above which a rank starts another file, at the end of the layer.
    """
    folder = Path(folder)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("model*.safetensors"), folder / WEIGHTS_INDEX):
            old.unlink(missing_ok=True)
    _barrier()
    ignored = set(model._keys_to_ignore_on_save or ()) | adapter_parameters(model)
    written: list[tuple[str, dict[str, int]]] = []
    pending: dict[str, torch.Tensor] = {}
    size, last = 0, None
    for name, tensor, layer in _gathered(model, spec, plan, rank, ignored):
        if size >= max_shard_bytes and layer != last:
            written.append(_write_part(model, pending, folder, rank, len(written)))
            pending, size = {}, 0
        pending[base_name(name)] = tensor
        size += tensor.numel() * tensor.element_size()
        last = layer
    if pending:
        written.append(_write_part(model, pending, folder, rank, len(written)))
    parts = [part for of_rank in all_gather_values(written) for part in of_rank]
    names = {
        part: WEIGHTS if len(parts) == 1 else f"model-{index:05d}-of-{len(parts):05d}.safetensors"
        for index, (part, _) in enumerate(parts, 1)
    }
    for part, _ in written:
        (folder / part).rename(folder / names[part])
    if rank == 0:
        if len(parts) > 1:
            _write_index(folder, [(names[part], sizes) for part, sizes in parts], spec)
        _write_config(model, folder)
    _barrier()


def _write_part(
    model: Any, state: dict[str, torch.Tensor], folder: Path, rank: int, index: int
) -> tuple[str, dict[str, int]]:
    """Writes one file; returns its name for now and the size in bytes of each tensor under its original key."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(model, state)
    tensors = {key: tensor.contiguous() for key, tensor in state.items()}
    shared = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    if len(shared) < len(tensors):  # pieces of one tensor; a file takes none that share memory
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    name = f"part-{rank:05d}-{index:05d}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return name, {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}


def _write_index(folder: Path, parts: list[tuple[str, dict[str, int]]], spec: ModelSpec) -> None:
    """Writes which file has which key."""
    index = {
        "metadata": {
            "total_parameters": spec.num_parameters,
            "total_size": sum(size for _, sizes in parts for size in sizes.values()),
        },
        "weight_map": {key: name for name, sizes in parts for key in sizes},
    }
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_config(model: Any, folder: Path) -> None:
    """Writes the configurations beside the weights, and the code of a model that is not part of transformers."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def load_model(model: Any, spec: ModelSpec, plan: ParallelPlan, rank: int, folder: str | Path) -> None:
    """
    Reads weights into the live model of each rank, in place, from a checkpoint of any layout. Called by all ranks.

    Only what this rank holds is read, a shard of it where the parameter is sharded. Adapters are left as they are.

    Args:
        model (`PreTrainedModel`): The pruned model of this rank; its parameters stay the same objects.
        spec (`ModelSpec`): The whole model.
        plan (`ParallelPlan`): The layout.
        rank (`int`): This rank.
        folder (`str` or `Path`): What [`save_model`] or `save_pretrained` wrote.

    Raises:
        `ValueError`: On all ranks, if the checkpoint belongs to another model.
    """
    raise_together(lambda: _load_held(model, spec, plan, rank, folder))


def _load_held(model: Any, spec: ModelSpec, plan: ParallelPlan, rank: int, folder: str | Path) -> None:
    """Reads what the rank holds, about a gigabyte at a time."""
    files = checkpoint_files(folder)
    table = holdings(spec, plan)
    adapters = adapter_parameters(model)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    names = [name for name, holding in table.items() if holding.peers(rank) is not None and name not in adapters]
    chunk: list[str] = []
    size = 0
    for index, name in enumerate(names):
        local = _local(parameters[name])
        chunk.append(name)
        size += local.numel() * local.element_size()
        if size >= _LOAD_CHUNK_BYTES or index == len(names) - 1:
            for missing in sorted(_read_in_place(model, files, chunk, folder)):
                tied = [alias for alias in aliases[id(parameters[missing])] if alias != missing]
                if not tied or _read_in_place(model, files, tied[:1], folder):
                    raise ValueError(another_model(model, folder, [missing]))
            chunk, size = [], 0
    _read_in_place(model, files, list(_persistent_buffers(model)), folder)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _read_in_place(model: Any, files: Collection[Path], names: Collection[str], folder: str | Path) -> set[str]:
    """Copies tensors from files into the live ones; returns the names that no file has."""
    live: dict[str, tuple[dict[str, Any], torch.Tensor]] = {}
    try:
        for name in names:
            parent, _, attribute = name.rpartition(".")
            module = model.get_submodule(parent)
            home = module._parameters if attribute in module._parameters else module._buffers
            live[name] = (home, home[attribute])
            empty = torch.empty_like(home[attribute], device="meta")
            home[attribute] = nn.Parameter(empty, requires_grad=False) if home is module._parameters else empty
        missing = fill_parameters(model, files, names, "cpu", str(folder))
        for name, (home, tensor) in live.items():
            if name not in missing:
                _local(tensor).copy_(_local(home[name.rpartition(".")[2]]))
    finally:
        for name, (home, tensor) in live.items():
            home[name.rpartition(".")[2]] = tensor
    return missing


def gather_state_dict(
    model: nn.Module, spec: ModelSpec, plan: ParallelPlan, rank: int
) -> dict[str, torch.Tensor] | None:
    """
    The state dict of the whole model in the memory of rank 0, sent tensor by tensor. Called by all ranks.

    Returns:
        `dict[str, torch.Tensor]` or `None`: In host memory, with tied names, on rank 0; `None` elsewhere.
    """
    table = holdings(spec, plan)
    held = dict(model.named_parameters())
    buffers = {n: b for n, b in _persistent_buffers(model).items() if _owner_of_buffer(n, table) == rank}
    owned = {n: held[n] for n, holding in table.items() if holding.owner == rank} | buffers
    kinds = all_gather_values({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in owned.items()})
    owners = {name: holding.owner for name, holding in table.items()}
    owners |= {name: owner for owner, names in enumerate(kinds) for name in names if name not in table}
    device = next((p.device for p in held.values() if not is_hollow(p)), torch.device("cpu"))
    result: dict[str, torch.Tensor] = {}
    for name, owner in owners.items():
        holding = table.get(name)
        tensor: Any = None
        if owner == rank or (holding is not None and holding.peers(rank) is not None):
            tensor = _whole(owned[name] if name in owned else held[name], owner, rank)
        if rank == owner != 0:
            dist.send(tensor.contiguous().to(device), 0)
        elif rank == 0 != owner:
            shape, dtype = kinds[owner][name]
            received = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(received, owner)
            tensor = received.cpu()
        if rank == 0:
            result[name] = tensor
    if rank != 0:
        return None
    first = {id(parameter): name for name, parameter in held.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        result.setdefault(name, result[first[id(parameter)]])
    return result


def save_adapters(
    model: nn.Module, spec: ModelSpec, plan: ParallelPlan, rank: int, folder: str | Path, config: Any
) -> None:
    """
    Writes the adapters, and the other parameters that are trained, for `PeftModel.from_pretrained(base, folder)`.
    Called by all ranks; only these tensors travel.

    Args:
        model (`nn.Module`): The pruned model of this rank.
        spec (`ModelSpec`): The whole model with its adapters.
        plan (`ParallelPlan`): The layout.
        rank (`int`): This rank.
        folder (`str` or `Path`): Where rank 0 writes.
        config (`LoraConfig`): What [`add_adapters`] returned.
    """
    adapters = _adapter_names(spec)
    wanted = set(parameters_to_save(spec, adapters))
    skip = {p.name for module in spec.modules.values() for p in module.parameters} - wanted
    mine = {name: tensor for name, tensor, _ in _gathered(model, spec, plan, rank, skip) if name in wanted}
    device = next((p.device for p in model.parameters() if not is_hollow(p)), torch.device("cpu"))
    parts = gather_to_first(mine, device)
    if rank == 0:
        state = {name: tensor for of_rank in parts for name, tensor in of_rank.items()}
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_adapters({name: state[name] for name in sorted(wanted)}, spec, adapters, config, Path(folder))
    _barrier()


def _adapter_names(spec: ModelSpec) -> set[str]:
    """The adapters' own parameters: those of a layer that keeps its weight in `base_layer`."""
    names = [p.name for module in spec.modules.values() for p in module.parameters]
    wrapped = {name.partition(".base_layer.")[0] + "." for name in names if ".base_layer." in name}
    owners = tuple(wrapped)
    return {name for name in names if name.startswith(owners) and ".base_layer." not in name}


def load_adapters(model: nn.Module, spec: ModelSpec, plan: ParallelPlan, rank: int, folder: str | Path) -> None:
    """
    Reads what [`save_adapters`] wrote under any layout into the live model, in place. Called by all ranks.

    Args:
        model (`nn.Module`): The pruned model of this rank.
        spec (`ModelSpec`): The whole model with its adapters.
        plan (`ParallelPlan`): The layout.
        rank (`int`): This rank.
        folder (`str` or `Path`): What was written.

    Raises:
        `ValueError`: On all ranks, if the folder holds the adapters of another model.
    """
    raise_together(lambda: _read_adapters(model, spec, plan, rank, Path(folder)))


@torch.no_grad()
def _read_adapters(model: nn.Module, spec: ModelSpec, plan: ParallelPlan, rank: int, folder: Path) -> None:
    from safetensors import safe_open

    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"`{folder}` holds no `{ADAPTER_WEIGHTS}`. Give a folder that adapters were saved to.")
    parameters, table = dict(model.named_parameters()), holdings(spec, plan)
    with safe_open(str(folder / ADAPTER_WEIGHTS), framework="pt") as reader:
        keys = set(reader.keys())
        for name in parameters_to_save(spec, _adapter_names(spec)):
            if table[name].peers(rank) is None:
                continue
            key, parameter = adapter_file_key(name), parameters[name]
            found = tuple(reader.get_slice(key).get_shape()) if key in keys else None
            if found != tuple(parameter.shape):
                what = "lacks" if found is None else f"has shape {found} for"
                raise ValueError(
                    f"`{folder}` holds adapters of another model: it {what} `{key}`, of shape "
                    f"{tuple(parameter.shape)} here. Use the `peft_config` and frozen parts of the run that saved it."
                )
            value = reader.get_tensor(key)
            if isinstance(parameter, DTensor):
                value = value.to(parameter.device)
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            _local(parameter).copy_(_local(value))
