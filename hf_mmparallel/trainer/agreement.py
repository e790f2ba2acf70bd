"""What the ranks agree on: what the first of them finds out, and which samples of a step can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.logging import get_logger

from ..data.bad_samples import BadSample, BadSampleError
from ..data.loader import StepBatch, StepDataset
from ..runtime.activity import doing
from ..runtime.failure import RemoteRankError, failure_sentence

logger = get_logger(__name__)
T = TypeVar("T")


def from_first_rank(find: Callable[[], T], device: torch.device) -> T:
    """
    What the first rank finds, on all ranks. Collective.

    Args:
        find (`Callable`): Called on the first rank only; what it returns can be pickled.
        device (`torch.device`): Where collectives of the default group take place.

    Raises:
        `ValueError`: On the other ranks with the sentence of the first, for a `ValueError` or `OSError` there.
        [`RemoteRankError`]: On the other ranks, for any other exception there.
    """
    if not dist.is_initialized():
        return find()
    found: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found[0] = find()
        except Exception as error:
            plain = isinstance(error, (OSError, ValueError))
            failure = error
            found[1] = ValueError(str(error)) if plain else RemoteRankError(failure_sentence(0, error))
    with doing("what rank 0 finds out", waits=True):
        dist.broadcast_object_list(found, src=0, device=device if dist.get_backend() == "nccl" else None)
    if failure is not None:
        raise failure
    if found[1] is not None:
        raise found[1]
    return found[0]


class SampleAgreement:
    """
    Decides what happens to samples that some rank can't read, the same on every rank.

    Args:
        skip (`bool`): Whether to leave such samples out; otherwise they end the run.
        device (`torch.device`): Where collectives of the default group take place.
    """

    def __init__(self, skip: bool, device: torch.device):
        self.skip = skip
        self.device = device
        self.num_skipped = 0
        self._reported: set[str] = set()

    def settle(self, batch: StepBatch | None, dataset: StepDataset) -> StepBatch | None:
        """
        A batch without bad samples.

        Collective if `skip`: the ranks combine their bitmaps of bad samples, and while there are any the step is
        planned and read again without them. Collective for a stream, of which all ranks must read the same.

        Args:
            batch (`StepBatch` or `None`): What the loader yields, `None` at its end.
            dataset (`StepDataset`): What reads again.

        Raises:
            [`BadSampleError`]: For a bad sample unless `skip`, and when no sample of the step can be read.
            `RuntimeError`: For streams that differ.
        """
        if dataset.window is not None:
            self._compare(batch)
        if batch is None:
            return None
        if not self.skip:
            for bad in batch.bad.values():
                raise bad.error()
            return batch
        while slots := self._bad_slots(batch):
            found = self._exchange(batch)
            if len(slots) == len(batch.drawn.samples):
                raise BadSampleError(
                    f"None of the last {len(slots)} samples of a global batch can be read, the first because of: "
                    f"{found[slots[0]]} Check the files and the collator."
                )
            for slot in slots:
                self._report(found[slot])
            self.num_skipped += len(slots)
            batch = dataset.again(batch, slots)
        return batch

    def _bad_slots(self, batch: StepBatch) -> list[int]:
        """The slots that are bad on any rank."""
        flags = torch.zeros(len(batch.drawn.samples), dtype=torch.uint8)
        flags[list(batch.bad)] = 1
        flags = flags.to(self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return flags.nonzero().flatten().tolist()

    def _compare(self, batch: StepBatch | None) -> None:
        """Raises `RuntimeError` if the ranks don't read the same rows of a stream."""
        count = 0 if batch is None else len(batch.drawn.samples)
        digest = 0 if batch is None else batch.digest
        extremes = torch.tensor([count, -count, digest, -digest], device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        most, least, high, low = extremes.tolist()
        if (most, high) != (-least, -low):
            raise RuntimeError(
                f"The ranks read different samples from the stream, {-least} to {most} for this step (checksums from "
                f"{-low} to {high}). Every rank reads all of it: seed its shuffling, and don't split it by rank."
            )

    def _exchange(self, batch: StepBatch) -> dict[int, BadSample]:
        """Slot -> what the first rank that met it says."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, batch.bad)
        return {slot: bad for found in reversed(every) for slot, bad in found.items()}

    def _report(self, bad: BadSample) -> None:
        """Logs a sample once, on rank 0."""
        sentence = str(bad)
        if sentence not in self._reported:
            self._reported.add(sentence)
            logger.warning(f"{sentence} It is left out.")
