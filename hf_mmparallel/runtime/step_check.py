"""Checks that all ranks are about to run the same step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..data.context_tokens import WORDS
from ..data.fingerprint import MEDIA_ROUNDING, StepFingerprint
from ..plan import LANGUAGE_MODEL, StepPlan
from ..world import World

_UNKNOWN_VALUE = torch.iinfo(torch.int64).min
_SEEDS = (
    "Several ranks read the same samples under a plan. While they do, the global generators of `random`, `numpy` and "
    "`torch` have the same seeds on all of them: a dataset or collator that augments, shuffles, or replaces what it "
    'can\'t read must draw from these and not from a generator of its own. `on_bad_sample="skip"` leaves out samples '
    "that can't be read."
)


class StepCheck:
    """
    Compares what ranks decided on their own before they exchange tensors, whose sizes and order follow from it.

    A rank knows the programs of those only that it exchanges tensors with in a step. With all others it has nothing in
    common but gradient sums, which the same plan puts in the same order on every rank at every step.
    """

    def __init__(self, world: World, num_replicas: int, sums: int):
        self.world = world
        self.num_replicas = num_replicas
        self.sums = sums  # checksum of the gradient sums of all ranks in their order

    def __call__(self, mark: StepFingerprint, step: StepPlan) -> None:
        """Raises `RuntimeError` on all ranks, with the table of ranks, if they disagree. Collective, at every step."""
        values = {0: (mark.step,), 1: (self.sums,)}
        values |= {2 + replica: (checksum,) for replica, checksum in mark.programs.items()}
        differ = self._differing(values, np.zeros(2 + self.num_replicas, np.int64))
        if 0 in differ:
            raise RuntimeError(
                f"The ranks drew different global batches, or arranged them differently ({self._table(mark.step)}). "
                "The dataset must have the same length and order on all ranks, its samples the same sizes, and "
                "`data_seed` the same value."
            )
        if 1 in differ:
            raise RuntimeError(
                f"The ranks are about to sum other gradients ({self._table(self.sums)}). Which parameters are trained "
                "must be the same on all ranks: set `requires_grad` alike, and use one version of each package."
            )
        if differ:
            checksum = mark.programs.get(differ[0] - 2)
            raise RuntimeError(
                f"The ranks ordered the tasks of the same step differently ({self._table(checksum)}). The order "
                "follows from predicted times, which processors of different kinds can round differently. Use one "
                "kind of processor and one version of each package on all hosts."
            )
        self._compare_contents(mark, step)

    def _compare_contents(self, mark: StepFingerprint, step: StepPlan) -> None:
        """Raises unless ranks that share samples or microbatches of the same step read the same of them."""
        starts: dict[tuple[str, int], int] = {}  # microbatches before those of each replica
        total = 0
        for module, replicas in step.microbatches.items():
            for replica, microbatches in enumerate(replicas):
                starts[module, replica] = total
                total += len(microbatches)
        # Places for samples, then for inputs and media of microbatches, and for the cuts that have each sample.
        num_samples = len(step.samples)
        values: dict[int, Collection[int]] = dict(mark.samples)
        for kind, numbers in enumerate((mark.inputs, mark.media)):
            first = num_samples + kind * total
            values |= {first + starts[key[:2]] + key[2]: (number,) for key, number in numbers.items()}
        first, modules = num_samples + 2 * total, list(step.microbatches)
        values |= {
            first + modules.index(module) * num_samples + batch_index: (checksum,)
            for (module, batch_index), checksum in mark.shardings.items()
        }
        slack = np.zeros(first + len(modules) * num_samples, np.int64)
        slack[num_samples + total : num_samples + 2 * total] = MEDIA_ROUNDING
        differ = self._differing(values, slack)
        if not differ:
            return
        place = differ[0]
        table = self._table(max(values.get(place, ()), default=None))
        if place < num_samples:
            raise RuntimeError(f"Sample {step.samples[place]} differs between ranks that share it ({table}). {_SEEDS}")
        if place < first:
            number = (place - num_samples) % total
            module, replica = next(
                key for key, start in starts.items() if 0 <= number - start < len(step.microbatches[key[0]][key[1]])
            )
            index = number - starts[module, replica]
            raise RuntimeError(
                f"The inputs of microbatch {index} of `{module}`, replica {replica}, differ between the ranks that "
                f"compute it together ({table}). {_SEEDS}"
            )
        number, batch_index = divmod(place - first, num_samples)
        reason = (
            '`cp_mode="auto"` the cut follows from predicted times, which processors of different kinds can round '
            'differently: use `cp_mode="row"`.'
            if modules[number] == LANGUAGE_MODEL
            else "a collator whose `without_media` leaves out more than floating-point entries, ranks can't know the "
            "images of others: keep the whole numbers that go with them, such as grids and sizes."
        )
        raise RuntimeError(
            f"The ranks cut the chunk of `{modules[number]}` with sample {step.samples[batch_index]} differently for "
            f"its cp ranks, and those of {len(differ) - 1} other samples ({table}). With {reason}"
        )

    def _differing(self, values: Mapping[int, Collection[int]], slack: np.ndarray) -> list[int]:
        """Returns the places at which the values of ranks lie farther apart than `slack`; a rank may have none."""
        extremes = np.full((2, len(slack)), _UNKNOWN_VALUE)
        for place, numbers in values.items():
            extremes[:, place] = max(numbers), -min(numbers)
        high, low = self.world.all_reduce(torch.from_numpy(extremes), "max").numpy()
        return np.flatnonzero((high != _UNKNOWN_VALUE) & (high + low > slack)).tolist()

    def _table(self, value: int | None) -> str:
        """Lists, rank by rank, the values of those that have one. Collective."""
        values = self.world.all_gather(value)
        rows = ", ".join(f"rank {rank}: {number % 2**20}" for rank, number in enumerate(values) if number is not None)
        return f"checksums: {rows}"


# The numbers of a step over all ranks.

SIGNS: tuple[str, ...] = ("was_asked_to_stop", "was_asked_to_leave", "sees_waiting", "gave_up_save")
"""
What ranks notice by themselves and tell each other with the numbers of a step, so that they decide alike: a signal
that asks all to stop, or a node to leave, processes that wait to join, and a checkpoint that was given up, since ranks
were lost.
"""


@dataclass(frozen=True)
class LossWeights:
    """How the losses of a step count: each is divided by its own targets in the global batch."""

    num_targets: Mapping[str, int] = field(default_factory=dict)  # module -> its targets, in a model with generators
    # generator -> the factor of its summed loss beside the summed loss of target tokens
    factors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, num_targets: Mapping[str, int], weights: Mapping[str, float]) -> LossWeights:
        """The weights of a step, whose gradients are divided by the number of target tokens at its end."""
        tokens = max(num_targets[LANGUAGE_MODEL], 1)
        factors = {name: weight * tokens / max(num_targets[name], 1) for name, weight in weights.items()}
        return cls(num_targets, factors)


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks of one step."""

    # float64 scalar on the device, over the target tokens of the global batch, and generators with their factors
    loss: torch.Tensor
    num_targets: int  # target tokens
    num_tokens: int  # input tokens with padding
    num_real_tokens: int  # input tokens without padding
    # module -> its mean loss, of a model with generators
    losses: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def mean_loss(self) -> torch.Tensor:
        return self.loss / max(self.num_targets, 1)


def add_up(
    world: World,
    # module, sum and targets of each microbatch that this rank reports
    losses: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
    batches: Iterable[Mapping[str, Any]],  # of each that it counts the tokens of, in host memory
    signs: Mapping[str, int],
    weighed: LossWeights,
) -> tuple[StepTotals, dict[str, int]]:
    """
    Adds up a step over all ranks: the totals, and `signs`, such as how many ranks have noticed each of [`SIGNS`].
    Collective. The host does not wait for the device, on which the loss stays.
    """
    names = [LANGUAGE_MODEL, *weighed.factors]
    sums = torch.zeros(len(names), dtype=torch.float64, device=world.device)
    numbers = torch.tensor([0, 0, 0, *signs.values()], dtype=torch.int64)
    for module, of_microbatch, count in losses:
        sums[names.index(module)] += of_microbatch
        numbers[0] += count if module == LANGUAGE_MODEL else 0
    for inputs in batches:
        ids = inputs["input_ids"]
        numbers[1] += ids.numel()
        words = inputs.get(WORDS)
        mask = inputs.get("attention_mask") if words is None else words != 0
        numbers[2] += ids.numel() if mask is None or mask.dim() != 2 else int(mask.sum())
    targets, tokens, real, *num_signs = world.all_reduce(numbers, activity="adding up the step").tolist()
    world.all_reduce(sums, activity="adding up the loss")
    by_module = dict(zip(names, sums, strict=True))
    loss = sums[0] + sum(factor * by_module[name] for name, factor in weighed.factors.items())
    means = {name: by_module[name] / max(count, 1) for name, count in weighed.num_targets.items()}
    return StepTotals(loss, targets, tokens, real, means), dict(zip(signs, num_signs, strict=True))
