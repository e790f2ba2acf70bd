"""Values of all ranks on the first one, with tensors sent one by one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from .collectives import gather_values, receive_tensor, send_tensor


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor that is sent by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def gather_to_first(value: Any, device: torch.device) -> list[Any]:
    """
    The values of all ranks on rank 0, an empty list elsewhere. Collective.

    Tensors come from their owners one after the other, so that a rank needs memory for one of them on its device;
    `torch.distributed.gather_object` takes memory for the largest value of all, once for every rank.

    Args:
        value (`Any`): Lists, tuples and dicts of tensors and of what can be pickled.
        device (`torch.device`): Where the ranks compute.

    Returns:
        `list`: By rank, with the tensors in host memory.
    """
    if not dist.is_initialized():
        return [value]
    main = dist.get_rank() == 0
    tensors: list[torch.Tensor] = []

    def stand_in(tensor: torch.Tensor) -> _Sent:
        tensors.append(tensor)
        return _Sent(tuple(tensor.shape), tensor.dtype)

    def receive(sent: _Sent, source: int) -> torch.Tensor:
        return receive_tensor(sent.shape, sent.dtype, source, device)

    outlines = gather_values(None if main else tree_map_only(torch.Tensor, stand_in, value))
    for tensor in tensors:
        send_tensor(tensor, 0, device)
    if outlines is None:
        return []
    received = [
        tree_map_only(_Sent, functools.partial(receive, source=source), outline)
        for source, outline in enumerate(outlines)
    ]
    return [tree_map_only(torch.Tensor, torch.Tensor.cpu, value), *received[1:]]
