"""A forward that computes shapes only, whatever device a module is on."""

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


class _MetaWins(TorchFunctionMode):
    """
    Moves the other tensors of an operation to the meta device when one of them is there, such as positions that a
    forward counts on the CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = (args, kwargs or {})
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(given)):
            given = tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to("meta"), given)
        return func(*given[0], **given[1])


@contextmanager
def _same_hooks(module: nn.Module) -> Iterator[None]:
    """
    Takes away the hooks that a forward adds. With `output_hidden_states` transformers hooks the layers at the first
    forward and never again, so that placeholders put in their places later would not be recorded.
    """
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
    What a module returns for these inputs, with its weights on the meta device. The module stays as it is.

    Args:
        module (`nn.Module`): On any device.
        inputs: Arguments of its forward; tensors on the meta device, or on the CPU where the forward reads values.

    Returns:
        What the forward returns, or `None` if it reads values of tensors that have none.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    with _same_hooks(module), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _MetaWins():
        warnings.simplefilter("ignore")
        try:
            return functional_call(module, tensors, kwargs=inputs)
        except Exception:  # a forward can fail in any way on tensors without values
            return None
