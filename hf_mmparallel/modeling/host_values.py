"""
Inputs whose values the host knows: what a model's forward reads of them does not wait for the device.

Forwards read token ids, masks and image sizes to find positions, lengths and numbers of placeholders. On a GPU each
such read makes the host wait until the device has computed all that is queued. The values came from the host, however:
here a forward computes with them on both sides, and reads those of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .._device import keep_values, known_values, to_device

_MOST_ELEMENTS = 2**18  # of a result that is computed on the host, too
_READS = {
    *("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__format__", "__repr__"),
    *("equal", "is_nonzero", "numpy", "cpu"),
}
# What would read values on the device, for the size of a result or a number that fills it.
_SIZED_BY_VALUES = {
    *("bincount", "masked_select", "new_full", "nonzero", "one_hot", "repeat_interleave"),
    *("unique", "unique_consecutive"),
}
_FACTORIES = {"arange", "eye", "full", "ones", "tensor", "zeros"}
# Rounded alike on every device; other results with a floating point are not kept.
_EXACT = {"float", "double", "to", "mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__"}
_INDEXED = {"__getitem__", "__setitem__"}
_WITHOUT_VALUES = ("rand", "empty", "bernoulli", "multinomial", "dropout")  # in names: no input determines the result


def send_known(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies a batch to the device, and keeps the values of whole numbers and masks for [`KnownOnHost`]."""
    sent = to_device(dict(inputs), device)
    if device.type != "cpu":
        for name, value in inputs.items():
            # a forward that changes its input changes both sides, and not the batch
            keep_values(sent[name], value.clone() if isinstance(value, Tensor) else value)
    return sent


class KnownOnHost(TorchFunctionMode):
    """A block in which values that the host knows are read there, see [`send_known`]."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # nearly half of all calls: shapes, dtypes, devices
            return func(*args, **kwargs)
        has_tensors, is_known = False, True
        for tensor in _tensors((*args, *kwargs.values())):
            has_tensors, is_known = True, known_values(tensor) is not None
            if not is_known:
                break
        if not has_tensors:
            is_known = name in _FACTORIES and self._is_made(kwargs)
        if not is_known and name in _INDEXED and args[0].device.type == self.device.type:
            return func(args[0], self._sent(args[1]), *args[2:])
        if not is_known and name == "masked_scatter" and not kwargs and _selects_rows(args[0], args[1], args[2]):
            return self._scatter_rows(*args)
        if not is_known or any(part in name for part in _WITHOUT_VALUES):
            return func(*args, **kwargs)
        if name in _READS or (name == "to" and any(map(_is_cpu, (*args, *kwargs.values())))):
            return self._run_on_host(func, args, kwargs)
        if name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        if name in _FACTORIES and not self._is_made(kwargs):  # a tensor of the CPU
            return self._run_on_host(func, args, kwargs)
        if name in _FACTORIES and (has_tensors or name == "tensor"):
            return self._send(func, args, kwargs)
        if name in _SIZED_BY_VALUES or (name == "__getitem__" and _has_mask(args[1])):
            return self._send(func, args, kwargs)
        # both sides read their arguments before either changes them
        on_host = self._arguments(args, kwargs)
        if name == "__setitem__":
            func(args[0], self._sent(args[1]), args[2])
            func(*on_host[0])
            keep_values(args[0], on_host[0][0])
            return None
        result = func(*args, **kwargs)
        if _num_elements(result) <= _MOST_ELEMENTS:
            keep_values(result, func(*on_host[0], **on_host[1]), exact=name in _EXACT)
        return result

    def _arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns the host's side of arguments: known values, and the CPU in place of the device."""

        def on_host(value: Any) -> Any:
            if isinstance(value, Tensor):
                return known_values(value)
            is_device = isinstance(value, (str, torch.device)) and str(value).split(":")[0] == self.device.type
            return torch.device("cpu") if is_device else value

        return tree_map(on_host, args), tree_map(on_host, kwargs)

    def _send(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Sends what an operation returns on the host."""
        on_host = self._run_on_host(func, args, kwargs)
        result = to_device(on_host, self.device)
        keep_values(result, on_host)
        return result

    def _scatter_rows(self, target: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        """`masked_scatter` of whole rows by their positions: its own backward asks the device how many there are."""
        on_host = known_values(mask)
        assert on_host is not None
        positions = on_host.expand(*target.shape[:-1], 1)[..., 0].nonzero(as_tuple=True)
        num_rows, width = len(positions[0]), target.shape[-1]
        rows = source.reshape(-1)[: num_rows * width].view(num_rows, width)
        return target.index_put(to_device(positions, self.device), rows)

    def _is_made(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation makes a tensor on the device."""
        return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == self.device.type

    def _run_on_host(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._arguments(args, kwargs)
        return func(*args, **kwargs)

    def _sent(self, index: Any) -> Any:
        """An index on the device, of positions for a mask that the host knows, which need not be counted there."""
        parts: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            on_host = part if not isinstance(part, Tensor) or part.device.type == "cpu" else known_values(part)
            if isinstance(on_host, Tensor) and on_host.dtype == torch.bool:
                parts += to_device(on_host.nonzero(as_tuple=True), self.device)
            elif isinstance(part, Tensor):
                parts.append(to_device(part, self.device))
            else:
                parts.append(part)
        return tuple(parts) if isinstance(index, tuple) or len(parts) != 1 else parts[0]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _is_cpu(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value) == "cpu"


def _selects_rows(target: Tensor, mask: Tensor, source: Tensor) -> bool:
    """Whether the host knows a mask that selects whole rows of a tensor of the device, for which there are values."""
    on_host = known_values(mask)
    if on_host is None or target.device.type == "cpu" or on_host.dim() != target.dim() or on_host.shape[-1] != 1:
        return False
    num_rows = int(on_host.expand(*target.shape[:-1], 1).sum())
    return target.dtype == source.dtype and num_rows * target.shape[-1] <= source.numel()


def _has_mask(index: Any) -> bool:
    return any(part.dtype == torch.bool for part in _tensors((index,)))


def _num_elements(result: Any) -> int:
    return max((value.numel() for value in tree_leaves(result) if isinstance(value, Tensor)), default=0)
