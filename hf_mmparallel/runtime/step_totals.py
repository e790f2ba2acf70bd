"""The numbers of a step over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..data.context_tokens import WORDS
from ..world import World


@dataclass(frozen=True)
class StepTotals:
    """
    Sums over all ranks of one step.

    Args:
        loss (`float`): Sum over the target tokens of the global batch.
        num_targets (`int`): Target tokens.
        num_tokens (`int`): Input tokens with padding.
        num_real_tokens (`int`): Input tokens without padding.
    """

    loss: float
    num_targets: int
    num_tokens: int
    num_real_tokens: int

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.num_targets, 1)


def add_up(
    world: World,
    losses: Iterable[tuple[torch.Tensor, torch.Tensor]],
    batches: Iterable[Mapping[str, Any]],
    signs: Sequence[bool],
) -> tuple[StepTotals, list[int]]:
    """
    Adds up the numbers of a step over all ranks. Collective.

    Args:
        world ([`World`]): The ranks.
        losses (`Iterable[tuple[torch.Tensor, torch.Tensor]]`):
            Sum over target tokens, and their number, of each microbatch that this rank reports.
        batches (`Iterable[Mapping[str, Any]]`): The inputs of each microbatch that it counts the tokens of.
        signs (`Sequence[bool]`): What this rank has noticed, such as that it was asked to stop.

    Returns:
        The totals, and the number of ranks that gave each of the signs.
    """
    numbers = torch.tensor([0.0, 0.0, 0.0, 0.0, *map(float, signs)], dtype=torch.float64)
    for loss, count in losses:
        numbers[0] += loss.double().cpu()
        numbers[1] += float(count)
    for inputs in batches:
        ids = inputs["input_ids"]
        numbers[2] += ids.numel()
        words = inputs.get(WORDS)
        mask = inputs.get("attention_mask") if words is None else words != 0
        numbers[3] += ids.numel() if mask is None or mask.dim() != 2 else float(mask.sum())
    total, *counts = world.all_reduce(numbers, activity="adding up the step").tolist()
    targets, tokens, real, *num_signs = map(int, counts)
    return StepTotals(total, targets, tokens, real), num_signs
