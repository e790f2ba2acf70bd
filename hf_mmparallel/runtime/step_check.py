"""Whether all ranks are about to run the same step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from ..data.fingerprint import MEDIA_ROUNDING, StepFingerprint
from ..plan import LANGUAGE_MODEL, StepPlan
from ..world import World

_UNKNOWN = torch.iinfo(torch.int64).min
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

    Args:
        world ([`World`]): All ranks.
        num_replicas (`int`): Replicas of the language model.
        sums (`int`): Checksum of the gradient sums of all ranks in their order.
    """

    def __init__(self, world: World, num_replicas: int, sums: int):
        self.world = world
        self.num_replicas = num_replicas
        self.sums = sums

    def __call__(self, mark: StepFingerprint, step: StepPlan) -> None:
        """
        Collective, at every step.

        Args:
            mark ([`StepFingerprint`]): Of this rank.
            step ([`StepPlan`]): The step.

        Raises:
            `RuntimeError`: On all ranks with the table of ranks, if they disagree.
        """
        programs = [mark.programs.get(replica) for replica in range(self.num_replicas)]
        differ = self._differing(map(_alone, [mark.step, self.sums, *programs]))
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
        self._compare_contents(mark, step)

    def _compare_contents(self, mark: StepFingerprint, step: StepPlan) -> None:
        """Raises unless ranks that share samples or microbatches of the same step read the same of them."""
        microbatches = [
            (module, replica, index)
            for module, replicas in step.microbatches.items()
            for replica, of_replica in enumerate(replicas)
            for index in range(len(of_replica))
        ]
        of_model = [key for key in microbatches if key[0] == LANGUAGE_MODEL]
        samples = [mark.samples.get(index, ()) for index in range(len(step.samples))]
        inputs = [_alone(numbers.get(key)) for numbers in (mark.inputs, mark.media) for key in microbatches]
        cuts = [_alone(mark.shardings.get(index)) for index in range(len(of_model))]
        values = [*samples, *inputs, *cuts]
        slack = [0] * len(values)
        slack[len(samples) + len(microbatches) : len(samples) + len(inputs)] = [MEDIA_ROUNDING] * len(microbatches)
        differ = self._differing(values, slack)
        if not differ:
            return
        first = differ[0]
        table = self._table(max(values[first], default=None))
        if first < len(samples):
            raise RuntimeError(f"Sample {step.samples[first]} differs between ranks that share it ({table}). {_SEEDS}")
        if first < len(samples) + len(inputs):
            module, replica, index = microbatches[(first - len(samples)) % len(microbatches)]
            raise RuntimeError(
                f"The inputs of microbatch {index} of `{module}`, replica {replica}, differ between the ranks that "
                f"compute it together ({table}). {_SEEDS}"
            )
        raise RuntimeError(
            f"The ranks cut the tokens of {len(differ)} of {len(of_model)} microbatches of the language model "
            f"differently, the first of which is {first - len(samples) - len(inputs)} ({table}). With "
            '`cp_mode="auto"` the cut follows from predicted times, which processors of different kinds can round '
            'differently: use `cp_mode="row"`.'
        )

    def _differing(self, values: Iterable[Collection[int]], slack: Sequence[int] | None = None) -> list[int]:
        """The positions at which the values of all ranks lie farther apart than `slack`; a rank may have none."""
        known = list(values)
        highest = [max(numbers, default=_UNKNOWN) for numbers in known]
        lowest_negated = [-min(numbers) if numbers else _UNKNOWN for numbers in known]
        extremes = self.world.all_reduce(torch.tensor([highest, lowest_negated]), "max").tolist()
        limits = slack or [0] * len(known)
        return [
            position
            for position, (high, low, limit) in enumerate(zip(*extremes, limits, strict=True))
            if high != _UNKNOWN and high + low > limit
        ]

    def _table(self, value: int | None) -> str:
        """Rank by rank, the values of those that have one. Collective."""
        values = self.world.all_gather(value)
        rows = ", ".join(f"rank {rank}: {number % 2**20}" for rank, number in enumerate(values) if number is not None)
        return f"checksums: {rows}"


def _alone(value: int | None) -> tuple[int, ...]:
    """One value of a rank, or none."""
    return () if value is None else (value,)
