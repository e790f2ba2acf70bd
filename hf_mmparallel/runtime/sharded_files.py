"""
Reads the tensors that the stock Trainer writes under accelerate's FSDP2 and DeepSpeed, by name, executing nothing.

Of FSDP2 that is the sharded state dict; DeepSpeed's own files are pickles that its universal form replaces, with one
file for each tensor.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .._files import readable
from .tensor_shards import TensorPlanner, TensorReader

FSDP_OPTIMIZER = "optimizer.bin"
"""Optimizer state of a full state dict, which is `optimizer.pt` with names in the place of numbers."""
_FSDP_WEIGHTS, _FSDP_STATE = "pytorch_model_fsdp_0", "optimizer_0"
_DEEPSPEED, _UNIVERSAL, _WEIGHT = "global_step", "zero", "fp32"


class ShardedFiles(Protocol):
    """Weights and optimizer state of all parameters."""

    @property
    def names(self) -> Collection[str]:
        """The parameters with optimizer state."""
        ...

    def weight(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """A whole parameter or buffer; `None` if it is not there."""
        ...

    def state(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        """The optimizer state of a whole parameter."""
        ...


def sharded_files(folder: Path) -> ShardedFiles | None:
    """
    Returns the files of a checkpoint of FSDP2 or DeepSpeed; `None` for a folder without any. Raises `ValueError` for
    one of DeepSpeed without its universal form.
    """
    if (folder / _FSDP_WEIGHTS).is_dir() or (folder / _FSDP_STATE).is_dir():
        return _FsdpFiles(folder)
    steps = sorted(path for path in folder.glob(f"{_DEEPSPEED}*") if path.is_dir())
    universal = [path for path in steps if (path / _UNIVERSAL).is_dir()]
    if universal:
        return _UniversalFiles(folder, universal[-1] / _UNIVERSAL)
    if steps:
        raise ValueError(
            f"`{steps[-1]}` has the form of one DeepSpeed layout. Convert it first: `python -m "
            f"deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {steps[-1]} --output_folder "
            f"{steps[-1]}_universal`."
        )
    return None


class _FsdpFiles:
    """A sharded state dict of FSDP2."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def names(self) -> Collection[str]:
        return self._keys.keys()

    def weight(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        stored = f"model.{name}"
        return self._read(self._weights, [stored])[stored] if stored in _tensors(self._weights) else None

    def state(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        keys = self._keys[name]
        tensors = self._read(self._state, [f"optimizer.state.{name}.{key}" for key in keys])
        return dict(zip(keys, tensors.values(), strict=True))

    @functools.cached_property
    def _weights(self) -> TensorReader:
        return TensorReader(self.folder / _FSDP_WEIGHTS, tensors_only=False)

    @functools.cached_property
    def _state(self) -> TensorReader:
        return TensorReader(self.folder / _FSDP_STATE, tensors_only=False)

    @functools.cached_property
    def _keys(self) -> dict[str, list[str]]:
        """Parameter -> the keys of its state."""
        keys: dict[str, list[str]] = {}
        for stored in _tensors(self._state):
            name, _, key = stored.removeprefix("optimizer.state.").rpartition(".")
            keys.setdefault(name, []).append(key)
        return keys

    @staticmethod
    def _read(reader: TensorReader, names: list[str]) -> dict[str, torch.Tensor]:
        known = _tensors(reader)
        tensors = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names}
        load(tensors, storage_reader=reader, planner=TensorPlanner(), no_dist=True)
        return tensors


def _tensors(reader: TensorReader) -> dict[str, TensorStorageMetadata]:
    """Stored name -> description of a tensor."""
    known = reader.read_metadata().state_dict_metadata
    return {name: kind for name, kind in known.items() if isinstance(kind, TensorStorageMetadata)}


class _UniversalFiles:
    """The universal form of a DeepSpeed checkpoint, with one folder for each parameter."""

    def __init__(self, checkpoint: Path, folder: Path):
        self.checkpoint, self.folder = checkpoint, folder
        self._names = {path.name for path in folder.iterdir() if (path / f"{_WEIGHT}.pt").is_file()}

    @property
    def names(self) -> Collection[str]:
        return self._names

    def weight(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        path = self.folder / name / f"{_WEIGHT}.pt"
        return _read_tensor(path, shape) if path.is_file() else None

    def state(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        found = {path.stem: _read_tensor(path, shape) for path in sorted((self.folder / name).glob("*.pt"))}
        found.pop(_WEIGHT, None)
        # tensors of stage 3 are flat and have no count of steps
        if found and "step" not in found:
            trainer_state = self.checkpoint / "trainer_state.json"
            with readable(trainer_state):
                found["step"] = torch.tensor(float(json.loads(trainer_state.read_text())["global_step"]))
        return found


def _read_tensor(path: Path, shape: torch.Size) -> torch.Tensor:
    """Reads a tensor of DeepSpeed's universal form, which may be flat and an entry of a dict."""
    with readable(path):
        value = torch.load(path, map_location="cpu", weights_only=True)
    tensor = (value["param"] if isinstance(value, dict) else value).detach()
    return tensor.view(shape) if tensor.dim() == 1 and tensor.numel() == math.prod(shape) else tensor
