"""
Frozen layers whose weights are in host memory and come to the device layer by layer.

A layer's forward and backward use a buffer on the device; a second one receives the weights of the layer that comes
next. What autograd saves of weights for the backward is their place in the buffer, so that none stay there for it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .._device import SideStream
from .compiled_layers import is_compiled
from .unowned import give_values, local

_ALIGNMENT = 64  # bytes; kernels read weights in vectors


@dataclass
class _Buffer:
    """A buffer on the device, the layer whose weights it has, and the event of their arrival."""

    values: torch.Tensor
    layer: int
    arrived: Any = None


@dataclass(frozen=True)
class _SavedWeight:
    """A view of a layer's weights that autograd saved; `spec` is the layout of a `DTensor`."""

    layer: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any


class StreamedLayers:
    """Keeps frozen weights of layers in host memory, pinned beside a GPU, and brings them to the device in time."""

    def __init__(self, layers: Mapping[int, nn.Module], device: torch.device):
        self.device = device
        self.order = list(layers)  # in which they run
        self.parameters = {
            index: [parameter for parameter in layer.parameters() if not parameter.requires_grad]
            for index, layer in layers.items()
        }
        self.peak_bytes = 0  # the most that have been on the device at a time
        self._stream = SideStream(device)
        self._buffers: list[_Buffer] = []
        self._in_use: int | None = None
        self._ends_with_backward = False
        self.hold()
        self._running: int | None = None  # the layer in whose forward the host is
        recomputed: dict[Callable, Callable] = {}  # layers of one structure share their graphs
        for index, layer in layers.items():
            layer.forward = self._streamed(index, layer, layer.forward)
            if (checkpoint := getattr(layer, "_gradient_checkpointing_func", None)) is not None:
                recomputed[checkpoint] = recomputed.get(checkpoint) or self._recomputed(checkpoint)
                layer.__dict__["_gradient_checkpointing_func"] = recomputed[checkpoint]
            if (offloaded := getattr(layer, "offloaded_activations", None)) is not None:
                offloaded.save_weight, offloaded.read_weight = self._pack, self._unpack

    @property
    def bytes_on_device(self) -> int:
        return sum(buffer.values.numel() for buffer in self._buffers)

    def hold(self) -> None:
        """Moves the weights to host memory, with the dtypes that they have now."""
        self._in_use = None  # all parameters get new places below
        self.release()
        self._host: dict[int, torch.Tensor] = {}
        for index, parameters in self.parameters.items():
            num_bytes = sum(map(aligned_bytes, parameters))
            host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream.pins)
            for parameter, view in zip(parameters, _views(host, parameters), strict=True):
                view.copy_(local(parameter).detach())
            self._host[index] = host
            self._point_to(index, host)

    def release(self) -> None:
        """Frees the buffers on the device."""
        for buffer in self._buffers:
            self._stream.wait(buffer.arrived)
        self._buffers.clear()
        if self._in_use is not None:
            self._point_to(self._in_use, self._host[self._in_use])
        self._in_use = None
        self._ends_with_backward = False

    def _point_to(self, index: int, values: torch.Tensor) -> None:
        """Makes the parameters of a layer views of a buffer."""
        for parameter, view in zip(self.parameters[index], _views(values, self.parameters[index]), strict=True):
            give_values(parameter, view)

    def _streamed(self, index: int, layer: nn.Module, forward: Callable) -> Callable:
        """Returns a forward of a layer with its weights on the device."""

        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self._running = self._running, index
            try:
                # The recomputation of a layer keeps what it saves until the layer's backward, which comes next; in a
                # graph it starts from saved weights.
                is_recomputed = getattr(layer, "gradient_checkpointing", False) and layer.training
                is_recomputed = is_recomputed and not is_compiled(layer)
                saves = torch.is_grad_enabled() and not is_recomputed
                hooks = saved_tensors_hooks(self._pack, self._unpack) if saves else contextlib.nullcontext()
                with self._on_device(index), hooks:
                    return forward(*args, **kwargs)
            finally:
                self._running = outer
                if index == self.order[-1] and not _in_backward():
                    self.release()

        return run

    def _recomputed(self, checkpoint: Callable) -> Callable:
        """Returns the function that checkpoints layers, for which their weights come to the device again."""

        def run(function: Callable, *args: Any, **kwargs: Any) -> Any:
            index = None if torch.compiler.is_compiling() else self._running
            if index is None:  # in a graph, or `function` is the forward of [`_streamed`]
                return checkpoint(function, *args, **kwargs)

            def with_weights(*args: Any, **kwargs: Any) -> Any:
                with self._on_device(index):
                    return function(*args, **kwargs)

            return checkpoint(with_weights, *args, **kwargs)

        return run

    @contextlib.contextmanager
    def _on_device(self, index: int) -> Iterator[None]:
        """A block in which the parameters of a layer are those on the device."""
        self._point_to(index, self._take(index))
        try:
            yield
        finally:
            if not _in_backward():  # recomputation saves the parameters themselves, for the backward that follows
                self._point_to(index, self._host[index])

    def _take(self, index: int) -> torch.Tensor:
        """Returns the weights of a layer on the device; starts to bring those of the layer that is used next."""
        if _in_backward() and not self._ends_with_backward:
            self._ends_with_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.release)  # type: ignore[attr-defined]
        buffer = self._bring(index)
        if self._in_use != index:
            self._stream.wait(buffer.arrived)
            if self._in_use is not None:
                self._point_to(self._in_use, self._host[self._in_use])
            self._in_use = index
            position = self.order.index(index) + (-1 if _in_backward() else 1)
            if 0 <= position < len(self.order):
                self._bring(self.order[position])
        return buffer.values

    def _bring(self, index: int) -> _Buffer:
        """Returns the buffer of a layer, whose copy it starts unless a buffer has the layer."""
        for buffer in self._buffers:
            if buffer.layer == index:
                return buffer
        host = self._host[index]
        free = [buffer for buffer in self._buffers if buffer.layer != self._in_use]
        if len(self._buffers) == 2 and free:
            self._buffers.remove(free[0])
            reused = free[0].values if free[0].values.numel() == host.numel() else None
        else:
            reused = None
        values = torch.empty_like(host, device=self.device, pin_memory=False) if reused is None else reused
        buffer = _Buffer(values, index)
        self._buffers.append(buffer)
        self.peak_bytes = max(self.peak_bytes, self.bytes_on_device)
        with self._stream.copying():
            buffer.values.copy_(host, non_blocking=True)
        buffer.arrived = self._stream.mark()
        return buffer

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Saves a tensor for the backward: of a view of a layer's weights, its place in them."""
        values = local(tensor.detach())
        storage = values.untyped_storage().data_ptr()
        for buffer in self._buffers:
            if values.layout == torch.strided and buffer.values.untyped_storage().data_ptr() == storage:
                spec = tensor._spec if isinstance(tensor, DTensor) else None
                return _SavedWeight(
                    buffer.layer, values.dtype, values.size(), values.stride(), int(values.storage_offset()), spec
                )
        return tensor

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedWeight):
            return saved
        values = self._take(saved.layer).view(saved.dtype)
        view = values.as_strided(saved.size, saved.stride, saved.offset)
        return view if saved.spec is None else DTensor(view, saved.spec, requires_grad=False)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def aligned_bytes(parameter: torch.Tensor) -> int:
    values = local(parameter)
    return -(-values.numel() * values.element_size() // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    views, start = [], 0
    for parameter in parameters:
        values = local(parameter)
        flat = buffer[start : start + values.numel() * values.element_size()]
        views.append(flat.view(values.dtype).view(values.shape))
        start += aligned_bytes(parameter)
    return views


# Activations that are in host memory between the forward and the backward of their layer. What autograd saves of a
# layer goes to the host while the next layer computes, and comes back while the layer behind it has its backward.
# Weights stay on the device, and so do tensors that all layers read, such as rotary embeddings.


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
        self._stream: SideStream | None = None
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
        self._stream = self._stream or SideStream(copy.device)
        with self._stream.copying():
            target.copy_(source, non_blocking=True)
        copy.copied = self._stream.mark()

    def _wait(self, copy: _Copy) -> None:
        if self._stream is not None:
            self._stream.wait(copy.copied)


def _address(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
