"""Samples that are larger than a microbatch is predicted to hold, which run in a microbatch of their own."""

from __future__ import annotations

from collections.abc import Iterator

from .steps import Prediction


def large_samples(prediction: Prediction) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """
    The microbatches of a step that are larger than the memory is predicted to allow.

    Args:
        prediction ([`Prediction`]): The step.

    Returns:
        `Iterator[tuple[str, tuple[int, ...], int, int]]`: Module, the slots of the samples, their tokens, and the most
        tokens of a microbatch there.
    """
    workloads = prediction.planned.workloads
    for name, limit in workloads.max_tokens.items():
        tokens = workloads.tokens[name]
        for replica in prediction.planned.step.microbatches.get(name, ()):
            for slots in replica:
                total = int(tokens[list(slots)].sum())
                if total > limit:
                    yield name, tuple(slots), total, limit


def runs_large_samples_alone(prediction: Prediction) -> bool:
    """
    Whether there are such microbatches, each of one sample, which no arrangement can make smaller, and most samples of
    the step are not in them.
    """
    found = list(large_samples(prediction))
    slots = {slot for _, own, _, _ in found for slot in own}
    is_alone = all(len(own) == 1 for _, own, _, _ in found)
    return bool(found) and is_alone and 2 * len(slots) < prediction.sizes.num_samples
