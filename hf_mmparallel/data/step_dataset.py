"""Reads datasets and makes the inputs of each task of this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from ..cost.step_planner import StepPlanner
from ..plan import LANGUAGE_MODEL, ParallelPlan, StepPlan
from .bad_samples import BadSample, stored_row
from .context_tokens import ChunkKey
from .fingerprint import text_digest
from .global_batches import GlobalBatch
from .item_sharding import Sharder
from .randomness import seeded, stable_seed
from .size_sources import measure_samples
from .step_batch import StepBatch, StepData, StreamRows, UnreadableBatch
from .streams import StreamWindow


@dataclass(frozen=True)
class Reader:
    """Map-style dataset and collator of a module."""

    dataset: Any
    collator: Callable[[list], Mapping[str, Any]]


@dataclass(frozen=True)
class RankInputs:
    """The inputs that one rank reads of a step. It can be pickled, for the workers of a data loader."""

    plan: ParallelPlan
    rank: int
    # module -> floating-point entries of a collated batch that it does not need, such as pixels in the language model,
    # and that are dropped
    unused: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # module with several cp ranks -> what distributes its chunks over them
    sharders: Mapping[str, Sharder] = field(default_factory=dict)
    # generator -> entry with its targets, id of its placeholder, and placeholders of a target
    targets: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)

    def chunks(self, step: StepPlan) -> dict[ChunkKey, tuple[int, ...]]:
        """(module, replica, microbatch, chunk) -> batch indices, for every chunk of the rank."""
        own = dict.fromkeys((module, replica) for module, replica, _ in self.plan.stages_of_rank(self.rank))
        return {
            (module, replica, index, chunk): batch_indices
            for module, replica in own
            for index in range(len(step.microbatches[module][replica]))
            for chunk, batch_indices in enumerate(step.chunks[module, replica, index])
        }

    def shared_chunks(self, step: StepPlan) -> dict[ChunkKey, tuple[int, ...]]:
        """Chunks, as in `chunks`, that cp ranks share and this rank computes or exchanges features with."""
        mine: dict[str, set[int]] = {}
        for module, replica, _ in self.plan.stages_of_rank(self.rank):
            mine.setdefault(module, set()).update(*step.microbatches[module][replica])
        edges = [{edge.source, edge.target} for edge in self.plan.edges]
        result = {}
        for name in self.sharders:
            ends = {name}.union(*(edge for edge in edges if name in edge))
            wanted = set().union(*(mine.get(module, ()) for module in ends))
            located = {step.location_of[name, index] for index in wanted if (name, index) in step.location_of}
            for replica, microbatch in sorted(located):
                for chunk, batch_indices in enumerate(step.chunks[name, replica, microbatch]):
                    if not wanted.isdisjoint(batch_indices):
                        result[name, replica, microbatch, chunk] = batch_indices
        return result


def check_targets(batch: Mapping[str, Any], inputs: RankInputs, samples: Sequence[int]) -> None:
    """Refuses samples of the language model with targets of a generator that have no placeholders."""
    for name, (entry, token, num_tokens) in inputs.targets.items():
        if entry in batch and "input_ids" in batch:
            count, found = len(batch[entry]), int((torch.as_tensor(batch["input_ids"]) == token).sum())
            if count * num_tokens > found:
                raise ValueError(
                    f"Samples {list(samples)} have {count} items in `{entry}`, but {found} placeholders of generator "
                    f"`{name}` (id {token}) in `input_ids`. Give {num_tokens} placeholders for each item."
                )


class _BadSamplesError(Exception):
    """Raised if samples of a step can't be read; `bad` has them by batch index."""

    def __init__(self, bad: Mapping[int, BadSample]):
        super().__init__(*bad.values())
        self.bad = bad


class StepDataset(Dataset):
    """
    A dataset of steps: reads each sample once for each [`Reader`] of this rank, and collates every chunk.

    Random generators are seeded by epoch and dataset index while a sample is read or collated, so that all ranks get
    the same sample, and a resumed run repeats it.
    """

    def __init__(
        self,
        readers: Mapping[str, Reader] | Reader,  # module -> its reader, or one reader for all modules
        inputs: RankInputs,
        seed: int,  # base of all seeds
        planner: StepPlanner | None = None,  # plans the steps of global batches; not used by `read`
        window: StreamWindow | None = None,  # of the stream that the readers read from, if any
    ):
        self.readers = readers
        self.inputs = inputs
        self.seed = seed
        self.planner = planner
        self.window = window

    def reader(self, module: str) -> Reader:
        return self.readers if isinstance(self.readers, Reader) else self.readers[module]

    def __len__(self) -> int:
        """Number of samples, which `Trainer.num_examples` reads; the length of the batch sampler is that of steps."""
        return len(self.reader(LANGUAGE_MODEL).dataset)

    def __getitems__(self, global_batch: GlobalBatch) -> StepBatch | UnreadableBatch | None:
        """Plans the step of a global batch and reads its samples; `None` after the end of a stream."""
        if self.window is None:
            return self._planned(global_batch)
        global_batch = self.window.fetch(global_batch)
        if not global_batch.samples:
            return None
        return self._planned(global_batch, StreamRows(self.window.digest(), self.window.packed_rows()))

    def again(self, batch: StepBatch | UnreadableBatch, batch_indices: Collection[int]) -> StepBatch | UnreadableBatch:
        """Plans and reads the step of a batch again, without some of its samples."""
        if self.window is not None and batch.stream is not None and batch.stream.packed is not None:
            self.window.restore(batch.global_batch, batch.stream.packed)
        return self._planned(batch.global_batch.without(batch_indices), batch.stream)

    def digests(self, global_batch: GlobalBatch, count: int) -> list[int | None]:
        """A checksum of each of the first samples of a global batch, `None` for one that can't be read."""
        dataset, result = self.reader(LANGUAGE_MODEL).dataset, []  # decodes no media
        for index in global_batch.samples[:count]:
            try:
                with seeded(stable_seed(self.seed, global_batch.epoch, index)):
                    result.append(text_digest(dataset[index]))
            except (MemoryError, ImportError):  # no fault of the sample
                raise
            except Exception:  # reported when its batch is read
                result.append(None)
        return result

    def _planned(self, global_batch: GlobalBatch, stream: StreamRows | None = None) -> StepBatch | UnreadableBatch:
        """Plans and reads the step of a global batch, of a stream that has been read up to it."""
        assert self.planner is not None
        if global_batch.bad:
            return UnreadableBatch(global_batch, dict(global_batch.bad), stream)
        try:
            planned = self.planner(global_batch, self.inputs.rank)
        except Exception:
            bad = self._unmeasurable(global_batch)
            if not bad:
                raise
            return UnreadableBatch(global_batch, bad, stream)
        try:
            data = self.read(planned.step)
        except _BadSamplesError as error:
            return UnreadableBatch(global_batch, error.bad, stream)
        known = {"sizes": planned.sizes, "workloads": planned.workloads, "stream": stream}
        return StepBatch.of(data, planned.program, self.inputs.rank, global_batch, **known)

    def _unmeasurable(self, global_batch: GlobalBatch) -> dict[int, BadSample]:
        """Batch index -> its sample, if its size can't be measured."""
        sizes = None if self.planner is None else self.planner.sizes
        if sizes is None:
            return {}
        dataset = self.reader(LANGUAGE_MODEL).dataset
        errors = measure_samples(sizes, global_batch.samples)
        return {
            batch_index: BadSample.of(index, errors[index], stored_row(dataset, index))
            for batch_index, index in enumerate(global_batch.samples)
            if index in errors
        }

    def read(self, step: StepPlan) -> StepData:
        collated = _Collated(self, step)
        batches = {}
        for key, batch_indices in self.inputs.chunks(step).items():
            unused = self.inputs.unused.get(key[0], frozenset())
            batch = collated.batch(self.reader(key[0]), batch_indices)
            if key[0] == LANGUAGE_MODEL:
                check_targets(batch, self.inputs, [step.samples[index] for index in batch_indices])
            batches[key] = {
                name: value
                for name, value in batch.items()
                if not (name in unused and torch.is_tensor(value) and value.is_floating_point())
            }
        shardings = {}
        for key, batch_indices in self.inputs.shared_chunks(step).items():
            tokens = collated.batch(self.reader(LANGUAGE_MODEL), batch_indices)
            if tokens:
                shardings[key] = self.inputs.sharders[key[0]](tokens)
        if collated.bad:
            raise _BadSamplesError(collated.bad)
        return StepData(step, batches, shardings, collated.checksums)


class _Collated:
    """The collated samples of a step, each read once from each dataset; a batch with a bad sample is empty."""

    def __init__(self, source: StepDataset, step: StepPlan):
        self.source = source
        self.step = step
        self.samples: dict[tuple[int, int], Any] = {}
        # by the reader's id, so that modules with the same reader share batches
        self.batches: dict[tuple[int, tuple[int, ...]], Mapping[str, Any]] = {}
        self.bad: dict[int, BadSample] = {}
        self.checksums: dict[int, set[int]] = {}

    def batch(self, reader: Reader, batch_indices: tuple[int, ...]) -> Mapping[str, Any]:
        key = (id(reader), batch_indices)
        if key not in self.batches:
            samples = {batch_index: self.sample(reader.dataset, batch_index) for batch_index in batch_indices}
            self.batches[key] = {} if self.bad.keys() & samples.keys() else self._collate(reader, samples)
        return self.batches[key]

    def _collate(self, reader: Reader, samples: Mapping[int, Any]) -> Mapping[str, Any]:
        """Collates samples by batch index; if that fails, collates each one alone to find the bad samples."""
        try:
            return self._collate_seeded(reader, samples)
        except (MemoryError, ImportError):  # no fault of the sample
            raise
        except Exception:
            bad = {}
            for batch_index, sample in samples.items():
                try:
                    self._collate_seeded(reader, {batch_index: sample})
                except (MemoryError, ImportError):  # no fault of the sample
                    raise
                except Exception as error:
                    bad[batch_index] = self._describe(reader.dataset, batch_index, error, sample)
            if not bad:
                raise
            self.bad.update(bad)
            return {}

    def _collate_seeded(self, reader: Reader, samples: Mapping[int, Any]) -> Mapping[str, Any]:
        indices = [self.step.samples[batch_index] for batch_index in samples]
        with seeded(stable_seed(self.source.seed, self.step.epoch, indices)):
            # Collators may modify samples, and a sample can be in several chunks.
            return reader.collator([dict(s) if isinstance(s, Mapping) else s for s in samples.values()])

    def sample(self, dataset: Any, batch_index: int) -> Any:
        """The sample of a batch index; `None`, and an entry in `bad`, if it can't be read."""
        key = (id(dataset), batch_index)
        if key not in self.samples:
            index = self.step.samples[batch_index]
            self.samples[key] = None
            try:
                with seeded(stable_seed(self.source.seed, self.step.epoch, index)):
                    self.samples[key] = sample = dataset[index]
                self.checksums.setdefault(batch_index, set()).add(text_digest(sample))
            except (MemoryError, ImportError):  # no fault of the sample
                raise
            except Exception as error:
                self.bad[batch_index] = self._describe(dataset, batch_index, error)
        return self.samples[key]

    def _describe(self, dataset: Any, batch_index: int, error: Exception, sample: Any = None) -> BadSample:
        """Describes a bad sample, with its file if its stored row or the sample names one."""
        index = self.step.samples[batch_index]
        return BadSample.of(index, error, [stored_row(dataset, index), sample])


def as_is(batch: Any) -> Any:
    return batch
