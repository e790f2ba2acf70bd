"""Checksums of a step, which ranks compare before they exchange tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np

from ..plan import LANGUAGE_MODEL, StepPlan
from ..schedule import Program
from .context_tokens import ChunkKey, ContextSharding


@dataclass(frozen=True)
class StepFingerprint:
    """
    Checksums of all decisions that the ranks of a step make independently and that must be equal.

    Args:
        step (`int`): Checksum of the samples and of their microbatches.
        programs (`Mapping[int, int]`):
            Replica of the language model -> checksum of the ordered actions of all ranks that exchange tensors with
            it in the step; for the replicas in the part of the step that this rank has planned.
        shardings (`Mapping[int, int]`, *optional*):
            Index of a microbatch of the language model, over all replicas -> checksum of the distribution of its
            tokens over cp ranks; for the microbatches of this rank.
    """

    step: int
    programs: Mapping[int, int]
    shardings: Mapping[int, int] = field(default_factory=dict)


def fingerprint(step: StepPlan, program: Program, shardings: Mapping[ChunkKey, ContextSharding]) -> StepFingerprint:
    """
    The fingerprint of a step.

    Args:
        step ([`StepPlan`]): The arrangement.
        program ([`Program`]): The actions of all ranks, or of those in the part of one.
        shardings (`Mapping[ChunkKey, ContextSharding]`): Distribution of the tokens of this rank's microbatches.
    """
    starts = list(accumulate(map(len, step.microbatches[LANGUAGE_MODEL]), initial=0))
    return StepFingerprint(
        _arrangement(step),
        dict.fromkeys(program.replicas(LANGUAGE_MODEL), program.checksum),
        {starts[replica] + index: _checksum(sharding) for (_, replica, index, _), sharding in shardings.items()},
    )


def _arrangement(step: StepPlan) -> int:
    """Checksum of the samples of a step and their microbatches."""
    digest = hashlib.blake2b(repr((step.epoch, list(step.microbatches))).encode(), digest_size=8)
    digest.update(np.array(step.samples, np.int64).tobytes())
    for replicas in step.microbatches.values():
        microbatches = list(chain.from_iterable(replicas))
        sizes = [len(replicas), *map(len, replicas), *map(len, microbatches)]
        digest.update(np.array(sizes, np.int64).tobytes())
        digest.update(np.fromiter(chain.from_iterable(microbatches), np.int64).tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _checksum(sharding: ContextSharding) -> int:
    """Checksum of the cp rank of each token, and of the gathered blocks."""
    assignment = sharding.assignment
    digest = hashlib.blake2b(digest_size=8)
    for array in (assignment.layout, assignment.blocks, assignment.gathered):
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1
