"""Sums of gradients over microbatches and replicas, their scale, and the norm over all modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..cost import GRADIENT_BUCKET_BYTES
from ..modeling.dtensors import from_shard, local
from ..plan import ParameterShards, SyncGroup
from ..plan.ownership import Cut
from ..world import World


def accumulate_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """
    Lets autograd add up the gradients of 16-bit parameters in float32, over all chunks of a step. Each backward still
    computes in the parameter's dtype. Wider parameters stay as they are.

    Args:
        parameters (`Iterable[nn.Parameter]`): The trained parameters of this rank.
    """
    for parameter in parameters:
        if parameter.dtype.itemsize < torch.float32.itemsize:
            _change_gradient_dtype(parameter, torch.float32)


def round_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Casts each gradient to its parameter's dtype, which is what optimizers expect; called right before the step."""
    for parameter in parameters:
        _change_gradient_dtype(parameter, parameter.dtype)


def _change_gradient_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Casts the gradient of a parameter, if there is one, and all that autograd adds to it from now on."""
    if parameter.grad_dtype != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if gradient is None else gradient.to(dtype)


@dataclass
class _StartedSum:
    """A sum in flight: its collectives, and how many ranks used each parameter."""

    works: list[Any]
    parameters: list[nn.Parameter]
    used: torch.Tensor


class GradientSync:
    """
    Sums the gradients of one step over the ranks that hold the same slice of a parameter.

    Gradients become views of buckets that are summed in place, so that only one bucket at a time exists twice. A
    parameter that none of the ranks used keeps `grad=None`, as on one process, so that the optimizer skips it.

    Args:
        groups (`Sequence[SyncGroup]`): All sums of the plan.
        parameters (`Mapping[str, nn.Parameter]`): The parameters of this rank.
        rank (`int`): This rank.
        process_groups (`Mapping[tuple[int, ...], ProcessGroup]`): By ranks.
        before_sum (`Callable[[Sequence[nn.Parameter]], None]`, *optional*):
            Called with the parameters of a group before their gradients are summed.
    """

    def __init__(
        self,
        groups: Sequence[SyncGroup],
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        before_sum: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None,
    ):
        self.sums = {
            index: (process_groups[group.ranks], [parameters[name] for name in group.parameters])
            for index, group in enumerate(groups)
            if rank in group.ranks
        }
        self.before_sum = before_sum
        self._started: list[_StartedSum] = []

    def start(self, index: int) -> None:
        """Starts the sum `index` of the plan; its ranks call this in the program's order."""
        group, parameters = self.sums[index]
        self.before_sum(parameters)
        device = local(parameters[0]).device
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
        works: list[Any] = [dist.all_reduce(used, group=group, async_op=True)]
        for bucket in _buckets(parameters):
            works.append(dist.all_reduce(_flatten_gradients(bucket), group=group, async_op=True))
        self._started.append(_StartedSum(works, parameters, used))

    def finish(self) -> None:
        """Waits for all started sums, after which the gradients hold them."""
        for started in self._started:
            for work in started.works:
                work.wait()
            for parameter, count in zip(started.parameters, started.used.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        self._started.clear()


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters whose gradients have one dtype and fit into a bucket; a larger one has its own."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(_gradient_dtype(parameter), []).append(parameter)
    for dtype, members in by_dtype.items():
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in members:
            num_bytes = local(parameter).numel() * dtype.itemsize
            if bucket and size + num_bytes > GRADIENT_BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += num_bytes
        yield bucket


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype


@torch.no_grad()
def _flatten_gradients(bucket: Sequence[nn.Parameter]) -> torch.Tensor:
    """One tensor with the gradients of a bucket, zeros where there is none; they become views of it."""
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=_gradient_dtype(parameter))
    gradients: list[Any] = [parameter.grad for parameter in bucket]
    pieces = [local(gradient).reshape(-1) for gradient in gradients]
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    for parameter, gradient, view in zip(bucket, gradients, flat.split([p.numel() for p in pieces]), strict=True):
        view = view.view(local(gradient).shape)
        parameter.grad = from_shard(view, gradient) if isinstance(gradient, DTensor) else view
    return flat


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float | torch.Tensor) -> None:
    """Multiplies all gradients by `factor`."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # type: ignore[attr-defined]


def owned_cuts(shards: ParameterShards, rank: int) -> list[tuple[Cut, ...]]:
    """
    The slices of a parameter that a rank counts in the gradient norm, as cuts of the tensor that it holds.

    Args:
        shards (`ParameterShards`): Where the parameter lives.
        rank (`int`): The rank. What it holds is the parameter after the cuts that all of its shards begin with: one
            shard, or several if all holders have each of them, as where only the optimizer's state is sharded.
    """
    held = shards.on_rank(rank)
    num_made = 0
    for cuts in zip(*(shard.cuts for shard in held), strict=False):
        if len(set(cuts)) > 1:
            break
        num_made += 1
    return [shard.cuts[num_made:] for shard in held if shard.owner == rank]


def narrow(tensor: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """
    A slice of a tensor.

    Args:
        tensor (`torch.Tensor`): The tensor.
        cuts (`Sequence[Cut]`): Each cuts what the ones before leave; the last part may be smaller than the others.
    """
    for cut in cuts:
        dim = cut.dim
        if dim is None:
            tensor, dim = tensor.reshape(-1), 0
        blocks = tensor.unflatten(dim, (cut.num_blocks, tensor.shape[dim] // cut.num_blocks))
        size = -(-blocks.shape[dim + 1] // cut.num_slices)
        start = min(cut.index * size, blocks.shape[dim + 1])
        tensor = blocks.narrow(dim + 1, start, min(size, blocks.shape[dim + 1] - start)).flatten(dim, dim + 1)
    return tensor


def gradient_norm(counted: Sequence[tuple[nn.Parameter, tuple[Cut, ...]]], world: World) -> torch.Tensor:
    """
    The 2-norm of the gradient of the whole model.

    Args:
        counted (`Sequence[tuple[nn.Parameter, tuple[Cut, ...]]]`):
            The parameters (or shards) that this rank counts, each with the cuts of what it holds to what it counts;
            over all ranks each element is counted once.
        world ([`World`]): All ranks.

    Returns:
        `torch.Tensor`: A float32 scalar on the device, equal on all ranks.
    """
    gradients = [narrow(local(p.grad), cuts).float() for p, cuts in counted if p.grad is not None]
    square = get_total_norm(gradients).double().square() if gradients else torch.zeros(())
    square = square.to(device=world.device, dtype=torch.float64)
    return world.all_reduce(square).sqrt().float()


def clip_gradients(parameters: Sequence[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients so that `norm` becomes at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
