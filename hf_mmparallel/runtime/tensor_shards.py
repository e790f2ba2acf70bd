"""
Reads tensors that `torch.distributed.checkpoint` wrote, and nothing else.

Its table of tensors is a pickle. It is read by an unpickler that knows the few classes of such a table and refuses the
rest, and other values than tensors are never read: torch unpickles those without any restriction. So nothing of a
checkpoint is executed.
"""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

_METADATA = ".metadata"
_CLASSES = {
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


class TensorPlanner(DefaultLoadPlanner):
    """Reads tensors only: its parent unpickles other values whatever they are."""

    def load_bytes(self, read_item: Any, value: Any) -> NoReturn:
        raise ValueError(f"`{read_item.dest_index.fqn}` is no tensor. Resume from another checkpoint that you trust.")


class TensorReader(FileSystemReader):
    """Reads the table of tensors without executing anything, and checks that the files hold what it says."""

    def __init__(self, path: Path, tensors_only: bool = True):
        super().__init__(str(path))
        # other values make the table invalid; otherwise it is read as if they were not there
        self.tensors_only = tensors_only
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._checked_metadata()
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def _checked_metadata(self) -> Metadata:
        path = Path(self.path) / _METADATA
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not self.tensors_only:
                _drop_other_values(metadata)
            _check_tensors(metadata)
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
    """Removes what is no tensor from a table, and how values were nested, which only other values need."""
    metadata.state_dict_metadata = {
        name: described
        for name, described in metadata.state_dict_metadata.items()
        if not isinstance(described, BytesStorageMetadata)
    }
    known = metadata.state_dict_metadata
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn in known}
    metadata.planner_data = None


def _check_tensors(metadata: Any) -> None:
    """Refuses a table that describes anything but tensors, as they are in the files."""
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            raise ValueError(f"it says that `{name}` is no tensor")
    for index, info in metadata.storage_data.items():
        if info.transform_descriptors:
            raise ValueError(f"`{index.fqn}` would have to be decoded")
