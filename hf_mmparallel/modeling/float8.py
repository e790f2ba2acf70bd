"""Matrix products of linear layers in float8, by `torchao`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ..plan import ParallelPlan
from .products import as_multiplied, compute_by

_MULTIPLE = 16  # of the sizes of a matrix that float8 kernels multiply
_LEAST_CAPABILITY = (8, 9)  # of CUDA devices with float8 products


def check_float8(plan: ParallelPlan, device: torch.device, dtype: torch.dtype) -> None:
    """Raises `ValueError` where modules of a plan ask for float8 and it can't be had; `dtype` is that of products."""
    name, recipe = next(((n, m.storage.float8) for n, m in plan.modules.items() if m.storage.float8), (None, None))
    if name is None:
        return
    asked = f"`float8={recipe!r}` of `{name}`"
    if find_spec("torchao") is None:
        raise ValueError(f"{asked} needs the package torchao. Install it: `pip install torchao`.")
    if device.type != "cuda":
        return  # products of rounded values, which are as slow as others
    if dtype != torch.bfloat16:
        raise ValueError(f"{asked} replaces products in bfloat16; those of this run are in {dtype}. Use `bf16=True`.")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY and not torch.version.hip:
        raise ValueError(
            f"{asked}: `{torch.cuda.get_device_name(device)}` has compute capability {capability[0]}.{capability[1]}, "
            "and products in float8 need 8.9 or later. Leave `float8` out."
        )


@lru_cache
def _converted(recipe: str, emulate: bool) -> nn.Module:
    """A linear layer of `torchao` without a weight of its own."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # the gradient of a weight is a sum over tokens, of which there is any number
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True)
    blank = nn.Linear(_MULTIPLE, _MULTIPLE, bias=False, device="meta")
    return convert_to_float8_training(blank, config=config)


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None, emulated: nn.Module, converted: nn.Module) -> Tensor:
    if any(size % _MULTIPLE for size in weight.shape):  # of a share of a tensor-parallel rank, too
        return functional.linear(input, weight, bias)
    input, on_cpu = as_multiplied(input), input.device.type == "cpu"
    weight = weight.to(input.dtype) if on_cpu else weight  # rounded from its own dtype elsewhere
    output = functional_call(emulated if on_cpu else converted, {"weight": weight}, (input,))
    return output if bias is None else output + bias.to(output.dtype)


def use_float8(layers: nn.Module, recipe: str) -> None:
    """Lets the linear layers in `layers`, but no adapters, compute in float8 by a recipe of `torchao`, in place."""
    product = partial(_multiply, emulated=_converted(recipe, True), converted=_converted(recipe, False))
    for name, layer in layers.named_modules():
        if type(layer) is nn.Linear and ".lora_" not in name:
            own: Any = layer
            own.float8 = recipe
            compute_by(layer, product)
