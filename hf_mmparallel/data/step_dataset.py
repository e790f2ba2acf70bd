"""Reads datasets and makes the inputs of each task of this rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from ..plan import LANGUAGE_MODEL, ParallelPlan, SampleSizes, StepPlan, Workloads
from ..schedule import Program
from ..steps.step_planner import StepPlanner
from .bad_samples import BadSample, stored_row
from .context_tokens import BatchKey, ContextSharder, ContextSharding
from .digests import text_digest
from .fingerprint import StepFingerprint, fingerprint
from .global_batches import GlobalBatch
from .randomness import seeded, stable_seed
from .streams import StreamWindow
from .transfer import pack, unpack


@dataclass
class StepBatch:
    """
    This rank's part of a global batch.

    Args:
        step (`StepPlan`): The assignment of samples to microbatches.
        batches (`dict[BatchKey, dict[str, Any]]`):
            (module, replica, microbatch, chunk) -> the collated samples, for each chunk of this rank.
        shardings (`dict[BatchKey, ContextSharding]`):
            Distribution of the tokens of the language model's microbatches over cp ranks, as far as this rank needs
            it.
        program (`Program`, *optional*): This rank's actions, which an engine needs.
        sizes (`SampleSizes`, *optional*): Sizes of the samples, if known.
        workloads (`Workloads`, *optional*): The workloads by which samples were assigned.
        global_batch (`GlobalBatch`, *optional*): The global batch of the step.
        bad (`dict[int, BadSample]`):
            Batch index -> its sample, if this rank can't read it. A batch with bad samples has no inputs.
        rows (`torch.Tensor`, *optional*): Packed rows of a stream, needed to plan the step again.
        digest (`int`, *optional*, defaults to 0): Checksum of the rows of a stream, compared by the ranks.
        fingerprint (`StepFingerprint`, *optional*): Checksums that ranks compare before they run the step.
    """

    step: StepPlan
    batches: dict[BatchKey, dict[str, Any]] = field(default_factory=dict)
    shardings: dict[BatchKey, ContextSharding] = field(default_factory=dict)
    program: Program | None = None
    sizes: SampleSizes | None = None
    workloads: Workloads | None = None
    global_batch: GlobalBatch | None = None
    bad: dict[int, BadSample] = field(default_factory=dict)
    rows: torch.Tensor | None = None
    digest: int = 0
    fingerprint: StepFingerprint | None = None

    def __getitem__(self, name: Any) -> Any:
        raise TypeError(
            f"A step under a plan has no entry {name!r}: its inputs are split into chunks, in `StepBatch.batches`. "
            "Change inputs in the `data_collator`."
        )

    @property
    def planned_for(self) -> GlobalBatch:
        """The global batch; always present in batches of a loader."""
        assert self.global_batch is not None
        return self.global_batch

    def pin_memory(self) -> StepBatch:
        """Called by the data loader's pinning thread. Tensors that share a storage, as from a worker, still do."""
        pinned: dict[int, torch.Tensor] = {}
        for batch in self.batches.values():
            for name, value in batch.items():
                if torch.is_tensor(value):
                    storage = value.untyped_storage()
                    if storage.data_ptr() not in pinned:
                        pinned[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).pin_memory()
                    copied = pinned[storage.data_ptr()].untyped_storage()
                    place = value.storage_offset(), value.size(), value.stride()
                    batch[name] = torch.empty(0, dtype=value.dtype).set_(copied, *place)
        return self

    def __reduce__(self) -> tuple:
        return _unpacked, pack(self.__dict__)


def _unpacked(*packed: Any) -> StepBatch:
    """Unpickles a batch."""
    return StepBatch(**unpack(packed))


def keys_of_rank(plan: ParallelPlan, step: StepPlan, rank: int) -> dict[BatchKey, tuple[int, ...]]:
    """(module, replica, microbatch, chunk) -> batch indices, for every chunk of `rank`."""
    mine = dict.fromkeys((module, replica) for module, replica, _ in plan.stages_of_rank(rank))
    return {
        (module, replica, index, chunk): batch_indices
        for module, replica in mine
        for index in range(len(step.microbatches[module][replica]))
        for chunk, batch_indices in enumerate(step.chunks[module, replica, index])
    }


@dataclass(frozen=True)
class Reader:
    """
    Dataset and collator of a module.

    Args:
        dataset: A map-style dataset.
        collator (`Callable[[list], Mapping[str, Any]]`): Collates its samples.
    """

    dataset: Any
    collator: Callable[[list], Mapping[str, Any]]


class StepDataset(Dataset):
    """
    A dataset of [`StepBatch`]es: reads each sample once for each [`Reader`] of this rank, and collates every chunk.

    Random generators are seeded by epoch and dataset index while a sample is read or collated, so that all ranks get
    the same sample, and a resumed run repeats it.

    Args:
        readers (`Mapping[str, Reader]` or `Reader`): Module -> its reader, or one reader for all modules.
        keys (`Callable[[StepPlan], Mapping[BatchKey, tuple[int, ...]]]`): The chunks of this rank.
        seed (`int`): Base of all seeds.
        unused (`Mapping[str, frozenset[str]]`, *optional*):
            Module -> floating-point entries of a collated batch that it does not need, such as pixels in the language
            model. They are dropped.
        sharder ([`ContextSharder`], *optional*): Distributes the language model's microbatches over cp ranks.
        planner ([`StepPlanner`], *optional*): Plans the steps of global batches; not used by [`~StepDataset.read`].
        rank (`int`, *optional*, defaults to 0): This rank, whose program a batch contains.
        window ([`StreamWindow`], *optional*): The window of the stream that the readers read from, if any.
    """

    def __init__(
        self,
        readers: Mapping[str, Reader] | Reader,
        keys: Callable[[StepPlan], Mapping[BatchKey, tuple[int, ...]]],
        seed: int,
        unused: Mapping[str, frozenset[str]] | None = None,
        sharder: ContextSharder | None = None,
        planner: StepPlanner | None = None,
        rank: int = 0,
        window: StreamWindow | None = None,
    ):
        self.readers = readers
        self.keys = keys
        self.seed = seed
        self.unused = unused or {}
        self.sharder = sharder
        self.planner = planner
        self.rank = rank
        self.window = window

    def reader(self, module: str) -> Reader:
        """The reader of a module."""
        return self.readers if isinstance(self.readers, Reader) else self.readers[module]

    def __len__(self) -> int:
        """Number of samples, although an item is the step of a global batch: the batch sampler is not asked by it."""
        return len(self.reader(LANGUAGE_MODEL).dataset)

    def __getitems__(self, global_batch: GlobalBatch) -> StepBatch | None:
        """
        Plans the step of a global batch and reads its samples; `None` after the end of a stream. Samples that can't be
        read are listed in the batch, so that the ranks can agree on how to handle them.
        """
        if self.window is None:
            return self._planned(global_batch)
        global_batch = self.window.fetch(global_batch)
        if not global_batch.samples:
            return None
        batch = self._planned(global_batch)
        batch.rows, batch.digest = self.window.packed_rows(), self.window.digest()
        return batch

    def again(self, batch: StepBatch, batch_indices: Collection[int]) -> StepBatch:
        """Plans and reads the step of a batch again, without some of its samples."""
        if self.window is not None and batch.rows is not None:
            self.window.restore(batch.planned_for, batch.rows)
        result = self._planned(batch.planned_for.without(batch_indices))
        result.rows, result.digest = batch.rows, batch.digest
        return result

    def digests(self, global_batch: GlobalBatch, count: int) -> list[int | None]:
        """
        A checksum of each of the first samples of a global batch, `None` for one that can't be read. The language
        model's reader is used, so that no media are decoded.
        """
        dataset, result = self.reader(LANGUAGE_MODEL).dataset, []
        for index in global_batch.samples[:count]:
            try:
                with seeded(stable_seed(self.seed, global_batch.epoch, index)):
                    result.append(text_digest(dataset[index]))
            except MemoryError:
                raise
            except Exception:  # reported when its batch is read
                result.append(None)
        return result

    def _planned(self, global_batch: GlobalBatch) -> StepBatch:
        """Plans and reads the step of a global batch whose samples are available."""
        assert self.planner is not None
        if global_batch.bad:
            return StepBatch(
                StepPlan((), {}, {}, global_batch.epoch), global_batch=global_batch, bad=dict(global_batch.bad)
            )
        try:
            planned = self.planner(global_batch, self.rank)
        except Exception:
            bad = self._unmeasurable(global_batch)
            if not bad:
                raise
            return StepBatch(StepPlan((), {}, {}, global_batch.epoch), global_batch=global_batch, bad=bad)
        batch = self.read(planned.step)
        batch.program = planned.program.of_rank(self.rank)
        batch.fingerprint = fingerprint(planned.step, planned.program, batch.shardings)
        batch.sizes = planned.sizes
        batch.workloads = planned.workloads
        batch.global_batch = global_batch
        return batch

    def _unmeasurable(self, global_batch: GlobalBatch) -> dict[int, BadSample]:
        """Batch index -> its sample, if its size can't be measured."""
        sizes = None if self.planner is None else self.planner.sizes
        if sizes is None:
            return {}
        dataset = self.reader(LANGUAGE_MODEL).dataset
        return _failures(
            {batch_index: functools.partial(sizes, [index]) for batch_index, index in enumerate(global_batch.samples)},
            lambda batch_index, error: BadSample.of(
                global_batch.samples[batch_index], error, stored_row(dataset, global_batch.samples[batch_index])
            ),
        )

    def read(self, step: StepPlan) -> StepBatch:
        """Reads the inputs of this rank for a step, or lists its bad samples."""
        collated = _Collated(self, step)
        batches = {}
        for key, batch_indices in self.keys(step).items():
            unused = self.unused.get(key[0], frozenset())
            batches[key] = {
                name: value
                for name, value in collated.batch(self.reader(key[0]), batch_indices).items()
                if not (name in unused and torch.is_tensor(value) and value.is_floating_point())
            }
        shardings = {}
        if self.sharder is not None:
            reader = self.reader(LANGUAGE_MODEL)
            for key, batch_indices in self.sharder.keys(step).items():
                row = collated.batch(reader, batch_indices)
                if row:
                    shardings[key] = self.sharder(row)
        return StepBatch(step, bad=collated.bad) if collated.bad else StepBatch(step, batches, shardings)


class _Collated:
    """
    The collated samples of a step. Modules with the same reader share batches, and each sample is read once from each
    dataset. A batch with a bad sample is empty.
    """

    def __init__(self, source: StepDataset, step: StepPlan):
        self.source = source
        self.step = step
        self.samples: dict[tuple[int, int], Any] = {}
        self.batches: dict[tuple[int, tuple[int, ...]], Mapping[str, Any]] = {}
        self.bad: dict[int, BadSample] = {}

    def batch(self, reader: Reader, batch_indices: tuple[int, ...]) -> Mapping[str, Any]:
        """The batch of some batch indices, collated by `reader`."""
        key = (id(reader), batch_indices)
        if key not in self.batches:
            samples = {batch_index: self.sample(reader.dataset, batch_index) for batch_index in batch_indices}
            self.batches[key] = {} if self.bad.keys() & samples.keys() else self._collate(reader, samples)
        return self.batches[key]

    def _collate(self, reader: Reader, samples: Mapping[int, Any]) -> Mapping[str, Any]:
        """Collates samples by batch index; if that fails, collates each one alone to find the bad samples."""
        try:
            return self._collate_seeded(reader, samples)
        except MemoryError:
            raise
        except Exception:
            bad = _failures(
                {
                    batch_index: functools.partial(self._collate_seeded, reader, {batch_index: s})
                    for batch_index, s in samples.items()
                },
                lambda batch_index, error: self._describe(reader.dataset, batch_index, error, samples[batch_index]),
            )
            if not bad:
                raise
            self.bad.update(bad)
            return {}

    def _collate_seeded(self, reader: Reader, samples: Mapping[int, Any]) -> Mapping[str, Any]:
        indices = [self.step.samples[batch_index] for batch_index in samples]
        with seeded(stable_seed(self.source.seed, self.step.epoch, indices)):
            # Collators may modify samples, and a sample can be in several chunks.
            return reader.collator([_copy(sample) for sample in samples.values()])

    def sample(self, dataset: Any, batch_index: int) -> Any:
        """The sample of a batch index; `None`, and an entry in `bad`, if it can't be read."""
        key = (id(dataset), batch_index)
        if key not in self.samples:
            index = self.step.samples[batch_index]
            self.samples[key] = None
            try:
                with seeded(stable_seed(self.source.seed, self.step.epoch, index)):
                    self.samples[key] = dataset[index]
            except MemoryError:
                raise
            except Exception as error:
                self.bad[batch_index] = self._describe(dataset, batch_index, error)
        return self.samples[key]

    def _describe(self, dataset: Any, batch_index: int, error: Exception, sample: Any = None) -> BadSample:
        """Describes a bad sample, with its file if its stored row or the sample names one."""
        index = self.step.samples[batch_index]
        return BadSample.of(index, error, [stored_row(dataset, index), sample])


def _failures(
    attempts: Mapping[int, Callable[[], Any]], describe: Callable[[int, Exception], BadSample]
) -> dict[int, BadSample]:
    """Batch index -> description of the failure, for the attempts that fail."""
    bad = {}
    for batch_index, attempt in attempts.items():
        try:
            attempt()
        except MemoryError:
            raise
        except Exception as error:
            bad[batch_index] = describe(batch_index, error)
    return bad


def _copy(sample: Any) -> Any:
    return dict(sample) if isinstance(sample, Mapping) else sample


def as_is(batch: Any) -> Any:
    """The collate function of a loader whose dataset collates."""
    return batch
