"""The shards of this rank of parameters that tensor parallelism cuts, which are `DTensor`s."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the shard of a tensor on this rank, or all of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def give_own_memory(parameter: torch.nn.Parameter) -> None:
    """Copies the values of a parameter on this rank into contiguous memory that nothing else refers to."""
    give_values(parameter, local(parameter).clone(memory_format=torch.contiguous_format))


def give_values(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Lets a parameter have other memory on this rank."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = values  # whose `data` is that of the whole tensor, which has none
    else:
        parameter.data = values


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Returns a parameter's shape, also if DeepSpeed's ZeRO-3 shards it, so that it is empty on every rank."""
    return getattr(parameter, "ds_shape", parameter.shape)


def from_shard(shard: torch.Tensor, like: DTensor) -> DTensor:
    """Makes the tensor, of the shape and layout of `like`, of which this rank has `shard`; nothing is copied."""
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_as(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """Cuts a whole tensor, which is the same on all ranks of the mesh, in the layout of `like`."""
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def is_on_mesh(tensor: torch.Tensor, process: int) -> bool:
    """Returns whether a tensor is a `DTensor` over a mesh that a process of the default group is in."""
    return isinstance(tensor, DTensor) and process in tensor.device_mesh.mesh.flatten().tolist()
