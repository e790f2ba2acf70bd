"""Whether all ranks are about to run the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..data.fingerprint import StepFingerprint
from ..world import World

_UNKNOWN = torch.iinfo(torch.int64).min


class StepCheck:
    """
    Compares what ranks decided on their own before they exchange tensors, whose sizes and order follow from it.

    A rank knows the programs of those only that it exchanges tensors with in a step. With all others it has nothing in
    common but gradient sums, which the same plan puts in the same order on every rank at every step.

    Args:
        world ([`World`]): All ranks.
        num_replicas (`int`): Replicas of the language model.
        sums (`int`): Checksum of the gradient sums of all ranks in their order.
        has_shardings (`bool`): Whether ranks share tokens of the language model's microbatches.
    """

    def __init__(self, world: World, num_replicas: int, sums: int, has_shardings: bool):
        self.world = world
        self.num_replicas = num_replicas
        self.sums = sums
        self.has_shardings = has_shardings

    def __call__(self, mark: StepFingerprint, num_microbatches: int) -> None:
        """
        Collective, at every step.

        Args:
            mark ([`StepFingerprint`]): Of this rank.
            num_microbatches (`int`): Microbatches of the language model, over all replicas.

        Raises:
            `RuntimeError`: On all ranks with the table of ranks, if they disagree.
        """
        programs = [mark.programs.get(replica) for replica in range(self.num_replicas)]
        differ = self._differing([mark.step, self.sums, *programs])
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
            checksum = programs[differ[0] - 2]
            raise RuntimeError(
                f"The ranks ordered the tasks of the same step differently ({self._table(checksum)}). The order "
                "follows from predicted times, which processors of different kinds can round differently. Use one "
                "kind of processor and one version of each package on all hosts."
            )
        if not self.has_shardings:
            return
        differ = self._differing([mark.shardings.get(index) for index in range(num_microbatches)])
        if differ:
            raise RuntimeError(
                f"The ranks cut the tokens of {len(differ)} of {num_microbatches} microbatches of the language model "
                f"differently, the first of which is {differ[0]} ({self._table(mark.shardings.get(differ[0]))}). With "
                '`cp_mode="auto"` the cut follows from predicted times, which processors of different kinds can round '
                'differently: use `cp_mode="row"`. Otherwise the collator gives ranks different tokens: let it draw '
                "nothing but from the global seeds."
            )

    def _differing(self, values: Sequence[int | None]) -> list[int]:
        """The positions at which ranks have different values; ranks that have `None` there don't count."""
        known = [_UNKNOWN if value is None else value for value in values]
        extremes = torch.tensor([known, [value if value == _UNKNOWN else -value for value in known]])
        highest, lowest_negated = self.world.all_reduce(extremes, "max").tolist()
        return [
            position
            for position, (high, low) in enumerate(zip(highest, lowest_negated, strict=True))
            if high not in (_UNKNOWN, -low)
        ]

    def _table(self, value: int | None) -> str:
        """Rank by rank, the values of those that have one. Collective."""
        values = self.world.all_gather(value)
        rows = ", ".join(f"rank {rank}: {number % 2**20}" for rank, number in enumerate(values) if number is not None)
        return f"checksums: {rows}"
