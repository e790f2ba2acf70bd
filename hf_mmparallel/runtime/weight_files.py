"""Files of weights that a rank writes or reads by itself, in the format of `save_pretrained`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..modeling.checkpoint_reader import WEIGHTS, WEIGHTS_INDEX, CheckpointReader
from ..modeling.dtensors import local
from ..plan import ModelSpec
from .atomic import sync_file


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
