"""
Linear layers that the ranks of a tensor-parallel group share, on plain tensors: column- and row-parallel products
(Shoeybi et al., Megatron-LM, 2019, section 3).

transformers computes these layers on `DTensor`s, which derive the layout of each operation anew for rows of another
length. That takes longer than the products, and batches of multimodal samples have another length in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from .dtensors import local
from .lazy_logits import return_lazy_logits
from .tp_collectives import Sum, SumGradients

# The columns of a matrix are the features that it returns; its rows are those that it takes.
_COLUMN_STYLES = ("colwise", "colwise_gather_output", "colwise_rep")
_ROW_STYLES = ("rowwise",)


def shares_linear(layer: nn.Module, style: str, tp_size: int) -> TypeGuard[nn.Linear]:
    """Returns whether `use_plain_tensors` computes a layer of this style: a linear one that all ranks cut alike."""
    if type(layer) is not nn.Linear:  # one that is quantized computes its product in another way
        return False
    if style in _COLUMN_STYLES:
        return layer.out_features % tp_size == 0
    return style in _ROW_STYLES and layer.in_features % tp_size == 0


def use_plain_tensors(layer: nn.Linear, style: str, mesh: DeviceMesh) -> None:
    """
    Lets a linear layer whose parameters are cut compute on plain tensors, in place. A column-parallel one takes all
    features and returns those of this rank, or for the styles that gather, which are those of a head, lazy ones of
    all ranks; a row-parallel one takes those of this rank and returns all.
    """
    group = mesh.get_group()
    if style in _ROW_STYLES:
        layer.forward = _row_parallel(layer, group)  # type: ignore[method-assign]
    elif style == "colwise":
        layer.forward = _column_parallel(layer, group)  # type: ignore[method-assign]
    else:
        return_lazy_logits(layer, group)


def _column_parallel(layer: nn.Linear, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        features = SumGradients.apply(input, group) if input.requires_grad else input
        return functional.linear(features, local(layer.weight), _local_bias(layer))

    return forward


def _row_parallel(layer: nn.Linear, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        output = Sum.apply(functional.linear(input, local(layer.weight)), group)
        bias = _local_bias(layer)
        return output if bias is None else output + bias  # which each rank has whole

    return forward


def _local_bias(layer: nn.Linear) -> Tensor | None:
    return None if layer.bias is None else local(layer.bias)
