"""
Reads the tensors that the stock Trainer writes under accelerate's FSDP2 and DeepSpeed, by name, executing nothing.

Of FSDP2 that is the sharded state dict, whose table of tensors is a pickle; DeepSpeed's own files are pickles that its
universal form replaces, with one file for each tensor.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .._files import readable

FSDP_OPTIMIZER = "optimizer.bin"
"""Optimizer state of a full state dict, which is `optimizer.pt` with names in the place of numbers."""
_FSDP_WEIGHTS, _FSDP_STATE = "pytorch_model_fsdp_0", "optimizer_0"
_DEEPSPEED, _UNIVERSAL, _WEIGHT = "global_step", "zero", "fp32"
_TABLE = ".metadata"
_TABLE_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
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


class _FsdpFiles:
    """A sharded state dict of FSDP2, by the names of parameters; a weight that it does not have is `None`."""

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
        return TensorReader(self.folder / _FSDP_WEIGHTS)

    @functools.cached_property
    def _state(self) -> TensorReader:
        return TensorReader(self.folder / _FSDP_STATE)

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
    tensors: Any = reader.read_metadata().state_dict_metadata
    return tensors


class _TableUnpickler(pickle._Unpickler):  # the one in Python, whose steps can be refused
    """Knows what a table of tensors consists of; torch's own restricted unpickler does not read its protocol, 4."""

    stack: list[Any]
    dispatch: dict[int, Any] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # what Python 3.13 calls it
        if name not in _TABLE_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to `{module}.{name}`")
        return super().find_class(module, name)

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or inspect.isroutine(target):  # whose attributes would change for everybody
            raise pickle.UnpicklingError(f"it changes `{target.__qualname__}`")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch[pickle.BUILD[0]] = load_build


class TensorPlanner(DefaultLoadPlanner):
    """Reads tensors only: its parent unpickles other values whatever they are."""

    def load_bytes(self, read_item: Any, value: Any) -> NoReturn:
        raise ValueError(f"`{read_item.dest_index.fqn}` is no tensor. Resume from another checkpoint that you trust.")


class TensorReader(FileSystemReader):
    """Reads the table of tensors as if no other values were there, and checks that the files hold what it says."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._checked_metadata()
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def _checked_metadata(self) -> Metadata:
        path = Path(self.path) / _TABLE
        try:
            with path.open("rb") as file:
                metadata = _TableUnpickler(file).load()
            _drop_other_values(metadata)
            pieces = [
                (info.relative_path, info.offset, info.offset + info.length) for info in metadata.storage_data.values()
            ]
        except Exception as error:  # a damaged pickle can raise anything
            raise ValueError(
                f"`{path}` is no table of tensors that can be read ({error or type(error).__name__}). Resume "
                f"from another checkpoint that you trust."
            ) from error
        for name, start, end in pieces:
            part = path.parent / name
            if name == ".." or Path(name).name != name:
                raise ValueError(f"`{path}` names the file `{name}` outside of its folder. Use another checkpoint.")
            size = part.stat().st_size if part.is_file() else 0
            if not 0 <= start < end <= size:
                raise ValueError(f"`{part}` has {size} of {end} bytes of its tensors. Resume from another checkpoint.")
        return metadata


def _drop_other_values(metadata: Any) -> None:
    """Removes what is no tensor from a table, and how values were nested; raises `ValueError` for encoded tensors."""
    metadata.state_dict_metadata = {
        name: described
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    known = metadata.state_dict_metadata
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn in known}
    metadata.planner_data = None
    for index, info in metadata.storage_data.items():
        if info.transform_descriptors:
            raise ValueError(f"`{index.fqn}` would have to be decoded")


class _UniversalFiles:
    """The universal form of a DeepSpeed checkpoint, with one folder for each parameter."""

    def __init__(self, checkpoint: Path, folder: Path):
        self.checkpoint, self.folder = checkpoint, folder
        self.names: Collection[str] = {path.name for path in folder.iterdir() if (path / f"{_WEIGHT}.pt").is_file()}

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


ShardedFiles = _FsdpFiles | _UniversalFiles


def sharded_files(folder: Path) -> ShardedFiles | None:
    """The files of a checkpoint of FSDP2, or of DeepSpeed's universal form; `None` for a folder without any."""
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


def _read_tensor(path: Path, shape: torch.Size) -> torch.Tensor:
    """Reads a tensor of DeepSpeed's universal form, which may be flat and an entry of a dict."""
    with readable(path):
        value = torch.load(path, map_location="cpu", weights_only=True)
    tensor = (value["param"] if isinstance(value, dict) else value).detach()
    return tensor.view(shape) if tensor.dim() == 1 and tensor.numel() == math.prod(shape) else tensor
