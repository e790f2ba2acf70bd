"""Forward on the meta device, which computes shapes only, of a module on any device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


class _PromoteToMeta(TorchFunctionMode):
    """Moves all tensor arguments of an operation to the meta device if one of them is there."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        arguments = (args, kwargs or {})
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(arguments)):
            # such as position ids that a forward creates on the CPU
            arguments = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), arguments)
        return func(*arguments[0], **arguments[1])


@contextmanager
def _restore_hooks(module: nn.Module) -> Iterator[None]:
    """Removes hooks that a forward adds."""
    # With `output_hidden_states` transformers hooks the layers in the first forward only, so that identity layers
    # which replace them later would not be recorded.
    flag = "_output_capturing_hooks_installed"
    before = [(part, set(part._forward_hooks), flag in part.__dict__) for part in module.modules()]
    try:
        yield
    finally:
        for part, hooks, was_hooked in before:
            for added in part._forward_hooks.keys() - hooks:
                del part._forward_hooks[added]
            if not was_hooked:
                part.__dict__.pop(flag, None)


@torch.no_grad()
def meta_forward(module: nn.Module, **inputs: Any) -> Any:
    """
    Returns the output of a module, which is not changed, with its weights on the meta device; `None` if its forward
    needs values of tensors there. Inputs are on the meta device, or on the CPU if the forward reads their values.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    with _restore_hooks(module), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _PromoteToMeta():
        warnings.simplefilter("ignore")
        try:
            return functional_call(module, tensors, kwargs=inputs)
        except Exception:  # any error is possible with tensors without values
            return None
