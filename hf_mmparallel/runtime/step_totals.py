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
    """Sums over all ranks of one step."""

    loss: float  # over the target tokens of the global batch
    num_targets: int  # target tokens
    num_tokens: int  # input tokens with padding
    num_real_tokens: int  # input tokens without padding

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.num_targets, 1)


def add_up(
    world: World,
    losses: Iterable[tuple[torch.Tensor, torch.Tensor]],  # of each microbatch that this rank reports
    batches: Iterable[Mapping[str, Any]],  # of each that it counts the tokens of
    signs: Mapping[str, bool],
) -> tuple[StepTotals, dict[str, int]]:
    """Adds up a step over all ranks: the totals, and how many ranks have noticed each of [`SIGNS`]. Collective."""
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
