"""The samples of a step on one rank: as they are read, with their program, or the reasons why they can't be read."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..plan import SampleSizes, StepPlan, Workloads
from ..schedule import Program
from .bad_samples import BadSample
from .context_tokens import ChunkKey
from .fingerprint import StepFingerprint, fingerprint
from .global_batches import GlobalBatch
from .item_sharding import Sharding

# Packs the tensors of an object into one, to send it from a data loader's worker to the main process.

_ALIGNMENT = 64


def pack(value: Any) -> tuple[bytes, Tensor]:
    """Packs the tensors of a picklable object into one: the object without them, and their bytes as uint8."""
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(value)
    # One tensor, since each takes a message and an open file to send, and a batch can have hundreds of them.
    buffer = torch.empty(packer.num_bytes, dtype=torch.uint8)
    for offset, tensor in packer.found.values():
        _view(buffer, offset, tensor.dtype, tensor.shape).copy_(tensor)
    return stream.getvalue(), buffer


def unpack(packed: tuple[bytes, Tensor]) -> Any:
    """The object that was packed, whose tensors are views of the one that has their bytes."""
    content, buffer = packed
    return _Unpacker(io.BytesIO(content), buffer).load()


def _view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return buffer[offset : offset + size].view(dtype).view(shape)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, on the CPU, and without gradient, quantization or other metadata."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and tensor.device.type == "cpu" and not tensor.requires_grad


class _Packer(pickle.Pickler):
    """Replaces dense CPU tensors by indices, and collects them."""

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.found: dict[int, tuple[int, Tensor]] = {}
        self.num_bytes = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        if id(obj) not in self.found:
            self.found[id(obj)] = self.num_bytes, obj
            self.num_bytes += -(-obj.numel() * obj.element_size() // _ALIGNMENT) * _ALIGNMENT
        return self.found[id(obj)][0], obj.dtype, tuple(obj.shape)


class _Unpacker(pickle.Unpickler):
    """Replaces indices by tensors that are views of a buffer."""

    def __init__(self, stream: io.BytesIO, buffer: Tensor):
        super().__init__(stream)
        self.buffer = buffer

    def persistent_load(self, pid: Any) -> Tensor:
        return _view(self.buffer, *pid)


T = TypeVar("T")
_TARGETS = ("labels", "shift_labels")


@dataclass(frozen=True)
class StepData:
    """The samples of a step that one rank computes on: what [`~StepDataset.read`] returns."""

    step: StepPlan  # the assignment of samples to microbatches
    # (module, replica, microbatch, chunk) -> the collated samples, for each chunk of this rank
    batches: dict[ChunkKey, dict[str, Any]] = field(default_factory=dict)
    # distribution of the tokens of the language model's microbatches over cp ranks, as far as this rank needs it
    shardings: dict[ChunkKey, Sharding] = field(default_factory=dict)
    # batch index -> checksums of the sample, of each dataset that it was read from
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
    """The stored samples of a stream that a worker read for a global batch."""

    digest: int  # their checksum, which the ranks compare
    packed: torch.Tensor | None = None  # their bytes, if the main process may have to plan the step again


@dataclass(frozen=True, kw_only=True)
class StepBatch(StepData):
    """A step that an engine can run: an item of a loader."""

    program: Program  # the actions of this rank
    fingerprint: StepFingerprint  # checksums that ranks compare before they run the step
    global_batch: GlobalBatch
    sizes: SampleSizes | None = None
    workloads: Workloads | None = None  # by which samples were assigned
    stream: StreamRows | None = None  # if they come from a stream

    @classmethod
    def of(
        cls,
        data: StepData,
        program: Program,  # actions of all ranks, or of those in the part of the rank
        rank: int,
        global_batch: GlobalBatch | None = None,  # made of the samples of the step if left out
        **known: Any,  # `sizes`, `workloads` and `stream`, as far as they are known
    ) -> StepBatch:
        """Makes the batch of a rank from the samples that it computes on."""
        return cls(
            data.step,
            data.batches,
            data.shardings,
            program=program.of_rank(rank),
            fingerprint=fingerprint(data.step, program, data.shardings, data.batches, data.checksums),
            global_batch=global_batch or GlobalBatch(data.step.samples, data.step.epoch),
            **known,
        )

    def forwards(self) -> StepBatch:
        """The same without targets and backwards."""
        batches = {key: {k: v for k, v in inputs.items() if k not in _TARGETS} for key, inputs in self.batches.items()}
        return replace(self, batches=batches, program=self.program.forwards())

    @property
    def bad(self) -> Mapping[int, BadSample]:
        """None of the samples: a batch of which this rank can't read some is an [`UnreadableBatch`]."""
        return {}


@dataclass(frozen=True)
class UnreadableBatch:
    """A global batch with unreadable samples, never run: the ranks agree to leave these out, or to end the run."""

    global_batch: GlobalBatch
    bad: Mapping[int, BadSample]  # batch index -> its sample, at least one
    stream: StreamRows | None = None  # if they come from a stream

    def __reduce__(self) -> tuple:
        return _unpacked, (type(self), *pack(self.__dict__))


def _unpacked(kind: type[T], *packed: Any) -> T:
    return kind(**unpack(packed))
