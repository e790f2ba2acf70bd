"""
The optimizer's step on the CPU, for entries whose state is in host memory.

Bucket by bucket gradients come to the host, the CPU updates the copies of the weights there, and the weights go back.
On a GPU both directions have a stream of their own, so that copies of one bucket overlap with the step of another.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.logging import get_logger

from ..cost import OFFLOAD_BUCKET_BYTES
from ..modeling.streamed_layers import aligned_bytes
from ..modeling.unowned import local
from ..world import track_activity
from .optimizer_slices import optimizer_name
from .updated_copies import entries_of, is_offloaded, mark_updated, source_of, source_of_copy

logger = get_logger(__name__)
_SUPPORTED = (torch.optim.Adam, torch.optim.AdamW)


def check_offloaded(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose step can't be on the CPU."""
    if type(optimizer) not in _SUPPORTED:
        raise ValueError(
            f"`{optimizer_name(optimizer)}` can't be used with `offload_optimizer=True`: only the steps of Adam and "
            'AdamW run on the CPU. Use `optim="adamw_torch"`, or leave `offload_optimizer` out.'
        )


class _Copies:
    """Copies between a device and the host on a stream of their own; the CPU as a device has none."""

    def __init__(self, device: torch.device):
        self.stream: Any = torch.Stream(device) if device.type != "cpu" else None

    def on_stream(self) -> AbstractContextManager[Any]:
        """Lets copies in this context come after what the device has been given to do."""
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
        return self.stream

    def mark(self) -> Any:
        return None if self.stream is None else self.stream.record_event()

    def join(self) -> None:
        """Lets the device wait for the copies."""
        if self.stream is not None:
            torch.accelerator.current_stream(self.stream.device).wait_stream(self.stream)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


class OffloadedStep:
    """The part of a step of Adam or AdamW that runs on the CPU, called before the step on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device):
        self.to_host, self.to_device = _Copies(device), _Copies(device)
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
            with self.to_device.on_stream():
                for entry in bucket:
                    entry.grad = None  # the optimizer itself skips the entry
                    mark_updated(entry)
                    local(source_of_copy(entry)).copy_(entry, non_blocking=True)
        self.to_device.join()

    def _fetch(self, bucket: Sequence[Any], index: int) -> Any:
        """Starts the copies of a bucket's gradients to the host; returns the event of their arrival."""
        num_bytes = sum(aligned_bytes(entry) for entry in bucket)
        if self._staging[index % 2].numel() < num_bytes:
            pinned = self.to_host.stream is not None
            self._staging[index % 2] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        start = 0
        with self.to_host.on_stream():
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
