"""Sums of gradients over replicas, their scale, and the norm over all modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..plan import SyncGroup


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class GradientSync:
    """
    Sums the gradients of one step over the ranks that hold the same parameter, one flat buffer for each group.

    Whether a parameter got a gradient at all travels in the same buffer: one that none of the ranks used keeps
    `grad=None`, as on one process, so that the optimizer skips it.

    Args:
        groups (`Sequence[SyncGroup]`): All sums of the plan.
        parameters (`Mapping[str, nn.Parameter]`): The parameters of this rank.
        rank (`int`): This rank.
        process_groups (`Mapping[tuple[int, ...], ProcessGroup]`): By ranks.
    """

    def __init__(
        self,
        groups: Sequence[SyncGroup],
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ):
        self.groups = {
            index: (process_groups[group.ranks], [parameters[name] for name in group.parameters])
            for index, group in enumerate(groups)
            if rank in group.ranks
        }
        self._started: list[tuple[Any, torch.Tensor, list[nn.Parameter]]] = []

    def start(self, index: int) -> None:
        """Starts the sum of group `index`; every rank of the group calls this in the program's order."""
        group, parameters = self.groups[index]
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            members = [p for p in parameters if p.dtype == dtype]
            pieces = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in members]
            used = torch.tensor([p.grad is not None for p in members], dtype=dtype, device=pieces[0].device)
            flat = torch.cat([piece.reshape(-1) for piece in pieces] + [used])
            work: Any = dist.all_reduce(flat, group=group, async_op=True)
            self._started.append((work, flat, members))

    def finish(self) -> None:
        """Waits for all started sums and writes them into the gradients."""
        for work, flat, members in self._started:
            work.wait()
            used = flat[-len(members) :].tolist()
            start = 0
            for parameter, count in zip(members, used, strict=True):
                stop = start + local(parameter).numel()
                if count:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    target = local(parameter.grad)
                    target.copy_(flat[start:stop].view_as(target))
                start = stop
        self._started.clear()


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiplies all gradients by `factor`."""
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def gradient_norm(counted: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """
    The 2-norm of the gradient of the whole model.

    Args:
        counted (`Sequence[nn.Parameter]`):
            The parameters (or shards) that this rank counts; over all ranks each element is counted once.
        device (`torch.device`): Device of the result.

    Returns:
        `torch.Tensor`: A float32 scalar, equal on all ranks.
    """
    gradients = [local(p.grad).float() for p in counted if p.grad is not None]
    square = get_total_norm(gradients).double().square() if gradients else torch.zeros(())
    square = square.to(device=device, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(square)
    return square.sqrt().float()


def clip_gradients(parameters: Sequence[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients so that `norm` becomes at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
