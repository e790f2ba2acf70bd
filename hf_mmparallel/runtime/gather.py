"""Values of all ranks on the first one, with tensors sent one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only


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
    wire = device if dist.get_backend() == "nccl" else torch.device("cpu")
    if dist.get_rank() != 0:
        tensors: list[torch.Tensor] = []

        def stand_in(tensor: torch.Tensor) -> _Sent:
            tensors.append(tensor)
            return _Sent(tuple(tensor.shape), tensor.dtype)

        dist.gather_object(tree_map_only(torch.Tensor, stand_in, value), None, dst=0)
        for tensor in tensors:
            if tensor.numel():
                dist.send(tensor.detach().contiguous().to(wire), 0)
        return []
    outlines: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(None, outlines, dst=0)

    def receive(sent: _Sent, source: int) -> torch.Tensor:
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=wire)
        if tensor.numel():
            dist.recv(tensor, source)
        return tensor.cpu()

    received = [
        tree_map_only(_Sent, lambda sent, source=source: receive(sent, source), outline)
        for source, outline in enumerate(outlines)
    ]
    return [tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value), *received[1:]]
