"""
Activations of layers that are in host memory between their forward and their backward.

What autograd saves of a layer goes to the host while the next layer computes, and comes back while the layer behind it
has its backward. Weights stay on the device, and so do tensors that all layers read, such as rotary embeddings.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from .dtensors import local


@dataclass
class _Copy:
    """A storage that a layer saved: its bytes on the device, in host memory, and the end of the last copy."""

    device: torch.device
    on_device: torch.Tensor | None
    on_host: torch.Tensor
    copied: Any = None


class _LayerPass:
    """What one forward of a layer saved, by the address that each storage had then."""

    def __init__(self, before: _LayerPass | None):
        # that of the layer before it in the same pass through a stage, whose backward comes next
        self.before = (lambda: None) if before is None else weakref.ref(before)
        self.copies: dict[int, _Copy] = {}


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor that autograd saved, as a view of a copied storage."""

    layer_pass: _LayerPass
    address: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadedActivations:
    """Keeps what the layers of a stage save in host memory, pinned beside a GPU."""

    def __init__(self, layers: Mapping[int, nn.Module]):
        self.last = max(layers, default=None)
        # What else saves tensors of layers: `StreamedLayers` puts its own functions here.
        self.save_weight: Callable[[torch.Tensor], Any] = lambda tensor: tensor
        self.read_weight: Callable[[Any], torch.Tensor] = lambda saved: saved
        self._latest: _LayerPass | None = None  # in the forward of a stage
        self._stream: Any = None
        for index, layer in layers.items():
            layer.__dict__["offloaded_activations"] = self
            # of a recomputed layer the inputs of the recomputation are saved
            key = "_gradient_checkpointing_func" if getattr(layer, "gradient_checkpointing", False) else "forward"
            layer.__dict__[key] = functools.partial(self._run, index, layer, getattr(layer, key))

    def _run(self, index: int, layer: nn.Module, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Runs a layer whose saved tensors go to host memory."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        own, before = _LayerPass(self._latest), self._latest
        shared = (t for t in tree_leaves((args[1:], kwargs)) if isinstance(t, torch.Tensor) and not t.requires_grad)
        kept = {_address(tensor) for tensor in (*layer.parameters(), *layer.buffers(), *shared)}
        with saved_tensors_hooks(functools.partial(self._save, own, kept), self._read):
            result = function(*args, **kwargs)
        for done in (before, own if index == self.last else None):
            if done is not None:
                self._free(done)
        self._latest = None if index == self.last else own
        return result

    def _save(self, own: _LayerPass, kept: set[int], tensor: torch.Tensor) -> Any:
        saved = self.save_weight(tensor)
        is_plain = saved is tensor and type(tensor) is torch.Tensor and tensor.layout == torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg() or not tensor.untyped_storage().nbytes():
            return saved
        address = _address(tensor)
        if address in kept:
            return tensor
        if address not in own.copies:
            own.copies[address] = self._to_host(tensor)
        place = (tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return _SavedTensor(own, address, *place)

    def _read(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedTensor):
            return self.read_weight(saved)
        for needed in (saved.layer_pass, saved.layer_pass.before()):  # that of the layer before comes meanwhile
            if needed is not None:
                self._to_device(needed)
        copy = saved.layer_pass.copies[saved.address]
        assert copy.on_device is not None
        self._wait(copy)
        values = torch.empty(0, dtype=saved.dtype, device=copy.device)
        return values.set_(copy.on_device.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _to_host(self, tensor: torch.Tensor) -> _Copy:
        """Starts the copy of a tensor's storage to host memory; the device keeps its own until [`_free`]."""
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        on_host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=tensor.device.type != "cpu")
        copy = _Copy(tensor.device, source, on_host)
        self._start(copy, on_host, source)
        return copy

    def _to_device(self, layer_pass: _LayerPass) -> None:
        """Starts the copies of what a layer saved to the device, but for what is there."""
        for copy in layer_pass.copies.values():
            if copy.on_device is None:
                copy.on_device = torch.empty_like(copy.on_host, device=copy.device, pin_memory=False)
                self._start(copy, copy.on_device, copy.on_host)

    def _free(self, layer_pass: _LayerPass) -> None:
        """Frees what is in host memory from the device."""
        for copy in layer_pass.copies.values():
            self._wait(copy)
            copy.on_device = None

    def _start(self, copy: _Copy, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies after all that the device has been given to do, on a GPU beside what it gets next."""
        if copy.device.type == "cpu":
            target.copy_(source)
            return
        self._stream = self._stream or torch.Stream(copy.device)
        self._stream.wait_stream(torch.accelerator.current_stream(copy.device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        copy.copied = self._stream.record_event()

    def _wait(self, copy: _Copy) -> None:
        """Lets the device wait for a copy."""
        if copy.copied is not None:
            torch.accelerator.current_stream(copy.device).wait_event(copy.copied)


def _address(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
