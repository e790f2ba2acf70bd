"""`StepPlan`: the assignment of the samples of a global batch to the replicas and microbatches of each module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._html_repr import HtmlRepr
from .model_spec import LANGUAGE_MODEL
from .parallel_plan import ParallelPlan

BatchIndices = tuple[int, ...]
Replicas = tuple[tuple[BatchIndices, ...], ...]  # replica -> microbatch -> batch indices


def turn_of(index: Any, count: Any, turns: Any) -> Any:
    """Turn of microbatch `index` if the `count` microbatches of a replica are spread evenly over `turns`."""
    return (2 * index + 1) * turns // (2 * count)


@dataclass(frozen=True)
class SampleLocations:
    """Replica and microbatch of the batch indices of a module, `[samples]` each."""

    batch_indices: NDArray
    replica: NDArray
    microbatch: NDArray  # within the replica
    microbatch_index: NDArray  # among the microbatches of all these replicas


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of a module as arrays, ordered by replica and microbatch."""

    replica: NDArray  # (chunks,)
    microbatch: NDArray  # (chunks,)
    chunk: NDArray  # (chunks,) in its microbatch
    batch_indices: NDArray  # (samples,) of all chunks
    chunk_of: NDArray  # (samples,) for each of `batch_indices`, the index of its chunk in the arrays above

    def find(self, replica: NDArray, microbatch: NDArray, chunk: NDArray) -> NDArray:
        """Indices in the arrays of chunks, given by replica, microbatch and chunk; -1 for those without samples."""
        width, depth = int(self.microbatch.max()) + 1, int(self.chunk.max()) + 1
        keys = (self.replica * width + self.microbatch) * depth + self.chunk
        wanted = (replica * width + microbatch) * depth + chunk
        position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[position] == wanted, position, -1)


@dataclass(frozen=True)
class StepPlan(HtmlRepr):
    """
    The assignment of one global batch.

    Replicas of a module may have different numbers of microbatches; a fast replica has more. An encoder or generator
    that works for several replicas of the language model counts in turns, as many as the largest number of
    microbatches among these replicas, over which the microbatches of each are spread evenly; see
    [`StepPlan.consumer_turns`].

    Example:

    ```python
    >>> microbatches = {"vision": [[(0, 1), (2, 3)]], "language_model": [[(0, 2)], [(1, 3)]]}
    >>> plan = StepPlan((7, 3, 5, 1), microbatches, {"vision": ("language_model",), "language_model": ()})
    >>> replica, microbatch = plan.locations["language_model"]
    >>> replica.tolist()
    [0, 1, 0, 1]
    ```
    """

    samples: tuple[int, ...]  # dataset indices in the sampler's order; a sample's *batch index* is its index here
    # module -> replica -> microbatch -> its batch indices
    microbatches: Mapping[str, Replicas]
    targets: Mapping[str, tuple[str, ...]]  # module -> the consumers of its features
    epoch: int = 0
    # for a part of a step, the whole step, which has the locations of all batch indices
    whole: StepPlan | None = field(default=None, repr=False, compare=False)

    @cached_property
    def _counts(self) -> dict[str, NDArray]:
        """Module -> number of microbatches of each replica, int64 `[replicas]`."""
        return {name: np.array(list(map(len, replicas))) for name, replicas in self.microbatches.items()}

    @cached_property
    def locations(self) -> dict[str, tuple[NDArray, NDArray]]:
        """Module -> replica and microbatch of every batch index, int64 `[num_samples]` each; -1 for one not in it."""
        if self.whole is not None:
            return self.whole.locations
        return {module: self._locations(replicas) for module, replicas in self.microbatches.items()}

    def _locations(self, replicas: Replicas) -> tuple[NDArray, NDArray]:
        """Replica and microbatch of every batch index in one module."""
        microbatches = list(chain.from_iterable(replicas))
        sizes = np.fromiter(map(len, microbatches), np.int64, len(microbatches))
        batch_indices = np.fromiter(chain.from_iterable(microbatches), np.int64, int(sizes.sum()))
        counts = list(map(len, replicas))
        replica, microbatch = np.full((2, len(self.samples)), -1)
        replica[batch_indices] = np.repeat(np.arange(len(counts)), counts).repeat(sizes)
        microbatch[batch_indices] = np.fromiter(chain.from_iterable(map(range, counts)), np.int64, len(sizes)).repeat(
            sizes
        )
        return replica, microbatch

    @cached_property
    def location_of(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        """(module, batch index) -> (replica, microbatch): [`~StepPlan.locations`] of single samples."""
        return _LocationOf(self)

    def consumer_turns(self, module: str, replica: int, target: str) -> dict[int, int]:
        """
        Batch index of a replica of `module` -> the turn in which `target` consumes its output; there are as many turns
        as the largest number of microbatches among the replicas of `target` that this replica feeds.
        """
        samples = self.batch_indices_of(module, [replica])
        used, turns, _ = self.turns(samples, target)
        return dict(zip(samples.batch_indices[used].tolist(), turns.tolist(), strict=True))

    @cached_property
    def chunks(self) -> _Chunks:
        """(module, replica, microbatch) -> its chunks, each with a forward and a backward of its own."""
        return _Chunks(self, {} if self.whole is None else self.whole.chunks.known)

    def chunk(self, module: str, replica: int, microbatch: int, index: int) -> BatchIndices:
        """The batch indices of a chunk, none for that of an empty task, see [`build_graph`]."""
        microbatches = self.chunks.of_replica(module, replica)
        chunks = microbatches[microbatch] if microbatch < len(microbatches) else ()
        return chunks[index] if index < len(chunks) else ()

    def chunk_table(self, module: str, replicas: Sequence[int]) -> ChunkTable:
        """
        The chunks of several replicas (ascending) of a module: an encoder's microbatch is split by the turn in which
        its features are consumed; one without samples has no chunks, and one of the language model is one chunk.
        """
        samples = self.batch_indices_of(module, replicas)
        key = np.full(len(samples.batch_indices), -1)
        for target in self.targets.get(module, ()) if module != LANGUAGE_MODEL else ():
            used, turns, _ = self.turns(samples, target)
            key[used] = np.maximum(key[used], turns)
        # samples that nothing consumes have the microbatch's index in place of a turn
        key = np.where(key < 0, samples.microbatch, key)
        width = int(key.max(initial=0)) + 1
        cells, chunk_of = np.unique(samples.microbatch_index * width + key, return_inverse=True)
        first = np.empty(len(cells), np.int64)
        first[chunk_of] = np.arange(len(chunk_of))  # any sample of each chunk
        microbatch_index = cells // width
        chunk = np.arange(len(cells)) - np.searchsorted(microbatch_index, microbatch_index)
        replica, microbatch = samples.replica[first], samples.microbatch[first]
        return ChunkTable(replica, microbatch, chunk, samples.batch_indices, chunk_of)

    def batch_indices_of(self, module: str, replicas: Sequence[int]) -> SampleLocations:
        """The batch indices of several replicas (ascending) of a module, ordered by microbatch."""
        chosen = [self.microbatches[module][replica] for replica in replicas]
        counts = np.fromiter(map(len, chosen), np.int64, len(chosen))
        microbatches = list(chain.from_iterable(chosen))
        sizes = np.fromiter(map(len, microbatches), np.int64, len(microbatches))
        microbatch_index = np.repeat(np.arange(len(microbatches)), sizes)
        replica = np.repeat(np.asarray(replicas, np.int64), counts)[microbatch_index]
        microbatch = (np.arange(len(microbatches)) - np.repeat(np.cumsum(counts) - counts, counts))[microbatch_index]
        batch_indices = np.fromiter(chain.from_iterable(microbatches), np.int64, len(microbatch_index))
        return SampleLocations(batch_indices, replica, microbatch, microbatch_index)

    def turns(self, given: SampleLocations, target: str) -> tuple[NDArray, NDArray, NDArray]:
        """
        [`~StepPlan.consumer_turns`] for many replicas at once: positions in `given` of the samples that `target`
        consumes, and for each of them its turn and the number of turns.
        """
        consumers, indices = (location[given.batch_indices] for location in self.locations[target])
        used = np.flatnonzero(consumers >= 0)
        counts = (self.whole or self)._counts[target][consumers[used]]
        turns_of_replica = np.zeros(int(given.replica.max(initial=-1)) + 1, np.int64)
        np.maximum.at(turns_of_replica, given.replica[used], counts)
        turns = turns_of_replica[given.replica[used]]
        return used, turn_of(indices[used], counts, turns), turns

    def replicas(self, module: str) -> list[int]:
        """Indices of the replicas of a module with microbatches: all of them, unless this is a part of a step."""
        replicas = self.microbatches[module]
        return list(compress(range(len(replicas)), replicas))

    def part(self, members: Collection[tuple[str, int]]) -> StepPlan:
        """The step with the microbatches of some (module, replica) only; its indices do not change."""
        # members include all that they exchange tensors with
        of_members: dict[str, list[tuple[BatchIndices, ...]]] = {
            name: [()] * len(all_) for name, all_ in self.microbatches.items()
        }
        for name, replica in members:
            of_members[name][replica] = self.microbatches[name][replica]
        microbatches = {name: tuple(replicas) for name, replicas in of_members.items()}
        return replace(self, microbatches=microbatches, whole=self.whole or self)

    @property
    def structure(self) -> tuple:
        """Everything that a program depends on: two steps with equal structure run the same program."""
        links: list[tuple] = []
        for (module, replica, index), chunks in self.chunks.items():
            for number, batch_indices in enumerate(chunks):
                consumers = {
                    (target, *self.location_of[target, batch_index])
                    for target in self.targets.get(module, ())
                    for batch_index in batch_indices
                    if (target, batch_index) in self.location_of
                }
                links.append((module, replica, index, number, tuple(sorted(consumers))))
        return tuple(links)

    def check(self, plan: ParallelPlan) -> None:
        """
        Raises `AssertionError` unless every batch index occurs exactly once in the language model and at most once in
        every other module, and the numbers of replicas match the plan.
        """
        for name, replicas in self.microbatches.items():
            assert len(replicas) == plan.modules[name].dp_size, name
            batch_indices = np.fromiter(chain.from_iterable(chain.from_iterable(replicas)), np.int64)
            assert not len(batch_indices) or 0 <= batch_indices.min() <= batch_indices.max() < len(self.samples), (
                f"a batch index of {name} is no sample"
            )
            counts = np.bincount(batch_indices, minlength=len(self.samples))
            assert counts.max(initial=0) < 2, f"a sample occurs twice in {name}"
            assert name != LANGUAGE_MODEL or counts.all(), "a sample is lost"


class _LocationOf(Mapping[tuple[str, int], tuple[int, int]]):
    """(module, batch index) -> (replica, microbatch) in a step."""

    def __init__(self, step: StepPlan):
        self._lists = {name: [array.tolist() for array in location] for name, location in step.locations.items()}

    def __getitem__(self, key: tuple[str, int]) -> tuple[int, int]:
        module, batch_index = key
        replicas, microbatches = self._lists[module]
        if replicas[batch_index] < 0:
            raise KeyError(key)
        return replicas[batch_index], microbatches[batch_index]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for module, (replicas, _) in self._lists.items():
            yield from ((module, batch_index) for batch_index, replica in enumerate(replicas) if replica >= 0)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Chunks(Mapping[tuple[str, int, int], tuple[BatchIndices, ...]]):
    """(module, replica, microbatch) -> chunks of a step, computed per replica on first access."""

    def __init__(self, step: StepPlan, known: dict[tuple[str, int], tuple[tuple[BatchIndices, ...], ...]]):
        self._step = step
        self.known = known

    def __getitem__(self, key: tuple[str, int, int]) -> tuple[BatchIndices, ...]:
        module, replica, index = key
        microbatches = self.of_replica(module, replica)
        if index >= len(microbatches):
            raise KeyError(key)
        return microbatches[index]

    def of_replica(self, module: str, replica: int) -> tuple[tuple[BatchIndices, ...], ...]:
        """The chunks of each microbatch of a replica, computed on first access."""
        if (module, replica) not in self.known:
            self.known[module, replica] = self._split(module, replica)
        return self.known[module, replica]

    def _split(self, module: str, replica: int) -> tuple[tuple[BatchIndices, ...], ...]:
        """[`~StepPlan.chunk_table`] of a replica as tuples."""
        table = self._step.chunk_table(module, [replica])
        chunks: list[list[int]] = [[] for _ in range(len(table.chunk))]
        for batch_index, chunk in zip(table.batch_indices.tolist(), table.chunk_of.tolist(), strict=True):
            chunks[chunk].append(batch_index)
        result: list[list[BatchIndices]] = [[] for _ in self._step.microbatches[module][replica]]
        for microbatch, batch_indices in zip(table.microbatch.tolist(), chunks, strict=True):
            result[microbatch].append(tuple(batch_indices))
        return tuple(map(tuple, result))

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        for module, replicas in self._step.microbatches.items():
            for replica in self._step.replicas(module):
                for index in range(len(replicas[replica])):
                    yield module, replica, index

    def __len__(self) -> int:
        return sum(len(microbatches) for replicas in self._step.microbatches.values() for microbatches in replicas)
