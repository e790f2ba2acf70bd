"""Recomputation of activations in the backward pass, tower by tower."""

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
    """
    What is recomputed, and where its inputs wait.

    Args:
        every_n_layers (`int`, *optional*, defaults to 1): Only layers whose number in the tower it divides.
        offload (`bool`, *optional*, defaults to `False`): Whether inputs of layers wait in host memory.
        options (`Mapping[str, Any]`): Further arguments of `torch.utils.checkpoint.checkpoint`.
    """

    every_n_layers: int = 1
    offload: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_arguments(cls, values: Mapping[str, Any]) -> Recomputation:
        """What the Trainer's `activation_checkpointing_kwargs` ask for."""
        options = dict(values)
        return cls(options.pop("every_n_layers", 1), options.pop("offload", False), options)

    @property
    def as_arguments(self) -> dict[str, Any]:
        """The arguments of `PreTrainedModel.activation_checkpointing_enable`."""
        options = {"use_reentrant": False, **self.options}
        return {
            "activation_checkpointing_kwargs": options,
            "every_n_layers": self.every_n_layers,
            "offload": self.offload,
        }

    @property
    def function(self) -> Callable:
        """What runs a layer."""
        run = partial(checkpoint, **{"use_reentrant": False, **self.options})
        return partial(_offloaded, run) if self.offload else run


def _offloaded(run: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer whose inputs wait in host memory, pinned where there is a device to copy from."""
    device = torch.accelerator.current_accelerator(check_available=True)
    with save_on_cpu(pin_memory=device is not None, device_type="cpu" if device is None else device.type):
        return run(function, *args, **kwargs)


def enable_checkpointing(model: nn.Module, tower: str, stack: str, recomputation: Recomputation | None = None) -> None:
    """
    Recomputes the activations of the real layers of one tower in the backward pass.

    Args:
        model (`nn.Module`): The model, maybe with placeholders.
        tower (`str`): Path of the tower.
        stack (`str`): Path of its layers.
        recomputation ([`Recomputation`], *optional*): What is recomputed; by default every layer.

    Raises:
        `ValueError`: If the tower has no switch for it.
    """
    recomputation = recomputation or Recomputation()
    found = False
    for name, module in model.named_modules():
        if not inside(name, tower) or not hasattr(module, "gradient_checkpointing"):
            continue
        if getattr(module, "is_placeholder", False):
            continue
        found = found or inside(name, stack)
        number = name.removeprefix(f"{stack}.")
        wanted = not number.isdigit() or int(number) % recomputation.every_n_layers == 0
        module.__dict__.update(gradient_checkpointing=wanted, _gradient_checkpointing_func=recomputation.function)
    if not found:
        raise ValueError(
            f"`activation_checkpointing=True`: the layers of `{stack}` have no `gradient_checkpointing`. "
            f"Leave it off for this module."
        )
