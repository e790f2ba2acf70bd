"""Modality generators, the modules behind the language model: they take its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, Workloads
from ..plan.step_plan import Slots
from .estimate import Pipeline
from .exchange import Room
from .greedy import NoRoomError
from .tracks import Track, generator_tracks

Replicas = tuple[tuple[Slots, ...], ...]


def generated(plan: ParallelPlan, workloads: Workloads, language: Sequence[Sequence[Slots]]) -> dict[str, Replicas]:
    """
    The microbatches of generators.

    A sample is generated in the microbatch in which the language model has it, since its hidden states are there then
    and wait for the gradient. What the language-model replicas of a group take at one place is divided among the
    generator's replicas of the group by its work there, see [`Track`]. Samples without work in a generator are in none
    of its microbatches.

    Args:
        plan (`ParallelPlan`): The plan.
        workloads (`Workloads`): What samples cost. Limits of tokens hold as far as the language model's microbatches
            allow it.
        language (`Sequence[Sequence[tuple[int, ...]]]`): Replica -> microbatch -> slots of the language model.

    Returns:
        `dict[str, tuple[tuple[tuple[int, ...], ...], ...]]`: Generator -> replica -> microbatch -> the slots it takes.
    """
    if not plan.generators:
        return {}
    replica, microbatch = (np.zeros(workloads.num_samples, np.int64) for _ in range(2))
    for number, microbatches in enumerate(language):
        for index, slots in enumerate(microbatches):
            replica[list(slots)], microbatch[list(slots)] = number, index
    counts = np.array([len(microbatches) for microbatches in language])
    result = {}
    for track in generator_tracks(plan, workloads, Pipeline.of(plan, workloads.backward_ratio).bottleneck):
        turn = track.turn(replica, microbatch, counts)
        copy = _copies(track, workloads, replica, turn, int(counts.max()))
        result.update(dict.fromkeys(track.modules, track.microbatches(copy, turn, counts)))
    return result


def _copies(track: Track, workloads: Workloads, replica: NDArray, turn: NDArray, count: int) -> NDArray:
    """The track's replica of each sample, within its limits of tokens if that can be."""
    names = [name for name in track.modules if name in workloads.max_tokens]
    if names:
        sizes = np.stack([workloads.tokens_of_limit(name) for name in names], axis=1).astype(float)
        room = Room(sizes, np.array([workloads.max_tokens[name] for name in names], dtype=float))
        with suppress(NoRoomError):  # of methods that keep to no limits
            return track.copies(replica, turn, count, room)
    return track.copies(replica, turn, count, None)
