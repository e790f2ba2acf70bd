"""Agreement of the ranks on samples: the same ones everywhere, without those that some rank can't read."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainingArguments

from ..data.bad_samples import BadSample, BadSampleError
from ..data.global_batches import GlobalBatch
from ..data.step_batch import StepBatch, UnreadableBatch
from ..data.step_dataset import StepDataset
from ..world import World
from .start_checks import check_output_dir

logger = get_logger(__name__)
_NUM_COMPARED = 8
_UNREAD_CHECKSUM = -1


def check_same_folder(folder: str, setting: str, world: World) -> None:
    """Raises `ValueError` on all ranks, with two folders, if some rank saves to another one. Collective."""
    # each rank writes its part of a checkpoint there; `setting` names the argument in the error
    folders = world.all_gather(folder, "comparing the folder to save to")
    other = next((rank for rank, path in enumerate(folders) if path != folders[0]), None)
    if other is not None:
        raise ValueError(
            f"`{setting}` is `{folders[0]}` on rank 0 and `{folders[other]}` on rank {other}. Each rank writes its "
            "part of a checkpoint there: give all the same folder, without the rank, or a time that each process "
            "reads by itself, in its name."
        )


def check_output_folder(args: TrainingArguments, world: World) -> None:
    """Raises `ValueError` on all ranks if they save to different folders, or can't write to theirs. Collective."""
    if args.save_strategy != "no":
        check_same_folder(str(args.output_dir), "output_dir", world)
    world.from_first_rank(functools.partial(check_output_dir, args))


class SampleAgreement:
    """Leaves out samples that some rank can't read, or raises, the same on every rank."""

    def __init__(self, skip: bool, world: World, name: str = "dataset"):
        self.skip = skip  # otherwise such samples end the run
        self.world = world
        self.name = name  # of the dataset in errors
        self.num_skipped = 0
        self._reported: set[str] = set()
        self._compared: StepDataset | None = None

    def compare_again(self) -> None:
        """Lets the ranks compare samples again: of other samples, or of ranks, some may have compared and some not."""
        self._compared = None

    def agree(self, item: StepBatch | UnreadableBatch | None, dataset: StepDataset) -> StepBatch | None:
        """
        Returns the step of a loader's item, `None` at its end, without bad samples, the same on every rank. Raises
        [`BadSampleError`] for a bad sample unless `skip`, and when no sample of the step can be read; `RuntimeError`
        for streams and datasets that differ.

        Collective if `skip`: the ranks combine their bitmaps of bad samples, and while there are any the step is
        planned and read again without them. Collective for streams, whose rows the ranks compare, and for the first
        batch of any other dataset, of which they compare some samples.
        """
        if dataset.window is not None:
            self._compare(item)
        elif dataset is not self._compared:
            self._compare_first(None if item is None else item.global_batch, dataset)
            self._compared = dataset
        if item is None:
            return None
        if not self.skip and isinstance(item, UnreadableBatch):
            raise next(iter(item.bad.values())).error(self.world.rank if self.world.size > 1 else None)
        while self.skip and (batch_indices := self._bad_batch_indices(item)):
            reasons = self._exchange(item)
            if len(batch_indices) == len(item.global_batch.samples):
                raise BadSampleError(
                    f"None of the {len(batch_indices)} samples of a global batch can be read, the first because of: "
                    f"{reasons[batch_indices[0]][1]} Check the files and the collator."
                )
            for batch_index in batch_indices:
                self._report(*reasons[batch_index])
            self.num_skipped += len(batch_indices)
            item = dataset.again(item, batch_indices)
        assert isinstance(item, StepBatch)
        return item

    def batches(self, loader: Any) -> Iterator[StepBatch]:
        """The steps of a loader, without samples that can't be read. Collective, see [`~SampleAgreement.agree`]."""
        items = iter(loader)
        while (batch := self.agree(next(items, None), loader.dataset)) is not None:
            yield batch

    def _bad_batch_indices(self, item: StepBatch | UnreadableBatch) -> list[int]:
        flags = torch.zeros(len(item.global_batch.samples), dtype=torch.uint8)
        flags[list(item.bad)] = 1
        self.world.all_reduce(flags, "max", "comparing which samples can be read")
        return flags.nonzero().flatten().tolist()

    def _compare(self, item: StepBatch | UnreadableBatch | None) -> None:
        """Raises `RuntimeError` if the ranks don't read the same samples of a stream."""
        count = 0 if item is None else len(item.global_batch.samples)
        digest = 0 if item is None or item.stream is None else item.stream.digest
        extremes = torch.tensor([count, -count, digest, -digest])
        self.world.all_reduce(extremes, "max", "comparing samples of the stream")
        max_count, min_count, max_digest, min_digest = extremes.abs().tolist()
        if max_count != min_count or max_digest != min_digest:
            raise RuntimeError(
                f"The ranks read different samples from the stream, {min_count} to {max_count} for this step "
                f"(checksums from {min_digest} to {max_digest}). Every rank reads all of it: seed its shuffling, and "
                "don't split it by rank."
            )

    def _compare_first(self, global_batch: GlobalBatch | None, dataset: StepDataset) -> None:
        """Raises `RuntimeError` if the first samples of a global batch have another content on another rank."""
        samples = () if global_batch is None else global_batch.samples
        digests = [_UNREAD_CHECKSUM] * (1 + _NUM_COMPARED)
        digests[0] = zlib.crc32(repr(samples).encode())
        for number, digest in enumerate(
            dataset.digests(global_batch, _NUM_COMPARED) if global_batch is not None else ()
        ):
            digests[1 + number] = _UNREAD_CHECKSUM if digest is None else digest
        drawn, *columns = zip(*self.world.all_gather(digests, "comparing the first samples"), strict=True)
        if len(set(drawn)) > 1:
            return  # the ranks drew different indices: the check of the step reports it
        for number, column in enumerate(columns):
            known = {rank: digest for rank, digest in enumerate(column) if digest != _UNREAD_CHECKSUM}
            first = next(iter(known), 0)
            other = next((rank for rank, digest in known.items() if digest != known[first]), None)
            if other is not None:
                raise RuntimeError(
                    f"Sample {samples[number]} of the {self.name} differs between rank {first} and rank {other}. "
                    "Under a plan several ranks work on one sample, so that all need the same dataset in the same "
                    "order. `train_test_split`, `shuffle` and `random_split` without a seed draw in each process "
                    "anew: give them one (`seed=0`, or a `generator` with a seed), or build the dataset once and load "
                    "it on all ranks."
                )

    def _exchange(self, item: StepBatch | UnreadableBatch) -> dict[int, tuple[int, BadSample]]:
        """Batch index -> the first rank that could not read its sample, and the reason."""
        every = self.world.all_gather(item.bad, "comparing which samples can be read")
        ranks = reversed(list(enumerate(every)))
        return {batch_index: (rank, bad) for rank, samples in ranks for batch_index, bad in samples.items()}

    def _report(self, rank: int, bad: BadSample) -> None:
        """Logs a sample that a rank met once, on rank 0."""
        sentence = str(bad)
        if sentence not in self._reported:
            self._reported.add(sentence)
            logger.warning(f"{sentence} Rank {rank} met it. It is left out.")


class TargetCount:
    """Warns of global batches without target tokens, whose loss is always 0."""

    def __init__(self):
        self.num_without = 0

    def saw(self, num_targets: int, is_first: bool) -> None:
        """
        Counts the target tokens of a global batch, over all ranks; raises `ValueError` if the first batch of a run has
        none.
        """
        if num_targets:
            return
        reason = (
            "all `labels` are -100. Targets are what the `assistant` says in conversations, and what has a label of "
            "its own otherwise"
        )
        # not the first of one that is resumed
        if is_first:
            raise ValueError(
                f"The first global batch has no target token: {reason}. Give the roles of messages these names, or "
                "filter samples without targets."
            )
        self.num_without += 1
        # a later batch without any is logged the first time
        if self.num_without == 1:
            logger.warning(
                f"A global batch has no target token: {reason}. Its loss is 0, where the stock Trainer's is NaN; "
                "nothing is learned from it. Further ones are not reported."
            )
