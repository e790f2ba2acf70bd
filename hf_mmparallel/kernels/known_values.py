"""Tensors of a device whose values the host knows, because it has sent them or has computed them, too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_VALUES = "_values_on_host"  # attribute of a tensor on the device: the tensor in host memory
_VERSION = "_version_on_host"  # of the tensor that is no view: the version of its memory that the host knows


def keep_values(on_device: Any, on_host: Any, exact: bool = False) -> None:
    """Keeps the values of whole numbers and masks, of others if they are `exact`, of one tensor or of several."""
    if isinstance(on_device, Tensor) and isinstance(on_host, Tensor):
        is_rounded = on_host.is_floating_point() or on_host.is_complex()
        if on_device.shape == on_host.shape and on_device.dtype == on_host.dtype and (exact or not is_rounded):
            setattr(on_device, _VALUES, on_host)
            setattr(_memory_of(on_device), _VERSION, on_device._version)
    elif isinstance(on_device, (tuple, list)) and isinstance(on_host, (tuple, list)):
        for pair in zip(on_device, on_host, strict=True):
            keep_values(*pair, exact)


def known_values(tensor: Tensor) -> Tensor | None:
    """Returns the values of a tensor that are known, and that nothing has changed on the device alone since."""
    on_host = getattr(tensor, _VALUES, None)
    return on_host if on_host is None or getattr(_memory_of(tensor), _VERSION, -1) == tensor._version else None


def _memory_of(tensor: Tensor) -> Tensor:
    """The tensor of which this is a view, which is changed with it."""
    return tensor if tensor._base is None else tensor._base
