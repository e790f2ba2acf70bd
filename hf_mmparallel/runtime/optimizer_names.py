"""Names of optimizers, and the keys of saved state: names of parameters, settings of groups, tensors of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .optimizer_slices import slice_of, whole_parameter

STATE = "optimizer.pt"


def named_groups(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """Names the parameters of each group of an optimizer."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(whole_parameter(p))] for p in group["params"]] for group in optimizer.param_groups]


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class with its package, such as `apollo_torch.AdamW`."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_rank_local(key: str) -> bool:
    """Returns whether a key of the state is only for the same rank of a tp group or shard group of the same size."""
    return "@" in key


def rank_local_suffix(parameter: torch.Tensor) -> str:
    """Returns the suffix of the keys of one rank's state of an entry; empty for a whole parameter."""
    whole, flat_slice, suffix = whole_parameter(parameter), slice_of(parameter), ""
    if isinstance(whole, DTensor):
        suffix += f"@{whole.device_mesh.get_local_rank()}of{whole.device_mesh.size()}"
    if flat_slice is not None:
        suffix += f"@zero{flat_slice.index}of{flat_slice.num_slices}"
    return suffix


def cant_be_cut(key: str, name: str) -> ValueError:
    """Returns the error for state that can only be read with the sharding that it was saved with."""
    return ValueError(
        f"The optimizer's `{key}` of `{name}` is a rank's own tensor and can't be cut anew. Resume with the same "
        f"`tp_size`, `zero_stage` and `shard_size`."
    )
