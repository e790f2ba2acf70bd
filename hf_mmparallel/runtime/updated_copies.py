"""
Copies of weights that an optimizer updates in their place: in float32, in host memory, or both.

A copy is an entry of the optimizer. Gradients arrive at the weights; the step hands them to the copies and writes the
updated copies back into the weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.distributed.tensor import DTensor

from .._device import SideStream
from ..cost import OFFLOAD_BUCKET_BYTES
from ..modeling.streamed_layers import aligned_bytes
from ..modeling.unowned import local
from ..plan import StorageSettings
from ..world import track_activity
from .gradients import round_gradients
from .optimizer_slices import local_shard, optimizer_name, slice_of, whole_parameter

logger = get_logger(__name__)

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
    return getattr(entry, "is_offloaded", False)


def source_of(entry: torch.Tensor) -> Any:
    """Returns the parameter or slice in which gradient sums leave the gradient of an entry of an optimizer."""
    weights = entry if source_of_copy(entry) is None else source_of_copy(entry)
    return weights if slice_of(weights) is not None else whole_parameter(weights)


def needs_copy(entry: torch.Tensor, storage: StorageSettings) -> bool:
    """Returns whether the optimizer updates a copy of some weights rather than the weights."""
    return storage.offload_optimizer or (storage.has_master_weights and entry.dtype in _HALF)


def copy_for_update(entry: torch.Tensor, storage: StorageSettings) -> nn.Parameter:
    """Copies an entry of an optimizer to float32, and to (pinned) host memory if the optimizer is offloaded."""
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


# The optimizer's step on the CPU, for entries whose state is in host memory.
#
# Bucket by bucket gradients come to the host, the CPU updates the copies of the weights there, and the weights go
# back. On a GPU both directions have a stream of their own, so that copies of one bucket overlap with the step of
# another.

_SUPPORTED = (torch.optim.Adam, torch.optim.AdamW)


def check_offloaded(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose step can't be on the CPU."""
    if type(optimizer) not in _SUPPORTED:
        raise ValueError(
            f"`{optimizer_name(optimizer)}` can't be used with `offload_optimizer=True`: only the steps of Adam and "
            'AdamW run on the CPU. Use `optim="adamw_torch"`, or leave `offload_optimizer` out.'
        )


class OffloadedStep:
    """The part of a step of Adam or AdamW that runs on the CPU, called before the step on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device):
        self.to_host, self.to_device = SideStream(device), SideStream(device)
        self.deepspeed: Any = _deepspeed_adam(optimizer)
        self._staging: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with track_activity("the optimizer's step on the CPU"):
            self._step(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        self.to_device.synchronize()  # the weights of the last step, which are about to change
        buckets = _buckets([entry for entry in entries_of(optimizer) if is_offloaded(entry) and _gradient(entry)])
        arrived = [self._fetch(buckets[0], 0)] if buckets else []
        for index, bucket in enumerate(buckets):
            if index + 1 < len(buckets):
                arrived.append(self._fetch(buckets[index + 1], index + 1))
            if arrived[index] is not None:
                arrived[index].synchronize()
            self._update(optimizer, bucket)
            with self.to_device.copying():
                for entry in bucket:
                    entry.grad = None  # the optimizer itself skips the entry
                    mark_updated(entry)
                    local(source_of_copy(entry)).copy_(entry, non_blocking=True)
        self.to_device.wait(self.to_device.mark())

    def _fetch(self, bucket: Sequence[Any], index: int) -> Any:
        """Starts the copies of a bucket's gradients to the host; returns the event of their arrival."""
        num_bytes = sum(aligned_bytes(entry) for entry in bucket)
        if self._staging[index % 2].numel() < num_bytes:
            self._staging[index % 2] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.to_host.pins)
        start = 0
        with self.to_host.copying():
            for entry in bucket:
                flat = self._staging[index % 2][start : start + entry.numel() * entry.element_size()]
                entry.grad = flat.view(entry.dtype).view(entry.shape)
                entry.grad.copy_(local(source_of(entry).grad), non_blocking=True)
                start += aligned_bytes(entry)
        return self.to_host.mark()

    def _update(self, optimizer: torch.optim.Optimizer, bucket: Sequence[Any]) -> None:
        members = {id(entry) for entry in bucket}
        groups = [
            {**group, "params": [entry for entry in group["params"] if id(entry) in members]}
            for group in optimizer.param_groups
        ]
        for group in groups:
            if self.deepspeed is not None and _fits_deepspeed(group):
                self._update_by_deepspeed(optimizer, group)
            elif group["params"]:
                _fused(optimizer, group).step()

    def _update_by_deepspeed(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Updates one group by DeepSpeed's kernel, with state as torch has it."""
        for entry in group["params"]:
            state = optimizer.state[entry]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(entry), torch.zeros_like(entry)
            state["step"] += 1
            self.deepspeed.ds_opt_adam.adam_update(
                self.deepspeed.opt_id,
                int(state["step"]),
                float(group["lr"]),
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                True,  # corrects the bias
                entry.data,
                entry.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
            )


def _gradient(entry: Any) -> bool:
    return source_of(entry).grad is not None


def _buckets(entries: Sequence[Any]) -> list[list[Any]]:
    """Groups consecutive entries of up to [`OFFLOAD_BUCKET_BYTES`]; a larger one has its own bucket."""
    result: list[list[Any]] = []
    size = 0
    for entry in entries:
        size += aligned_bytes(entry)
        if not result or size > OFFLOAD_BUCKET_BYTES:
            result.append([])
            size = aligned_bytes(entry)
        result[-1].append(entry)
    return result


def _fits_deepspeed(group: dict[str, Any]) -> bool:
    plain = not (group["amsgrad"] or group["maximize"])
    return plain and all(entry.dtype == torch.float32 for entry in group["params"])


def _fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    """Makes an optimizer of the same class and state with one group, which uses torch's fused kernel of the CPU."""
    result: Any = object.__new__(type(optimizer))
    result.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    settings = {"fused": True, "foreach": None, "capturable": False, "differentiable": False}
    result.param_groups = [{**group, **settings}]
    result._optimizer_step_pre_hooks, result._optimizer_step_post_hooks = {}, {}
    return result


def _deepspeed_adam(optimizer: torch.optim.Optimizer) -> Any:
    """Makes a `DeepSpeedCPUAdam` for our tensors; `None` without deepspeed or a compiler for its kernel."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(optimizer.defaults.get("decoupled_weight_decay"))
    try:
        return DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], adamw_mode=decoupled)
    except RuntimeError as error:
        logger.warning(
            f"The CPU's step of torch is used in place of `DeepSpeedCPUAdam`: {error}", main_process_only=True
        )
        return None
