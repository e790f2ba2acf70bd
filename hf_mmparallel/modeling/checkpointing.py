"""Activation checkpointing, per tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from .spec import inside


@dataclass(frozen=True)
class Recomputation:
    """Settings of activation checkpointing."""

    every_n_layers: int = 1  # only layers whose index is divisible by it are recomputed
    offload: bool = False  # keeps the saved inputs of layers in host memory
    # further arguments of `torch.utils.checkpoint.checkpoint`
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_arguments(cls, values: Mapping[str, Any]) -> Recomputation:
        """Reads the Trainer's `activation_checkpointing_kwargs`."""
        options = dict(values)
        return cls(options.pop("every_n_layers", 1), options.pop("offload", False), options)

    @property
    def as_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `PreTrainedModel.activation_checkpointing_enable`."""
        options = {"use_reentrant": False, **self.options}
        return {
            "activation_checkpointing_kwargs": options,
            "every_n_layers": self.every_n_layers,
            "offload": self.offload,
        }

    @property
    def function(self) -> Callable:
        """Returns the function that runs a layer."""
        run = partial(checkpoint, **{"use_reentrant": False, **self.options})
        return partial(_offloaded, run) if self.offload else run


def _offloaded(run: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer with its saved inputs in host memory, pinned if there is an accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True)
    with save_on_cpu(pin_memory=device is not None, device_type="cpu" if device is None else device.type):
        return run(function, *args, **kwargs)


def inputs_require_gradients(model: nn.Module) -> bool:
    """Returns whether gradients flow through frozen layers too, see `PreTrainedModel.enable_input_require_grads`."""
    return any(getattr(module, "_require_grads_hook", None) is not None for module in model.modules())


def enable_checkpointing(model: nn.Module, tower: str, stack: str, recomputation: Recomputation | None = None) -> None:
    """
    Enables activation checkpointing of the layers `stack` of one tower, of every layer by default; identity layers are
    left out. Raises `ValueError` if the layers do not support it.
    """
    recomputation = recomputation or Recomputation()
    is_supported = False
    for name, module in model.named_modules():
        if not inside(name, tower) or not hasattr(module, "gradient_checkpointing"):
            continue
        if getattr(module, "is_identity_layer", False):
            continue
        is_supported = is_supported or inside(name, stack)
        index = name.removeprefix(f"{stack}.")
        enabled = not index.isdigit() or int(index) % recomputation.every_n_layers == 0
        module.__dict__.update(gradient_checkpointing=enabled, _gradient_checkpointing_func=recomputation.function)
    if not is_supported:
        raise ValueError(
            f"`activation_checkpointing=True`: the layers of `{stack}` do not support `gradient_checkpointing`. "
            f"Leave it out for this module."
        )
