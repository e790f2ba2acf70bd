"""Checksums of a step, which ranks compare before they exchange tensors."""

from __future__ import annotations

import hashlib
import mimetypes
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..plan import LANGUAGE_MODEL, StepPlan
from ..schedule import Program
from .context_tokens import ChunkKey
from .item_sharding import Sharding

MEDIA_ONE = 2**30
MEDIA_ROUNDING = MEDIA_ONE // 10**4
_NUM_LOOKED_AT = 1024  # numbers of a tensor; another augmentation changes most of them


@dataclass(frozen=True)
class StepFingerprint:
    """Checksums of all decisions that the ranks of a step make independently and that must be equal."""

    step: int  # of the samples and of their microbatches
    # language model replica -> checksum of the ordered actions of all ranks that exchange tensors with it in the step;
    # for the replicas in the part of the step that this rank has planned
    programs: Mapping[int, int]
    # (module, batch index) -> checksum of the distribution over cp ranks of the chunk with the sample, for the chunks
    # that this rank knows
    shardings: Mapping[tuple[str, int], int] = field(default_factory=dict)
    # batch index -> checksums of the sample as this rank read it, once for each dataset that it reads
    samples: Mapping[int, Collection[int]] = field(default_factory=dict)
    # (module, replica, microbatch) of this rank -> checksum of the whole numbers of its inputs
    inputs: Mapping[tuple[str, int, int], int] = field(default_factory=dict)
    # (module, replica, microbatch) of this rank -> a number of its floating-point inputs, which differs by at most
    # `MEDIA_ROUNDING` where they differ by rounding, as between processors
    media: Mapping[tuple[str, int, int], int] = field(default_factory=dict)


def fingerprint(
    step: StepPlan,
    program: Program,  # actions of all ranks, or of those in the part of one
    shardings: Mapping[ChunkKey, Sharding],  # of the chunks that this rank knows
    batches: Mapping[ChunkKey, Mapping[str, Any]],  # collated inputs of this rank's chunks
    samples: Mapping[int, Collection[int]],  # batch index -> checksums of the sample
) -> StepFingerprint:
    chunks: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for (module, replica, index, _), batch in sorted(batches.items()):
        chunks.setdefault((module, replica, index), []).append(batch)
    return StepFingerprint(
        _arrangement(step),
        dict.fromkeys(program.replicas(LANGUAGE_MODEL), program.checksum),
        {
            (key[0], batch_index): _checksum(sharding)
            for key, sharding in shardings.items()
            for batch_index in step.chunk(*key)
        },
        samples,
        {key: _inputs(of_microbatch) for key, of_microbatch in chunks.items()},
        {key: _media(of_microbatch) for key, of_microbatch in chunks.items()},
    )


def _arrangement(step: StepPlan) -> int:
    digest = hashlib.blake2b(repr((step.epoch, list(step.microbatches))).encode(), digest_size=8)
    digest.update(np.array(step.samples, np.int64).tobytes())
    for replicas in step.microbatches.values():
        microbatches = list(chain.from_iterable(replicas))
        sizes = [len(replicas), *map(len, replicas), *map(len, microbatches)]
        digest.update(np.array(sizes, np.int64).tobytes())
        digest.update(np.fromiter(chain.from_iterable(microbatches), np.int64).tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _tensors(batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of batches by name, in an order that is the same on all ranks."""
    return ((name, batch[name]) for batch in batches for name in sorted(batch) if torch.is_tensor(batch[name]))


def _inputs(batches: Iterable[Mapping[str, Any]]) -> int:
    """Checksum of the names, shapes and whole numbers of the chunks of a microbatch."""
    result = 0
    for name, value in _tensors(batches):
        result = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), result)
        if not value.is_floating_point():
            result = zlib.crc32(np.ascontiguousarray(value.cpu().numpy()).data, result)
    return result


def _media(batches: Iterable[Mapping[str, Any]]) -> int:
    """A weighted mean of some of the floating-point numbers of the chunks, each squeezed between -1 and 1."""
    means = [0.0]
    for _, value in _tensors(batches):
        if value.is_floating_point() and value.numel():
            flat = value.reshape(-1)
            some = flat[:: max(1, len(flat) // _NUM_LOOKED_AT)].double().nan_to_num().cpu().numpy()
            weights = np.arange(1, len(some) + 1, dtype=np.uint32) * np.uint32(2654435761) / 2**32
            means.append(float((weights * (some / (1 + np.abs(some)))).mean()))
    return round(sum(means) * MEDIA_ONE)


def _checksum(sharding: Sharding) -> int:
    """Checksum of the cp rank of each token or image, and of what else ranks must have alike."""
    digest = hashlib.blake2b(digest_size=8)
    for array in sharding.decided:
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


# Checksums of samples, the same in every process.

_ENDS = 8  # of a sequence, at each end
_MEDIA_DIMS = 3  # of an array that is an image, or several
_FILE_KEYS = frozenset({"bytes", "array"})  # of what `datasets` makes of a file, beside its `path`


def row_digest(rows: Any) -> int:
    """A 31-bit number of nested lists and mappings as they are stored; of long values only both ends count."""
    return zlib.crc32(repr(_sketch(rows)).encode()) >> 1


def text_digest(sample: Any) -> int:
    """A 31-bit number of the tokens, or of text and whole numbers: equal where a sample is read without media, too."""
    if isinstance(sample, Mapping) and "input_ids" in sample:
        sample = {name: sample.get(name) for name in ("input_ids", "labels")}
    return zlib.crc32(repr(_text(sample)).encode()) >> 1


def _sketch(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _sketch(item) for key, item in value.items()}
    if isinstance(value, (bytes, str)):
        content = value if isinstance(value, bytes) else value.encode(errors="replace")
        return len(content), zlib.crc32(content[:1024]), zlib.crc32(content[-1024:])
    if isinstance(value, (torch.Tensor, np.ndarray)):
        flat = value.reshape(-1)
        return str(value.dtype), tuple(value.shape), flat[:_ENDS].tolist(), flat[-_ENDS:].tolist()
    if isinstance(value, (list, tuple)):
        ends = value if len(value) <= 2 * _ENDS else [*value[:_ENDS], *value[-_ENDS:]]
        return len(value), [_sketch(item) for item in ends]
    return value if isinstance(value, (int, float, bool, type(None))) else type(value).__name__


def _text(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "path" in value and _FILE_KEYS & value.keys():
            return None
        parts = ((str(key), _text(value[key])) for key in sorted(value, key=str))
        return {key: part for key, part in parts if part is not None}
    if isinstance(value, str):
        kind = mimetypes.guess_type(value)[0] or ""
        return None if kind.startswith(("image/", "audio/", "video/")) else zlib.crc32(value.encode(errors="replace"))
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = np.zeros(0) if value.is_floating_point() or value.is_complex() else value.numpy()
    elif isinstance(value, (list, tuple)):
        if not set(map(type, value)) <= {int}:
            return [_text(item) for item in value[: 2 * _ENDS]]
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        counts = value.dtype.kind in "iub" and value.ndim < _MEDIA_DIMS
        return (value.shape, zlib.crc32(np.ascontiguousarray(value.astype(np.int64)).tobytes())) if counts else None
    return value if isinstance(value, (int, bool, type(None))) else None
