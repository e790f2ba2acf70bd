"""Packs the tensors of an object into one, to send it from a data loader's worker to the main process."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64


def pack(value: Any) -> tuple[bytes, Tensor]:
    """Packs the tensors of a picklable object into one: the object without them, and their bytes as uint8."""
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(value)
    # One tensor, since each takes a message and an open file to send, and a batch can have hundreds of them.
    buffer = torch.empty(packer.num_bytes, dtype=torch.uint8)
    for offset, tensor in packer.found.values():
        _view(buffer, offset, tensor.dtype, tensor.shape).copy_(tensor)
    return stream.getvalue(), buffer


def unpack(packed: tuple[bytes, Tensor]) -> Any:
    """The object that was packed, whose tensors are views of the one that has their bytes."""
    content, buffer = packed
    return _Unpacker(io.BytesIO(content), buffer).load()


def _view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return buffer[offset : offset + size].view(dtype).view(shape)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, on the CPU, and without gradient, quantization or other metadata."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and tensor.device.type == "cpu" and not tensor.requires_grad


class _Packer(pickle.Pickler):
    """Replaces dense CPU tensors by indices, and collects them."""

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.found: dict[int, tuple[int, Tensor]] = {}
        self.num_bytes = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        if id(obj) not in self.found:
            self.found[id(obj)] = self.num_bytes, obj
            self.num_bytes += -(-obj.numel() * obj.element_size() // _ALIGNMENT) * _ALIGNMENT
        return self.found[id(obj)][0], obj.dtype, tuple(obj.shape)


class _Unpacker(pickle.Unpickler):
    """Replaces indices by tensors that are views of a buffer."""

    def __init__(self, stream: io.BytesIO, buffer: Tensor):
        super().__init__(stream)
        self.buffer = buffer

    def persistent_load(self, pid: Any) -> Tensor:
        return _view(self.buffer, *pid)
