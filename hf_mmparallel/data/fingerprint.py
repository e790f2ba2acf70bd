"""What ranks compare before they exchange the tensors of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np

from ..plan import LANGUAGE_MODEL, StepPlan
from ..schedule import Program
from .context_tokens import BatchKey, ContextCut


@dataclass(frozen=True)
class StepFingerprint:
    """
    Checksums of all that the ranks of a step decide on their own and have to decide alike.

    Args:
        step (`int`): Of the samples, and of the microbatches that they are arranged in.
        programs (`Mapping[int, int]`):
            Replica of the language model -> of the actions, in their order, of all ranks that exchange tensors with it
            in the step; for those replicas whose ranks this rank has planned the actions of.
        cuts (`Mapping[int, int]`, *optional*):
            Number of a microbatch of the language model, over all replicas -> of how its tokens are cut over rows of
            ranks; for those that this rank has a part in.
    """

    step: int
    programs: Mapping[int, int]
    cuts: Mapping[int, int] = field(default_factory=dict)


def fingerprint(step: StepPlan, program: Program, cuts: Mapping[BatchKey, ContextCut]) -> StepFingerprint:
    """
    The fingerprint of a step.

    Args:
        step ([`StepPlan`]): The arrangement.
        program ([`Program`]): The actions of all ranks, or of those in the part of one.
        cuts (`Mapping[BatchKey, ContextCut]`): How this rank cuts microbatches.
    """
    starts = list(accumulate((len(row) for row in step.microbatches[LANGUAGE_MODEL]), initial=0))
    return StepFingerprint(
        _arrangement(step),
        dict.fromkeys(program.replicas(LANGUAGE_MODEL), program.checksum),
        {starts[replica] + index: _checksum(cut) for (_, replica, index, _), cut in cuts.items()},
    )


def _arrangement(step: StepPlan) -> int:
    """Of the samples of a step, and of the microbatches that they are in."""
    digest = hashlib.blake2b(repr((step.epoch, list(step.microbatches))).encode(), digest_size=8)
    digest.update(np.array(step.samples, np.int64).tobytes())
    for replicas in step.microbatches.values():
        microbatches = list(chain.from_iterable(replicas))
        sizes = [len(replicas), *map(len, replicas), *map(len, microbatches)]
        digest.update(np.array(sizes, np.int64).tobytes())
        digest.update(np.fromiter(chain.from_iterable(microbatches), np.int64).tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _checksum(cut: ContextCut) -> int:
    """Of which token is where, and what is gathered."""
    assignment = cut.assignment
    digest = hashlib.blake2b(digest_size=8)
    for array in (assignment.layout, assignment.blocks, assignment.gathered):
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1
