"""Samples larger than the predicted limit of a microbatch, which run in microbatches of their own."""

from __future__ import annotations

from collections.abc import Iterator

from ..steps.step_planner import Prediction


def large_samples(prediction: Prediction) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """
    Yields the microbatches of a step that exceed the predicted limit of tokens: module, batch indices of the samples,
    their tokens, and the maximum tokens of a microbatch there.
    """
    workloads = prediction.planned.workloads
    for name, limit in workloads.token_limits.items():
        tokens = workloads.tokens[name]
        for replica in prediction.planned.step.microbatches.get(name, ()):
            for batch_indices in replica:
                total = int(tokens[list(batch_indices)].sum())
                if total > limit:
                    yield name, tuple(batch_indices), total, limit


def runs_large_samples_alone(prediction: Prediction) -> bool:
    """
    Checks that there are such microbatches, all with a single sample, which no arrangement can make smaller, and few
    of them: less than half of the samples in the module with the fewest.
    """
    counts = dict.fromkeys(prediction.planned.workloads.token_limits, 0)
    for name, batch_indices, _, _ in large_samples(prediction):
        if len(batch_indices) > 1:
            return False
        counts[name] += 1
    # Modules on the same ranks split the memory in proportion to their work, so that large samples of one module lower
    # the limits of the others as well.
    return any(counts.values()) and 2 * min(counts.values()) < prediction.sizes.num_samples
