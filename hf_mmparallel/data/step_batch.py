"""The samples of a step on one rank: as they are read, with their program, or the reasons why they can't be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..plan import SampleSizes, StepPlan, Workloads
from ..schedule import Program
from .bad_samples import BadSample
from .context_tokens import ChunkKey, ContextSharding
from .fingerprint import StepFingerprint, fingerprint
from .global_batches import GlobalBatch
from .transfer import pack, unpack

T = TypeVar("T")


@dataclass(frozen=True)
class StepData:
    """
    The samples of a step that one rank computes on: what [`~StepDataset.read`] returns.

    Args:
        step (`StepPlan`): The assignment of samples to microbatches.
        batches (`dict[ChunkKey, dict[str, Any]]`):
            (module, replica, microbatch, chunk) -> the collated samples, for each chunk of this rank.
        shardings (`dict[ChunkKey, ContextSharding]`):
            Distribution of the tokens of the language model's microbatches over cp ranks, as far as this rank needs
            it.
        checksums (`dict[int, set[int]]`, *optional*):
            Batch index -> checksums of the sample, of each dataset that it was read from.
    """

    step: StepPlan
    batches: dict[ChunkKey, dict[str, Any]] = field(default_factory=dict)
    shardings: dict[ChunkKey, ContextSharding] = field(default_factory=dict)
    checksums: dict[int, set[int]] = field(default_factory=dict)

    def __getitem__(self, name: Any) -> Any:
        raise TypeError(
            f"A step under a plan has no entry {name!r}: its inputs are split into chunks, in `StepBatch.batches`. "
            "Change inputs in the `data_collator`."
        )

    def pin_memory(self) -> StepData:
        """Called by the data loader's pinning thread. Tensors that share a storage, as from a worker, still do."""
        pinned: dict[int, torch.Tensor] = {}
        for batch in self.batches.values():
            for name, value in batch.items():
                if torch.is_tensor(value):
                    storage = value.untyped_storage()
                    if storage.data_ptr() not in pinned:
                        pinned[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).pin_memory()
                    copied = pinned[storage.data_ptr()].untyped_storage()
                    layout = value.storage_offset(), value.size(), value.stride()
                    batch[name] = torch.empty(0, dtype=value.dtype).set_(copied, *layout)
        return self

    def __reduce__(self) -> tuple:
        return _unpacked, (type(self), *pack(self.__dict__))


@dataclass(frozen=True)
class StreamRows:
    """
    The stored samples of a stream that a worker read for a global batch.

    Args:
        digest (`int`): Their checksum, which the ranks compare.
        packed (`torch.Tensor`, *optional*): Their bytes, if the main process may have to plan the step again.
    """

    digest: int
    packed: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepBatch(StepData):
    """
    A step that an engine can run: an item of a loader.

    Args:
        program (`Program`): The actions of this rank.
        fingerprint (`StepFingerprint`): Checksums that ranks compare before they run the step.
        global_batch (`GlobalBatch`): The global batch of the step.
        sizes (`SampleSizes`, *optional*): Sizes of the samples, if known.
        workloads (`Workloads`, *optional*): The workloads by which samples were assigned.
        stream ([`StreamRows`], *optional*): The stored samples, if they come from a stream.
    """

    program: Program
    fingerprint: StepFingerprint
    global_batch: GlobalBatch
    sizes: SampleSizes | None = None
    workloads: Workloads | None = None
    stream: StreamRows | None = None

    @classmethod
    def of(
        cls, data: StepData, program: Program, rank: int, global_batch: GlobalBatch | None = None, **known: Any
    ) -> StepBatch:
        """
        The batch of a rank.

        Args:
            data ([`StepData`]): The samples that the rank computes on.
            program (`Program`): The actions of all ranks, or of those in the part of the rank.
            rank (`int`): The rank.
            global_batch (`GlobalBatch`, *optional*): The global batch; made of the samples of the step if left out.
            known: `sizes`, `workloads` and `stream`, as far as they are known.
        """
        return cls(
            data.step,
            data.batches,
            data.shardings,
            program=program.of_rank(rank),
            fingerprint=fingerprint(data.step, program, data.shardings, data.batches, data.checksums),
            global_batch=global_batch or GlobalBatch(data.step.samples, data.step.epoch),
            **known,
        )

    @property
    def bad(self) -> Mapping[int, BadSample]:
        """None of the samples: a batch of which this rank can't read some is an [`UnreadableBatch`]."""
        return {}


@dataclass(frozen=True)
class UnreadableBatch:
    """
    A global batch with samples that this rank can't read: an item of a loader that is never run. The ranks agree to
    leave the samples out, or to end the run.

    Args:
        global_batch (`GlobalBatch`): The global batch.
        bad (`Mapping[int, BadSample]`): Batch index -> its sample, at least one.
        stream ([`StreamRows`], *optional*): The stored samples, if they come from a stream.
    """

    global_batch: GlobalBatch
    bad: Mapping[int, BadSample]
    stream: StreamRows | None = None

    def __reduce__(self) -> tuple:
        return _unpacked, (type(self), *pack(self.__dict__))


def _unpacked(kind: type[T], *packed: Any) -> T:
    """Unpickles a batch."""
    return kind(**unpack(packed))
