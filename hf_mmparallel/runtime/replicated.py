"""Parameters that tensor-parallel ranks hold whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .gradients import local


@dataclass(frozen=True)
class ReplicatedParameters:
    """
    The parameters that the ranks of a tensor-parallel row each hold whole.

    Args:
        ranks (`tuple[int, ...]`): The row.
        group (`ProcessGroup`): Its group.
        parameters (`Mapping[str, nn.Parameter]`): By name, in one order on all ranks.
        modules (`Mapping[str, str]`): Name -> module.
        partial (`frozenset[str]`): Those whose gradients are shares, which add up to the whole.
    """

    ranks: tuple[int, ...]
    group: Any
    parameters: Mapping[str, nn.Parameter]
    modules: Mapping[str, str]
    partial: frozenset[str]


class EqualGradients:
    """
    Gradients that each rank of a tensor-parallel row has whole. They are divided by the ranks before the sum over all
    copies of the parameter, which then counts each microbatch once, and after which all copies have the same bits.

    Args:
        rows (`Sequence[ReplicatedParameters]`): Of this rank.
    """

    def __init__(self, rows: Sequence[ReplicatedParameters]):
        self.sizes = {
            id(parameter): len(row.ranks)
            for row in rows
            for name, parameter in row.parameters.items()
            if name not in row.partial
        }

    @torch.no_grad()
    def divide(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divides those among the gradients of `parameters`."""
        for parameter in parameters:
            size = self.sizes.get(id(parameter))
            if size is not None and parameter.grad is not None:
                local(parameter.grad).div_(size)
