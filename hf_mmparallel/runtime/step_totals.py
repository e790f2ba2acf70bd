"""The numbers of a step over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..data.context_tokens import WORDS
from ..world import World

SIGNS: tuple[str, ...] = ("was_asked_to_stop", "sees_waiting", "gave_up_save")
"""
What ranks notice by themselves and tell each other with the numbers of a step, so that they decide alike: a signal
that asks to stop, processes that wait to join, and a checkpoint that was given up, since ranks were lost.
"""


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
    signs: Mapping[str, bool],
) -> tuple[StepTotals, dict[str, int]]:
    """
    Adds up the numbers of a step over all ranks. Collective.

    Args:
        world ([`World`]): The ranks.
        losses (`Iterable[tuple[torch.Tensor, torch.Tensor]]`):
            Sum over target tokens, and their number, of each microbatch that this rank reports.
        batches (`Iterable[Mapping[str, Any]]`): The inputs of each microbatch that it counts the tokens of.
        signs (`Mapping[str, bool]`): What this rank has noticed, of each of [`SIGNS`].

    Returns:
        The totals, and the number of ranks that have noticed each.
    """
    numbers = torch.tensor([0.0, 0.0, 0.0, 0.0, *(float(signs[name]) for name in SIGNS)], dtype=torch.float64)
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
    return StepTotals(total, targets, tokens, real), dict(zip(SIGNS, num_signs, strict=True))
