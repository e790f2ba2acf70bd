"""
Copies of weights that an optimizer updates in their place: in float32, in host memory, or both.

A copy is an entry of the optimizer. Gradients arrive at the weights; the step hands them to the copies and writes the
updated copies back into the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..modeling.unowned import local
from ..plan import StorageSettings
from .gradients import round_gradients
from .optimizer_slices import local_shard, slice_of, whole_parameter

MASTER = "master"
"""Key of the float32 weights in saved optimizer state."""
_HALF = (torch.bfloat16, torch.float16)


def entries_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yields what an optimizer updates, over all of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def source_of_copy(entry: torch.Tensor) -> Any:
    """Returns the parameter, shard or slice that an entry of an optimizer is a copy of. `None` for no copy."""
    return getattr(entry, "source_of_copy", None)


def is_offloaded(entry: torch.Tensor) -> bool:
    """Returns whether an entry of an optimizer is a copy in host memory whose step is on the CPU."""
    return getattr(entry, "is_offloaded", False)


def source_of(entry: torch.Tensor) -> Any:
    """Returns the parameter or slice in which gradient sums leave the gradient of an entry of an optimizer."""
    weights = entry if source_of_copy(entry) is None else source_of_copy(entry)
    return weights if slice_of(weights) is not None else whole_parameter(weights)


def needs_copy(entry: torch.Tensor, storage: StorageSettings) -> bool:
    """Returns whether the optimizer updates a copy of some weights rather than the weights."""
    return storage.offload_optimizer or (storage.has_master_weights and entry.dtype in _HALF)


def copy_for_update(entry: torch.Tensor, storage: StorageSettings) -> nn.Parameter:
    """
    Copies an entry of an optimizer: to float32 unless master weights are switched off, to host memory (pinned beside a
    GPU) if the optimizer is offloaded.
    """
    if storage.offload_optimizer and isinstance(entry, DTensor):
        entry = local_shard(entry)
    dtype = torch.float32 if storage.has_master_weights and entry.dtype in _HALF else entry.dtype
    if storage.offload_optimizer:
        values = torch.empty(entry.shape, dtype=dtype, pin_memory=entry.device.type == "cuda")
        values.copy_(entry.detach())
    else:
        values = entry.detach().to(dtype, copy=True)
    result: Any = nn.Parameter(values)
    result.source_of_copy, result.is_offloaded = entry, storage.offload_optimizer
    result.sharded_parameter, result.flat_slice = whole_parameter(entry), slice_of(entry)
    return result


def hand_over_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Gives each entry on the device its gradient: in the dtype of the weights, or of its copy in float32."""
    for entry in entries_of(optimizer):
        source = source_of(entry)
        if is_offloaded(entry):
            continue
        if entry.dtype == source.dtype:
            round_gradients([source])
        if entry is not source:
            gradient = source.grad
            if gradient is not None and not isinstance(entry, DTensor):
                gradient = local(gradient).contiguous()
            entry.grad = gradient


@torch.no_grad()
def write_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Rounds the copies that a step has updated into the weights."""
    for entry in entries_of(optimizer):
        weights = source_of_copy(entry)
        if weights is not None and entry.grad is not None:
            local(weights).copy_(local(entry))
            mark_updated(entry)


def mark_updated(entry: Any) -> None:
    """Notes that a copy may hold more digits than the weights."""
    entry.is_updated = True


def drop_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Frees the gradients of shards, slices and copies after a step; no `zero_grad` of a model reaches them."""
    for entry in entries_of(optimizer):
        source = source_of(entry)
        if whole_parameter(entry) is not entry:
            entry.grad = None
        if slice_of(source) is not None:
            source.grad = None


@torch.no_grad()
def refresh_copies(optimizer: torch.optim.Optimizer | None) -> None:
    """Sets all copies to the weights, which were read from a checkpoint."""
    for entry in () if optimizer is None else entries_of(optimizer):
        if source_of_copy(entry) is not None:
            local(entry).copy_(local(source_of_copy(entry)))


@torch.no_grad()
def restore_copy(entry: Any, master: torch.Tensor) -> None:
    """Sets a copy to this rank's part of saved master weights."""
    weights = local(source_of_copy(entry)).to(entry.device)
    master = local(master).to(entry.device)
    # but for elements where these don't round to the weights, which have changed since
    set_copy(entry, torch.where(master.to(weights.dtype) == weights, master, weights.to(master.dtype)))


@torch.no_grad()
def set_copy(entry: Any, master: torch.Tensor) -> None:
    """Sets a copy to master weights of this rank."""
    local(entry).copy_(master)
    mark_updated(entry)


def master_to_save(entry: torch.Tensor) -> torch.Tensor | None:
    """Returns the master weights that a checkpoint needs of an entry: none of what is no wider than the weights."""
    weights = source_of_copy(entry)
    has_more = weights is not None and entry.dtype != weights.dtype and getattr(entry, "is_updated", False)
    return entry.detach() if has_more else None
