"""
A model that no rank holds whole: saving it, loading it, and gathering it on one rank.

Every rank writes what it owns into files of its own: a checkpoint is a plain folder that `from_pretrained` reads and
any other layout can load. Keys are those of the original checkpoint format, as `save_pretrained` writes them.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._files import readable
from ..modeling.adapter import (
    ADAPTER_WEIGHTS,
    Adapter,
    adapter_file_key,
    adapter_folder,
    adapter_names,
    names_to_save,
    persistent_buffers,
    resized_embeddings,
    write_adapters,
)
from ..modeling.loading import (
    WEIGHTS,
    WEIGHTS_INDEX,
    CheckpointReader,
    another_model,
    blank_peft_model,
    check_gatherable,
    whole_model,
)
from ..modeling.tensor_parallel import base_name
from ..modeling.unowned import from_shard, is_on_mesh, local, shard_as
from ..plan import ModelSpec, ParallelPlan, ParameterShards, parameter_shards
from ..world import World, track_activity
from .optimizer_slices import OptimizerSlices, Regions, local_regions
from .sharded_files import ShardedFiles, sharded_files
from .writes import Writes, sync_file


@dataclass
class ShardedModel:
    """A model of which each rank holds its part. Its methods are called by all ranks, but for the properties."""

    model: Any  # pruned, with the names of the whole one
    spec: ModelSpec
    plan: ParallelPlan
    world: World
    adapter: Adapter | None = None  # saved and loaded in place of the model
    slices: OptimizerSlices | None = None  # of the parameters that are divided

    @functools.cached_property
    def shards(self) -> dict[str, ParameterShards]:
        return parameter_shards(self.spec, self.plan)

    @functools.cached_property
    def regions(self) -> Regions:
        """Where shards lie of which this rank has several."""
        return local_regions(self.spec.parameters, self.shards, self.world.rank)

    def holds(self, name: str) -> bool:
        """Returns whether this rank has a parameter, or a shard of it."""
        return bool(self.shards[name].on_rank(self.world.rank))

    def group_of_owner(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that hold a parameter together with its owner: a tp group, or those that share experts."""
        shards = self.shards[name]
        module, _, stage = shards.stages[0]
        if shards.axis == "ep":
            groups = (tuple(itertools.chain(*group)) for group in self.plan.modules[module].expert_groups(stage))
        else:
            groups = (tp_group for key in shards.stages for tp_group in self.plan.stage(*key).mesh)
        return next(group for group in groups if shards.owner in group)

    def write_adapter_card(self, folder: str | Path) -> None:
        """Writes or updates `peft`'s model card of an adapter, by which the Hub links it to its base."""
        if self.adapter is not None:
            self.peft_model.create_or_update_model_card(str(folder))

    @functools.cached_property
    def peft_model(self) -> Any:
        """The `PeftModel` of the adapter, without weights. Takes seconds with hundreds of adapted layers."""
        assert self.adapter is not None
        return blank_peft_model(self.model, self.spec, self.adapter)

    def save(self, writes: Writes) -> None:
        """Writes the adapters if there are any, otherwise the model."""
        if self.adapter is not None:
            self.save_adapters(writes, self.adapter)
        else:
            self.save_model(writes)

    def load(self, folder: str | Path) -> None:
        """Reads what [`ShardedModel.save`] wrote under any layout, in place."""
        if self.adapter is not None:
            self.load_adapters(folder, self.adapter)
        else:
            self.load_model(folder)

    # Saving

    def save_model(self, writes: Writes, max_file_bytes: int = 5 * 10**9) -> None:
        """
        Writes the model, without adapters, to a folder from which `from_pretrained` restores the same weights. Each
        rank writes the parameters and persistent buffers that it owns, helped only by its tensor-parallel group.
        """
        from transformers.core_model_loading import revert_weight_conversion

        model, world, folder = self.model, self.world, writes.folder
        if world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for old in (*folder.glob("model*.safetensors"), folder / WEIGHTS_INDEX):
                old.unlink(missing_ok=True)
        ignored = set(model._keys_to_ignore_on_save or ()) | adapter_names(self.spec.parameters)
        # a rank starts another file above this size, at the end of the layer
        files = self._files(ignored, max_file_bytes)
        counts = world.all_gather(len(files))
        tensors, sizes = self._owned(ignored, writes), {}
        for file, names in zip(file_names(counts, world.rank), files, strict=True):
            # what adapters wrap has its plain name
            state = {base_name(name): tensor for name, tensor in itertools.islice(tensors, len(names))}
            state = revert_weight_conversion(model, state)
            sizes[file] = {key: tensor.numel() * tensor.element_size() for key, tensor in state.items()}
            writes.add(write_weights, state, folder / file)
            del state
        collections.deque(tensors, maxlen=0)  # gives other ranks their shards
        every = {file: keys for of_rank in world.all_gather(sizes) for file, keys in of_rank.items()}
        if world.is_first:
            if len(every) > 1:
                write_index(folder, every, self.spec)
            write_config(model, folder)

    def _files(self, skip: Collection[str], max_bytes: int) -> list[list[str]]:
        """Names the tensors in each file of this rank, in the order of [`~ShardedModel._owned`]."""
        parameters, buffers = dict(self.model.named_parameters()), persistent_buffers(self.model)
        files: list[list[str]] = []
        size, last = 0, None
        for name, layer in self._saved(skip):
            if name in self.shards and self.shards[name].owner != self.world.rank:
                continue
            if not files or (size >= max_bytes and layer != last):
                files.append([])
                size = 0
            files[-1].append(name)
            tensor = parameters[name] if name in self.shards else buffers[name]
            size += tensor.numel() * tensor.element_size()
            last = layer
        return files

    def _saved(self, skip: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Yields (name, layer) of the parameters that this rank holds, and then of the buffers that it owns."""
        for module, part in self.spec.modules.items():
            for entry in part.parameters:
                if entry.name not in skip and self.holds(entry.name):
                    yield entry.name, (module, entry.layer)
        for name in persistent_buffers(self.model):
            if self._owner_of_buffer(name) == self.world.rank:
                yield name, None

    def _owned(self, skip: Collection[str], writes: Writes) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, whole tensor) of the parameters and buffers that this rank owns."""
        parameters, buffers = dict(self.model.named_parameters()), persistent_buffers(self.model)
        # the ranks of a tp group pass the parameters in one order, so each has to iterate to the end
        for name, _ in self._saved(skip):
            if name not in self.shards:
                yield name, writes.on_host(buffers[name])
                continue
            tensor = self._whole(parameters[name], self.shards[name].owner)
            if tensor is not None:
                yield name, writes.on_host(tensor)

    def _whole(self, tensor: torch.Tensor, owner: int) -> torch.Tensor | None:
        """Returns the whole tensor on its owner; others of its tp group, and those that divide it, take part."""
        if self.slices is not None:
            with track_activity("gathering the slices of a parameter", waits=True):
                tensor = self.slices.whole(tensor)
        tensor = tensor.detach()
        if isinstance(tensor, DTensor) and is_on_mesh(tensor, self.world.processes[owner]):
            with track_activity("gathering the shards of a parameter", waits=True):
                shard = local(tensor).to(self.world.device)  # NCCL refuses frozen weights that are in host memory
                tensor = from_shard(shard, tensor).full_tensor()
        return tensor if owner == self.world.rank else None

    def _owner_of_buffer(self, name: str) -> int:
        """Returns the rank that owns the parameters next to a buffer, the first rank when there are none."""
        return next((self._owners[parent] for parent in _parents(name) if parent in self._owners), 0)

    @functools.cached_property
    def _owners(self) -> dict[str, int]:
        """Submodule -> the owner of its first parameter."""
        result: dict[str, int] = {}
        for name, shards in self.shards.items():
            for parent in _parents(name):
                result.setdefault(parent, shards.owner)
        return result

    def save_adapters(self, writes: Writes, adapter: Adapter) -> None:
        """
        Writes the adapters, the other parameters that are trained, and embeddings of another size than those of the
        base, for `PeftModel.from_pretrained(base, folder)`. An adapter of another name than "default" has a folder
        below.
        """
        buffers = persistent_buffers(self.model)
        names = {*names_to_save(self.spec, buffers), *self._resized_embeddings}
        # only these tensors travel
        state = self.gather_tensors(names, {name: buffer for name, buffer in buffers.items() if name in names})
        if state is not None:
            state = {name: writes.on_host(tensor) for name, tensor in state.items()}
            writes.add(write_adapters, state, self.model, self.spec, adapter, adapter_folder(writes.folder, adapter))

    @functools.cached_property
    def _resized_embeddings(self) -> list[str]:
        return self.world.from_first_rank(lambda: resized_embeddings(self.model, self.spec))

    # Loading

    def load_model(self, folder: str | Path) -> None:
        """
        Reads weights in place, from a folder of [`~ShardedModel.save_model`] or `save_pretrained`, or of the stock
        Trainer under FSDP2 or DeepSpeed; adapters, and parameters as objects, stay as they are. Raises `ValueError` on
        all ranks, if the checkpoint belongs to another model or has to be converted.
        """
        self.world.raise_together(lambda: self._read(folder))

    def _read(self, folder: str | Path) -> None:
        """Reads the parameters of this rank, or shards of them, layer by layer."""
        has_safetensors = any((Path(folder) / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))
        sharded = None if has_safetensors else sharded_files(Path(folder))
        if sharded is not None:
            self._read_sharded(sharded, folder)
            return
        parameters, aliases = dict(self.model.named_parameters()), self._aliases()
        with CheckpointReader(self.model, folder) as reader:
            for _, layer in groupby(self._read_names(), key=self.spec.used_at.__getitem__):
                names = list(layer)
                with self._rewriting(parameters[name] for name in names):
                    for missing in sorted(read_in_place(reader, names)):
                        tied = [alias for alias in aliases[missing] if alias != missing]
                        if not tied or read_in_place(reader, tied[:1]):
                            raise ValueError(another_model(self.model, folder, [missing]))
            read_in_place(reader, list(persistent_buffers(self.model)))

    @torch.no_grad()
    def _read_sharded(self, files: ShardedFiles, folder: str | Path) -> None:
        """Reads the parameters and buffers of this rank one by one from the files of FSDP2 or DeepSpeed."""
        parameters, aliases = dict(self.model.named_parameters()), self._aliases()
        for name in self._read_names():
            parameter = parameters[name]
            found = (files.weight(alias, parameter.shape) for alias in aliases[name])
            value = next((value for value in found if value is not None), None)
            if value is None or value.shape != parameter.shape:
                raise ValueError(another_model(self.model, folder, [name]))
            with self._rewriting([parameter]):
                local(parameter).copy_(local(shard_as(value, parameter) if isinstance(parameter, DTensor) else value))
        for name, buffer in persistent_buffers(self.model).items():
            value = files.weight(name, buffer.shape)
            if value is not None:
                buffer.copy_(value)

    def _read_names(self) -> list[str]:
        """Lists the parameters that this rank reads from a checkpoint: those that it holds, without adapters."""
        adapters = adapter_names(self.shards)
        return [name for name in self.shards if self.holds(name) and name not in adapters]

    def _aliases(self) -> dict[str, list[str]]:
        """Maps the first name of each parameter to all of its names, of which a checkpoint may have any."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return {own[0]: own for own in names.values()}

    def _rewriting(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager:
        return nullcontext() if self.slices is None else self.slices.rewriting(parameters)

    def load_adapters(self, folder: str | Path, adapter: Adapter) -> None:
        """Reads what [`ShardedModel.save_adapters`] wrote under any layout, in place."""
        self.world.raise_together(lambda: self._read_adapters(adapter_folder(folder, adapter), adapter))

    @torch.no_grad()
    def _read_adapters(self, folder: Path, adapter: Adapter) -> None:
        from safetensors import safe_open

        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ValueError(f"`{folder}` holds no `{ADAPTER_WEIGHTS}`. Give a folder that adapters were saved to.")
        parameters = dict(self.model.named_parameters())
        with readable(folder / ADAPTER_WEIGHTS):
            opened = safe_open(str(folder / ADAPTER_WEIGHTS), framework="pt")
        with opened as reader:
            keys = set(reader.keys())
            needed = set(names_to_save(self.spec))
            for name in self.spec.parameters:
                key = adapter_file_key(name, adapter)
                if not self.holds(name) or (name not in needed and key not in keys):
                    continue
                parameter = parameters[name]
                found = tuple(reader.get_slice(key).get_shape()) if key in keys else None
                if found != tuple(parameter.shape):
                    what = "lacks" if found is None else f"has shape {found} for"
                    raise ValueError(
                        f"`{folder}` holds adapters of another model: it {what} `{key}`, of shape "
                        f"{tuple(parameter.shape)} here. Use the `peft_config` and frozen parts of the run that saved "
                        "it."
                    )
                value = reader.get_tensor(key)
                with self._rewriting([parameter]):
                    shard = shard_as(value, parameter) if isinstance(parameter, DTensor) else value
                    local(parameter).copy_(local(shard))
            for name, buffer in persistent_buffers(self.model).items():
                if (key := adapter_file_key(name, adapter)) in keys:
                    buffer.copy_(reader.get_tensor(key))

    # Gathering

    def gather_tensors(
        self, names: Collection[str] | None = None, buffers: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor] | None:
        """
        Returns tensors of the whole model, by first names, in the host memory of rank 0, `None` elsewhere; each is
        sent by its owner. By default these are all parameters and no buffers.
        """
        world = self.world
        owners = {name: shards.owner for name, shards in self.shards.items() if names is None or name in names}
        parameters = dict(self.model.named_parameters())
        owned = {name: parameters[name] for name, owner in owners.items() if owner == world.rank}
        owned |= {n: buffer for n, buffer in (buffers or {}).items() if self._owner_of_buffer(n) == world.rank}
        kinds = world.all_gather({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in owned.items()})
        owners |= {name: owner for owner, kind in enumerate(kinds) for name in kind if name not in owners}
        result: dict[str, torch.Tensor] = {}
        for name, owner in owners.items():
            tensor: Any = None
            if name in owned or (name in self.shards and self.holds(name)):
                tensor = self._whole(owned[name] if name in owned else parameters[name], owner)
                tensor = None if tensor is None else tensor.cpu()
            if world.rank == owner != 0:
                world.send(tensor, 0)
            elif world.rank == 0 != owner:
                tensor = world.receive(*kinds[owner][name], owner)
            if world.is_first:
                result[name] = tensor
        return result if world.is_first else None

    def gather_model(self) -> Any:
        """Returns the whole model, a `PeftModel` with adapters, in the host memory of rank 0, `None` elsewhere."""
        check_gatherable(self.model)
        state = self.gather_state_dict(all_buffers=True)
        return None if state is None else whole_model(self.model, self.spec, state, self.adapter)

    def gather_state_dict(self, all_buffers: bool = False) -> dict[str, torch.Tensor] | None:
        """Returns the whole model's state dict, with tied names, in the host memory of rank 0, `None` elsewhere."""
        # also such as rotary frequencies
        buffers = dict(self.model.named_buffers()) if all_buffers else persistent_buffers(self.model)
        result = self.gather_tensors(buffers=buffers)
        if result is None:
            return None
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            result.setdefault(name, result[first[id(parameter)]])
        return result


def _parents(name: str) -> list[str]:
    """Names the submodules that a parameter or buffer is in, the innermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def file_names(counts: Sequence[int], rank: int) -> list[str]:
    """Names the files of weights that a rank writes, of the number of files of each rank."""
    first, total = sum(counts[:rank]) + 1, sum(counts)
    if total == 1:
        return [WEIGHTS] * counts[rank]
    return [f"model-{first + index:05d}-of-{total:05d}.safetensors" for index in range(counts[rank])]


def write_weights(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes one file and waits until it is on the disk."""
    from safetensors.torch import save_file

    tensors = {key: tensor.contiguous() for key, tensor in state.items()}
    shared = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    if len(shared) < len(tensors):  # views of one tensor; safetensors refuses shared memory
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    sync_file(path)


def write_index(folder: Path, files: Mapping[str, Mapping[str, int]], spec: ModelSpec) -> None:
    """Writes which file has which key; `files` has, by file, the size in bytes of each tensor by its key."""
    index = {
        "metadata": {
            "total_parameters": spec.num_parameters,
            "total_size": sum(size for sizes in files.values() for size in sizes.values()),
        },
        "weight_map": {key: name for name, sizes in files.items() for key in sizes},
    }
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_config(model: Any, folder: Path) -> None:
    """Writes the configurations beside the weights, and the code of a model that is not part of transformers."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


@torch.no_grad()
def read_in_place(reader: CheckpointReader, names: Collection[str]) -> set[str]:
    """Copies tensors from files into those of the reader's model; returns the names that no file has."""
    model = reader.model
    live: dict[str, tuple[dict[str, Any], torch.Tensor]] = {}
    try:
        for name in names:
            parent, _, attribute = name.rpartition(".")
            module = model.get_submodule(parent)
            home = module._parameters if attribute in module._parameters else module._buffers
            live[name] = (home, home[attribute])
            empty = torch.empty_like(home[attribute], device="meta")
            home[attribute] = nn.Parameter(empty, requires_grad=False) if home is module._parameters else empty
        missing = reader.fill(names, "cpu")
        for name, (home, tensor) in live.items():
            if name not in missing:
                local(tensor).copy_(local(home[name.rpartition(".")[2]]))
    finally:
        for name, (home, tensor) in live.items():
            home[name.rpartition(".")[2]] = tensor
    return missing
